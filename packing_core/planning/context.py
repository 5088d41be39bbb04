"""Cuts documents over the ranks of a context-parallel group: lengths in, the tokens that each rank holds out.

Documents go to ranks by falling cost, each whole to the rank that carries least while it has room there. Where all have
room, nothing is communicated. A document that no rank has room for is cut, over the ranks that have most. But ranks
that hold parts of one document wait for each other in every layer, before attention and after it. Then equal costs are
not enough: a rank of many tokens and one of many pairs would wait for each other in turn. So longer documents are also
cut over all ranks alike, and the plan is taken whose slowest parts add up to least. It follows from the lengths alone,
so every rank makes it for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning.cost import Cost, checked_cost
from packing_core.planning.pieces import MOST_TOKENS, check_lengths, integer, positive
from packing_core.storage.arrays import Float64, Int64, read_only
from packing_core.storage.segment_indexing import indexes, offsets_of

ROOM = 1.01  # how far a whole document may fill a rank, as a share of the mean, before it is cut instead
CUT_ALIKE = (1.0, 0.5, 0.125)  # documents that cost more than this part of a rank's share, where one must be cut
SHORTEST = 256  # tokens of a piece of a document that is cut over all ranks alike
# The time of a token that a rank fetches, beside that of one that it computes: 4 KB a layer, forward, again and back,
# at 200 GB a second, beside 2.2 microseconds.
FETCHED = 0.03


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """The pieces of documents that each rank holds, in compressed sparse rows over ranks.

    A rank's pieces stand in the order of their documents, and pieces of one document in the order of their tokens.

    Attributes:
        lengths: int64 [N] tokens of each document.
        rank_offsets: int64 [W+1]: rank w holds the pieces ``rank_offsets[w]`` to ``rank_offsets[w + 1]``.
        document, start, length: int64 [P] of each piece: its document, its first token there, its tokens.
        cost: what the pieces were weighed by.
    """

    lengths: Int64
    rank_offsets: Int64
    document: Int64
    start: Int64
    length: Int64
    cost: Cost

    @property
    def ranks(self) -> int:
        """Ranks W."""
        return len(self.rank_offsets) - 1

    @cached_property
    def rank(self) -> Int64:
        """int64 [P]: the rank that holds each piece."""
        return read_only(np.repeat(np.arange(self.ranks), np.diff(self.rank_offsets)))

    @cached_property
    def straddling(self) -> NDArray[np.bool_]:
        """bool [N]: documents that lie on more than one rank."""
        lowest, highest = np.full(len(self.lengths), self.ranks), np.zeros(len(self.lengths), np.int64)
        np.minimum.at(lowest, self.document, self.rank)
        np.maximum.at(highest, self.document, self.rank)
        return read_only(lowest < highest)

    def pieces(self, document: int) -> Int64:
        """The numbers of a document's pieces on all ranks, in the order of its tokens."""
        found = np.flatnonzero(self.document == document)
        ordered: Int64 = found[np.argsort(self.start[found])]
        return ordered

    def of_rank(self, rank: int) -> slice:
        """The pieces of one rank.

        Raises:
            PackingError: there is no such rank.
        """
        number = integer(rank)
        if number is None or not 0 <= number < self.ranks:
            raise PackingError(f"rank is {rank!r} and the plan is for ranks 0 to {self.ranks - 1}: pass one of them")
        return slice(int(self.rank_offsets[number]), int(self.rank_offsets[number + 1]))

    def tokens(self, rank: int) -> Int64:
        """int64 [T]: the rank's tokens, as places among the documents laid end to end."""
        pieces = self.of_rank(rank)
        first = offsets_of(self.lengths)[self.document[pieces]] + self.start[pieces]
        return indexes(first, self.length[pieces])

    def positions(self, rank: int) -> Int64:
        """int64 [T]: the position of each of the rank's tokens in its whole document."""
        pieces = self.of_rank(rank)
        return indexes(self.start[pieces], self.length[pieces])

    @cached_property
    def loads(self) -> Float64:
        """float64 [W]: the cost of each rank: of its tokens, and of the pairs of its queries with all earlier keys."""
        costs = self.cost.of_segments(self.length, self.start)
        loads: Float64 = np.bincount(self.rank, costs, self.ranks).astype(float)
        return read_only(loads)

    @property
    def imbalance(self) -> float:
        """The cost of the slowest rank over the mean, 1.0 at best."""
        return float(self.loads.max() / self.loads.mean())


