"""Cuts tokens into pieces of at most so many: on the host, and on the device in lists whose length shapes decide."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_lengths(begin: int, end: int, row_length: int, longest: int) -> list[int]:
    """Lengths of the segments that stand for the padding from one place of a batch to another: none crosses rows, and
    none is longer than ``longest``."""
    lengths: list[int] = []
    while begin < end:
        row_end = min(end, (begin // row_length + 1) * row_length)
        whole, rest = divmod(row_end - begin, longest)
        lengths += [longest] * whole + [rest] * (rest > 0)
        begin = row_end
    return lengths


def most_pieces(tokens: int, segments: int, size: int) -> int:
    """No segmentation of ``tokens`` into as many segments, cut into pieces of ``size``, has more pieces than this."""
    return (tokens + segments * (size - 1)) // size  # each segment wastes at most size - 1 places of its last piece


def pieces(lengths: Tensor, size: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Segments cut into pieces of ``size`` tokens and a rest each, in a list whose length does not depend on values.

    Args:
        lengths: int [S]; a segment of length 0 has no pieces.
        size: of a piece, in tokens.
        n: of the list; at least the number of pieces, see :func:`most_pieces`.

    Returns:
        int64 [n] the segment of each piece, int64 [n] the piece's first token within it, bool [n] whether the entry is
        a piece: the others stand at the end, with values that mean nothing.
    """
    counts = (lengths + (size - 1)) // size
    ends = counts.cumsum(0)
    index = torch.arange(n, device=lengths.device)
    segment = torch.searchsorted(ends, index, right=True).clamp_(max=counts.shape[0] - 1)
    return segment, (index - (ends - counts)[segment]) * size, index < ends[-1]
