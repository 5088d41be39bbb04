"""The convolutions in front of audio encoders of Whisper's kind, over clips that lie in one row without padding.

Clips [N, bins, T], padded at their ends -> :class:`ClipRows` says where their frames go -> one row, in which a clip
sees what it sees alone: the frames behind its end that were given, and zeros before its first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_backend.segments import to_device

BEYOND = 2  # frames behind the end of a clip that two convolutions over three frames read


def convolve_clips(
    features: Tensor, rows: ClipRows, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> Tensor:
    """Runs two convolutions over clips [N, C, T] as one row; [F, D], (L + 1) // 2 outputs of each clip of L frames.

    Args:
        features: the clips.
        rows: where they lie.
        first: [1, C, W] -> [1, D, W], over three frames, with a frame of zeros on either side.
        second: likewise of stride 2, [1, D, W] -> [1, D, W / 2].
    """
    indices = (to_device(torch.from_numpy(x), features.device) for x in (rows.source, rows.kept, rows.outputs))
    source, kept, outputs = indices
    kept = kept.to(features.dtype)
    row = features.transpose(0, 1).flatten(1).index_select(1, source) * kept
    return second(first(row[None]) * kept)[0].T.index_select(0, outputs)  # a clip begins and ends in zeros


class ClipRows:
    """Where the frames of clips lie in one row, by plain numbers.

    A clip of L frames takes its L frames, as many as ``BEYOND`` behind them, and one or two zeros; so it begins at an
    even place, and the convolution of stride 2 begins at its first frame.

    Attributes:
        halves: positions of each clip after that convolution.
        source: [W] the frame of the features at each place of the row; kept: float32 [W], 0 where it is to be a zero.
        outputs: [F] the outputs of the convolution that are kept; places: [F] their numbers in their clips.
        pairs: [P] the first of each two of them that are averaged.
    """

    def __init__(self, frames: Sequence[int], width: int) -> None:
        count = np.asarray(frames, np.int64)
        seen = np.minimum(count + BEYOND, width)
        slots = seen + 2 - seen % 2
        clip, place = _numbered(slots)
        halves = (count + 1) // 2
        half_clip, half_place = _numbered(halves)
        pair_clip, pair_place = _numbered(halves // 2)
        self.halves = halves.tolist()
        self.source = clip * width + np.minimum(place, seen[clip] - 1)
        self.kept = (place < seen[clip]).astype(np.float32)
        self.outputs = (np.cumsum(slots) - slots)[half_clip] // 2 + half_place
        self.places = half_place
        self.pairs = (np.cumsum(halves) - halves)[pair_clip] + 2 * pair_place


def _numbered(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Any, Any]:
    """Of items that lie one after the other, the item and the number in it at each place."""
    item = np.repeat(np.arange(len(lengths)), lengths)
    return item, np.arange(len(item)) - (np.cumsum(lengths) - lengths)[item]
