"""The cost of segments and rows of one model: a model's sizes in, a few factors out, and with lengths a cost for each.

The ranks of a step finish together if what they carry costs the same (``balance``), and the time of a step is
proportional to it (``crosspack report``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.errors import LayoutError, PackingError
from packing_core.planning.model_sizes import operations
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import integer
from packing_core.storage.arrays import Float64, Int64, as_int64

# An operation of attention takes as long as so many of a product. For each one of the forward, it has 2.5 in the
# backward, where a product has 2; and on an H200 attention runs at 400 TFLOP/s, the products of a step at 600.
ATTENTION_TIME = 3.5 / 3 * 600 / 400


@dataclass(frozen=True)
class Cost:
    """The cost of a row: ``tokens * (its tokens) + squares * (sum of its squared segment lengths)``.

    Layers with a window and image tokens add terms of their own. The unit is free, only the ratio matters: that of
    times. The default ratio is that of a Llama of 8 billion parameters.

    Attributes:
        tokens: cost of a token: projections, feed-forward blocks or the experts it visits, recurrent layers, the head.
        squares: cost of a squared segment length: causal attention to all earlier tokens.
        windows: (window, cost) of the layers whose attention sees ``window`` tokens: a segment of n tokens has
            ``2 n window - window**2`` squares there where it is longer than the window.
        vision: cost of an image or audio token beside that of a token: the tower and the projector.

    Raises:
        PackingError: a factor is negative, ``tokens``, ``squares`` and those of all windows are 0, or a window is not
            an integer of at least 1.
    """

    tokens: float = 1.0
    squares: float = 3.06e-5
    windows: tuple[tuple[int, float], ...] = ()
    vision: float = 0.0

    def __post_init__(self) -> None:
        factors = (self.tokens, self.squares)
        beside = (self.vision, *(factor for _, factor in self.windows))
        if not all(isinstance(x, Real) and isfinite(x) and x >= 0 for x in factors) or not any(factors + beside[1:]):
            raise PackingError(
                f"cost has tokens={self.tokens} and squares={self.squares}: pass factors of 0 or more, not both 0"
            )
        if not all(isinstance(x, Real) and isfinite(x) and x >= 0 for x in beside):
            raise PackingError(f"cost has windows={self.windows} and vision={self.vision}: pass factors of 0 or more")
        for window, _ in self.windows:
            if (size := integer(window)) is None or size < 1:
                raise PackingError(f"cost has a window of {window!r} tokens: pass an integer of at least 1")

    @classmethod
    def from_config(cls, config: Any) -> Cost:
        """The time of a training step by :meth:`operations` of a model, with tokens at 1.

        Operations of attention count :data:`ATTENTION_TIME` times, as they were measured to take longer.

        Raises:
            PackingError: as :meth:`operations`.
        """
        cost = cls.operations(config)
        return cls(
            tokens=1.0,
            squares=ATTENTION_TIME * cost.squares / cost.tokens,
            windows=tuple((window, ATTENTION_TIME * factor / cost.tokens) for window, factor in cost.windows),
            vision=cost.vision / cost.tokens,
        )

    @classmethod
    def operations(cls, config: Any) -> Cost:
        """Forward floating-point operations of a decoder, after Kaplan et al. 2020 (arXiv:2001.08361), table 1.

        Per token and layer the projections take ``2 h d (2 n + 2 k)`` and a gated feed-forward block ``6 h f`` per
        expert that a token visits, and per shared one; the head takes ``2 h v``. Causal attention takes ``2 n d`` per
        layer and squared length: half of all pairs, a multiplication and an addition for the score and for the value.
        (h hidden size, d head width, n and k query and key heads, f feed-forward width, v vocabulary.) Layers with a
        window count for their windows; recurrent layers count for tokens alone. The backward is a multiple of all.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
        """
        token, squares, windows, vision = operations(config)
        return cls(float(token), float(squares), tuple(sorted(windows.items())), float(vision))

    def of_segments(self, lengths: ArrayLike, before: ArrayLike = 0) -> Float64:
        """float64 [S]: the cost of each segment, where its queries see ``before`` earlier tokens beside itself.

        A segment of n tokens after b of its ancestors has n (n + 2 b) = (b + n)^2 - b^2 squares, so the segments on a
        path cost together what the whole path does.

        >>> Cost(tokens=0, squares=1).of_segments([4, 2], before=[0, 4]).tolist()
        [16.0, 20.0]
        >>> Cost(tokens=0, squares=0, windows=((3, 1.0),)).of_segments([2, 3, 5]).tolist()
        [4.0, 9.0, 21.0]
        """
        length, seen = np.asarray(lengths, np.float64), np.asarray(before)
        costs: Float64 = length * (self.tokens + self.squares * (length + 2 * seen))
        for window, factor in self.windows:
            costs = costs + factor * (_in_window(seen + length, window) - _in_window(seen, window))
        return costs

    def of_rows(self, rows: PackPlan | WeighedRows, *, vision_tokens: ArrayLike | None = None) -> Float64:
        """float64 [R]: the cost of each row; that of a segment that continues others as :meth:`of_segments` has it.

        Args:
            rows: a plan, or a ``PackedBatch``.
            vision_tokens: [N] image tokens of each document of a plan, which the vision tower makes; None for no
                images.

        Raises:
            LayoutError: there is not one number of image tokens per document, or the rows are a batch, which knows
                none.
        """
        if not isinstance(rows, PackPlan):
            if vision_tokens is not None:
                raise LayoutError("vision_tokens are of the documents of a plan: pass what crosspack.plan returns")
            of_batch = self.of_segments(rows.lengths, rows.offsets)
            return np.bincount(rows.rows, of_batch, minlength=len(rows)).astype(np.float64)
        plan, costs = rows, self.of_segments(rows.length)
        if vision_tokens is not None:
            images = as_int64(vision_tokens, "vision_tokens")
            if images.shape != (plan.n_documents,) or images.min(initial=0) < 0:
                raise LayoutError(
                    f"vision_tokens has {len(images):,} entries from {images.min(initial=0):,} on and the plan is of "
                    f"{plan.n_documents:,} documents: pass the image tokens of each, 0 or more"
                )
            costs = costs + self.vision * images[plan.source] * (plan.start == 0)
        # a plan has no empty row
        row_costs: Float64 = np.add.reduceat(costs, plan.row_offsets[:-1])
        return row_costs


def checked_cost(cost: Any) -> Cost:
    """The cost that was given, or the default one for None.

    Raises:
        PackingError: it is something else.
    """
    if cost is not None and not isinstance(cost, Cost):
        raise PackingError(f"cost is {cost!r}: pass Cost(tokens=..., squares=...) or Cost.from_config(config)")
    return Cost() if cost is None else cost


class WeighedRows(Protocol):
    """The parts of a ``PackedBatch`` that its rows are weighed by: ``rows``, ``lengths`` and ``offsets``, [S] each."""

    @property
    def rows(self) -> Int64: ...
    @property
    def lengths(self) -> Int64: ...
    @property
    def offsets(self) -> Int64: ...
    def __len__(self) -> int: ...


def cost_of(configs: Sequence[Any]) -> Cost:
    """The cost of a row by the last of a model's configurations that says how large it is; ``Cost()`` if none does."""
    for config in reversed(configs):
        with suppress(PackingError):
            return Cost.from_config(config)
    return Cost()


def _in_window(length: NDArray[Any], window: int) -> Float64:
    """Twice the pairs of ``length`` queries that see ``window`` tokens with their own; less than that, its square."""
    seen = np.minimum(length, window).astype(np.float64)
    pairs: Float64 = seen * (2.0 * length - seen)
    return pairs
