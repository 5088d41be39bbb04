"""Sizes of pieces in, rows of pieces out: sorted, counted, packed by ``bins``, shuffled and written as CSR arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.planning import bins
from packing_core.storage.arrays import Int64
from packing_core.storage.segment_indexing import blocks as batches
from packing_core.storage.segment_indexing import indexes, offsets_of, ranges

Shuffle = np.random.PCG64 | None  # the source of randomness; None keeps the planner's order


class RowAssignment(NamedTuple):
    """Row r holds the pieces ``order[offsets[r]:offsets[r+1]]``, whose sizes stand in the same places of ``sizes``."""

    offsets: Int64
    order: Int64
    sizes: Int64

    @property
    def counts(self) -> Int64:
        """int64 [R] pieces of each row."""
        return np.diff(self.offsets)


def decreasing(
    pack: Callable[[Int64, Int64, int, int], bins.Blocks],
    sizes: Int64,
    capacity: int,
    max_segments: int,
    shuffle: Shuffle,
) -> RowAssignment:
    """Hand the number of pieces of each size, by decreasing size, to ``pack`` and write down its blocks."""
    # Sizes and indexes are sorted together, in half the memory where both fit an int32, which is several times faster
    # than an indirect sort. They fit an int64 always (``pieces``). Large arrays are used again: new memory takes time.
    n = len(sizes)
    bits = (n - 1).bit_length()
    dtype = np.int32 if int(sizes.max()) << bits <= 1 << 31 else np.int64
    spare = np.arange(n, dtype=dtype)
    keys = np.left_shift(sizes, bits, dtype=dtype, casting="unsafe")
    np.subtract(spare, keys, out=keys)
    keys.sort()
    ordered = np.right_shift(keys, bits, out=spare)
    first = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
    blocks = pack(-ordered[first].astype(np.int64), np.diff(first, append=n), capacity, max_segments)
    offsets = _scatter(blocks, keys, shuffle, out=spare)
    order = np.bitwise_and(spare, (1 << bits) - 1, out=keys).astype(np.int64, copy=False)
    np.negative(np.right_shift(spare, bits, out=spare), out=spare)
    return RowAssignment(offsets, order, spare.astype(np.int64, copy=False))


def sequential(sizes: Int64, capacity: int, max_segments: int, shuffle: Shuffle) -> RowAssignment:
    """Next fit on the pieces in their order."""
    offsets = bins.next_fit(sizes, capacity, max_segments)
    if shuffle is None:
        return RowAssignment(offsets, np.arange(len(sizes)), sizes)
    rows = permutation(len(offsets) - 1, shuffle)
    counts = np.diff(offsets)[rows]
    order = np.repeat(offsets[rows], counts) + ranges(counts)
    return RowAssignment(offsets_of(counts), order, sizes[order])


best_fit = partial(decreasing, bins.best_fit)
first_fit = partial(decreasing, bins.first_fit)


def permutation(n: int, bits: np.random.PCG64) -> Int64:
    """A permutation of 0..n-1 from raw random bits, whose stream NumPy promises to keep from version to version."""
    low = np.uint64((1 << (n - 1).bit_length()) - 1)
    keys = bits.random_raw(n)
    keys &= ~low
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def _scatter(blocks: bins.Blocks, items: NDArray[Any], shuffle: Shuffle, *, out: NDArray[Any]) -> Int64:
    """Write ``items``, which stand in the order of the blocks, to ``out`` row by row; returns the row offsets [R+1]."""
    enter = np.bincount(blocks.first, blocks.per_row, blocks.n_rows + 1)
    leave = np.bincount(blocks.first + blocks.rows, blocks.per_row, blocks.n_rows + 1)
    counts = np.cumsum(enter - leave)[:-1].astype(np.int64)
    if shuffle is None:
        offsets = offsets_of(counts)
        begin = offsets[:-1]
    else:
        rows = permutation(blocks.n_rows, shuffle)
        offsets = offsets_of(counts[rows])
        begin = np.empty(blocks.n_rows, np.int64)
        begin[rows] = offsets[:-1]

    # A block is cut into runs the long way: across its rows, one item into each, or down every row. Item t of a run
    # goes to begin[row + t] + slot if it runs across, and to begin[row] + slot + t if it runs down.
    across = blocks.rows >= blocks.per_row
    runs = np.minimum(blocks.rows, blocks.per_row)
    length = np.repeat(np.maximum(blocks.rows, blocks.per_row), runs)
    number = ranges(runs)
    across = np.repeat(across, runs)
    row = np.repeat(blocks.first, runs) + np.where(across, 0, number)
    slot = np.repeat(blocks.slot, runs) + np.where(across, number, 0)
    source = np.where(across, row, begin[row] + slot)
    slot = np.where(across, slot, 0)
    done = 0
    for batch in batches(length):
        at = indexes(source[batch], length[batch])
        if across[batch].all():
            at = begin[at]
        else:
            np.copyto(at, begin.take(at, mode="clip"), where=np.repeat(across[batch], length[batch]))
        at += np.repeat(slot[batch], length[batch])
        out[at] = items[done : done + len(at)]
        done += len(at)
    return offsets
