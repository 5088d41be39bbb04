"""Work lists of the Triton attention kernels: one item per tile, made once per batch and shared by its layers.

Segment boundaries -> ``(segment's first token, segment's length, the tile's first token in the segment)`` for every
tile of every segment. A segment's tiles follow each other, so that its keys and values are read while the cache holds
them; the longest segment comes first, and each begins with its most expensive tile, so that the last programs to start
are short ones. Where the lengths are on the host the list is made there and is exact; else the same arithmetic runs on
the device, without reading back, in a list whose length depends on shapes alone, with items of length 0 at its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.segments import PackedMetadata, most_pieces, pieces, to_device


def query_tiles(packed: PackedMetadata, tokens: int, *, fixed_shape: bool = False) -> Tensor:
    """Items of tiles of ``tokens`` queries, int32 [items, 3]; in causal attention the last one sees the most keys.

    With ``fixed_shape`` their number follows from shapes alone, as it does where the lengths are not on the host.
    """
    return _work(packed, tokens, True, fixed_shape)


def key_tiles(packed: PackedMetadata, tokens: int, *, fixed_shape: bool = False) -> Tensor:
    """Items of blocks of ``tokens`` keys, int32 [items, 3]; in causal attention the first is seen by most queries."""
    return _work(packed, tokens, False, fixed_shape)


def _work(packed: PackedMetadata, tokens: int, last_first: bool, fixed_shape: bool) -> Tensor:
    def make(packed: PackedMetadata) -> Tensor:
        if packed.lengths is None or fixed_shape or torch.compiler.is_compiling():
            boundaries = packed.cu_seqlens
            items = most_pieces(packed.tokens, boundaries.shape[0] - 1, tokens)
        else:
            boundaries = torch.tensor((0, *packed.lengths)).cumsum(0)
            items = sum(-(-length // tokens) for length in packed.lengths)
        return to_device(_items(boundaries, items, tokens, last_first), packed.device)

    return packed.derived(("triton tiles", tokens, last_first), make)


def _items(boundaries: Tensor, items: int, tokens: int, last_first: bool) -> Tensor:
    lengths, order = boundaries.diff().sort(descending=True, stable=True)
    starts = boundaries[:-1][order]
    segment, first, live = pieces(lengths, tokens, items)
    length = lengths[segment]
    if last_first:
        first = (length - 1) // tokens * tokens - first
    return torch.stack((starts[segment], length * live, first * live), dim=1).int()
