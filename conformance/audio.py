"""Clips of audio in front of an encoder, and the truth of each clip alone: CLIP, and SIZE for many and long ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from conformance.draws import generator, round_to
from conformance.judge import Judge, as_result
from conformance.oracle import Expected, Result
from packing_core import reference
from packing_core.protocol import Array
from packing_core.reference import WorkingDtype


@dataclass(frozen=True)
class ClipsCase:
    """One call of `Backend.clips`.

    Attributes:
        frames: of each clip; the features have as many as the longest.
        channels: of the features, between the convolutions, and of the outputs.
    """

    frames: tuple[int, ...] = (5, 12, 1, 8, 10, 11, 12, 3)  # odd, even, one, two short of all, one short of all, all
    channels: tuple[int, int, int] = (6, 8, 10)

    @property
    def outputs(self) -> Array:
        """int64 [N]: the outputs of each clip."""
        return (np.array(self.frames) + 1) // 2


@cache
def drawn(case: ClipsCase, dtype: str) -> dict[str, Array]:
    """The operands of a case, and ``dout``."""
    draw, (features, inner, width) = generator("clips"), case.channels
    shapes = {
        "features": (len(case.frames), max(case.frames), features),
        "up": (inner, features, 3),
        "up_bias": (inner,),
        "down": (width, inner, 3),
        "dout": (int(case.outputs.sum()), width),
    }
    return {name: round_to(dtype, draw.standard_normal(shape)) for name, shape in shapes.items()}


def ask(
    judge: Judge, case: ClipsCase, changed: Mapping[str, Array | None] | None = None, dtype: str | None = None
) -> Result:
    """Outputs and gradients of the backend."""
    dtype = dtype or judge.dtype
    arrays: dict[str, Any] = {**drawn(case, dtype), **(changed or {})}
    return as_result(judge.ask("clips", arrays.pop("features"), np.array(case.frames), **arrays, dtype=dtype))


@cache
def expected(case: ClipsCase, dtype: WorkingDtype) -> Expected:
    """Outputs and gradients of each clip alone."""
    weights: dict[str, Any] = {**drawn(case, dtype)}
    features, dout = weights.pop("features"), weights.pop("dout")

    def compute(arithmetic: WorkingDtype) -> Result:
        douts = np.split(dout, np.cumsum(case.outputs)[:-1])
        clips = list(zip(features, case.frames, strict=True))
        out = [reference.clip_convolutions(x, n, **weights, dtype=arithmetic) for x, n in clips]
        by_clip = [
            reference.clip_convolutions_vjp(x, n, **weights, dout=dout, dtype=arithmetic)
            for (x, n), dout in zip(clips, douts, strict=True)
        ]
        total = {name: np.sum([gradients[name] for gradients in by_clip], axis=0) for name in weights}
        return np.concatenate(out), {"features": np.stack([gradients["features"] for gradients in by_clip]), **total}

    return Expected(compute("float64"), compute(dtype))


def check(judge: Judge, case: ClipsCase) -> None:
    """Outputs and gradients of a batch of clips."""
    judge.within(ask(judge, case), expected(case, judge.dtype), None, judge.dtype)
