"""Rows whose lengths look like a random draw of the documents: sizes of pieces in, rows of pieces out.

Best fit puts pieces of one size together: a row of short documents, then a row of long ones. Here most pieces stay in
the order in which they were drawn, and only the space that is left at the end of each row is filled by length.
Everything is a few array operations over all rows at once.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.planning import bins as _bins
from packing_core.planning.assignment import RowAssignment, Shuffle, best_fit, permutation
from packing_core.storage.segment_indexing import indexes, ranges

Int64 = NDArray[np.int64]

SECTION = 64  # rows that one section of the draw fills: sections are filled side by side
TAIL = 5  # one part in so many, the end of a section, gives its long pieces to the part before it
FULL = 0.999  # efficiency below which more pieces are held back
CLOSE = 1.005  # times the rows of best fit, where those are not full either
DRAWN = (100, 90, 80, 65, 40, 0)  # percent of the fewest rows possible that the draw fills; the next where one fails


def mixed(sizes: Int64, capacity: int, max_segments: int, shuffle: Shuffle, *, once: bool = False) -> RowAssignment:
    """Rows of random composition, ``FULL``, or ``CLOSE`` to the number of best fit's rows where those are not ``FULL``.

    1. The pieces are drawn in random order (in their own order without ``shuffle``), and the draw is cut into sections.
       Long pieces, of more than half a row, leave the last fifth of their section: one at place ``p`` of this fifth
       changes places with the piece at place ``4 p`` of the section, unless that is long too.
    2. Each section fills its share of the fewest rows possible by next fit. Its remaining pieces are held back.
    3. The rows take turns until nothing fits: in every round each row takes the longest piece held back that fits it,
       the rows that the fewest pieces fit first. So a row takes one piece a round.
    4. What fits no row is packed by best fit into rows of its own.

    If there are too many rows, fewer are filled in step 2, down to none, which is best fit itself. With ``once`` the
    first rows are taken as they are, for callers who keep back rows that are not full.
    """
    order = np.arange(len(sizes)) if shuffle is None else permutation(len(sizes), shuffle)
    sizes = sizes.take(order)
    bound = _fewest(sizes, capacity, max_segments)
    sections = _shares(len(sizes), max(1, ceil(bound) // SECTION))
    _move_long_forward(order, sizes, sections, capacity)
    enough = inf if once else bound / FULL
    for share in DRAWN:
        drawn = _draw(sizes, sections, share * ceil(bound) // 100, capacity, max_segments)
        if drawn.n_rows > enough and share == DRAWN[0]:
            enough = most_rows(sizes, capacity, max_segments)
        if drawn.n_rows <= enough:
            break
    return _written(drawn, order, sizes, shuffle)


def most_rows(sizes: Int64, capacity: int, max_segments: int) -> int:
    """Returns an upper bound on the rows that ``mixed`` makes of these pieces, for every draw and order."""
    enough = _fewest(sizes, capacity, max_segments) / FULL
    values, counts = np.unique(sizes, return_counts=True)
    fewest = _bins.best_fit(values[::-1], counts[::-1], capacity, max_segments).n_rows
    return int(enough if fewest <= enough else fewest * CLOSE)


def _fewest(sizes: Int64, capacity: int, max_segments: int) -> float:
    """No fewer rows hold these pieces."""
    return max(int(sizes.sum()) / capacity, len(sizes) / max_segments)


class _Draw(NamedTuple):
    """Row r begins with pieces ``begin[r]:begin[r] + counts[r]`` of the draw; piece ``place`` is number ``slot`` of
    ``row``, which may be one of the rows after those."""

    n_rows: int
    begin: Int64
    counts: Int64
    row: Int64
    slot: Int64
    place: Int64


def _shares(n: int, count: int) -> Int64:
    """[count + 1] where each share of ``n`` begins: shares differ by one at most."""
    return np.arange(count + 1) * n // count


def _move_long_forward(order: Int64, sizes: Int64, sections: Int64, capacity: int) -> None:
    """Step 1, in place: held back, a piece that is longer than what rows have left would need a row of its own."""
    is_long = sizes > capacity // 2
    at = np.flatnonzero(is_long)
    section = np.searchsorted(sections, at, side="right") - 1
    begin, length = sections[section], np.diff(sections)[section]
    place = at - begin - (length - length // TAIL)
    other = begin + (TAIL - 1) * place
    moved = (place >= 0) & ~is_long[np.maximum(other, 0)]
    at, other = at[moved], other[moved]
    for array in (order, sizes):
        array[at], array[other] = array[other], array[at]


def _draw(sizes: Int64, sections: Int64, fewest: int, capacity: int, max_segments: int) -> _Draw:
    """Steps 2 to 4."""
    before = _offsets(sizes)
    begin, end = _next_fit(sizes, before, sections, fewest, capacity, max_segments)
    counts = end - begin
    is_held = np.ones(len(sizes), np.bool_)
    is_held[indexes(begin, counts)] = False
    free = capacity - (before[end] - before[begin])
    row, slot, place, left = _take_turns(sizes, np.flatnonzero(is_held), free, counts, max_segments)
    n_rows = len(counts)
    if len(left):
        rest = best_fit(sizes[left], capacity, min(max_segments, len(left)), None)
        added = np.diff(rest.offsets)
        row = np.concatenate([row, np.repeat(n_rows + np.arange(len(added)), added)])
        slot = np.concatenate([slot, ranges(added)])
        place = np.concatenate([place, left[rest.order]])
        n_rows += len(added)
    return _Draw(n_rows, begin, counts, row, slot, place)


def _written(drawn: _Draw, order: Int64, sizes: Int64, shuffle: Shuffle) -> RowAssignment:
    """Each row's pieces of the draw, then those it took, both copied as runs."""
    taken = np.bincount(drawn.row, minlength=drawn.n_rows)
    first = _offsets(taken)
    begin, counts = np.zeros((2, drawn.n_rows, 2), np.int64)
    begin[: len(drawn.begin), 0], counts[: len(drawn.begin), 0] = drawn.begin, drawn.counts
    begin[:, 1], counts[:, 1] = len(order) + first[:-1], taken
    late = np.empty(len(drawn.place), np.int64)
    late[(first[:-1] - counts[:, 0])[drawn.row] + drawn.slot] = drawn.place
    if shuffle is not None:
        rows = permutation(drawn.n_rows, shuffle)
        begin, counts = begin.take(rows, axis=0), counts.take(rows, axis=0)
    at = indexes(begin.reshape(-1), counts.reshape(-1))
    offsets = _offsets(counts[:, 0] + counts[:, 1])
    is_late = at >= len(order)
    at[is_late] = late[at[is_late] - len(order)]
    return RowAssignment(offsets, order.take(at), sizes.take(at))


