"""The options of a stream that decide its rows: checked once, saved in its state."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from packing_core.batches.stored import WEIGHTINGS, Weighting
from packing_core.errors import PackingError
from packing_core.planning.order import Order
from packing_core.planning.pieces import Overflow, OverflowRule, check_seed, choice, integer, positive
from packing_core.planning.plan import plan

StreamStrategy = Literal["mixed", "best_fit"]


@dataclass(frozen=True)
class StreamOptions:
    """The options of :func:`packing_core.stream` as numbers; ``checked`` makes them.

    ``keys`` identifies the keys and weights of the ``order``. ``equal_cost`` is the number of shards whose rows of a
    step cost the same by ``cost``, 0 for rows in any order.
    """

    capacity: int
    buffer: int
    buffer_tokens: int
    max_age: int
    alignment: int
    max_segments: int | None
    seed: int | None
    overflow: Overflow
    context: int
    min_piece: int
    strategy: StreamStrategy
    pad_id: int
    weighting: Weighting
    order: Order = "random"
    keys: str | None = None
    equal_cost: int = 0
    cost: str | None = None

    @staticmethod
    def checked(**given: Any) -> StreamOptions:
        """Checks the options of :func:`packing_core.stream`, and fills in those that depend on others.

        Raises:
            PackingError: one of them is out of range, or two contradict each other.
        """
        capacity, buffer = (positive(name, given[name]) for name in ("capacity", "buffer"))
        defaults = {"max_age": 16 * buffer, "buffer_tokens": max(2**24, 64 * capacity), "max_segments": None}
        for name in ("capacity", "buffer", "max_age", "buffer_tokens", "alignment", "max_segments"):
            given[name] = defaults[name] if given[name] is None and name in defaults else positive(name, given[name])
        if given["max_age"] < buffer:
            age = given["max_age"]
            raise PackingError(f"max_age is {age:,} and buffer {buffer:,}: pass an age of at least one buffer")
        given["seed"] = check_seed(given["seed"])
        rule = OverflowRule.checked(capacity, given["overflow"], given["context"], given["min_piece"])
        given |= {"context": rule.context, "min_piece": rule.min_piece}
        choice("strategy", given["strategy"], get_args(StreamStrategy))
        plan([1], capacity, alignment=given["alignment"])  # checks that the two agree
        pad_id = integer(given["pad_id"])
        if pad_id is None:
            raise PackingError(f"pad_id is {given['pad_id']!r}: pass an integer")
        choice("weighting", given["weighting"], WEIGHTINGS)
        if given["order"] != "random" and given["strategy"] != "mixed":
            raise PackingError(f'order="{given["order"]}" packs mixed rows: leave strategy={given["strategy"]!r} out')
        if given["equal_cost"] and given["order"] != "random":
            raise PackingError(
                f'equal_cost=True chooses the rows of a step by cost: leave it or order="{given["order"]}" out'
            )
        return StreamOptions(**given | {"pad_id": pad_id})

    def state(self) -> dict[str, Any]:
        """Returns the options that a state holds: those of the order, and of equal cost, only where there is one."""
        held = asdict(self)
        if self.order == "random":
            del held["order"], held["keys"]
        if not self.equal_cost:
            del held["equal_cost"], held["cost"]
        return held

    @property
    def rule(self) -> OverflowRule:
        """The rule for documents longer than a row."""
        return OverflowRule(self.capacity, self.overflow, self.context, self.min_piece)
