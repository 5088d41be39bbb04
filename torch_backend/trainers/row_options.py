"""The options of ``enable_packing`` that decide its rows: one object from the call to the plan of each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from packing_core.errors import PackingError
from packing_core.planning.order import Order
from packing_core.planning.pieces import CUTS
from packing_core.planning.plan import Overflow

_LIMITS = ("overflow", "context", "min_piece", "max_segments")


@dataclass(frozen=True)
class RowOptions:
    """Options that :func:`torch_backend.enable_packing` documents; ``keys`` is the name of a column."""

    capacity: int | None = None
    overflow: Overflow = "error"
    context: int | None = None
    min_piece: int = 1
    max_segments: int | None = None
    order: Order = "random"
    keys: str | None = None
    weights: Mapping[Any, float] | None = None
    equal_cost: bool = False

    @property
    def given(self) -> str | None:
        """The first option that is not its default, as it was written; None if all are."""
        return self._given(*(field.name for field in fields(self)))

    def _given(self, *names: str) -> str | None:
        """The first of these options that is not its default, as it was written."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                number = isinstance(value, int) and not isinstance(value, bool)
                return f"{field.name}={value:,}" if number else f"{field.name}={value!r}"
        return None

    @property
    def cuts(self) -> bool:
        """Returns whether a document may become several pieces."""
        return self.overflow in CUTS

    @property
    def keeps_whole(self) -> bool:
        """Returns whether a document is never cut or shortened."""
        return self.overflow in ("error", "drop")

    @property
    def packing(self) -> dict[str, Any]:
        """The options of ``packing_core.plan`` and ``stream`` beside the order."""
        return {name: getattr(self, name) for name in _LIMITS}

    def refuse_limits(self, why: str) -> None:
        """
        Raises:
            PackingError: an option of ``packing`` is given, which has no effect because of ``why``.
        """
        if (given := self._given(*_LIMITS)) is not None:
            raise PackingError(f"{given} has no effect, because {why}")

    def refuse_order(self, why: str) -> None:
        """
        Raises:
            PackingError: an order or ``equal_cost`` is given, which has no effect because of ``why``.
        """
        if self.equal_cost:
            raise PackingError(f"equal_cost=True has no effect, because {why}: leave it out", option="equal_cost")
        if (self.order, self.keys, self.weights) != ("random", None, None):
            raise PackingError(
                f'order="{self.order}" has no effect, because {why}: put the documents in that order before, and leave '
                "order, keys and weights out"
            )
