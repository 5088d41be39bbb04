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
from torch.nn import functional as F

from torch_backend.segments import to_device

Activation = Callable[[Tensor], Tensor]
Weights = tuple[Tensor, Tensor | None]

BEYOND = 2  # frames behind the end of a clip that two convolutions over three frames read


def convolve_clips(
    features: Tensor, rows: ClipRows, first: Weights, second: Weights, activation: Activation = F.gelu
) -> Tensor:
    """Runs two convolutions over three frames over clips as one row; [F, D], (L + 1) // 2 outputs of each of L frames.

    As products with the frames on either side: cuDNN would look for an algorithm anew for every length of a row.

    Args:
        features: [N, C, T].
        rows: where they lie.
        first: weight [D, C, 3] and bias [D] or None; second: likewise, of stride 2.
        activation: after each.
    """
    indices = (to_device(torch.from_numpy(x), features.device) for x in (rows.source, rows.kept, rows.outputs))
    source, kept, outputs = indices
    kept = kept.to(features.dtype)[:, None]
    row = features.transpose(1, 2).flatten(0, 1).index_select(0, source) * kept
    before, behind = F.pad(row[:-1], (0, 0, 1, 0)), F.pad(row[1:], (0, 0, 0, 1))
    middle = activation(_product(torch.cat((before, row, behind), 1), *first)) * kept  # a clip begins and ends in zeros
    pairs = middle.view(-1, 2 * middle.shape[1])
    before = F.pad(pairs[:-1, middle.shape[1] :], (0, 0, 1, 0))
    return activation(_product(torch.cat((before, pairs), 1).index_select(0, outputs), *second))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[W, 3C] and the weight of a convolution [D, C, 3] -> [W, D]."""
    return F.linear(x, weight.transpose(1, 2).flatten(1), bias)


class ClipRows:
    """Places the frames of clips in one row, by plain numbers.

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
    """Numbers items that lie one after the other: the item at each place, and the place in it."""
    item = np.repeat(np.arange(len(lengths)), lengths)
    return item, np.arange(len(item)) - (np.cumsum(lengths) - lengths)[item]
