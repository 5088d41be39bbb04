"""Bin packing on counts: how many items of each size in, blocks of equal rows out.

Rows with the same contents are interchangeable, so a run of equal items goes into a run of equal rows at once. The work
in Python is per distinct size; ``assignment`` writes the blocks down with a few array operations. No document
ids pass through here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from struct import Struct

import numpy as np

from packing_core.storage.arrays import Int64
from packing_core.storage.segment_indexing import offsets_of

Range = tuple[int, int, int, int]  # free units, segments so far, first row, number of rows

block_bytes = Struct("4q").pack  # collects blocks in less time and memory than a list of numbers would


@dataclass(frozen=True)
class Blocks:
    """Block b puts ``per_row[b]`` items into each of ``rows[b]`` rows from ``first[b]``, from segment ``slot[b]`` on.

    Blocks stand in the order of the items: those of the first size, then those of the second, and so on.
    """

    first: Int64
    rows: Int64
    slot: Int64
    per_row: Int64
    n_rows: int

    @classmethod
    def of(cls, packed: bytearray, n_rows: int) -> Blocks:
        """From ``block_bytes(first, rows, slot, per_row)`` of each block, one after the other."""
        first, rows, slot, per_row = np.frombuffer(packed, np.int64).reshape(-1, 4).T
        return cls(first, rows, slot, per_row, n_rows)

    def followed_by(self, other: Blocks) -> Blocks:
        """The blocks of both; ``other`` numbers its rows as a continuation of these."""
        pairs = zip(
            (self.first, self.rows, self.slot, self.per_row), (other.first, other.rows, other.slot, other.per_row)
        )
        first, rows, slot, per_row = (np.concatenate(pair) for pair in pairs)
        return Blocks(first, rows, slot, per_row, other.n_rows)


def best_fit(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> Blocks:
    """Best fit of ``counts[i]`` items of ``sizes[i]``, strictly decreasing: exactly best-fit-decreasing.

    Each item goes into the fullest row that takes it; among equals, the one with fewest segments, then the oldest.
    """
    alone = _over_half(sizes, capacity)  # no two of sizes[:alone] share a row, so each item of them opens one
    rows = counts[:alone]
    first = np.cumsum(rows) - rows
    opened = Blocks(first, rows, np.zeros_like(rows), np.ones_like(rows), int(rows.sum()))
    if alone == len(sizes):
        return opened
    free = (capacity - sizes[:alone]).tolist()
    ranges = zip(free, repeat(1), first.tolist(), rows.tolist())
    return opened.followed_by(fill(sizes[alone:], counts[alone:], capacity, max_segments, ranges, opened.n_rows))


def fill(sizes: Int64, counts: Int64, capacity: int, max_segments: int, ranges: Iterable[Range], n_rows: int) -> Blocks:
    """``best_fit`` into rows that are there before, and into new ones.

    While sizes decrease, rows that take the current size only gain members, and every newcomer has less free than those
    before. So they form a stack whose top is the fullest, and what is left of a row waits for the size that fits it.

    Args:
        sizes: [D] units of the items, strictly decreasing.
        counts: [D] items of each size.
        capacity: units of a row.
        max_segments: most items in a row.
        ranges: rows that are there before and take more; they are numbered from 0.
        n_rows: how many rows are there before.
    """
    blocks = bytearray()
    stack: list[Range] = []
    waiting: list[list[Range]] = [[] for _ in sizes]
    largest_within = _largest_within(sizes, capacity)
    smallest = int(sizes[-1])
    for range_ in ranges:
        if range_[0] >= smallest and range_[1] < max_segments:
            waiting[largest_within(range_[0])].append(range_)
    for arrived, size, count in zip(waiting, sizes.tolist(), counts.tolist()):
        if arrived:
            arrived.sort(reverse=True)
            stack += arrived
        while count:
            if stack:
                free, segments, first, rows = stack.pop()
            else:
                free, segments, first, rows = capacity, 0, n_rows, 0
            per_row = free // size
            if segments + per_row > max_segments:
                per_row = max_segments - segments
            if not rows:  # new ones
                rows = -(-count // per_row)
                n_rows += rows
            if rows * per_row <= count:
                count -= rows * per_row
            else:  # the items fill some of the rows, leave one half filled, and do not reach the others
                filled = count // per_row
                left = count - filled * per_row
                reached = filled + (left > 0)
                count = 0
                if rows > reached:
                    stack.append((free, segments, first + reached, rows - reached))
                if left:
                    blocks += block_bytes(first + filled, 1, segments, left)
                    stack.append((free - left * size, segments + left, first + filled, 1))
                if not filled:
                    break
                rows = filled
            blocks += block_bytes(first, rows, segments, per_row)
            free -= per_row * size
            segments += per_row
            if free >= smallest and segments < max_segments:
                waiting[largest_within(free)].append((free, segments, first, rows))
    return Blocks.of(blocks, n_rows)


def first_fit(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> Blocks:
    """First fit of ``counts[i]`` items of ``sizes[i]``, strictly decreasing: exactly first-fit-decreasing.

    Each item goes into the row opened first among those that take it.
    """
    blocks = bytearray()
    free_from = _Tournament()  # what the range of equal rows from here has free, 0 where no range begins
    ranges: dict[int, tuple[int, int]] = {}  # its segments so far and number of rows
    n_rows = 0
    for size, count in zip(sizes.tolist(), counts.tolist()):
        while count:
            first = free_from.first_at_least(size)
            if first >= 0:
                free = free_from.get(first)
                segments, rows = ranges[first]
                per_row = min(free // size, max_segments - segments)
            else:
                free, segments, first = capacity, 0, n_rows
                per_row = min(free // size, max_segments)
                rows = -(-count // per_row)
                n_rows += rows
            full, left = divmod(min(count, rows * per_row), per_row)
            count -= full * per_row + left
            for begin, width, items in ((first, full, per_row), (first + full, 1, left)):
                if width and items:
                    blocks += block_bytes(begin, width, segments, items)
                    ranges[begin] = segments + items, width
                    free_from.set(begin, free - items * size if segments + items < max_segments else 0)
            touched = full + (left > 0)
            if rows > touched:
                ranges[first + touched] = segments, rows - touched
                free_from.set(first + touched, free)
    return Blocks.of(blocks, n_rows)


def next_fit(sizes: Int64, capacity: int, max_segments: int) -> Int64:
    """Row offsets [R+1] of next fit on the items in their order: a row is closed when the next item does not fit."""
    ends = offsets_of(sizes)
    following = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    np.minimum(following, np.arange(len(sizes)) + max_segments, out=following)
    step, at, offsets = following.tolist(), 0, [0]
    while at < len(sizes):
        at = step[at]
        offsets.append(at)
    return np.array(offsets, np.int64)


def lower_bound(sizes: Int64, counts: Int64, capacity: int) -> int:
    """No packing of ``counts[i]`` items of ``sizes[i]``, strictly decreasing, has fewer rows.

    Bound L2 of Martello and Toth, Knapsack Problems (1990), section 8.3: for every threshold a <= capacity / 2, items
    over capacity - a stand alone, those over capacity / 2 open a row each, and those of at least a fill what is left.
    """
    number = offsets_of(counts)
    volume = offsets_of(sizes * counts)
    half = _over_half(sizes, capacity)
    thresholds = np.append(sizes[half:], 0)
    alone = np.minimum(np.searchsorted(-sizes, thresholds - capacity), half)
    upto = np.searchsorted(-sizes, -thresholds, side="right")
    left = (number[half] - number[alone]) * capacity - (volume[half] - volume[alone])
    extra = -((left - (volume[upto] - volume[half])) // capacity)
    return int(number[half] + np.maximum(extra, 0).max())


def _over_half(sizes: Int64, capacity: int) -> int:
    """Counts the ``sizes`` (decreasing) that are over half the capacity."""
    return int(np.searchsorted(-sizes, -(capacity // 2)))


def _largest_within(sizes: Int64, capacity: int) -> Callable[[int], int]:
    """A function from free units to the index of the largest of ``sizes`` (decreasing) that fits them."""
    if capacity <= 16 * len(sizes):  # a table is quicker to ask, and costs its length to make
        present = np.zeros(capacity + 1, np.int64)
        present[sizes] = 1
        table: list[int] = (len(sizes) - np.cumsum(present)).tolist()
        return table.__getitem__
    negated = (-sizes).tolist()
    return lambda free: bisect_left(negated, -free)


class _Tournament:
    """A growing list of numbers, 0 where not set, that finds the first one of at least a value in logarithmic time."""

    def __init__(self) -> None:
        self._leaves = 1
        self._tree = [0, 0]  # node i has children 2i and 2i+1, and is the larger of them

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
        """The index, or -1 where there is none."""
        tree, node = self._tree, 1
        if tree[node] < value:
            return -1
        while node < self._leaves:
            node *= 2
            node += tree[node] < value
        return node - self._leaves

    def _grow(self) -> None:
        grown, width = [0, self._tree[1]], 1
        while width <= self._leaves:  # a level of the old tree is the left half of the next level of the new one
            grown += self._tree[width : 2 * width] + [0] * width
            width *= 2
        self._tree, self._leaves = grown, 2 * self._leaves
