"""CLIP: clips of audio in one row, in front of an encoder: convolutions see of each what they see of it alone."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.audio import ClipsCase, ask, check, drawn, expected
from conformance.draws import LARGE
from conformance.judge import Judge
from packing_core.protocol import DTYPES

requirement = pytest.mark.requirement

CASE = ClipsCase()
FRAMES = np.array(CASE.frames)


@requirement("CLIP-01")
@pytest.mark.parametrize("frames", [CASE.frames, (7,), (6,) * 4, (1, 1)], ids=["several", "one", "alike", "one frame"])
def test_clips_are_those_of_each_clip_alone(judge: Judge, frames: tuple[int, ...]) -> None:
    case = ClipsCase(frames)
    judge.within(ask(judge, case, {"dout": None}), expected(case, judge.dtype), None, judge.dtype, only="out")
    check(judge, case)


@requirement("CLIP-02")
def test_gradients_of_clips_are_those_of_each_clip_alone(judge: Judge) -> None:
    answer = ask(judge, CASE)
    judge.within(answer, expected(CASE, judge.dtype), None, judge.dtype)
    unseen = np.arange(12) >= FRAMES[:, None] + 2
    judge.equal(
        "gradients of features that no output sees", answer[1]["features"][unseen], 0.0 * np.ones((unseen.sum(), 6))
    )


@requirement("CLIP-03")
def test_a_clip_moves_no_other(judge: Judge) -> None:
    arrays, before = drawn(CASE, judge.dtype), ask(judge, CASE)
    owner = np.repeat(np.arange(len(FRAMES)), CASE.outputs)
    for number in range(len(FRAMES)):
        own = np.arange(len(FRAMES)) == number
        large = np.float32(LARGE[judge.dtype])
        changed = {
            "features": np.where(own[:, None, None], large, arrays["features"]).astype(np.float32),
            "dout": np.where((owner == number)[:, None], large, arrays["dout"]).astype(np.float32),
        }
        after, because = ask(judge, CASE, changed), f"clip {number} changed"
        judge.unmoved("outputs of others", before[0][owner != number], after[0][owner != number], because=because)
        gradients = [answer[1]["features"][~own] for answer in (before, after)]
        judge.unmoved("gradients of others", *gradients, because=because)
        moved = not np.array_equal(before[0][owner == number], after[0][owner == number])
        judge.holds(moved, f"clip {number} changed and its outputs did not move")


@requirement("CLIP-04")
@pytest.mark.parametrize("dtype", DTYPES)
def test_clips_in_every_dtype(judge: Judge, dtype: str) -> None:
    for case in (CASE, ClipsCase((3, 70, 41, 70))):
        judge.within(ask(judge, case, dtype=dtype), expected(case, dtype), None, dtype)