@hinted()
def context_plan(lengths: Any, ranks: int, *, cost: Cost | None = None, contiguous: bool = False) -> ContextPlan:
    """Assign the tokens of documents to the ranks of a context-parallel group at equal cost.

    Documents stay whole where every one of them fits on a rank. Else those that do not, and others if the ranks then
    wait less for each other, are cut at any token, without padding. By default each of its ranks gets a piece from its
    front and one from its back of as many tokens (zigzag), which together cost the same for every token, but for the
    first ones inside a window; adjacent ones are one piece. A piece from [a, b) costs
    ``tokens * (b - a) + squares * (b**2 - a**2)``.

    Args:
        lengths: tokens of each document.
        ranks: W, 1 or more.
        cost: what tokens and pairs cost; by default ``Cost()``.
        contiguous: give each rank one piece of a document, in the order of the ranks, for layers that look back a few
            tokens alone. Where there is attention, ranks with later pieces hold fewer tokens and more pairs.

    Raises:
        PackingError: bad lengths, ``ranks`` is not an integer of at least 1, or there are fewer tokens than ranks.

    >>> made = context_plan([2, 12, 3], 2, cost=Cost(tokens=1, squares=0))
    >>> [made.positions(rank).tolist() for rank in range(2)]
    [[0, 1, 2, 3, 8, 9, 10, 11], [0, 1, 4, 5, 6, 7, 0, 1, 2]]
    """
    checked = check_lengths(lengths)
    ranks = positive("ranks", ranks)
    cost = checked_cost(cost)
    total = int(checked.sum())
    if total < ranks:
        raise PackingError(
            f"{total:,} tokens are fewer than {ranks:,} ranks, so a rank would have none: "
            "pack longer rows, or cut them over fewer ranks"
        )
    with within_memory(f"the loads of {ranks:,} ranks", "pass fewer ranks"):
        held = _assign(checked, ranks, cost, contiguous)
        if bool((held.length < checked[held.document]).any()):  # ranks wait for each other
            alike = _cut_alike(checked, ranks, cost, contiguous)
            held = min((held, *alike), key=lambda each: _time(each, ranks, cost))
    held = _without_empty(held, ranks)
    offsets = np.searchsorted(held.rank, np.arange(ranks + 1))
    document, start, length = (read_only(column) for column in held[1:])
    return ContextPlan(read_only(checked), read_only(offsets), document, start, length, cost)


class _Held(NamedTuple):
    """Pieces in the order of ranks, documents and tokens, int64 [P] each; adjacent ones of a rank are one."""

    rank: Int64
    document: Int64
    start: Int64
    length: Int64


