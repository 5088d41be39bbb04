"""CLIP: clips of audio in one row, in front of an encoder: convolutions see of each what they see of it alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.draws import LARGE, generator, round_to
from conformance.judge import Judge, as_result
from conformance.oracle import Expected, Result
from packing_core import reference
from packing_core.protocol import DTYPES, Array
from packing_core.reference import WorkingDtype

requirement = pytest.mark.requirement

# Frames of the clips, whose features have 12: odd, even, one, two short of all, one short of all, all.
FRAMES = np.array([5, 12, 1, 8, 10, 11, 12, 3])
NAMES = ("features", "up", "up_bias", "down")


@cache
def _drawn(dtype: str) -> dict[str, Array]:
    draw = generator("clips")
    shapes = {"features": (len(FRAMES), 12, 6), "up": (8, 6, 3), "up_bias": (8,), "down": (10, 8, 3)}
    shapes["dout"] = (int(((FRAMES + 1) // 2).sum()), 10)
    return {name: round_to(dtype, draw.standard_normal(shape)) for name, shape in shapes.items()}


def _ends() -> Array:
    return np.cumsum((FRAMES + 1) // 2)


def _ask(judge: Judge, changed: Mapping[str, Array | None] | None = None, dtype: str | None = None) -> Result:
    dtype = dtype or judge.dtype
    arrays: dict[str, Any] = {**_drawn(dtype), **(changed or {})}
    return as_result(judge.ask("clips", arrays.pop("features"), FRAMES, **arrays, dtype=dtype))


def _expected(dtype: WorkingDtype) -> Expected:
    arrays = _drawn(dtype)
    weights: dict[str, Any] = {name: arrays[name] for name in NAMES[1:]}

    def compute(arithmetic: WorkingDtype) -> Result:
        douts = np.split(arrays["dout"], _ends()[:-1])
        clips = [(x, int(n)) for x, n in zip(arrays["features"], FRAMES, strict=True)]
        out = [reference.clip_convolutions(x, n, **weights, dtype=arithmetic) for x, n in clips]
        by_clip = [
            reference.clip_convolutions_vjp(x, n, **weights, dout=dout, dtype=arithmetic)
            for (x, n), dout in zip(clips, douts, strict=True)
        ]
        total = {name: np.sum([gradients[name] for gradients in by_clip], axis=0) for name in NAMES[1:]}
        return np.concatenate(out), {"features": np.stack([gradients["features"] for gradients in by_clip]), **total}

    return Expected(compute("float64"), compute(dtype))


@requirement("CLIP-01")
def test_clips_are_those_of_each_clip_alone(judge: Judge) -> None:
    judge.within(_ask(judge, {"dout": None}), _expected(judge.dtype), None, judge.dtype, only="out")  # type: ignore[arg-type]


@requirement("CLIP-02")
def test_gradients_of_clips_are_those_of_each_clip_alone(judge: Judge) -> None:
    answer, expected = _ask(judge), _expected(judge.dtype)  # type: ignore[arg-type]
    judge.within(answer, expected, None, judge.dtype)
    unseen = np.arange(12) >= FRAMES[:, None] + 2
    judge.equal(
        "gradients of features that no output sees", answer[1]["features"][unseen], 0.0 * np.ones((unseen.sum(), 6))
    )


@requirement("CLIP-03")
def test_a_clip_moves_no_other(judge: Judge) -> None:
    arrays, before = _drawn(judge.dtype), _ask(judge)
    owner = np.repeat(np.arange(len(FRAMES)), (FRAMES + 1) // 2)
    for number in range(len(FRAMES)):
        own = np.arange(len(FRAMES)) == number
        large = np.float32(LARGE[judge.dtype])
        changed = {
            "features": np.where(own[:, None, None], large, arrays["features"]).astype(np.float32),
            "dout": np.where((owner == number)[:, None], large, arrays["dout"]).astype(np.float32),
        }
        after, because = _ask(judge, changed), f"clip {number} changed"
        judge.unmoved("outputs of others", before[0][owner != number], after[0][owner != number], because=because)
        gradients = [answer[1]["features"][~own] for answer in (before, after)]
        judge.unmoved("gradients of others", *gradients, because=because)
        moved = not np.array_equal(before[0][owner == number], after[0][owner == number])
        judge.holds(moved, f"clip {number} changed and its outputs did not move")


@requirement("CLIP-04")
@pytest.mark.parametrize("dtype", DTYPES)
def test_clips_in_every_dtype(judge: Judge, dtype: str) -> None:
    judge.within(_ask(judge, dtype=dtype), _expected(dtype), None, dtype)  # type: ignore[arg-type]
