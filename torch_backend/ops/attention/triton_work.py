"""Work lists of the Triton attention kernels: one item per tile, made once per batch and shared by its layers.

Segment boundaries -> ``(segment's first token, segment's length, the tile's first token in the segment)`` for every
tile of every segment. A segment's tiles follow each other, so that its keys and values are read while the cache holds
them; the longest segment comes first, and each begins with its most expensive tile, so that the last programs to start
are short ones.

Where queries are the last tokens of longer key segments, an item goes on with the other segment, of queries that of
keys and the reverse, as ``(first token, length, tokens from the start of the keys' segment to that of the queries')``.
Where segments continue others, an item says instead where in a second list its tile's parts stand, of the same form:
of queries the segments of keys that they see, of keys the segments of queries that see them.

Where the lengths are on the host the list is made there and is exact; else the same arithmetic runs on the device,
without reading back, in a list whose length depends on shapes alone, with items of length 0 at its end. So do the
parts, where the device knows which segment each one continues.

The queries of all answers see the keys of a prompt. Where the walk over them is long it is cut into shares, each an
item of its own, so items of keys in parts end with ``(first query, end, place of the share's sums)``: counted along the
parts together, and -1 for a walk that is whole. Which walks are cut depends on the lengths of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from packing_core.storage.forest import lineage, offsets
from torch_backend.pieces import most_pieces, pieces
from torch_backend.segments import PackedMetadata, ancestors, host_lengths, to_device

# A walk is at most this part of all walks of a batch and its heads: an H100 runs about half as many programs at once.
# It bounds what shares take to 1,024 float32 sums of a block.
PROGRAMS = 512
SHORTEST = 256  # queries, below which a walk is not cut: its sums would cost more than they save
LAST_TOKENS = 6  # numbers of an item where queries are the last tokens of longer key segments


def query_parts(packed: PackedMetadata) -> Tensor | None:
    """int32 [parts, 3] the segments that the queries of each segment see; None if no segment continues another."""
    return packed.derived("parts of queries", _query_parts)[0] if packed.parents is not None else None


def key_parts(packed: PackedMetadata) -> Tensor | None:
    """int32 [parts, 3] the segments that see the keys of each segment; None as for :func:`query_parts`."""
    return packed.derived("parts of keys", _key_parts)[0] if packed.parents is not None else None


def query_tiles(packed: PackedMetadata, tokens: int, *, fixed_shape: bool = False) -> Tensor:
    """Items of tiles of ``tokens`` queries, int32 [items, 3, 5 or 6]; in causal attention the last sees the most keys.

    With ``fixed_shape`` their number follows from shapes alone, as it does where the lengths are not on the host.
    """

    def make(packed: PackedMetadata) -> Tensor:
        made, segment = _tiles(packed, packed, tokens, fixed_shape, last_first=True)
        if packed.keys is not None:
            made = torch.cat([made, _other_segments(packed, packed.keys)[segment]], 1)
        elif packed.parents is not None:
            bounds = packed.derived("parts of queries", _query_parts)[1]
            made = torch.cat([made, bounds[segment, :2]], 1)
        return to_device(made, packed.device)

    return packed.derived(("tiles of queries", tokens), make)


def key_tiles(packed: PackedMetadata, tokens: int, heads: int = 1, *, fixed_shape: bool = False) -> Tensor:
    """Items of blocks of ``tokens`` keys, int32 [items, 3, 6 or 8]; in causal attention most queries see the first.

    Args:
        packed: the segments.
        tokens: of a block.
        heads: of keys, each of which runs the list.
        fixed_shape: as for :func:`query_tiles`.
    """
    return _key_work(packed, tokens, heads, fixed_shape)[0]


def key_sums(packed: PackedMetadata, tokens: int, heads: int = 1) -> Tensor | None:
    """int32 [shares, 4] where the shares of a block of keys add up; None if segments do not continue others.

    A row is ``(segment's first token, segment's length, the block's first token in the segment, shares)``. That of a
    block's first share counts its shares, which follow each other; the others say 0. There are two rows at least,
    since torch.compile makes a graph of its own for none.
    """
    return _key_work(packed, tokens, heads, False)[1]


def _key_work(packed: PackedMetadata, tokens: int, heads: int, fixed_shape: bool) -> tuple[Tensor, Tensor | None]:
    def make(packed: PackedMetadata) -> tuple[Tensor, Tensor | None]:
        if packed.keys is not None:
            made, segment = _tiles(packed, packed.keys, tokens, fixed_shape)
            return to_device(torch.cat([made, _other_segments(packed, packed)[segment]], 1), packed.device), None
        if packed.parents is None:
            return to_device(_tiles(packed, packed, tokens, fixed_shape)[0], packed.device), None
        bounds = packed.derived("parts of keys", _key_parts)[1]
        made, segment = _tiles(packed, packed, tokens, fixed_shape, walks=bounds[:, 2])
        walks = (bounds[segment, 2] - made[:, 2]) * (made[:, 1] > 0)
        made = torch.cat([made, bounds[segment, :2]], 1)
        work, sums = _shares(made, walks, heads, fixed=packed.parent_index is not None)
        return to_device(work, packed.device), to_device(sums, packed.device)

    return packed.derived(("tiles of keys", tokens, heads), make)


def _shares(tiles: Tensor, walks: Tensor, heads: int, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """Cuts the walk of a block of keys over queries that is longer than ``SHORTEST`` and than its part of the whole.

    Args:
        tiles: int32 [N, 5] the blocks; those of a segment first seen by its own queries, from the block's first token.
        walks: int [N] the queries that see each block, or would without a window.
        heads: of keys.
        fixed: make lists whose lengths do not depend on the walks.

    Returns:
        The items and the sums: see :func:`key_tiles` and :func:`key_sums`.
    """
    most = -(-PROGRAMS // heads)
    longest = (-(-walks.sum() // most)).clamp(min=SHORTEST)
    counts = -(-walks // longest)
    if fixed:  # no more than ``most`` blocks are cut, since each of their walks is longer than the whole over ``most``
        items, shares = len(tiles) + most, 2 * most
    else:
        items, shares = int(counts.sum()), max(2, int(counts[counts > 1].sum()))
    tile, number, live = pieces(counts, 1, items)
    cut = live & (counts[tile] > 1)
    begin = tiles[tile, 2] + number * longest
    place = torch.where(cut, cut.cumsum(0) - 1, -1)
    work = torch.cat([tiles[tile], torch.stack([begin, begin + longest, place], 1)], 1)
    work[:, 1] *= live
    sums = work.new_zeros(shares + 1, 4)
    rows = torch.cat([work[:, :3], torch.where(number == 0, counts[tile], 0)[:, None]], 1)
    sums[torch.where(cut, place, shares)] = rows  # the last row takes what is not cut, and is dropped
    return work.int(), sums[:-1].int()


def _tiles(
    packed: PackedMetadata,
    segments: PackedMetadata,
    tokens: int,
    fixed_shape: bool,
    *,
    last_first: bool = False,
    walks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Items of tiles, int32 [items, 3], and int64 [items] the segment of each, where they are made; the segments with
    the longest ``walks`` come first, or the longest themselves."""
    on_device, linked = packed.parent_index is not None, packed.parents is not None or packed.keys is not None
    if linked and not on_device:
        host_lengths(packed)
    if segments.lengths is None or on_device or (fixed_shape and not linked) or torch.compiler.is_compiling():
        boundaries = segments.cu_seqlens
        items = most_pieces(segments.tokens, boundaries.shape[0] - 1, tokens)
    else:
        boundaries = torch.tensor((0, *segments.lengths)).cumsum(0)
        items = sum(-(-length // tokens) for length in segments.lengths)
    lengths = boundaries.diff()
    order = (lengths if walks is None else walks).argsort(descending=True, stable=True)
    lengths = lengths[order]
    segment, first, live = pieces(lengths, tokens, items)
    length = lengths[segment]
    if last_first:
        first = (length - 1) // tokens * tokens - first
    segment = order[segment]
    return torch.stack((boundaries[:-1][segment], length * live, first * live), dim=1).int(), segment


def _other_segments(packed: PackedMetadata, others: PackedMetadata) -> Tensor:
    """int32 [S, 3] the segment of ``others``, of queries or of keys, that each segment meets, as an item has it."""
    assert packed.keys is not None
    lengths = torch.tensor(host_lengths(others))
    gaps = torch.tensor(host_lengths(packed.keys)) - torch.tensor(host_lengths(packed))
    return torch.stack([lengths.cumsum(0) - lengths, lengths, gaps], 1).int()


def _query_parts(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """The parts, and int32 [S, 3] where those of each segment begin and end, and their tokens together.

    The latter is where the items are made, on the host or the device.
    """
    if packed.parent_index is not None:
        return _query_parts_on_device(packed)
    parents = packed.parents
    assert parents is not None
    return _parts(packed, [[(s, above) for above in lineage(parents, s)] for s in range(len(parents))])


def _key_parts(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """As :func:`_query_parts`."""
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
    parts = torch.from_numpy(np.stack([starts[met], lengths[met], before[queries] - before[keys]], 1)).int()
    counts = torch.tensor([len(several) for several in pairs])
    ends = counts.cumsum(0)
    return to_device(parts, packed.device), _bounds(parts, ends - counts, ends)


def _bounds(parts: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    tokens = torch.nn.functional.pad(parts[:, 1].cumsum(0), (1, 0))
    return torch.stack([begins, ends, tokens[ends] - tokens[begins]], 1).int()


def _query_parts_on_device(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """Room for ``depth + 1`` parts of each segment, those on its path from the root down first."""
    table, before = ancestors(packed)
    count, (segments, width) = (table >= 0).sum(1), table.shape
    place = torch.arange(width, device=packed.device)
    keys = table.gather(1, (count[:, None] - 1 - place).clamp(min=0))
    queries = torch.arange(segments, device=packed.device)[:, None].expand_as(keys)
    first = torch.arange(0, segments * width, width, device=packed.device)
    parts = _rows(packed, keys, before[queries] - before[keys])
    return parts, _bounds(parts, first, first + count)


def _key_parts_on_device(packed: PackedMetadata) -> tuple[Tensor, Tensor]:
    """All pairs of a segment and one that it is or continues, sorted by the latter; what is no pair stands last."""
    table, before = ancestors(packed)
    segments = len(table)
    numbers = torch.arange(segments + 1, device=packed.device)
    pairs = torch.where(table >= 0, table * segments + numbers[:-1, None], segments * segments)
    pairs = pairs.flatten().sort().values
    keys, queries = (pairs // segments).clamp(max=segments - 1), pairs % segments
    edges = torch.searchsorted(pairs, numbers * segments)
    parts = _rows(packed, queries, before[queries] - before[keys])
    return parts, _bounds(parts, edges[:-1], edges[1:])


def _rows(packed: PackedMetadata, met: Tensor, gap: Tensor) -> Tensor:
    starts, lengths = packed.cu_seqlens[:-1], packed.cu_seqlens.diff()
    return torch.stack([starts[met], lengths[met], gap], -1).flatten(0, -2).int()
