"""Bin packing on counts: how many items of each size in, layers of rows out.

Rows with the same contents are interchangeable, so a run of equal items goes into a run of equal rows at once: the work
in Python is per distinct size, and whoever calls this turns layers into pieces with a few array operations.
Sizes are in units of the plan's alignment; no document ids pass through here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Layers:
    """One item in each of ``rows[i]`` consecutive rows from ``first[i]``, as the ``slot[i]``-th segment of each.

    Layers stand in the order of the items: all of the first size, then all of the second, and so on.
    """

    first: Int64
    rows: Int64
    slot: Int64
    n_rows: int


def best_fit(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> Layers:
    """Best fit on ``counts[i]`` items of ``sizes[i]``, strictly decreasing: exactly best-fit-decreasing.

    Each item goes into the fullest row that still takes it; among equally full rows, into one with the fewest segments.
    """
    blocks: list[tuple[int, int, int, int]] = []  # first row, number of rows, first slot, items per row
    ranges: list[tuple[int, int, int, int]] = []  # free, segments, first row, end row; sorted: the fullest come first
    smallest = int(sizes[-1])
    n_rows = 0

    def put_back(free: int, segments: int, first: int, end: int) -> None:
        if free >= smallest and segments < max_segments and first < end:
            insort(ranges, (free, segments, first, end))

    for size, count in zip(sizes.tolist(), counts.tolist()):
        while count:
            at = bisect_left(ranges, (size,))
            if at < len(ranges):
                free, segments, first, end = ranges.pop(at)
                per_row = min(free // size, max_segments - segments)
            else:
                free, segments, first = capacity, 0, n_rows
                per_row = min(free // size, max_segments)
                end = n_rows = first - (-count // per_row)
            full = min(end - first, count // per_row)
            if full:
                blocks.append((first, full, segments, per_row))
                put_back(free - per_row * size, segments + per_row, first, first + full)
                count -= full * per_row
                first += full
            if first < end:
                if count:
                    blocks.append((first, 1, segments, count))
                    put_back(free - count * size, segments + count, first, first + 1)
                    count = 0
                    first += 1
                put_back(free, segments, first, end)
    return _layers(blocks, n_rows)


def first_fit(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> Layers:
    """First fit on ``counts[i]`` items of ``sizes[i]``, strictly decreasing: exactly first-fit-decreasing.

    Each item goes into the row opened earliest among those that still take it.
    """
    blocks: list[tuple[int, int, int, int]] = []
    free_of = _Tournament()
    ends: dict[int, int] = {}  # a run of equal rows is known by its first row
    segments_of: dict[int, int] = {}
    n_rows = 0

    def put(free: int, segments: int, first: int, end: int) -> None:
        if first < end:
            ends[first], segments_of[first] = end, segments
            free_of.set(first, free if segments < max_segments else 0)

    for size, count in zip(sizes.tolist(), counts.tolist()):
        while count:
            first = free_of.first_at_least(size)
            if first >= 0:
                free, segments, end = free_of.get(first), segments_of[first], ends[first]
                per_row = min(free // size, max_segments - segments)
            else:
                free, segments, first = capacity, 0, n_rows
                per_row = min(free // size, max_segments)
                end = n_rows = first - (-count // per_row)
            full = min(end - first, count // per_row)
            if full:
                blocks.append((first, full, segments, per_row))
                put(free - per_row * size, segments + per_row, first, first + full)
                count -= full * per_row
                first += full
            if first < end:
                if count:
                    blocks.append((first, 1, segments, count))
                    put(free - count * size, segments + count, first, first + 1)
                    count = 0
                    first += 1
                put(free, segments, first, end)
    return _layers(blocks, n_rows)


class _Tournament:
    """A list of numbers, 0 where not set, that finds the first one of at least a given size in logarithmic time."""

    def __init__(self) -> None:
        self._leaves = 1
        self._tree = [0, 0]  # node i has children 2i and 2i+1; every node is the maximum of its children

    def get(self, index: int) -> int:
        return self._tree[self._leaves + index]

    def set(self, index: int, value: int) -> None:
        while index >= self._leaves:
            self._grow()
        tree, node = self._tree, self._leaves + index
        tree[node] = value
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    def first_at_least(self, value: int) -> int:
        tree, node = self._tree, 1
        if tree[1] < value:
            return -1
        while node < self._leaves:
            node *= 2
            if tree[node] < value:
                node += 1
        return node - self._leaves

    def _grow(self) -> None:
        tree, width, levels = self._tree, self._leaves, []
        while width:
            levels.append(tree[width : 2 * width] + [0] * width)
            width //= 2
        self._tree = [0, tree[1]]
        for level in reversed(levels):
            self._tree += level
        self._leaves *= 2


def _layers(blocks: list[tuple[int, int, int, int]], n_rows: int) -> Layers:
    """Cut each block of ``k`` items per row into ``k`` layers of one item per row."""
    first, rows, slot, per_row = np.array(blocks, np.int64).T
    ends = np.cumsum(per_row)
    layer = np.arange(ends[-1]) - np.repeat(ends - per_row, per_row)
    return Layers(np.repeat(first, per_row), np.repeat(rows, per_row), np.repeat(slot, per_row) + layer, n_rows)


def next_fit(sizes: Int64, capacity: int, max_segments: int) -> Int64:
    """Row offsets [R+1] of next fit on the items in their order: a row is closed when the next item does not fit."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    following = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    np.minimum(following, np.arange(len(sizes)) + max_segments, out=following)
    step, at, offsets = following.tolist(), 0, [0]
    while at < len(sizes):
        at = step[at]
        offsets.append(at)
    return np.array(offsets, np.int64)


