"""The tokens of a batch that one rank of a context-parallel group holds, and those of other ranks that it needs.

Document lengths -> :class:`packing_core.planning.context.ContextPlan`, the same on every rank -> :class:`RankShare`.
Everything here is host arithmetic on intervals of documents; each result is made once per batch and shared by its
layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core.planning.context import ContextPlan
from torch_backend.segments import PackedMetadata, host_lengths, to_device

Int64 = NDArray[np.int64]
Value = TypeVar("Value")


class TokenRun(NamedTuple):
    """Tokens that follow each other where they are and where they go.

    Attributes:
        source, target: places of the first one.
        tokens: their number.
    """

    source: int
    target: int
    tokens: int


@dataclass(frozen=True)
class KeyLayout:
    """The earlier tokens that the pieces of a rank need, for layers that look back ``reach`` tokens.

    The pieces that begin a document stand first among a rank's tokens; the others continue one.

    Attributes:
        sent: the rank's tokens that others need, as they are sent, by receiving rank.
        send, receive: tokens to and from each rank.
        own, fetched: for each piece that continues a document the tokens that it needs and its own, from the rank's
            tokens and from the received ones; targets count from the first such piece.
        beginning: segments of the pieces that begin a document; None without one.
        continuing: segments of the others, with ``keys``; None without one.
    """

    sent: list[TokenRun]
    send: list[int]
    receive: list[int]
    own: list[TokenRun]
    fetched: list[TokenRun]
    beginning: PackedMetadata | None
    continuing: PackedMetadata | None

    @cached_property
    def first(self) -> int:
        """Counts the tokens of the pieces that begin a document."""
        return 0 if self.beginning is None else self.beginning.tokens

    def runs(self, *, whole: bool) -> tuple[list[TokenRun], list[TokenRun]]:
        """Returns :attr:`own` and :attr:`fetched`; if ``whole``, behind the pieces that begin documents."""
        if not whole or not self.first:
            return self.own, self.fetched
        own, fetched = ([run._replace(target=run.target + self.first) for run in x] for x in (self.own, self.fetched))
        return [TokenRun(0, 0, self.first), *own], fetched

    @cached_property
    def extended(self) -> PackedMetadata:
        """Segments of the pieces that begin a document, and of the others with the earlier tokens that they need."""
        continuing = self.continuing
        keys = () if continuing is None or continuing.keys is None else host_lengths(continuing.keys)
        return PackedMetadata.from_lengths((*self._of_beginning, *keys), device=self._device)

    @cached_property
    def queries(self) -> PackedMetadata:
        """Segments of all pieces, as the last tokens of those of :attr:`extended`."""
        lengths = () if self.continuing is None else host_lengths(self.continuing)
        return PackedMetadata.of_last_tokens(
            (*self._of_beginning, *lengths), host_lengths(self.extended), device=self._device
        )

    @cached_property
    def own_of_extended(self) -> Tensor:
        """int64 [T]: where the rank's own tokens stand in :attr:`extended`."""
        lengths, ends = host_lengths(self.queries), accumulate(host_lengths(self.extended))
        parts = [torch.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        return to_device(torch.cat(parts), self._device)

    @cached_property
    def longest(self) -> int:
        """Counts the tokens of the longest piece that continues a document."""
        return 0 if self.continuing is None else max(host_lengths(self.continuing))

    @property
    def _of_beginning(self) -> tuple[int, ...]:
        return () if self.beginning is None else host_lengths(self.beginning)

    @property
    def _device(self) -> torch.device:
        known = self.beginning or self.continuing
        assert known is not None, "a rank without tokens"
        return known.device


@dataclass(frozen=True)
class WholeLayout:
    """Straddling documents as a whole, apart from the documents that lie on this rank alone.

    Attributes:
        alone: int64, the rank's tokens of documents that lie on it alone.
        straddling: int64, its other tokens, as they are sent.
        inverse: int64 [T], where each of the rank's tokens stands among ``alone`` followed by ``straddling``.
        send: tokens to each rank; of :attr:`RankShare.whole` one number, because all ranks get the same.
        receive: tokens from each rank.
        order: int64 [N], the received tokens in the order of the documents.
        back: int64 [N], the inverse of ``order``.
        own, documents: lengths of the documents on this rank alone, and of those received.
        device: of the segments.
    """

    alone: Tensor
    straddling: Tensor
    inverse: Tensor
    send: list[int]
    receive: list[int]
    order: Tensor
    back: Tensor
    own: list[int]
    documents: list[int]
    device: torch.device

    @cached_property
    def segments_alone(self) -> PackedMetadata | None:
        """The documents on this rank alone; None without one."""
        return PackedMetadata.from_lengths(self.own, device=self.device) if self.own else None

    @cached_property
    def segments_received(self) -> PackedMetadata:
        """The straddling documents."""
        return PackedMetadata.from_lengths(self.documents, device=self.device)

    @cached_property
    def segments(self) -> PackedMetadata | None:
        """The documents alone, then those received; None where the rank has none."""
        lengths = [*self.own, *self.documents]
        return PackedMetadata.from_lengths(lengths, device=self.device) if lengths else None


class RankShare:
    """The tokens of one rank: first the pieces that begin a document, then those that continue one.

    Attributes:
        documents: the segments of each document of the whole batch, in source order; None if the batch does not say.
    """

    def __init__(self, plan: ContextPlan, rank: int, group: Any, device: torch.device) -> None:
        self.plan, self.rank, self.group, self.device = plan, rank, group, device
        self.documents: tuple[tuple[int, ...], ...] | None = None
        self._derived: dict[Hashable, Any] = {}

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self.plan.ranks

    @cached_property
    def straddles(self) -> bool:
        """Returns whether any document of the batch lies on several ranks. Every rank answers alike."""
        return bool(self.plan.straddling.any())

    @cached_property
    def pieces(self) -> Int64:
        """The numbers of the rank's pieces, in the order of its tokens."""
        return pieces_of(self.plan, self.rank)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each of the rank's pieces."""
        return tuple(self.plan.length[self.pieces].tolist())

    @cached_property
    def document_lengths(self) -> tuple[int, ...]:
        """Tokens of the whole document of each of the rank's pieces."""
        return tuple(self.plan.lengths[self.plan.document[self.pieces]].tolist())

    @cached_property
    def positions(self) -> Int64:
        """int64 [T]: the position of each token in its whole document."""
        return _places(self.plan.start[self.pieces], self.plan.length[self.pieces])

    @cached_property
    def tokens(self) -> Int64:
        """int64 [T]: the place of each token among those of the whole batch."""
        first = (self._starts - self.plan.start)[self.pieces]  # of its document
        return self.positions + np.repeat(first, self.lengths)

    @cached_property
    def index(self) -> Tensor:
        """:attr:`tokens` on the device of the batch."""
        return self._on_device(self.tokens)

    @cached_property
    def segments(self) -> PackedMetadata:
        """The rank's pieces as segments."""
        return PackedMetadata.from_lengths(self.lengths, device=self.device)

    @cached_property
    def _starts(self) -> Int64:
        """Starts of the pieces, of any rank, among the tokens of the whole batch."""
        return (np.cumsum(self.plan.lengths) - self.plan.lengths)[self.plan.document] + self.plan.start

    @cached_property
    def _offsets(self) -> Int64:
        """Starts of the pieces, of any rank, among the tokens of their rank."""
        offsets = np.empty(len(self.plan.length), np.int64)
        for rank in range(self.ranks):
            pieces = pieces_of(self.plan, rank)
            ends = np.cumsum(self.plan.length[pieces])
            offsets[pieces] = ends - self.plan.length[pieces]
        return offsets

    def derived(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns what ``make`` does, made once for a key."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Value = self._derived[key]
        return found

    def _on_device(self, places: Int64) -> Tensor:
        return to_device(torch.from_numpy(places), self.device)

    # -- earlier tokens ------------------------------------------------------------------------------------------------

    def earlier(self, reach: int | None) -> KeyLayout:
        """The earlier tokens that layers need which see ``reach`` tokens, their own included; None for all."""
        return self.derived(("earlier", reach), lambda: self._earlier(reach))

    def _earlier(self, reach: int | None) -> KeyLayout:
        start, length, offsets = self.plan.start, self.plan.length, self._offsets
        sent: list[TokenRun] = []
        send, receive = [0] * self.ranks, [0] * self.ranks
        # document -> (first, end, where the first is, among the rank's tokens or those that it received)
        held: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
        for piece in straddling_pieces(self.plan, self.rank).tolist():
            first = int(start[piece])
            held[int(self.plan.document[piece])].append((first, first + int(length[piece]), int(offsets[piece]), False))
        for rank in range(self.ranks):
            if rank == self.rank:
                continue
            for piece, low, high in _transfers(self.plan, self.rank, rank, reach):
                sent.append(TokenRun(int(offsets[piece] - start[piece]) + low, sum(send), high - low))
                send[rank] += high - low
            for piece, low, high in _transfers(self.plan, rank, self.rank, reach):
                held[int(self.plan.document[piece])].append((low, high, sum(receive), True))
                receive[rank] += high - low
        own: list[TokenRun] = []
        fetched: list[TokenRun] = []
        key_lengths: list[int] = []
        begins = start[self.pieces] == 0
        for piece in self.pieces[~begins].tolist():
            begin, stop = int(start[piece]), int(start[piece] + length[piece])
            low, target = _first_seen(begin, reach), sum(key_lengths)
            for first, last, place, received in sorted(held[int(self.plan.document[piece])]):
                a, b = max(first, low), min(last, stop)
                if a < b:
                    (fetched if received else own).append(TokenRun(place + a - first, target + a - low, b - a))
            key_lengths.append(stop - low)
        beginning, continuing = None, None
        if begins.any():
            beginning = PackedMetadata.from_lengths(length[self.pieces[begins]].tolist(), device=self.device)
        if key_lengths:
            lengths = length[self.pieces[~begins]].tolist()
            continuing = PackedMetadata.of_last_tokens(lengths, key_lengths, device=self.device)
        return KeyLayout(sent, send, receive, own, fetched, beginning, continuing)

    def tokens_sent(self, reach: int | None) -> int:
        """Counts the tokens that leave their rank, each once for every rank they go to, see :meth:`earlier`."""
        return self.derived(("sent", reach), lambda: sum(self._received(rank, reach) for rank in range(self.ranks)))

    def _received(self, rank: int, reach: int | None) -> int:
        wanted = sum(high - low for ranges in _wanted(self.plan, rank, reach).values() for low, high in ranges)
        return wanted - sum(high - low for _, low, high in _transfers(self.plan, rank, rank, reach))

    # -- whole documents -----------------------------------------------------------------------------------------------

    @cached_property
    def _alone(self) -> tuple[Int64, list[int]]:
        """Places of the rank's tokens of documents that lie on it alone, and the lengths of these documents."""
        whole = ~self.plan.straddling[self.plan.document[self.pieces]]
        return np.flatnonzero(np.repeat(whole, self.lengths)), self.plan.length[self.pieces[whole]].tolist()

    @cached_property
    def whole(self) -> WholeLayout:
        """The straddling documents as a whole, of a part of the heads on every rank."""
        of_ranks = [straddling_pieces(self.plan, rank) for rank in range(self.ranks)]
        received = [_places(self._starts[pieces], self.plan.length[pieces]) for pieces in of_ranks]
        straddling = np.setdiff1d(np.arange(len(self.tokens)), self._alone[0])
        return self._whole([straddling], received, self.plan.straddling)

    @cached_property
    def owned(self) -> WholeLayout:
        """The straddling documents as a whole, each on the rank that has fewest tokens then."""
        owners = _owners(self.plan)
        sent = [self._straddling_tokens(self.rank, owners, rank)[0] for rank in range(self.ranks)]
        received = [self._straddling_tokens(rank, owners, self.rank)[1] for rank in range(self.ranks)]
        return self._whole(sent, received, owners == self.rank)

    def _whole(self, sent: list[Int64], received: list[Int64], here: NDArray[np.bool_]) -> WholeLayout:
        (alone, own), straddling = self._alone, np.concatenate(sent)
        order = np.argsort(np.concatenate(received))
        return WholeLayout(
            alone=self._on_device(alone),
            straddling=self._on_device(straddling),
            inverse=self._on_device(np.argsort(np.concatenate([alone, straddling]))),
            send=[len(places) for places in sent],
            receive=[len(places) for places in received],
            order=self._on_device(order),
            back=self._on_device(np.argsort(order)),
            own=own,
            documents=self.plan.lengths[here].tolist(),
            device=self.device,
        )

    def _straddling_tokens(self, source: int, owners: Int64, owner: int) -> tuple[Int64, Int64]:
        """The tokens of a rank that belong to an owner's documents: places on the rank, and in the whole batch."""
        pieces = pieces_of(self.plan, source)
        pieces = pieces[owners[self.plan.document[pieces]] == owner]
        lengths = self.plan.length[pieces]
        return _places(self._offsets[pieces], lengths), _places(self._starts[pieces], lengths)


def _places(starts: Int64, lengths: Int64) -> Int64:
    """The places of runs of tokens that begin at ``starts``, one run behind the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def _owners(plan: ContextPlan) -> Int64:
    """int64 [N]: the rank that gets each straddling document, -1 for the others."""
    whole = ~plan.straddling[plan.document]
    tokens = np.bincount(plan.rank[whole], plan.length[whole], plan.ranks)
    owners = np.full(len(plan.lengths), -1)
    straddling = np.flatnonzero(plan.straddling)
    for document in straddling[np.argsort(-plan.lengths[straddling], kind="stable")]:
        owners[document] = tokens.argmin()
        tokens[owners[document]] += plan.lengths[document]
    return owners


def pieces_of(plan: ContextPlan, rank: int) -> Int64:
    """The pieces of a rank in the order of its tokens."""
    of_rank = plan.of_rank(rank)
    numbers = np.arange(of_rank.start, of_rank.stop)
    return numbers[np.argsort(plan.start[of_rank] > 0, kind="stable")]


def straddling_pieces(plan: ContextPlan, rank: int) -> Int64:
    """Returns those of :func:`pieces_of` that belong to a document on several ranks."""
    pieces = pieces_of(plan, rank)
    return pieces[plan.straddling[plan.document[pieces]]]


def _first_seen(start: int, reach: int | None) -> int:
    """The first token that a piece starting at ``start`` sees."""
    return 0 if reach is None else max(0, start - reach + 1)


def _wanted(plan: ContextPlan, rank: int, reach: int | None) -> dict[int, list[tuple[int, int]]]:
    """The earlier tokens that the pieces of a rank see, its own among them: disjoint ranges of each document."""
    wanted: dict[int, list[tuple[int, int]]] = defaultdict(list)
    of_rank = plan.of_rank(rank)
    pieces = of_rank.start + np.flatnonzero(plan.start[of_rank])
    for document, start in zip(plan.document[pieces].tolist(), plan.start[pieces].tolist(), strict=True):
        ranges = wanted[document]  # pieces of a document stand in the order of its tokens
        low = max(_first_seen(start, reach), ranges[-1][1] if ranges else 0)
        if low < start:
            ranges.append((low, start))
    return wanted


def _transfers(plan: ContextPlan, source: int, target: int, reach: int | None) -> Iterator[tuple[int, int, int]]:
    """The tokens of rank ``source`` that rank ``target`` needs, each once: (piece, first, end) in the document."""
    wanted = _wanted(plan, target, reach)
    for piece in straddling_pieces(plan, source).tolist():
        first, end = int(plan.start[piece]), int(plan.start[piece] + plan.length[piece])
        for low, high in wanted.get(int(plan.document[piece]), ()):
            if max(first, low) < min(end, high):
                yield piece, max(first, low), min(end, high)
