"""Work lists of the Triton attention kernels: one item per tile, made once per batch and shared by its layers.

Segment boundaries -> ``(segment's first token, segment's length, the tile's first token in the segment)`` for every
tile of every segment. A segment's tiles follow each other, so that its keys and values are read while the cache holds
them; the longest segment comes first, and each begins with its most expensive tile, so that the last programs to start
are short ones. Where segments continue others, or queries are the last tokens of longer key segments, an item also
says where in a second list its tile's parts stand: of queries the segments of keys that they see, of keys the segments
of queries that see them, each as ``(first token, length, tokens from the start of the keys' segment to that of the
queries')``. Where the lengths are on the host the list is made there and is exact; else the same arithmetic runs on the
device, without reading back, in a list whose length depends on shapes alone, with items of length 0 at its end. So do
the parts, where the device knows which segment each one continues.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from packing_core.storage.forest import lineage, offsets
from torch_backend.segments import PackedMetadata, ancestors, host_lengths, most_pieces, pieces, to_device


def query_parts(packed: PackedMetadata) -> Tensor | None:
    """int32 [parts, 3] the segments that the queries of each segment see; None if each sees its own alone."""
    return packed.derived("parts of queries", _query_parts)[0] if _in_parts(packed) else None


def key_parts(packed: PackedMetadata) -> Tensor | None:
    """int32 [parts, 3] the segments that see the keys of each segment; None as for :func:`query_parts`."""
    return packed.derived("parts of keys", _key_parts)[0] if _in_parts(packed) else None


def _in_parts(packed: PackedMetadata) -> bool:
    return packed.parents is not None or packed.keys is not None


def query_tiles(packed: PackedMetadata, tokens: int, *, fixed_shape: bool = False) -> Tensor:
    """Items of tiles of ``tokens`` queries, int32 [items, 3]; in causal attention the last one sees the most keys.

    With ``fixed_shape`` their number follows from shapes alone, as it does where the lengths are not on the host.
    """
    return _work(packed, tokens, True, fixed_shape)


def key_tiles(packed: PackedMetadata, tokens: int, *, fixed_shape: bool = False) -> Tensor:
    """Items of blocks of ``tokens`` keys, int32 [items, 3]; in causal attention the first is seen by most queries."""
    return _work(packed, tokens, False, fixed_shape)


def _work(packed: PackedMetadata, tokens: int, of_queries: bool, fixed_shape: bool) -> Tensor:
    def make(packed: PackedMetadata) -> Tensor:
        on_device, in_parts = packed.parent_index is not None, _in_parts(packed)
        if in_parts and not on_device:
            host_lengths(packed)
        segments = packed if of_queries or packed.keys is None else packed.keys
        fixed = on_device or (fixed_shape and not in_parts)
        if segments.lengths is None or fixed or torch.compiler.is_compiling():
            boundaries = segments.cu_seqlens
            items = most_pieces(segments.tokens, boundaries.shape[0] - 1, tokens)
        else:
            boundaries = torch.tensor((0, *segments.lengths)).cumsum(0)
            items = sum(-(-length // tokens) for length in segments.lengths)
        made = _items(boundaries, items, tokens, last_first=of_queries)
        if in_parts:
            bounds = packed.derived(
                *(("parts of queries", _query_parts) if of_queries else ("parts of keys", _key_parts))
            )
            segment = torch.searchsorted(boundaries, made[:, 0].to(boundaries.dtype).contiguous(), right=True) - 1
            made = torch.cat([made, bounds[1][segment.clamp(max=len(boundaries) - 2)]], 1)
        return to_device(made, packed.device)

    return packed.derived(("triton tiles", tokens, of_queries), make)


def _items(boundaries: Tensor, items: int, tokens: int, last_first: bool) -> Tensor:
    lengths, order = boundaries.diff().sort(descending=True, stable=True)
    starts = boundaries[:-1][order]
    segment, first, live = pieces(lengths, tokens, items)
    length = lengths[segment]
    if last_first:
        first = (length - 1) // tokens * tokens - first
    return torch.stack((starts[segment], length * live, first * live), dim=1).int()


def _query_parts(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """The parts, and int32 [S, 2] where those of each segment stand; that is where the items are made, on the host or
    the device."""
    if packed.keys is not None:
        return _parts_of_last_tokens(packed, packed.keys, packed.keys)
    if packed.parent_index is not None:
        return _query_parts_on_device(packed)
    parents = packed.parents
    assert parents is not None
    return _parts(packed, [[(s, above) for above in lineage(parents, s)] for s in range(len(parents))])


def _key_parts(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """As :func:`_query_parts`."""
    if packed.keys is not None:
        return _parts_of_last_tokens(packed, packed.keys, packed)
    if packed.parent_index is not None:
        return _key_parts_on_device(packed)
    parents = packed.parents
    assert parents is not None
    below: list[list[tuple[int, int]]] = [[] for _ in parents]
    for s in range(len(parents)):
        for above in lineage(parents, s):
            below[above].append((s, above))
    return _parts(packed, below, of_queries=False)


def _parts(
    packed: PackedMetadata, pairs: list[list[tuple[int, int]]], *, of_queries: bool = True
) -> tuple[Tensor, Tensor]:
    """The parts of each segment, given as pairs of a segment of queries and one of keys, which the queries see."""
    lengths = np.array(packed.lengths)
    starts, before = np.cumsum(lengths) - lengths, offsets(np.array(packed.parents), lengths)
    queries, keys = np.array([pair for several in pairs for pair in several]).T
    met = keys if of_queries else queries
    parts = np.stack([starts[met], lengths[met], before[queries] - before[keys]], 1)
    return _placed(packed, parts, np.array([len(several) for several in pairs]))


def _parts_of_last_tokens(packed: PackedMetadata, keys: PackedMetadata, met: PackedMetadata) -> tuple[Tensor, Tensor]:
    """One part for each segment: of queries their keys, of keys their queries, as ``met`` says."""
    lengths = np.array(met.lengths)
    parts = np.stack([np.cumsum(lengths) - lengths, lengths, np.array(keys.lengths) - np.array(packed.lengths)], 1)
    return _placed(packed, parts, np.ones(len(lengths), int))


def _placed(packed: PackedMetadata, parts: np.ndarray, counts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Parts, so many of each segment, as :func:`_query_parts` returns them."""
    ends = np.cumsum(counts)
    bounds = np.stack([ends - counts, ends], 1)
    return to_device(torch.from_numpy(parts).int(), packed.device), torch.from_numpy(bounds).int()


