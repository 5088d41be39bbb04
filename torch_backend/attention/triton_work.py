"""Work lists of the Triton attention kernels: one item per tile, made once per batch and shared by its layers.

Segment boundaries -> ``(segment's first token, segment's length, the tile's first token in the segment)`` for every
tile of every segment, the most expensive first, so that the last programs to start are the short ones. Where the
lengths are on the host the list is made there and is exact; else the same arithmetic runs on the device, without
reading back, in a list whose length depends on shapes alone, with items of length 0 at its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.metadata import PackedMetadata, to_device


def query_tiles(
    packed: PackedMetadata, tokens: int, *, causal: bool, window: int | None, fixed_shape: bool = False
) -> Tensor:
    """Items of tiles of ``tokens`` queries, int32 [items, 3]; a tile costs the keys that it sees.

    With ``fixed_shape`` their number follows from shapes alone, as it does where the lengths are not on the host.
    """
    return _work(packed, tokens, causal, window, False, fixed_shape)


def key_tiles(
    packed: PackedMetadata, tokens: int, *, causal: bool, window: int | None, fixed_shape: bool = False
) -> Tensor:
    """Items of blocks of ``tokens`` keys, int32 [items, 3]; a block costs the queries that see it."""
    return _work(packed, tokens, causal, window, True, fixed_shape)


def _work(
    packed: PackedMetadata, tokens: int, causal: bool, window: int | None, of_keys: bool, fixed_shape: bool
) -> Tensor:
    def make(packed: PackedMetadata) -> Tensor:
        if packed.lengths is None or fixed_shape or torch.compiler.is_compiling():
            boundaries = packed.cu_seqlens
            # each segment wastes at most tokens - 1 places of its last tile
            items = (packed.tokens + (boundaries.shape[0] - 1) * (tokens - 1)) // tokens
        else:
            boundaries = torch.tensor((0, *packed.lengths)).cumsum(0)
            items = sum(-(-length // tokens) for length in packed.lengths)
        return to_device(_items(boundaries, items, tokens, causal, window, of_keys), packed.device)

    return packed.derived(("triton tiles", tokens, causal, window, of_keys), make)


def _items(boundaries: Tensor, items: int, tokens: int, causal: bool, window: int | None, of_keys: bool) -> Tensor:
    starts, lengths = boundaries[:-1], boundaries.diff()
    counts = (lengths + (tokens - 1)) // tokens
    ends = counts.cumsum(0)
    index = torch.arange(items, device=boundaries.device)
    segment = torch.searchsorted(ends, index, right=True).clamp_(max=counts.shape[0] - 1)
    live = index < ends[-1]
    length = torch.where(live, lengths[segment], 0)
    first = torch.where(live, (index - (ends - counts)[segment]) * tokens, 0)
    if not causal:
        cost = length
    elif of_keys:
        cost = length - first
    else:
        cost = (first + tokens).minimum(length)
    if window is not None:
        cost = cost.clamp(max=window + tokens)
    order = cost.mul(live).argsort(descending=True, stable=True)
    return torch.stack((starts[segment], length, first), dim=1)[order].int()
