"""The options of a stream that decide its rows: checked once, saved in its state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from packing_core.batches.stored import WEIGHTINGS, Weighting
from packing_core.errors import PackingError
from packing_core.planning.cost import checked_cost
from packing_core.planning.pieces import check_seed, choice, integer, positive
from packing_core.planning.rule import RowRule

StreamStrategy = Literal["mixed", "best_fit"]


@dataclass(frozen=True)
class StreamOptions:
    """The options of :func:`packing_core.stream`; ``checked`` makes them.

    ``keys`` identifies the keys and weights of the rule's order. ``equal_cost`` is the number of shards whose rows of a
    step cost the same, 0 for rows in any order.
    """

    rule: RowRule
    buffer: int = 8192
    buffer_tokens: int = 0
    max_age: int = 0
    seed: int | None = None
    pad_id: int = 0
    weighting: Weighting = "token"
    keys: str | None = None
    equal_cost: int = 0

    @staticmethod
    def checked(rule: RowRule, **given: Any) -> StreamOptions:
        """Checks the options of :func:`packing_core.stream`, and fills in those that depend on others.

        Raises:
            PackingError: one of them is out of range, or two contradict each other.
        """
        choice("strategy", rule.strategy, get_args(StreamStrategy))
        buffer = positive("buffer", given["buffer"])
        defaults = {"max_age": 16 * buffer, "buffer_tokens": max(2**24, 64 * rule.capacity)}
        for name, default in defaults.items():
            given[name] = default if given[name] is None else positive(name, given[name])
        if given["max_age"] < buffer:
            age = given["max_age"]
            raise PackingError(f"max_age is {age:,} and buffer {buffer:,}: pass an age of at least one buffer")
        if (pad_id := integer(given["pad_id"])) is None:
            raise PackingError(f"pad_id is {given['pad_id']!r}: pass an integer")
        choice("weighting", given["weighting"], WEIGHTINGS)
        return StreamOptions(rule, **given | {"buffer": buffer, "seed": check_seed(given["seed"]), "pad_id": pad_id})

    def state(self) -> dict[str, Any]:
        """Returns the options that a state holds: those of the order, and of equal cost, only where there is one."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "rule"}
        limits = {name: getattr(self.rule, name) for name in ("capacity", "overflow", "min_piece", "max_segments")}
        state = limits | own | {"context": self.rule.context_tokens, "strategy": self.rule.strategy, "alignment": 1}
        if self.rule.order == "random":
            del state["keys"]
        else:
            state["order"] = self.rule.order
        if self.equal_cost:
            state["cost"] = repr(checked_cost(self.rule.cost))
        else:
            del state["equal_cost"]
        return state