def scatter(layers: Layers, items: Int64, place: Int64) -> tuple[Int64, Int64]:
    """Write the layers' items down row by row, row r as row ``place[r]``.

    Args:
        layers: as a packer gave them.
        items: [P] the items' ids in the order in which the layers stand.
        place: [R] a permutation of the rows.

    Returns:
        Row offsets [R+1] and item ids [P].
    """
    changes = np.bincount(layers.first, minlength=layers.n_rows + 1)
    changes -= np.bincount(layers.first + layers.rows, minlength=layers.n_rows + 1)
    counts = np.empty(layers.n_rows, np.int64)
    counts[place] = np.cumsum(changes)[:-1]
    row_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    ends = np.cumsum(layers.rows)
    row = np.arange(len(items)) + np.repeat(layers.first - (ends - layers.rows), layers.rows)
    at = row_offsets[place][row] + np.repeat(layers.slot, layers.rows)
    written = np.empty(len(items), np.int64)
    written[at] = items
    return row_offsets, written


def lower_bound(sizes: Int64, counts: Int64, capacity: int) -> int:
    """No packing of ``counts[i]`` items of ``sizes[i]``, strictly decreasing, has fewer rows.

    Bound L2 of Martello and Toth, Knapsack Problems (1990), section 8.3: for every threshold a <= capacity / 2, items
    over capacity - a stand alone, those over capacity / 2 open a row each, and those of at least a fill what is left.
    """
    volume = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes * counts)])
    number = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    half = int(np.searchsorted(-sizes, -(capacity // 2), side="left"))  # sizes[:half] are over half the capacity
    thresholds = np.concatenate([np.zeros(1, np.int64), sizes[half:]])  # 0 stands for "no item stands alone"
    alone = np.searchsorted(-sizes, thresholds - capacity, side="left")
    alone = np.minimum(alone, half)
    upto = np.searchsorted(-sizes, -thresholds, side="right")
    left = (number[half] - number[alone]) * capacity - (volume[half] - volume[alone])
    extra = -(-(volume[upto] - volume[half] - left) // capacity)
    return int((number[half] + np.maximum(extra, 0)).max())
