"""The options of a stream that decide its rows: checked once, saved in its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from packing_core.batches.stored import WEIGHTINGS, Weighting
from packing_core.errors import PackingError
from packing_core.planning.pieces import Overflow, check_seed, choice, integer, positive
from packing_core.planning.plan import plan

StreamStrategy = Literal["mixed", "best_fit"]


@dataclass(frozen=True)
class StreamOptions:
    """The options of :func:`packing_core.stream` as numbers; ``checked`` makes them."""

    capacity: int
    buffer: int
    buffer_tokens: int
    max_age: int
    alignment: int
    max_segments: int | None
    seed: int | None
    overflow: Overflow
    strategy: StreamStrategy
    pad_id: int
    weighting: Weighting

    @staticmethod
    def checked(
        capacity: Any,
        *,
        buffer: Any,
        buffer_tokens: Any,
        max_age: Any,
        alignment: Any,
        max_segments: Any,
        seed: Any,
        overflow: Any,
        strategy: Any,
        pad_id: Any,
        weighting: Any,
    ) -> StreamOptions:
        """The options, those that depend on others filled in.

        Raises:
            PackingError: one of them is out of range, or two contradict each other.
        """
        capacity, buffer = positive("capacity", capacity), positive("buffer", buffer)
        max_age = 16 * buffer if max_age is None else positive("max_age", max_age)
        if max_age < buffer:
            raise PackingError(f"max_age is {max_age:,} and buffer {buffer:,}: pass an age of at least one buffer")
        default = max(2**24, 64 * capacity)
        buffer_tokens = default if buffer_tokens is None else positive("buffer_tokens", buffer_tokens)
        seed = check_seed(seed)
        choice("overflow", overflow, get_args(Overflow))
        alignment = positive("alignment", alignment)
        max_segments = None if max_segments is None else positive("max_segments", max_segments)
        choice("strategy", strategy, get_args(StreamStrategy))
        plan([1], capacity, alignment=alignment)  # checks that the two agree
        number = integer(pad_id)
        if number is None:
            raise PackingError(f"pad_id is {pad_id!r}: pass an integer")
        choice("weighting", weighting, WEIGHTINGS)
        return StreamOptions(
            capacity,
            buffer,
            buffer_tokens,
            max_age,
            alignment,
            max_segments,
            seed,
            overflow,
            strategy,
            number,
            weighting,
        )
