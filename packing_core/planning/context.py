"""Cuts documents over the ranks of a context-parallel group: lengths in, the tokens that each rank holds out.

Documents go to ranks by falling cost, each whole to the rank that carries least while it has room there. Where all have
room, nothing is communicated. A document that no rank has room for is cut, over the ranks that have most. But ranks
that hold parts of one document wait for each other in every layer, before attention and after it. Then equal costs are
not enough: a rank of many tokens and one of many pairs would wait for each other in turn. So longer documents are also
cut over all ranks alike, and the plan is taken whose slowest parts add up to least. It follows from the lengths alone,
so every rank makes it for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning.cost import Cost, checked_cost
from packing_core.planning.pieces import MOST_TOKENS, check_lengths, integer, positive
from packing_core.storage.arrays import read_only

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

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
        several = np.zeros(len(self.lengths), np.int64)
        np.add.at(several, np.unique(np.stack([self.document, self.rank]), axis=1)[0], 1)
        return read_only(several > 1)

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
        ends = np.cumsum(self.lengths)
        first = (ends - self.lengths)[self.document[pieces]] + self.start[pieces]
        return np.concatenate([np.arange(f, f + n) for f, n in zip(first, self.length[pieces], strict=True)])

    def positions(self, rank: int) -> Int64:
        """int64 [T]: the position of each of the rank's tokens in its whole document."""
        pieces = self.of_rank(rank)
        return np.concatenate(
            [np.arange(s, s + n) for s, n in zip(self.start[pieces], self.length[pieces], strict=True)]
        )

    @cached_property
    def loads(self) -> Float64:
        """float64 [W]: the cost of each rank: of its tokens, and of the pairs of its queries with all earlier keys."""
        loads: Float64 = np.bincount(self.rank, _costs(self.cost, self.start, self.length), self.ranks).astype(float)
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
    front and one from its back, which together cost the same for every token (zigzag); adjacent ones are one piece. A
    piece from [a, b) costs ``tokens * (b - a) + squares * (b**2 - a**2)``.

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
        if _waits(held):
            alike = [_assign(checked, ranks, cost, contiguous, limit) for limit in CUT_ALIKE]
            held = min((held, *alike), key=lambda each: _time(each, checked, cost))
    _fill_empty(held)
    held = [_joined(sorted(pieces)) for pieces in held]
    flat = np.array([piece for pieces in held for piece in pieces], np.int64)
    offsets = np.cumsum([0, *map(len, held)])
    document, start, length = (read_only(np.ascontiguousarray(column)) for column in flat.T)
    return ContextPlan(read_only(checked), read_only(offsets), document, start, length, cost)


Piece = tuple[int, int, int]  # document, start, length


def _costs(cost: Cost, start: Any, length: Any) -> Any:
    """The cost of the pieces [start, start + length)."""
    return cost.of_segments(length, start)


def _assign(lengths: Int64, ranks: int, cost: Cost, contiguous: bool, alike: float = np.inf) -> list[list[Piece]]:
    """The pieces of each rank: whole documents where there is room, else cut; over all ranks where a document costs
    more than ``alike`` times the share of a rank."""
    if ranks > MOST_TOKENS // 8:
        raise MemoryError
    costs = _costs(cost, np.zeros(len(lengths)), lengths.astype(np.float64))
    share = costs.sum() / ranks
    loads = np.zeros(ranks)
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    cut = _contiguous if contiguous else _zigzag
    for document in np.argsort(-costs, kind="stable").tolist():
        length, rank = int(lengths[document]), int(loads.argmin())
        over_all = costs[document] > alike * share and length >= 2 * ranks * SHORTEST
        if not over_all and loads[rank] + costs[document] <= ROOM * share:
            held[rank].append((document, 0, length))
            loads[rank] += costs[document]
            continue
        if over_all:
            chosen, parts = np.arange(ranks), np.full(ranks, 1 / ranks)
        else:
            chosen, parts = _portions(loads, share, float(costs[document]))
        for rank, start, size in cut(cost, length, chosen, parts):
            held[rank].append((document, start, size))
            loads[rank] += _costs(cost, start, size)
    return held


def _waits(held: list[list[Piece]]) -> bool:
    """Returns whether a document lies on several ranks."""
    documents = [document for pieces in held for document in {document for document, *_ in pieces}]
    return len(documents) > len(set(documents))


def _time(held: list[list[Piece]], lengths: Int64, cost: Cost) -> float:
    """The time of a step in which ranks wait for each other between tokens and pairs, in the unit of the cost."""
    tokens, pairs, fetched = [], [], []
    for pieces in held:
        document, start, length = np.array(pieces, np.int64).reshape(-1, 3).T
        tokens.append(cost.tokens * length.sum())
        pairs.append(_costs(cost, start, length).sum() - tokens[-1])
        fetched.append(lengths[np.unique(document[length < lengths[document]])].sum() - length[start > 0].sum())
    return float(max(tokens) + max(pairs) + FETCHED * cost.tokens * max(fetched))


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


def _contiguous(cost: Cost, length: int, ranks: Int64, parts: Float64) -> list[Piece]:
    """A piece for each rank, as (rank, start, length): the cost of [0, b) is its part of the whole document's."""
    wanted = np.cumsum(parts) * _costs(cost, 0, float(length))
    if cost.windows:
        ends = np.searchsorted(cost.of_segments(np.arange(length + 1)), wanted)
    else:  # squares * b^2 + tokens * b = wanted, in the form that does not cancel
        ends = 2 * wanted / np.maximum(cost.tokens + np.sqrt(cost.tokens**2 + 4 * cost.squares * wanted), 1e-300)
    marks = [0, *np.rint(ends[:-1]).astype(int).tolist(), length]
    return [(int(r), a, b - a) for r, a, b in zip(ranks, marks[:-1], marks[1:], strict=True) if b > a]


def _zigzag(cost: Cost, length: int, ranks: Int64, parts: Float64) -> list[Piece]:
    """For each rank as many tokens from the front as from the back: [a, a + n) and [L - a - n, L - a) cost 2 n L."""
    del cost  # in proportion to the number of tokens, whatever the ratio
    half = np.cumsum(parts) * length / 2
    marks = [0, *np.rint(half[:-1]).astype(int).tolist()]
    found: list[Piece] = []
    for rank, a, b in zip(ranks[:-1].tolist(), marks[:-1], marks[1:], strict=True):
        if b > a:
            found += [(rank, a, b - a), (rank, length - b, b - a)]
    inner = marks[-1]
    if length > 2 * inner:
        found.append((int(ranks[-1]), inner, length - 2 * inner))
    return found


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Sorted pieces of a rank, adjacent ones of a document as one."""
    found: list[Piece] = []
    for document, start, length in pieces:
        if found and found[-1][0] == document and sum(found[-1][1:]) == start:
            length += found[-1][2]
            start = found.pop()[1]
        found.append((document, start, length))
    return found


def _fill_empty(held: list[list[Piece]]) -> None:
    """Give each rank without tokens a half of the longest piece of the rank that has most."""
    for pieces in held:
        if not pieces:
            donor = max(held, key=lambda other: sum(length for *_, length in other))
            longest = max(donor, key=lambda piece: piece[2])
            donor.remove(longest)
            document, start, length = longest
            kept = length // 2
            donor += [(document, start, kept)] * (kept > 0)
            pieces.append((document, start + kept, length - kept))
