"""Rows whose lengths look like a random draw of the documents: sizes of pieces in, rows of pieces out.

Best fit puts pieces of one size together: a row of short documents, then a row of long ones. Here most pieces stay in
the order in which they were drawn, and only the space that is left at the end of each row is filled by length.
Everything is a few array operations over all rows at once.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from packing_core.planning import bins as _bins
from packing_core.planning.assignment import RowAssignment, Shuffle, best_fit, permutation
from packing_core.storage.arrays import Int64
from packing_core.storage.segment_indexing import blocks, indexes, offsets_of, ranges

SECTION = 64  # rows that one section of the draw fills: sections are filled side by side
TAIL = 5  # one part in so many, the end of a section, gives its long pieces to the part before it
FULL = 0.999  # efficiency below which more pieces are held back
CLOSE = 1.005  # times the rows of best fit, where those are not full either
HELD = 0.15  # part of the units that all rows may hold back, for pieces held back to have a chance to fill them
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

    If there are too many rows, fewer are filled in step 2, down to none, which is best fit itself; so too, at once,
    if the first rows hold back more than ``HELD`` of all. With ``once`` the first rows are taken as they are, for
    callers who keep back rows that are not full.
    """
    order = np.arange(len(sizes)) if shuffle is None else permutation(len(sizes), shuffle)
    narrow = sizes.astype(np.min_scalar_type(capacity))  # what a cache holds is gathered twice as fast
    sizes = narrow.take(order).astype(np.int64)
    bound = _fewest(sizes, capacity, max_segments)
    sections = _shares(len(sizes), max(1, ceil(bound) // SECTION))
    _move_long_forward(order, sizes, sections, capacity)
    edges, filled = _next_fit(sizes, sections, ceil(bound), capacity, max_segments)
    close = 0
    for share in DRAWN:
        started = _first_rows(edges, filled, share * ceil(bound) // 100)
        if share == DRAWN[0] and not once and started.filled.sum() < (1 - HELD) * sizes.sum():
            continue
        drawn = _draw(sizes, started, sections, capacity, max_segments)
        if once or drawn.n_rows <= bound / FULL:
            break
        close = close or most_rows(sizes, capacity, max_segments)
        if drawn.n_rows <= close:
            break
    del edges, filled, started
    bits = (len(order) - 1).bit_length()
    sizes <<= bits
    sizes |= order
    del order
    return _written(drawn, sizes, bits, shuffle)


def most_rows(sizes: Int64, capacity: int, max_segments: int) -> int:
    """Returns an upper bound on the rows that ``mixed`` makes of these pieces, for every draw and order."""
    enough = _fewest(sizes, capacity, max_segments) / FULL
    values, counts = _counted(sizes)
    fewest = _bins.best_fit(values[::-1], counts[::-1], capacity, max_segments).n_rows
    return int(enough if fewest <= enough else fewest * CLOSE)


def _fewest(sizes: Int64, capacity: int, max_segments: int) -> float:
    """No fewer rows hold these pieces."""
    return max(int(sizes.sum()) / capacity, len(sizes) / max_segments)


class _Started(NamedTuple):
    """Rows of the pieces ``begin:begin + counts`` of the draw; section s is drawn up to piece ``stop[s]``."""

    begin: Int64
    counts: Int64
    filled: Int64
    stop: Int64


class _Draw(NamedTuple):
    """The first rows hold ``started`` pieces; piece ``place`` of the draw is number ``slot`` of ``row``, which may be
    one of the rows after those."""

    n_rows: int
    started: _Started
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


def _draw(sizes: Int64, started: _Started, sections: Int64, capacity: int, max_segments: int) -> _Draw:
    """Steps 3 and 4."""
    _, counts, filled, stop = started
    held = indexes(stop, sections[1:] - stop)
    row, slot, place, left = _take_turns(sizes, held, capacity - filled, counts, max_segments)
    n_rows = len(counts)
    if len(left):
        rest = best_fit(sizes[left], capacity, min(max_segments, len(left)), None)
        added = np.diff(rest.offsets)
        row = np.concatenate([row, np.repeat(n_rows + np.arange(len(added)), added)])
        slot = np.concatenate([slot, ranges(added)])
        place = np.concatenate([place, left[rest.order]])
        n_rows += len(added)
    return _Draw(n_rows, started, row, slot, place)


def _written(drawn: _Draw, pieces: Int64, bits: int, shuffle: Shuffle) -> RowAssignment:
    """Each row's pieces of the draw, then those it took: a number in so many ``bits``, and above it the size."""
    started = drawn.started
    counts = np.bincount(drawn.row, minlength=drawn.n_rows)
    counts[: len(started.counts)] += started.counts
    start = np.empty(drawn.n_rows, np.int64)
    if shuffle is None:
        offsets = offsets_of(counts)
        start[:] = offsets[:-1]
    else:
        rows = permutation(drawn.n_rows, shuffle)
        offsets = offsets_of(counts.take(rows))
        start[rows] = offsets[:-1]
    written = np.empty_like(pieces)
    written[start.take(drawn.row) + drawn.slot] = pieces.take(drawn.place)
    away = start[: len(started.begin)] - started.begin
    for block in blocks(started.counts):  # in a cache
        at = indexes(started.begin[block], started.counts[block])
        written[at + np.repeat(away[block], started.counts[block])] = pieces.take(at)
    np.bitwise_and(written, (1 << bits) - 1, out=pieces)
    written >>= bits
    return RowAssignment(offsets, pieces, written)


def _next_fit(sizes: Int64, sections: Int64, rows: int, capacity: int, max_segments: int) -> tuple[Int64, Int64]:
    """Fills each section's share of ``rows`` rows by next fit.

    Returns:
        int64 [K + 1, S]: the pieces from ``edges[k, s]`` to ``edges[k + 1, s]`` fill row k of section s; and [K, S],
        how far they fill it.
    """
    before = offsets_of(sizes)
    most = min(max_segments, capacity // int(sizes.min()), int(np.diff(sections).max()))  # pieces of a row
    near = (1 << (2 * len(sizes) // rows).bit_length()) - 1  # few rows have more
    begin, stop = sections[:-1], sections[1:]
    edges = np.empty((-(-rows // len(begin)) + 1, len(begin)), np.int64)
    edges[0] = begin
    for k in range(1, len(edges)):  # of all sections at once
        last, room = np.minimum(begin + most, stop), before.take(begin) + capacity
        end = _last_within(before, begin, np.minimum(begin + near, last), room)
        further = np.flatnonzero((end == begin + near) & (end < last))
        end[further] = _last_within(before, end[further], last[further], room[further])
        edges[k] = begin = end
    return edges, np.diff(before.take(edges), axis=0)


def _last_within(before: Int64, begin: Int64, last: Int64, room: Int64) -> Int64:
    """The last of the places from ``begin`` to ``last`` with no more than ``room`` before it, by binary search."""
    end = begin.copy()
    for width in (1 << bit for bit in reversed(range(int((last - begin).max(initial=0)).bit_length()))):
        further = np.minimum(end + width, last)
        np.copyto(end, further, where=before.take(further) <= room)
    return end


def _first_rows(edges: Int64, filled: Int64, rows: int) -> _Started:
    """At most ``rows`` of the rows, which are divided evenly among the sections."""
    wanted = np.diff(_shares(rows, edges.shape[1]))
    made = ((np.arange(len(filled))[:, None] < wanted) & (filled > 0)).T
    begin, end = edges[:-1].T[made], edges[1:].T[made]
    return _Started(begin, end - begin, filled.T[made], edges[wanted, np.arange(edges.shape[1])])


def _take_turns(
    sizes: Int64, held: Int64, free: Int64, counts: Int64, max_segments: int
) -> tuple[Int64, Int64, Int64, Int64]:
    """Step 3: rows, slots and places of the pieces taken, and places of those that no row took.

    A row that gets nothing in a round never will, because everything that fits it went to others.
    """
    taken: list[tuple[Int64, Int64, Int64]] = [(held[:0],) * 3]
    held, ascending = _sorted_together(sizes.take(held), held)
    rows, most = np.arange(len(free)), int(counts.max(initial=0))
    turn = 0
    while len(held):
        if most + turn >= max_segments:
            rows = rows[counts.take(rows) + turn < max_segments]
        rows = rows.take(np.flatnonzero(free.take(rows) >= ascending[0]))
        rows, fits = _sorted_together(_fitting(ascending, free.take(rows)), rows)
        which, piece = _match(fits)
        if not len(which):
            break
        rows = rows.take(which)
        taken.append((rows, counts.take(rows) + turn, held.take(piece)))
        free[rows] -= ascending.take(piece)
        stays = np.ones(len(held), np.bool_)
        stays[piece] = False
        left = np.flatnonzero(stays)
        held, ascending = held.take(left), ascending.take(left)
        turn += 1
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
    step = np.ones(n, np.int8)
    step[_count_below(fits, taken) + rows] = -1
    pieces = np.cumsum(step > 0)  # up to here
    depth = 2 * pieces - np.arange(1, n + 1) + (step < 0) + len(fits)  # both brackets of a pair have that of the first
    at, depth = _sorted_together(depth, np.arange(n))
    pair = np.flatnonzero((depth[1:] == depth[:-1]) & (step[at[:-1]] > 0) & (step[at[1:]] < 0))
    opening, closing = at[pair], at[pair + 1]
    return closing - pieces[closing], taken[pieces[opening] - 1]


def _count_below(values: Int64, ascending: Int64) -> Int64:
    """Counts the numbers below each of ascending values, all of them at least 1."""
    if not len(values) or int(values[-1]) > 4 * len(values):
        return np.searchsorted(ascending, values)
    marks = np.zeros(int(values[-1]), np.int64)
    marks[ascending] = 1
    return np.cumsum(marks, out=marks).take(values - 1)


def _counted(sizes: Int64) -> tuple[Int64, Int64]:
    """The different sizes, ascending, and how many pieces have each."""
    if int(sizes.max()) > len(sizes):
        return np.unique(sizes, return_counts=True)
    counts = np.bincount(sizes)  # faster than sorting where sizes are small
    values = np.flatnonzero(counts)
    return values, counts.take(values)