def _query_parts_on_device(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """Room for ``depth + 1`` parts of each segment, those on its path from the root down first."""
    table, before = ancestors(packed)
    count, (segments, width) = (table >= 0).sum(1), table.shape
    place = torch.arange(width, device=packed.device)
    keys = table.gather(1, (count[:, None] - 1 - place).clamp(min=0))
    queries = torch.arange(segments, device=packed.device)[:, None].expand_as(keys)
    first = torch.arange(0, segments * width, width, device=packed.device)
    return _rows(packed, keys, before[queries] - before[keys]), torch.stack([first, first + count], 1).int()


def _key_parts_on_device(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """All pairs of a segment and one that it is or continues, sorted by the latter; what is no pair stands last."""
    table, before = ancestors(packed)
    segments = len(table)
    numbers = torch.arange(segments + 1, device=packed.device)
    pairs = torch.where(table >= 0, table * segments + numbers[:-1, None], segments * segments)
    pairs = pairs.flatten().sort().values
    keys, queries = (pairs // segments).clamp(max=segments - 1), pairs % segments
    edges = torch.searchsorted(pairs, numbers * segments)
    return _rows(packed, queries, before[queries] - before[keys]), torch.stack([edges[:-1], edges[1:]], 1).int()


def _rows(packed: PackedMetadata, met: Tensor, gap: Tensor) -> Tensor:
    starts, lengths = packed.cu_seqlens[:-1], packed.cu_seqlens.diff()
    return torch.stack([starts[met], lengths[met], gap], -1).flatten(0, -2).int()
