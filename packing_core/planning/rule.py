"""``RowRule``: how documents become rows, as one checked value that plans, epochs, streams and commands take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from packing_core.errors import CapacityError, PackingError
from packing_core.planning.cost import Cost, checked_cost
from packing_core.planning.order import Order
from packing_core.planning.pieces import (
    CUTS,
    MOST_PIECES,
    Overflow,
    Pieces,
    PieceSpan,
    choice,
    integer,
    positive,
    too_long,
)
from packing_core.storage.arrays import Int64
from packing_core.storage.segment_indexing import ranges

Strategy = Literal["best_fit", "mixed", "first_fit", "sequential"]


@dataclass(frozen=True)
class RowRule:
    """Says how documents become rows, to ``plan``, ``pack`` and ``stream``, in place of a capacity and their keywords.

    >>> from packing_core import plan
    >>> plan([5, 12], RowRule(8, overflow="split"), seed=None).length.tolist()
    [5, 8, 4]

    Attributes:
        capacity, overflow, context, min_piece, max_segments, strategy, order, weights: as in ``plan``.
        keys: as in ``plan``, or the name of the column that holds them.
        equal_cost: makes the rows of a step cost the same, as ``plan_epoch`` and ``stream`` do.
        cost: what a row costs.

    Raises:
        PackingError: an option is out of range, or has no effect beside the others.
    """

    capacity: int
    overflow: Overflow = "error"
    context: int | None = None
    min_piece: int = 1
    max_segments: int | None = None
    strategy: Strategy = "mixed"
    order: Order = "random"
    keys: Any = field(default=None, compare=False)
    weights: Mapping[Any, float] | None = field(default=None, compare=False)
    equal_cost: bool = False
    cost: Cost | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "min_piece", "max_segments"):
            if name != "max_segments" or self.max_segments is not None:
                object.__setattr__(self, name, positive(name, getattr(self, name)))
        for name, allowed in (("overflow", Overflow), ("strategy", Strategy), ("order", Order)):
            choice(name, getattr(self, name), get_args(allowed))
        self._check_cuts()
        self._check_order()
        checked_cost(self.cost)

    @staticmethod
    def of(capacity: int | RowRule, **options: Any) -> RowRule:
        """Returns the rule of a capacity and keywords, or the rule that stands in their place.

        Raises:
            PackingError: a keyword stands beside a rule.
        """
        if not isinstance(capacity, RowRule):
            return RowRule(capacity, **options)
        for entry in fields(RowRule):
            value = options.get(entry.name, entry.default)
            if type(value) is not type(entry.default) or value != entry.default:
                raise PackingError(f"{entry.name} is an option of the RowRule: build the rule with it")
        return capacity

    @property
    def context_tokens(self) -> int:
        """Tokens of context of each later piece of a document."""
        if self.context is not None:
            return self.context
        return self.capacity // 8 if self.overflow in ("overlap", "restart") else 0

    def _check_cuts(self) -> None:
        number = integer(self.context_tokens)
        if number is None or not 0 <= number < self.capacity:
            raise PackingError(
                f"context must be an integer from 0 to {self.capacity - 1:,}, less than the capacity; got "
                f"{self.context!r}",
                option="context",
            )
        if self.context is not None:
            object.__setattr__(self, "context", number)
        if number and self.overflow not in ("overlap", "restart"):
            raise PackingError(
                f'context={number:,} has no effect under overflow="{self.overflow}": pass overflow="overlap" or '
                '"restart", or leave context out',
                option="context overflow",
            )
        if self.min_piece > 1 and self.overflow not in CUTS:
            raise PackingError(
                f'min_piece={self.min_piece:,} has no effect under overflow="{self.overflow}", which makes one piece '
                'at most: pass overflow="split", "overlap" or "restart", or leave min_piece out',
                option="min_piece overflow",
            )
        if self.min_piece > max(1, most := (self.capacity - number) // 2):
            raise PackingError(
                f"min_piece is {self.min_piece:,}, and may be at most {most:,} in rows of {self.capacity:,} tokens "
                f"with context={number:,}: lower min_piece or context, or raise capacity",
                option="min_piece context capacity",
            )

    def _check_order(self) -> None:
        if self.order in ("random", "curriculum"):
            for name in ("keys", "weights"):
                if getattr(self, name) is not None:
                    raise PackingError(
                        f'{name} has no effect under order="{self.order}": pass order="sorted" or "grouped", or leave '
                        f"{name} out",
                        option=f"{name} order",
                    )
        elif self.keys is None:
            raise PackingError(f'order="{self.order}" needs keys: pass one key per document', option="keys order")
        elif self.order != "weighted" and self.weights is not None:
            raise PackingError(
                f'weights has no effect under order="{self.order}": pass order="weighted", or leave weights out',
                option="weights order",
            )
        if self.order != "random" and self.strategy != "mixed":
            raise PackingError(
                f'order="{self.order}" packs mixed rows in stages of its own: leave strategy={self.strategy!r} out',
                option="order strategy",
            )
        if self.equal_cost and self.order != "random":
            raise PackingError(
                f'equal_cost=True chooses the rows of a step by cost: leave it or order="{self.order}" out',
                option="equal_cost order",
            )

    def parts_of(self, length: int) -> list[PieceSpan]:
        """The parts of a document that reach the rows.

        >>> [part[:2] for part in RowRule(8, "split").parts_of(20)]
        [(0, 8), (8, 16), (16, 20)]
        >>> [part[:3] for part in RowRule(8, "overlap", context=2).parts_of(20)]
        [(0, 8, 0), (6, 14, 2), (12, 20, 2)]
        >>> [part[:2] for part in RowRule(8, "split", min_piece=3).parts_of(17)]
        [(0, 8), (8, 14), (14, 17)]
        """
        if length > self.capacity and self.overflow in CUTS:
            _, start, size, context = self._cut(np.array([length]))
            spans = zip(start.tolist(), (start + size).tolist(), context.tolist(), strict=True)
            return [PieceSpan(*span, restarts=self.overflow == "restart") for span in spans]
        kept = {"truncate": self.capacity, "drop": 0}.get(self.overflow, length) if length > self.capacity else length
        return [PieceSpan(0, kept, 0)] if kept else []

    def cut(self, lengths: Int64) -> Pieces:
        """Apply the rule to every document, as :meth:`parts_of` does to one.

        Raises:
            CapacityError: one is too long under ``error``, or ``drop`` leaves nothing.
        """
        none, capacity = np.zeros(0, np.int64), self.capacity
        if lengths.max() <= capacity:
            return Pieces(lengths, none, none)
        long = np.flatnonzero(lengths > capacity)
        if self.overflow == "error":
            raise too_long(long[0], lengths[long[0]], capacity, len(long) - 1)
        if self.overflow == "truncate":
            return Pieces(np.minimum(lengths, capacity), none, long)
        if self.overflow == "drop":
            kept = np.flatnonzero(lengths <= capacity)
            if not len(kept):
                raise CapacityError(
                    f"nothing is left to pack: all {len(lengths):,} documents have more than {capacity:,} tokens and "
                    'are dropped; pass overflow="split" or "truncate", or raise capacity',
                    option="overflow capacity",
                )
            return Pieces(lengths[kept], long, none, source=kept)
        source, start, size, context = self._cut(lengths)
        return Pieces(size, none, none, source, start, context if self.context_tokens else None)

    def _cut(self, lengths: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """Document, first token, length and context of each piece, under a policy of ``CUTS``."""
        stride = self.capacity - self.context_tokens
        counts = 1 + np.maximum(0, -((self.capacity - lengths) // stride))
        if counts.sum() > MOST_PIECES:
            raise CapacityError(
                f"the documents split into {counts.sum():,} pieces of {self.capacity:,} tokens, more than 2**36: raise "
                "capacity",
                option="capacity",
            )
        source = np.repeat(np.arange(len(lengths)), counts)
        last = np.cumsum(counts) - 1
        number = ranges(counts)
        context = np.where(number > 0, self.context_tokens, 0)
        own = context + number * stride  # the first token that no earlier piece trains
        cut = last[counts > 1]
        own[cut] -= np.maximum(0, self.min_piece - (lengths[source[cut]] - own[cut]))
        end = np.append(own[1:], 0)
        end[last] = lengths
        start = own - context
        return source, start, end - start, context
