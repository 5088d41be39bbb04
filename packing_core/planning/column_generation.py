"""Column generation: fewer rows than best-fit-decreasing where few long pieces share a row.

Best fit leaves a tenth of every row empty when lengths lie between a quarter and a half of the capacity, because no
later piece fits the rest. The cutting-stock linear program (Gilmore and Gomory 1961) chooses how many rows of each
pattern to make instead. Counts per size come in; blocks of equal rows go out, as from ``_bins.best_fit``, which packs
what the program leaves over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packing_core.planning import bins as _bins

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

GROUPS = 128  # sizes that the program tells apart; a pivot costs the square of it
MOST = 4  # long pieces in a row: patterns are a pair and a pair
WORTH = 0.005  # rows over the lower bound, relative, from which the program is tried
TOLERANCE = 5e-4  # distance from the program's optimum, relative, at which it stops
ROUNDS = 400  # pricing rounds at most, so that every machine stops at the same plan
COLUMNS = 4  # a round brings a new pattern for at most every so-many-th group: prices are stale after a few pivots


def fewest(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> tuple[_bins.Blocks, Int64 | None]:
    """The better of best fit and column generation on ``counts[i]`` items of ``sizes[i]``, strictly decreasing.

    Returns:
        The blocks, and the order of the items in which they stand (None: by decreasing size).
    """
    plain = _bins.best_fit(sizes, counts, capacity, max_segments)
    bound = max(_bins.lower_bound(sizes, counts, capacity), -(-int(counts.sum()) // max_segments))
    if plain.n_rows <= (1 + WORTH) * bound:
        return plain, None
    blocks, order = _by_patterns(sizes, counts, capacity, max_segments)
    return (blocks, order) if blocks.n_rows < plain.n_rows else (plain, None)


def _by_patterns(sizes: Int64, counts: Int64, capacity: int, max_segments: int) -> tuple[_bins.Blocks, Int64]:
    """Rows by the program's patterns for the long items, best fit for everything that is left."""
    long = int(np.searchsorted(-sizes, -(capacity // (MOST + 1))))  # a row takes at most MOST of sizes[:long]
    if not long:
        return _bins.best_fit(sizes, counts, capacity, max_segments), np.arange(int(counts.sum()))
    ends = np.cumsum(counts)
    groups = min(GROUPS, long)
    last = np.unique(np.searchsorted(ends[:long], np.arange(1, groups + 1) * ends[long - 1] / groups))
    first = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])
    largest = sizes[first]  # an item counts as the largest of its group, so every pattern fits
    begin = ends[first] - counts[first]
    demand = np.diff(begin, append=ends[last[-1]])
    patterns, amount = _program(largest, demand.astype(np.float64), capacity, min(MOST, max_segments))

    flat: list[tuple[int, int, int, int, int]] = []  # group, then a block
    ranges: list[_bins.Range] = []
    left = demand.tolist()
    n_rows = 0
    for pattern, rows in zip(patterns, amount.tolist()):
        members = np.unique(pattern, return_counts=True)
        number = list(zip(*(part.tolist() for part in members)))
        rows = min(int(rows), *(left[group] // times for group, times in number))
        if not rows:
            continue
        slot = 0
        for group, times in number:
            flat.append((group, n_rows, rows, slot, times))
            left[group] -= rows * times
            slot += times
        ranges.append((capacity - int(largest[pattern].sum()), slot, n_rows, rows))
        n_rows += rows
    flat.sort()

    taken = np.zeros(int(ends[-1]), np.bool_)
    for at, items in zip(begin.tolist(), (demand - left).tolist()):
        taken[at : at + items] = True
    order = np.concatenate([np.flatnonzero(taken), np.flatnonzero(~taken)])
    counts = counts - np.diff(np.concatenate([[0], np.cumsum(taken)])[np.concatenate([[0], ends])])
    there = counts > 0
    made = bytearray().join(_bins.block_bytes(*block) for _, *block in flat)
    if not there.any():
        return _bins.Blocks.of(made, n_rows), order
    rest = _bins.fill(sizes[there], counts[there], capacity, max_segments, ranges, n_rows)
    return _bins.Blocks.of(made, n_rows).followed_by(rest), order


def _program(size: Int64, demand: Float64, capacity: int, most: int) -> tuple[list[Int64], Float64]:
    """Patterns, each the groups of at most ``most`` items that fit ``capacity``, and how many rows of each.

    Minimises the number of rows subject to every group's demand by the revised simplex method. Columns are priced by
    the best pair that fits what is left beside an item or another pair. Prices under which no pattern is worth more
    than ``best`` bound the program from below by the demand's price over ``best`` (Farley 1990), which says how far
    the rows are from the optimum.
    """
    pairs = _Pairs(size, capacity)
    copies = np.minimum(capacity // size, most)
    basis = [np.full(k, group) for group, k in enumerate(copies.tolist())]
    inverse = np.diag(1.0 / copies)
    rows = demand / copies
    price = 1.0 / copies  # what a row can at most pay for an item of each group
    bound = 0.0
    for _ in range(ROUNDS):
        best, found = pairs.columns(price, most)
        bound = max(bound, float(demand @ price) / best)
        if rows.sum() <= (1 + TOLERANCE) * bound:
            break
        for pattern in found:
            value = float(price[pattern].sum())
            if value <= 1 + TOLERANCE / 2:  # no longer worth a pivot, after those before it
                continue
            column = inverse[:, pattern].sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(column > 1e-9, rows / column, np.inf)
            out = int(ratio.argmin())
            step = ratio[out]
            rows -= step * column
            np.maximum(rows, 0, out=rows)
            rows[out] = step
            pivot = inverse[out] / column[out]
            inverse -= column[:, None] * pivot
            inverse[out] = pivot
            price += (1 - value) * pivot
            basis[out] = pattern
    return basis, np.floor(rows + 1e-6)


class _Pairs:
    """All pairs of groups that fit a row, by their sum; group n stands for no item."""

    def __init__(self, size: Int64, capacity: int) -> None:
        self.n = len(size)
        room = np.append(size, 0)
        self.i, self.j = np.triu_indices(self.n + 1)
        total = room[self.i] + room[self.j]
        order = np.argsort(total, kind="stable")
        order = order[: np.searchsorted(total[order], capacity, side="right")]
        self.i, self.j, self.total = self.i[order], self.j[order], total[order]
        self.beside_one = np.searchsorted(self.total, capacity - size, side="right") - 1
        self.beside_two = np.searchsorted(self.total, capacity - self.total, side="right") - 1

    def columns(self, price: Float64, most: int) -> tuple[float, list[Int64]]:
        """Returns the value of the best pattern, at least 1, and the patterns worth more than 1, the best first."""
        if most == 1:
            return 1.0, []
        priced = np.append(price, 0.0)
        value = priced[self.i] + priced[self.j]
        if most == 2:
            total, columns = value, [self.i, self.j]
        else:
            reach = np.maximum.accumulate(value)
            pair = np.maximum.accumulate(np.where(value >= reach, np.arange(len(value)), 0))
            fits = self.beside_one if most == 3 else self.beside_two
            beside = pair[fits]
            first = [np.arange(self.n)] if most == 3 else [self.i, self.j]
            total = (price if most == 3 else value) + reach[fits]
            columns = [*first, self.i[beside], self.j[beside]]
        better = np.flatnonzero(total > 1)
        better = better[np.argsort(-total[better], kind="stable")[: max(1, self.n // COLUMNS)]]
        members = np.stack([column[better] for column in columns], axis=1)
        return max(1.0, float(total.max())), [row[row < self.n] for row in members]
