"""Documents one after another in, packed rows out: packing without knowing all lengths, in bounded memory, resumable.

A buffer of pending documents is planned (``plan``); rows that came out full leave, the others stay pending
and are planned again with the documents that follow. Every shard plans the same rows and materialises its own: row r
belongs to shard r modulo N. The state is a few counters and the numbers of the pending documents, so a run goes on
where it stopped, also with another number of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing_core._mixed import mixed
from packing_core._pending import Pending, lengths_of, part
from packing_core._pieces import Overflow, check_seed, choice, positive
from packing_core.batch import IGNORE_INDEX, PackedBatch, Weighting
from packing_core.dataset import pack
from packing_core.errors import CapacityError, LayoutError, PackingError
from packing_core.plan import PackPlan, plan

Int64 = NDArray[np.int64]
Open = Callable[[int], Iterable[Any]]

WASTE = 5e-4  # of the slots of the rows that leave a round; the rest waits for documents that fill it
_OPTIONS = ("capacity", "buffer", "max_age", "seed", "overflow", "alignment", "max_segments", "strategy")
StreamStrategy = Literal["best_fit", "mixed"]


def stream(
    source: Any,
    capacity: int,
    *,
    buffer: int = 8192,
    max_age: int | None = None,
    seed: int | None = None,
    shard: tuple[int, int] = (0, 1),
    overflow: Overflow = "error",
    alignment: int = 1,
    max_segments: int | None = None,
    strategy: StreamStrategy = "best_fit",
    pad_id: int = 0,
    weighting: Weighting = "token",
) -> PackStream:
    """Pack documents as they come. Iterating yields rows, each a PackedBatch of one row.

    >>> rows = stream([[5, 6, 7], [8, 9], [3, 4, 2, 1]], 5)
    >>> [row.input_ids.tolist() for row in rows]
    [[[3, 4, 2, 1, 0]], [[5, 6, 7, 8, 9]]]

    Args:
        source: a sequence of documents, or a function ``open(start)`` that iterates over them from number ``start``. A
            document is token ids, or a mapping of ``input_ids`` and optionally ``labels``, ``loss_mask``,
            ``prompt_length`` and other per-token columns. It must give the same documents every time; every shard
            reads all of them.
        capacity: tokens a row can hold.
        buffer: documents that are pending at most; more fill rows better.
        max_age: how many documents may be read after a document before it is in a row; 16 buffers by default.
        seed: shuffles the rows that leave together, differently in every epoch; None keeps the planner's order.
        shard: (index, count). All shards get equally many rows: at the very end, up to ``count - 1`` shards get one row
            that is nothing but padding, so that none waits for the others.
        overflow, alignment, max_segments, strategy: as in ``plan``; under ``mixed`` every round draws from the pending
            documents, by the seed, or without one in their own order.
        pad_id, weighting: as in ``pack``.

    Raises:
        PackingError: an option is out of range; while iterating also: a document is empty, or longer than ``capacity``
            under ``overflow="error"`` (CapacityError), or has other columns than the first (LayoutError).
    """
    return PackStream(
        source,
        capacity,
        buffer=buffer,
        max_age=max_age,
        seed=seed,
        shard=shard,
        overflow=overflow,
        alignment=alignment,
        max_segments=max_segments,
        strategy=strategy,
        pad_id=pad_id,
        weighting=weighting,
    )


class PackStream:
    """An iterator over packed rows that can be stopped and continued; see :func:`stream`.

    ``iter()`` on a stream that is at its end starts the next epoch.

    Attributes:
        truncated, dropped: numbers of the documents that ``overflow`` cut or left out since this stream was made.
    """

    _reader: Iterator[Any] | None
    _ready: PackedBatch | tuple[()]  # this shard's rows of the present round
    _no_rows: PackedBatch | None  # a batch without rows, which says what columns there are

    def __init__(
        self,
        source: Any,
        capacity: int,
        *,
        buffer: int,
        max_age: int | None,
        seed: int | None,
        shard: tuple[int, int],
        overflow: Overflow,
        alignment: int,
        max_segments: int | None,
        strategy: StreamStrategy,
        pad_id: int,
        weighting: Weighting,
    ) -> None:
        self.capacity = positive("capacity", capacity)
        self.buffer = positive("buffer", buffer)
        self.max_age = 16 * self.buffer if max_age is None else positive("max_age", max_age)
        if self.max_age < self.buffer:
            raise PackingError(f"max_age is {max_age:,} and buffer {buffer:,}: pass an age of at least one buffer")
        self.seed = check_seed(seed)
        if not (len(shard) == 2 and all(isinstance(n, int) for n in shard) and 0 <= shard[0] < shard[1]):
            raise PackingError(f"shard is {shard}: pass (index, count) with 0 <= index < count")
        self.index, self.shards = shard
        choice("overflow", overflow, get_args(Overflow))
        self.overflow = overflow
        self.alignment = positive("alignment", alignment)
        self.max_segments = None if max_segments is None else positive("max_segments", max_segments)
        choice("strategy", strategy, get_args(StreamStrategy))
        self.strategy = strategy
        plan([1], self.capacity, alignment=self.alignment)  # checks that the two agree
        self.pad_id = pad_id
        self.weighting = weighting
        self.truncated: list[int] = []
        self.dropped: list[int] = []
        self._open = _opener(source)
        self._begin(epoch=0)

    def __iter__(self) -> PackStream:
        if self._done:
            self._begin(self._epoch + 1)
        return self

    def __next__(self) -> PackedBatch:
        while self._place >= len(self._ready):
            self._next_round()
        self._place += 1
        self._taken += 1
        return self._ready[self._place - 1]

    def chunks(self) -> Iterator[PackedBatch]:
        """This shard's rows of the rest of the epoch, all that are ready at a time as one batch: far fewer objects."""
        while True:
            try:
                while self._place >= len(self._ready):
                    self._next_round()
            except StopIteration:
                return
            chunk = self._ready[self._place :]
            assert isinstance(chunk, PackedBatch)
            self._place += len(chunk)
            self._taken += len(chunk)
            yield chunk

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as numbers and lists that JSON takes.

        It is the same on every shard that has yielded equally many rows, and loads onto any number of shards.
        """
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**options, "epoch": self._epoch, "rows": self._base + self._taken * self.shards, **self._at_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the remaining rows are the same ones.

        Raises:
            PackingError: the state is not one, or of a stream with other options, or the source has fewer documents
                than it had.
        """
        if missing := [name for name in self.state_dict() if name not in state]:
            raise PackingError(f"the state has no {missing[0]!r}: pass what state_dict() of a stream returned")
        for name in _OPTIONS:
            if state[name] != getattr(self, name):
                raise PackingError(
                    f"the state was taken with {name}={state[name]} and this stream has {name}={getattr(self, name)}: "
                    f"build it with the options that it had"
                )
        self._begin(state["epoch"])
        self._round, self._rows_before, self._cursor = state["round"], state["rows_before"], state["cursor"]
        self._base = state["rows"]
        wanted = {number for number, _ in state["pending"]}
        first = min(wanted, default=self._cursor)
        self._reader = iter(self._open(first))
        again = enumerate(islice(self._reader, self._cursor - first), first)
        found = {
            piece[:2]: piece for number, document in again if number in wanted for piece in self._cut(number, document)
        }
        try:
            self._pending = Pending.of([found[number, start] for number, start in state["pending"]])
        except KeyError as lost:
            raise PackingError(
                f"document {lost.args[0][0]} was pending and the source ends before it: give the source that it had"
            ) from None
        self._mark_round()

    # One epoch is a sequence of rounds: read until the buffer is full, plan, let the rows that are full go.

    def _begin(self, epoch: int) -> None:
        self._epoch, self._round, self._cursor = epoch, 0, 0
        self._rows_before = 0  # rows of all shards that earlier rounds let go
        self._base = self._taken = 0  # rows of all shards that earlier runs took; this shard's since
        self._reader = None
        self._exhausted = self._done = False
        self._pending = Pending.of([])
        self._ready, self._no_rows = (), None
        self._place = 0
        self._names: tuple[str, ...] | None = None
        self._mark_round()

    def _mark_round(self) -> None:
        pending = np.stack([self._pending.ids, self._pending.starts], axis=1).tolist()
        self._at_round = {
            "round": self._round,
            "rows_before": self._rows_before,
            "cursor": self._cursor,
            "pending": pending,
        }

    def _next_round(self) -> None:
        """Make the rows of the next round ready.

        Raises:
            StopIteration: there is none.
        """
        if self._done:
            raise StopIteration
        self._ready, self._place = (), 0
        if self._exhausted and not len(self._pending.ids):
            self._done = True
            raise StopIteration
        self._mark_round()
        self._fill()
        rows = self._plan_round()
        if rows is not None:
            leaving = self._leaving(rows)
            mine = self._mine(len(leaving))
            self._ready = self._materialise(rows, leaving[mine])
            self._no_rows = self._ready[:0]
            stay = np.ones(len(self._pending.ids), np.bool_)
            stay[rows.select(leaving).source] = False
            self._pending = self._pending.keep(np.flatnonzero(stay))
            self._rows_before += len(leaving)
        self._round += 1
        if self._exhausted and not len(self._pending.ids):
            self._even_out()

    def _fill(self) -> None:
        if self._reader is None:
            self._reader = iter(self._open(self._cursor))
        while (room := self.buffer - len(self._pending.ids)) > 0 and not self._exhausted:
            documents = list(islice(self._reader, room))
            self._exhausted = len(documents) < room
            lengths = lengths_of(documents)
            ids = np.arange(self._cursor, self._cursor + len(documents))
            if len(documents) and lengths.min() > 0 and lengths.max() <= self.capacity:
                new = Pending(ids, np.zeros_like(ids), lengths, documents)
            else:
                pairs = zip(ids.tolist(), documents, strict=True)
                new = Pending.of([piece for number, document in pairs for piece in self._cut(number, document)])
            self._pending = self._pending.and_then(new)
            self._cursor += len(documents)

    def _cut(self, number: int, document: Any) -> list[tuple[int, int, int, Any]]:
        """The pieces of a document under ``overflow``: number, first token, length, content."""
        length = int(lengths_of([document])[0])
        if 0 < length <= self.capacity:
            return [(number, 0, length, document)]
        if length == 0:
            raise PackingError(f"document {number} is empty: leave empty documents out of the source")
        if self.overflow == "error":
            raise CapacityError(
                f"document {number} has {length:,} tokens and capacity is {self.capacity:,}: "
                'pass overflow="split", "truncate" or "drop", or raise capacity'
            )
        if self.overflow == "drop":
            self.dropped.append(number)
            return []
        if self.overflow == "truncate":
            self.truncated.append(number)
            return [(number, 0, self.capacity, part(document, 0, self.capacity))]
        bounds = [*range(0, length, self.capacity), length]
        return [(number, a, b - a, part(document, a, b)) for a, b in pairwise(bounds)]

    def _plan_round(self) -> PackPlan | None:
        if not len(self._pending.ids):
            return None
        if self.strategy == "mixed":
            return self._draw_round()
        return plan(
            self._pending.lengths,
            self.capacity,
            alignment=self.alignment,
            max_segments=self.max_segments,
            seed=None,
        )

    def _draw_round(self) -> PackPlan:
        """Mixed rows of the pending documents. Rows that are not full stay, so the first draw will do until the end."""
        lengths = self._pending.lengths
        rows = mixed(
            -(-lengths // self.alignment),
            self.capacity // self.alignment,
            min(self.max_segments or len(lengths), len(lengths)),
            None if self.seed is None else np.random.PCG64([self.seed, self._epoch, self._round]),
            once=not self._exhausted,
        )
        return PackPlan(
            rows.offsets,
            rows.order,
            np.zeros_like(rows.order),
            lengths[rows.order],
            capacity=self.capacity,
            n_documents=len(lengths),
            alignment=self.alignment,
            check=False,
        )

    def _leaving(self, rows: PackPlan) -> Int64:
        """The rows that leave now, shuffled by the seed: all that are full, enough of them, and all too old."""
        if self._exhausted:
            leaving = np.arange(rows.n_rows)
        else:
            tokens = np.add.reduceat(rows.length, rows.row_offsets[:-1])
            fullest = np.argsort(-tokens, kind="stable")
            free = np.cumsum(self.capacity - tokens[fullest])
            within = np.flatnonzero(free <= WASTE * self.capacity * np.arange(1, rows.n_rows + 1))
            left = np.cumsum(np.diff(rows.row_offsets)[fullest])
            enough = int(np.searchsorted(left, len(rows.length) - self.buffer // 2)) + 1
            leaves = np.zeros(rows.n_rows, np.bool_)
            leaves[fullest[: max(enough, int(within[-1]) + 1 if len(within) else 0)]] = True
            # What stays now is asked again after another buffer of documents.
            old = self._pending.ids[rows.source] <= self._cursor - 1 - (self.max_age - self.buffer)
            leaves |= np.logical_or.reduceat(old, rows.row_offsets[:-1])
            leaving = np.flatnonzero(leaves)
        if self.seed is not None:
            leaving = np.random.default_rng([self.seed, self._epoch, self._round]).permutation(leaving)
        return leaving

    def _mine(self, count: int) -> Int64:
        """Which of the ``count`` rows that leave are this shard's and were not taken in an earlier run."""
        numbers = self._rows_before + np.arange(count)
        return np.flatnonzero((numbers % self.shards == self.index) & (numbers >= self._base))

    def _materialise(self, rows: PackPlan, mine: Int64) -> PackedBatch:
        if not len(mine):  # a batch without rows still says which columns there are
            return self._materialise(rows, np.zeros(1, np.int64))[:0]
        chosen = rows.select(mine)
        places = chosen.source.tolist()
        contents = [self._pending.contents[i] for i in places]
        local = PackPlan(
            chosen.row_offsets,
            np.arange(len(places)),
            np.zeros(len(places), np.int64),
            chosen.length,
            capacity=self.capacity,
            alignment=self.alignment,
            n_documents=len(places),
        )
        batch = pack(
            **self._columns(contents, places), capacity_or_plan=local, pad_id=self.pad_id, weighting=self.weighting
        )
        return replace(batch, sources=self._pending.ids[chosen.source], starts=self._pending.starts[chosen.source])

    def _columns(self, contents: list[Any], places: list[int]) -> dict[str, Any]:
        """The arguments of ``pack`` that hold the documents."""
        if not isinstance(contents[0], Mapping):
            return {"sequences": contents}
        names = self._names = self._names or tuple(contents[0])
        for content, place in zip(contents, places, strict=True):
            if not isinstance(content, Mapping) or tuple(content) != names:
                found = ", ".join(content) if isinstance(content, Mapping) else "no columns"
                raise LayoutError(
                    f"document {self._pending.ids[place]} has {found} and the first one has {', '.join(names)}: "
                    "give every document the same columns in the same order"
                )
        columns = {name: [content[name] for content in contents] for name in names}
        arguments = {
            "sequences": columns.pop("input_ids"),
            "labels": columns.pop("labels", None),
            "loss_mask": columns.pop("loss_mask", None),
            "prompt_lengths": columns.pop("prompt_length", None),
        }
        return {**arguments, "columns": columns}

    def _even_out(self) -> None:
        """After the last row: one row of padding for each shard that would otherwise have one row less.

        Raises:
            PackingError: the source gave nothing at all.
        """
        if self._no_rows is None:
            raise PackingError("the source has no document to pack")
        missing = -(self._rows_before - self._base) % self.shards if self._base < self._rows_before else 0
        numbers = self._rows_before + np.arange(missing)
        if (numbers % self.shards == self.index).any():
            self._ready = _with_empty_row(self._ready or self._no_rows)


def _with_empty_row(batch: PackedBatch) -> PackedBatch:
    def grown(array: NDArray[Any], fill: int) -> NDArray[Any]:
        return np.concatenate([array, np.full((1, batch.capacity), fill, array.dtype)])

    return replace(
        batch,
        input_ids=grown(batch.input_ids, batch.pad_id),
        labels=None if batch.labels is None else grown(batch.labels, IGNORE_INDEX),
        loss_mask=None if batch.loss_mask is None else grown(batch.loss_mask, 0),
        columns={name: grown(array, 0) for name, array in batch.columns.items()},
    )


def _opener(source: Any) -> Open:
    if callable(source) and not hasattr(source, "__getitem__"):
        return source  # type: ignore[no-any-return]
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise PackingError(
            f"source is a {type(source).__name__}: pass a sequence of documents, or a function open(start) that "
            "iterates from document number start, so that the stream can be resumed"
        )
    return lambda start: (source[i] for i in range(start, len(source)))