def _next_fit(
    sizes: Int64, before: Int64, sections: Int64, rows: int, capacity: int, max_segments: int
) -> tuple[Int64, Int64]:
    """Begin and end of each of at most ``rows`` rows, which are divided evenly among the sections.

    Args:
        before: [N + 1] units before each piece of the draw.
    """
    wanted = np.diff(_shares(rows, len(sections) - 1))
    most = min(max_segments, capacity // int(sizes.min()), int(np.diff(sections).max()))  # pieces of a row
    begin, stop = sections[:-1], sections[1:]
    edges = np.empty((int(wanted.max()) + 1, len(begin)), np.int64)
    edges[0] = begin
    for k in range(1, len(edges)):  # of all sections at once: a binary search for the last piece that fits
        last, room = np.minimum(begin + most, stop), before[begin] + capacity
        end = begin
        for width in (1 << bit for bit in reversed(range(most.bit_length()))):
            further = np.minimum(end + width, last)
            end = np.where(before[further] <= room, further, end)
        edges[k] = begin = end
    edges = edges.T
    made = (np.arange(edges.shape[1] - 1) < wanted[:, None]) & (edges[:, 1:] > edges[:, :-1])
    return edges[:, :-1][made], edges[:, 1:][made]


def _take_turns(
    sizes: Int64, held: Int64, free: Int64, counts: Int64, max_segments: int
) -> tuple[Int64, Int64, Int64, Int64]:
    """Step 3: rows, slots and places of the pieces taken, and places of those that no row took.

    A row that gets nothing in a round never will, because everything that fits it went to others.
    """
    taken: list[tuple[Int64, Int64, Int64]] = [(held[:0],) * 3]
    held, ascending = _sorted_together(sizes[held], held)
    rows = np.arange(len(free))
    for turn in range(len(held)):
        rows = rows[counts[rows] + turn < max_segments]
        fits = _fitting(ascending, free[rows])
        takers = fits > 0
        rows, fits = _sorted_together(fits[takers], rows[takers])
        which, piece = _match(fits)
        if not len(which):
            break
        rows = rows[which]
        taken.append((rows, counts[rows] + turn, held[piece]))
        free[rows] -= ascending[piece]
        stays = np.ones(len(held), np.bool_)
        stays[piece] = False
        held, ascending = held[stays], ascending[stays]
    row, slot, place = map(np.concatenate, zip(*taken))
    return row, slot, place, held


def _fitting(ascending: Int64, free: Int64) -> Int64:
    """Counts the pieces that fit each row."""
    most = int(free.max(initial=0))
    if most > len(free):
        return np.searchsorted(ascending, free, side="right")
    small = ascending[: np.searchsorted(ascending, most, side="right")]
    return np.cumsum(np.bincount(small, minlength=most + 1))[free]  # a table is several times faster for many rows


def _sorted_together(keys: Int64, values: Int64) -> tuple[Int64, Int64]:
    """Both by ascending key, then ascending value; many times faster than an indirect sort."""
    bits = int(values.max(initial=0)).bit_length()
    both = (keys << bits) | values
    both.sort()
    return both & ((1 << bits) - 1), both >> bits


def _match(fits: Int64) -> tuple[Int64, Int64]:
    """Row i takes the last of the first ``fits[i]`` (ascending) pieces that no row before it took.

    Returns:
        The rows that took a piece, in any order, and the piece of each.
    """
    # Which pieces are taken does not depend on the order of the rows. Seen from the last row, each takes the next
    # smaller piece, or the last one that fits it.
    rows = np.arange(len(fits))
    taken = np.minimum.accumulate((fits - rows)[::-1])[::-1] + rows - 1
    taken = taken[np.searchsorted(taken, 0) :]
    # These pieces and the rows in one sequence, each row after the pieces that fit it, match as opening and closing
    # brackets do: a closing bracket belongs to the nearest opening one of its depth.
    n = len(taken) + len(fits)
    step = np.ones(n, np.int64)
    step[np.searchsorted(taken, fits) + rows] = -1
    pieces = np.cumsum(step > 0)  # up to here
    depth = 2 * pieces - np.arange(1, n + 1) + (step < 0) + len(fits)  # both brackets of a pair have that of the first
    at, depth = _sorted_together(depth, np.arange(n))
    pair = np.flatnonzero((depth[1:] == depth[:-1]) & (step[at[:-1]] > 0) & (step[at[1:]] < 0))
    opening, closing = at[pair], at[pair + 1]
    return closing - pieces[closing], taken[pieces[opening] - 1]


def _offsets(counts: Int64) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
