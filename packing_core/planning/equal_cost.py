"""Rows that cost the same for the ranks of each step: lengths, a cost and a number of rows in, rows of pieces out.

``balance`` can only choose among rows that are there. With one row a rank and few steps, a row that is one long
document meets rows of short ones, and their ranks wait. Here the rows are made for the steps: those that share a step
with a long document get the next longest documents, and as many others as bring them to its cost. Python works per
piece.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from packing_core.planning.assignment import RowAssignment, Shuffle, permutation
from packing_core.planning.cost import Cost
from packing_core.storage.arrays import Int64

MAX_COST_RATIO = 1.1  # next piece's cost per token over the row's remaining budget per token


def equal_cost_rows(
    lengths: Int64, capacity: int, max_segments: int | None, rows: int, ranks: int, cost: Cost, shuffle: Shuffle
) -> RowAssignment | None:
    """So many rows, a multiple of the ranks, whose costs by falling cost are close within each ``ranks`` of them.

    1. While the longest piece costs more than the rows that are left cost on average, the longest pieces begin the
       rows of a step, one each. Its level is what the longest of them costs in a row that is filled up with the
       cheapest tokens; or less, down to the piece alone, if the shortest of them reaches no more in any full row. Each
       row takes the longest piece that costs about as much by the token as the row lacks, until it is full or level.
    2. All other pieces, longest first, go to the row that costs least so far among those that have room: the
       longest-processing-time rule (Graham 1969) under a capacity.

    ``shuffle`` draws which pieces of one length go where, and shuffles the rows; the number of pieces of each length
    that a row holds follows from the lengths alone.

    Returns:
        The rows; None if the pieces do not fit into so many rows in this way.
    """
    drawn = np.arange(len(lengths)) if shuffle is None else permutation(len(lengths), shuffle)
    drawn = drawn[np.argsort(lengths[drawn], kind="stable")]
    pieces = _Pieces(lengths[drawn], cost)
    limit = len(lengths) if max_segments is None else max_segments
    made: list[list[int]] = []
    unmade = sum(pieces.costs)
    while rows - len(made) > ranks:
        longest = pieces.longest(len(lengths))
        if longest < 0 or pieces.costs[longest] * (rows - len(made)) <= unmade:
            break
        step = _step_of_long_pieces(pieces, capacity, limit, ranks, cost)
        unmade -= sum(pieces.costs[piece] for row in step for piece in row)
        made += step
    others = _dealt(pieces, capacity, limit, rows - len(made))
    if others is None:
        return None
    made += others
    if shuffle is not None:
        made = [made[row] for row in permutation(rows, shuffle).tolist()]
    order = drawn[[piece for row in made for piece in row]]
    offsets = np.cumsum([0, *map(len, made)])
    return RowAssignment(offsets, order, lengths[order])


class _Pieces:
    """Pieces by rising length, each of which is taken once; ``rates`` are their costs by the token, which rise too."""

    def __init__(self, lengths: Int64, cost: Cost) -> None:
        costs = cost.of_segments(lengths)
        self.sizes: list[int] = lengths.tolist()
        self.costs: list[float] = costs.tolist()
        self.rates: list[float] = np.maximum.accumulate(costs / lengths).tolist()
        # Entry p + 1 stands for piece p. It leads to itself, or, once the piece is taken, towards the longest piece
        # before it that remains; entry 0 stands for none.
        self._towards = list(range(len(lengths) + 1))

    def longest(self, among: int) -> int:
        """The longest remaining one of the first ``among`` pieces; -1 if none remains."""
        towards, found = self._towards, among
        while towards[found] != found:
            found = towards[found]
        while among != found:  # the next search is shorter
            towards[among], among = found, towards[among]
        return found - 1

    def take(self, among: int) -> int:
        """Takes the longest remaining one of the first ``among`` pieces; -1 if none remains."""
        piece = self.longest(among)
        if piece >= 0:
            self._towards[piece + 1] = piece
        return piece


def _step_of_long_pieces(pieces: _Pieces, capacity: int, limit: int, ranks: int, cost: Cost) -> list[list[int]]:
    """Step 1: the rows of one step, fewer than ``ranks`` if no more pieces remain."""
    every = len(pieces.sizes)
    taken = (pieces.take(every) for _ in range(ranks))
    leads = [piece for piece in taken if piece >= 0]
    alone = pieces.costs[leads[0]]
    level = alone + (capacity - pieces.sizes[leads[0]]) * pieces.rates[0]
    shortest = pieces.sizes[leads[-1]]
    if shortest <= capacity <= 2 * shortest:  # or nothing limits what such a row can cost
        dearest = float(cost.of_segments([shortest, capacity - shortest]).sum())
        level = min(level, max(alone, dearest))

    rows = []
    for lead in leads:
        row, room, lacking = [lead], capacity - pieces.sizes[lead], level - pieces.costs[lead]
        while room > 0 and lacking > 0 and len(row) < limit:
            fitting = min(bisect_right(pieces.sizes, room), bisect_right(pieces.costs, lacking))
            cheap = bisect_right(pieces.rates, MAX_COST_RATIO * lacking / room) or every
            piece = pieces.take(min(fitting, cheap))
            if piece < 0:
                break
            row.append(piece)
            room -= pieces.sizes[piece]
            lacking -= pieces.costs[piece]
        rows.append(row)
    return rows


def _dealt(pieces: _Pieces, capacity: int, limit: int, rows: int) -> list[list[int]] | None:
    """Step 2: the remaining pieces in so many rows; None if a piece fits none of them, or a row would stay empty."""
    made: list[list[int]] = [[] for _ in range(rows)]
    room = [capacity] * rows
    cheapest = [(0.0, row) for row in range(rows)]
    heapify(cheapest)
    waiting: list[tuple[int, int, float]] = []  # rows without room for the present piece, the one with most room first
    every = len(pieces.sizes)
    while (piece := pieces.take(every)) >= 0:
        size = pieces.sizes[piece]
        while waiting and -waiting[0][0] >= size:
            _, row, spent = heappop(waiting)
            heappush(cheapest, (spent, row))
        while cheapest and room[cheapest[0][1]] < size:
            spent, row = heappop(cheapest)
            heappush(waiting, (-room[row], row, spent))
        if not cheapest:
            return None
        spent, row = cheapest[0]
        made[row].append(piece)
        room[row] -= size
        if len(made[row]) < limit:
            heapreplace(cheapest, (spent + pieces.costs[piece], row))
        else:
            heappop(cheapest)
    return made if all(made) else None
