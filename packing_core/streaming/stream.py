"""Documents one after another in, packed rows out: packing without knowing all lengths, in bounded memory, resumable.

A buffer of pending documents is planned (``plan``); rows that came out full leave, the others stay pending
and are planned again with the documents that follow. Every shard plans the same rows and materialises its own: row r
belongs to shard r modulo N. The state is a few counters and the numbers of the pending documents, so a run goes on
where it stopped, also with another number of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import with_empty_row
from packing_core.batches.joining import concatenate
from packing_core.batches.stored import Weighting
from packing_core.errors import PackingError
from packing_core.hints import hinted
from packing_core.planning.cost import Cost, checked_cost
from packing_core.planning.order import Order
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import Overflow, positive
from packing_core.planning.rule import RowRule
from packing_core.storage.arrays import Int64
from packing_core.streaming.pending import Pending
from packing_core.streaming.reader import Reader, StreamOptions, StreamStrategy
from packing_core.streaming.rounds import by_step, leaving, make_rows, plan_round, whole_steps
from packing_core.streaming.sources import OrderedSource, Source, share_of
from packing_core.streaming.state import Deal, Mark, part_of, read_state, restore, sealed

Collated = TypeVar("Collated")

CHUNK_TOKENS = 2**22  # slots of the rows that are made at a time


@hinted()
def stream(
    source: Any,
    capacity: int | RowRule,
    *,
    buffer: int = 8192,
    buffer_tokens: int | None = None,
    max_age: int | None = None,
    seed: int | None = None,
    shard: tuple[int, int] = (0, 1),
    worker: tuple[int, int] = (0, 1),
    rows_per_batch: int = 1,
    lengths: ArrayLike | None = None,
    overflow: Overflow = "error",
    context: int | None = None,
    min_piece: int = 1,
    max_segments: int | None = None,
    strategy: StreamStrategy = "mixed",
    pad_id: int = 0,
    weighting: Weighting = "token",
    order: Order = "random",
    keys: Any = None,
    weights: Mapping[Any, float] | None = None,
    equal_cost: bool = False,
    cost: Cost | None = None,
) -> PackStream:
    """Pack documents as they come. Iterating yields rows, each a PackedBatch of one row.

    >>> rows = stream([[5, 6, 7], [8, 9], [3, 4, 2, 1]], 5)
    >>> [row.input_ids.tolist() for row in rows]
    [[[5, 6, 7, 8, 9]], [[3, 4, 2, 1, 0]]]

    Args:
        source: a sequence of documents, or a function ``open(start)`` that iterates over them from number ``start``, as
            a mixture of sources is (:func:`packing_core.mix`). Also an iterable, which is read from its start to
            continue, and an iterator, with which the stream cannot be continued and has one epoch. A document is
            token ids, or a mapping of ``input_ids`` and optionally ``labels``, ``prompt_length``, the masks that
            ``pack`` reads (``loss_mask``, ``completion_mask``, ``assistant_masks``) and other per-token columns; a
            column that is None counts as absent. It must give the same documents every time; every shard reads all of
            them.
        capacity: tokens a row can hold.
        buffer: documents that are pending at most; more fill rows better.
        buffer_tokens: tokens that are pending at most, not counting the last document that was read; by default 2**24,
            or 64 rows if that is more. It bounds the memory where documents are long.
        max_age: how many documents may be read after a document before it is in a row; 16 buffers by default.
        seed: shuffles the rows that leave together, differently in every epoch; None keeps the planner's order.
        shard: (index, count). All shards get equally many rows: at the very end, up to ``count - 1`` shards get one row
            that is nothing but padding, so that none waits for the others.
        worker: (index, count) among the processes that make the rows of this shard: batch b of ``rows_per_batch`` rows
            is made by worker b modulo count, so a reader that takes a batch from each in turn gets the shard's rows in
            their order. Each worker has a state of its own; :func:`join_states` makes one of them, for any number of
            workers and shards.
        lengths: [N] tokens of each document of a sequence. Documents are then read when their rows are made: each shard
            reads its own, and plans by the lengths alone.
        overflow, context, min_piece, max_segments, strategy: as in ``plan``; under ``mixed`` every round
            draws from the pending documents, by the seed, or without one in their own order.
        pad_id, weighting: as in ``pack``.
        order, keys, weights: the order in which the documents of a sequence are read, as in ``plan``, drawn by the seed
            and the epoch; rows follow it up to a buffer, and are not shuffled. ``random`` reads them as they come. With
            ``curriculum`` and ``weighted``, pass ``lengths``, or every document is read once before for its length. To
            mix sources that are not sequences, pass :func:`packing_core.mix` as the source.
        equal_cost: gives the rows that leave together such an order that each row of a shard costs about as much as the
            rows of the other shards in its place. A state then loads onto as many shards alone.
        cost: what a row costs there, by default ``Cost()``.

    Raises:
        PackingError: an option is out of range; while iterating also: a document is empty, or longer than ``capacity``
            under ``overflow="error"`` (CapacityError), or has other columns than the first (LayoutError).

    Whatever is raised while iterating, by the source too, loses nothing: what was read stays, and the next call opens
    the source again at the first document that was not. A bad document raises every time.
    """
    if cost is not None and not equal_cost:
        raise PackingError("cost has no effect without equal_cost=True: pass both, or leave cost out")
    rule = RowRule.of(
        capacity,
        overflow=overflow,
        context=context,
        min_piece=min_piece,
        max_segments=max_segments,
        strategy=strategy,
        order=order,
        keys=keys,
        weights=weights,
        equal_cost=equal_cost,
        cost=cost,
    )
    options = StreamOptions.checked(
        rule,
        buffer=buffer,
        buffer_tokens=buffer_tokens,
        max_age=max_age,
        seed=seed,
        pad_id=pad_id,
        weighting=weighting,
        equal_cost=part_of("shard", shard)[1] if rule.equal_cost else 0,
    )
    given: Any = source
    if rule.order != "random":
        given = OrderedSource(source, rule.order, rule.keys, rule.weights, seed=options.seed, lengths=lengths)
        options, lengths = replace(options, keys=given.rule.digest), None
    dealt: dict[str, Any] = {"shard": shard, "worker": worker, "rows_per_batch": rows_per_batch}
    return PackStream(given, options, **dealt, lengths=lengths)


class PackStream:
    """An iterator over packed rows that can be stopped and continued; see :func:`stream`.

    ``iter()`` on a stream that is at its end starts the next epoch.
    """

    _ready: list[tuple[Mark, PackedBatch]]  # rows of this worker that are made, by the start of their round
    _place: int  # of the first row in them that is not taken
    _rows: Iterator[PackedBatch]  # the first of them one by one, from there on
    _no_rows: PackedBatch | None  # a batch without rows, which says what columns there are
    _mark: Mark  # where the present round begins
    _at_round: Mark  # where the round of the last row taken began
    _digest: tuple[Mark, str] | None  # of the documents of a mark: it takes a pass over them

    def __init__(
        self,
        source: Any,
        options: StreamOptions,
        *,
        shard: tuple[int, int] = (0, 1),
        worker: tuple[int, int] = (0, 1),
        rows_per_batch: int = 1,
        lengths: ArrayLike | None = None,
    ) -> None:
        self.options = options
        self._cost = checked_cost(options.rule.cost)
        self.capacity, self.seed = options.rule.capacity, options.seed
        self.index, self.shards = part_of("shard", shard)
        part = part_of("worker", worker)
        self._deal = Deal(self.index, self.shards, *part, positive("rows_per_batch", rows_per_batch))
        self._pack_options = {"pad_id": options.pad_id, "weighting": options.weighting}
        self._source = source if isinstance(source, Source) else Source(source, lengths=lengths)
        if self.shards > 1 and (share := share_of(self._source)):
            raise PackingError(
                f"the source is share {share} of a data set already, and shard={shard} would lose some of it: pass all "
                "documents on every shard; or shard=(0, 1), which packs the share alone, into as many rows as it fills"
            )
        self._reader = Reader(self._source, options)
        self.start_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0."""
        return self._epoch

    @property
    def truncated(self) -> list[int]:
        """Numbers of the documents that ``overflow`` cut since this stream was made, the last 65,536 of them."""
        return list(self._reader.truncated)

    @property
    def dropped(self) -> list[int]:
        """Numbers of the documents that ``overflow`` left out, likewise."""
        return list(self._reader.dropped)

    @property
    def n_truncated(self) -> int:
        """The number of documents that were cut."""
        return self._reader.n_truncated

    @property
    def n_dropped(self) -> int:
        """The number of documents that were left out."""
        return self._reader.n_dropped

    def __iter__(self) -> PackStream:
        if self._done and not self._ready:
            self.start_epoch(self._epoch + 1)
        return self

    def __next__(self) -> PackedBatch:
        row = next(self._rows, None)
        if row is None:
            if not self._made_of(1):
                raise StopIteration
            self._rows = self._ready[0][1].single_rows(self._place)
            row = next(self._rows)
        self._take(1)
        return row

    @overload
    def batches(self, rows: int) -> Iterator[PackedBatch]: ...

    @overload
    def batches(self, rows: int, collate: Callable[[PackedBatch], Collated]) -> Iterator[Collated]: ...

    def batches(self, rows: int, collate: Callable[[PackedBatch], Any] | None = None) -> Iterator[Any]:
        """This shard's rows of the rest of the epoch, so many at a time; the last batch may have fewer.

        ``collate`` makes what is yielded of each batch. Rows are taken when it has returned, not before.
        """
        positive("rows", rows)
        while count := self._made_of(rows):
            batch = concatenate(list(self._next_rows(count)))
            collated = batch if collate is None else collate(batch)
            self._take(count)
            self._rows = iter(())
            yield collated

    def chunks(self) -> Iterator[PackedBatch]:
        """This shard's rows of the rest of the epoch, many at a time as one batch: far fewer objects.

        A batch holds at most 2**22 tokens with padding, or one row.
        """
        while self._made_of(1):
            part = self._ready[0][1][self._place :]
            self._take(len(part))
            self._rows = iter(())
            yield part

    def _made_of(self, rows: int) -> int:
        """Makes the next ``rows`` rows; returns how many of them there are."""
        while (count := sum(len(block) for _, block in self._ready) - self._place) < rows:
            try:
                self._advance()
            except StopIteration:
                return count
        return rows

    def _next_rows(self, rows: int) -> Iterator[PackedBatch]:
        """Yields the next rows, which are made, without taking them."""
        first = self._place
        for _, block in self._ready:
            part = block[first : first + rows]
            yield part
            first, rows = 0, rows - len(part)
            if not rows:
                return

    def _take(self, rows: int) -> None:
        """Counts the next rows, which are made, as taken."""
        self._taken += rows
        self._place += rows
        while self._ready and self._place >= len(self._ready[0][1]):
            self._at_round, block = self._ready.pop(0)
            self._place -= len(block)
        if self._place:
            self._at_round = self._ready[0][0]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the stream, as numbers, strings and lists that JSON takes.

        Any shard's that has yielded as many rows as the others goes on with the same rows on any number of shards. That
        of one of several workers loads onto that worker; :func:`join_states` makes one of all.

        Raises:
            PackingError: the source can be read only once.
        """
        self._source.check_resumable()
        at = self._at_round
        if self._digest is None or self._digest[0] is not at:
            self._digest = at, at.digest()
        counters = {"epoch": self._epoch, "round": at.round, **self._deal.state(self._taken)}
        position = {"rows_before": at.rows_before, "cursor": at.cursor, "pending": at.places()}
        return sealed({**self.options.state(), **counters, **position, **self._source.state()}, self._digest[1])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the remaining rows are the same ones. A refused state changes nothing.

        Raises:
            PackingError: the state is not one, or was changed, or is of a stream with other options, or the source has
                fewer documents than it had, or others.
        """
        given = read_state(state, self.options.state())
        deal = self._deal.resumed(given)
        self._source.start_epoch(given["epoch"])
        try:
            mark, opened = restore(given, self._source, self._reader.cut)
        except BaseException:
            self._source.start_epoch(self._epoch)
            raise
        self.start_epoch(given["epoch"])
        self._round, self._rows_before, self._deal = mark.round, mark.rows_before, deal
        self._reader.go_on(mark.cursor, mark.pending, mark.last, opened)
        self._mark = self._at_round = mark

    # One epoch is a sequence of rounds: read until the buffer is full, plan, let the rows that are full go.

    def of_worker(self, index: int, count: int, rows_per_batch: int = 1) -> PackStream:
        """This stream, at the start of its epoch, making the rows of one of several workers; see :func:`stream`."""
        part = part_of("worker", (index, count))
        self._deal = Deal(self.index, self.shards, *part, positive("rows_per_batch", rows_per_batch))
        self.start_epoch(self._epoch)
        return self

    def start_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, counted from 0; ``iter()`` at the end of one starts the next by itself."""
        self._epoch, self._round = epoch, 0
        self._rows_before = 0  # rows of all shards that earlier rounds let go
        self._deal = replace(self._deal, base=0, taken=0)
        self._taken = 0  # rows of this worker since the epoch or the resumed run began
        self._reader.restart(epoch)
        self._done = False
        self._ready, self._rows, self._no_rows = [], iter(()), None
        self._place = 0
        self._leaves: tuple[Pending, PackPlan] | None = None  # the plan of a round, and what it was made of
        self._todo = np.zeros(0, np.int64)  # its rows of this worker that are not made yet
        self._pads = False  # whether a row of padding is to follow them
        self._mark = self._at_round = Mark(0, 0, 0, self._reader.pending, None)
        self._digest = None

    def _advance(self) -> None:
        """Make the next rows of this shard ready, or at least come closer to them.

        Raises:
            StopIteration: there are none.
        """
        if len(self._todo):
            block = self._todo[: max(1, CHUNK_TOKENS // self.capacity)]
            self._ready.append((self._mark, self._made(block)))
            self._todo = self._todo[len(block) :]
        elif self._pads:
            assert self._no_rows is not None
            self._ready.append((self._mark, with_empty_row(self._no_rows)))
            self._pads = False
        else:
            self._next_round()

    def _made(self, numbers: Int64) -> PackedBatch:
        assert self._leaves is not None
        return make_rows(*self._leaves, numbers, self.options.rule, self._pack_options)

    def _next_round(self) -> None:
        """Read, plan, and choose the rows that leave. What raises leaves everything as it was, but for documents read.

        Raises:
            StopIteration: there are no more rows.
        """
        self._leaves = None
        reader = self._reader
        if reader.exhausted and not len(reader.pending.ids):
            self._done = True
            raise StopIteration
        if self._mark.round != self._round:  # else the round began before, and the source failed in it
            self._mark = Mark(self._round, self._rows_before, reader.cursor, reader.pending, reader.last)
        reader.fill()
        if len(lengths := reader.pending.lengths):
            rows = plan_round(lengths, self.options.rule, self._round_seed, once=not reader.exhausted)
            self._leaves = reader.pending._replace(ids=self._source.numbers(reader.pending.ids)), rows
            if self._no_rows is None:
                self._no_rows = self._made(np.zeros(1, np.int64))[:0]
            gone = self._leaving(rows)
            self._todo = gone[self._deal.mine(self._rows_before + np.arange(len(gone)))]
            goes = np.zeros(rows.n_rows, np.bool_)
            goes[gone] = True
            stay = np.ones(len(reader.pending.ids), np.bool_)
            stay[rows.source[np.repeat(goes, np.diff(rows.row_offsets))]] = False
            reader.pending = reader.pending.keep(np.flatnonzero(stay))
            self._rows_before += len(gone)
        self._round += 1
        if reader.exhausted and not len(reader.pending.ids):
            self._even_out()

    @property
    def _round_seed(self) -> list[int] | None:
        """The seed that this round draws by; None where its rows keep an order."""
        if self.seed is None or self.options.rule.order != "random":
            return None
        return [self.seed, self._epoch, self._round]

    def _leaving(self, rows: PackPlan) -> Int64:
        """The rows that leave in this round: in steps of equal cost, shuffled by the seed unless they keep an order."""
        shares, seed = self.options.equal_cost, self._round_seed
        if self._reader.exhausted:
            gone = np.arange(rows.n_rows)
        else:  # what stays now is looked at again after another buffer of documents
            old = self._reader.pending.ids[rows.source] <= self._reader.cursor - 1 - (
                self.options.max_age - self.options.buffer
            )
            gone = leaving(rows, self.options.buffer // 2, self.options.buffer_tokens // 2, old)
            if shares:
                gone = whole_steps(rows, gone, old, shares, self._rows_before)
        if shares:
            return by_step(gone, self._cost.of_rows(rows), shares, self._rows_before, seed)
        return gone if seed is None else np.random.default_rng(seed).permutation(gone)

    def _even_out(self) -> None:
        """After the last row: one row of padding for each shard that would otherwise have one row less."""
        if self._no_rows is None:
            if self._rows_before:
                return  # gone on from the end of an epoch, after all its rows
            raise PackingError("the source has no document to pack: give it one at least")
        self._pads = self._deal.base < self._rows_before and self._deal.pads(self._rows_before)