def _in_order(rank: Int64, document: Int64, start: Int64, length: Int64) -> _Held:
    """Sorts pieces, and joins adjacent ones."""
    order = np.lexsort((start, document, rank))
    rank, document, start, length = (column[order] for column in (rank, document, start, length))
    follows = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1]) & (start[1:] == (start + length)[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return _Held(rank[first], document[first], start[first], np.add.reduceat(length, first))


def _cut_alike(lengths: Int64, ranks: int, cost: Cost, contiguous: bool) -> Iterator[_Held]:
    """The pieces of each rank with more and more documents cut over all of them."""
    costs = cost.of_segments(lengths)
    over_all = [(costs > part * costs.sum() / ranks) & (lengths >= 2 * ranks * SHORTEST) for part in CUT_ALIKE]
    counts = [int(each.sum()) for each in over_all]
    for before, count, documents in zip([0, *counts], counts, over_all, strict=False):
        if count > before:
            yield _assign(lengths, ranks, cost, contiguous, documents)


def _assign(
    lengths: Int64, ranks: int, cost: Cost, contiguous: bool, over_all: NDArray[np.bool_] | None = None
) -> _Held:
    """The pieces of each rank: whole documents where there is room, else cut; over all ranks where ``over_all``."""
    if ranks > MOST_TOKENS // 8:
        raise MemoryError
    costs = cost.of_segments(lengths)
    share = float(costs.sum()) / ranks
    order = np.argsort(-costs, kind="stable")
    alike = np.zeros(len(lengths), np.bool_) if over_all is None else over_all
    everywhere = np.arange(ranks), np.full(ranks, 1 / ranks)
    carried = [(0.0, rank) for rank in range(ranks)]  # a heap
    whole: list[tuple[int, int]] = []
    cut: list[tuple[int, int, int, int]] = []
    for document, needed, on_all in zip(order.tolist(), costs[order].tolist(), alike[order].tolist(), strict=True):
        load, rank = carried[0]
        if not on_all and load + needed <= ROOM * share:
            whole.append((rank, document))
            heapreplace(carried, (load + needed, rank))
            continue
        loads = np.array([load for load, _ in sorted(carried, key=itemgetter(1))])
        chosen, parts = everywhere if on_all else _portions(loads, share, needed)
        rank_of, start, length = _pieces(cost, int(lengths[document]), chosen, parts, contiguous)
        np.add.at(loads, rank_of, cost.of_segments(length, start))
        carried = list(zip(loads.tolist(), range(ranks), strict=True))
        heapify(carried)
        cut += zip(rank_of.tolist(), repeat(document), start.tolist(), length.tolist())
    ranks_of, documents = np.array(whole, np.int64).reshape(-1, 2).T
    columns = ranks_of, documents, np.zeros(len(whole), np.int64), lengths[documents]
    of_cut = np.array(cut, np.int64).reshape(-1, 4).T
    return _in_order(*(np.concatenate(both) for both in zip(columns, of_cut, strict=True)))


def _time(held: _Held, ranks: int, cost: Cost) -> float:
    """The time of a step in which ranks wait for each other between tokens and pairs, in the unit of the cost."""
    rank, document, start, length = held
    tokens = cost.tokens * np.bincount(rank, length, ranks)
    pairs = np.bincount(rank, cost.of_segments(length, start), ranks) - tokens
    same = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
    own = np.concatenate([[0], np.where(same, (start + length)[:-1], 0)])  # the end of the rank's piece before
    fetched = np.bincount(rank, start - own, ranks)
    return float(tokens.max() + pairs.max() + FETCHED * cost.tokens * fetched.max())


def _portions(loads: Float64, share: float, needed: float) -> tuple[Int64, Float64]:
    """The ranks that a document is cut over, ascending, and the part of it that each takes; the parts sum to 1.

    Those with most room are filled; where there is too little room in all, all are filled to one level.
    """
    order = np.argsort(loads, kind="stable")
    room = np.maximum(share - loads[order], 0.0)
    filled = np.cumsum(room)
    count = int(np.searchsorted(filled, needed * (1 - 1e-9))) + 1
    if count > len(order):  # rounding, and documents that took more than a share: raise the level
        low = loads[order]
        levels = (needed + np.cumsum(low)) / np.arange(1, len(low) + 1)
        count = int(np.flatnonzero(levels > low)[-1]) + 1
        room = levels[count - 1] - low
    chosen, parts = order[:count], room[:count].copy()
    parts[-1] = max(parts[-1] + needed - parts.sum(), 0.0)
    in_order = np.argsort(chosen)
    return chosen[in_order], parts[in_order] / parts.sum()


def _pieces(cost: Cost, length: int, ranks: Int64, parts: Float64, contiguous: bool) -> tuple[Int64, Int64, Int64]:
    """Rank, start and length of the pieces of a document, of which each rank gets its part of the cost."""
    windows = np.array([window for window, _ in cost.windows], np.float64)
    if contiguous:
        marks = _marks(cost.of_segments, length, windows, parts)
        starts, ends, of_rank = marks, np.append(marks[1:], length), ranks
    else:  # n tokens from the front and n from the back: without windows, [a, a + n) and [L - a - n, L - a) cost 2 n L
        marks = _marks(
            lambda n: cost.of_segments(n) + cost.of_segments(n, length - n),
            length / 2,
            np.concatenate([windows, length - windows]),
            parts,
        )
        marks = np.minimum(marks, length // 2)  # a last part of next to nothing rounds up
        inner = marks[-1:]
        starts = np.concatenate([marks[:-1], inner, length - marks[1:]])
        ends = np.concatenate([marks[1:], length - inner, length - marks[:-1]])
        of_rank = np.concatenate([ranks, ranks[:-1]])
    some = ends > starts
    return of_rank[some], starts[some], (ends - starts)[some]


def _marks(cost_of: Callable[[Float64], Float64], end: float, bends: Float64, parts: Float64) -> Int64:
    """Returns where parts begin that cost these shares of the tokens up to ``end``.

    ``cost_of`` rises with the number of tokens, between ``bends`` as a polynomial of second degree, which follows from
    its values at both ends and in the middle.
    """
    knots = np.unique(np.concatenate([[0.0, end], bends[(bends > 0) & (bends < end)]]))
    low, high = cost_of(knots[:-1]), cost_of(knots[1:])
    wanted = np.cumsum(parts[:-1]) * high[-1]
    i = np.minimum(np.searchsorted(high, wanted), len(high) - 1)
    bend = (2 * (low + high - 2 * cost_of((knots[:-1] + knots[1:]) / 2)))[i]
    slope, rise = (high - low)[i] - bend, np.maximum(wanted - low[i], 0.0)
    # of bend x^2 + slope x = rise, in the form that does not cancel
    x = 2 * rise / np.maximum(slope + np.sqrt(np.maximum(slope**2 + 4 * bend * rise, 0.0)), 1e-300)
    marks: Int64 = np.rint(np.append(0.0, knots[i] + x * (knots[i + 1] - knots[i]))).astype(np.int64)
    return marks


def _without_empty(held: _Held, ranks: int) -> _Held:
    """Gives each rank without tokens a half of the longest piece of the rank that has most."""
    tokens = np.bincount(held.rank, held.length, ranks)
    for empty in np.flatnonzero(tokens == 0).tolist():
        donor = int(tokens.argmax())
        piece = int(np.where(held.rank == donor, held.length, 0).argmax())
        kept = int(held.length[piece]) // 2
        given = int(held.length[piece]) - kept
        if kept:
            held.length[piece] = kept
            added = empty, held.document[piece], held.start[piece] + kept, given
            held = _Held(*(np.append(column, value) for column, value in zip(held, added, strict=True)))
        else:
            held.rank[piece] = empty
        tokens[donor] -= given
        tokens[empty] = given
    return _in_order(*held)
