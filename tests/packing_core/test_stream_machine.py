"""Streams as their readers use them, in any order: rows are taken, sources and collators fail, runs stop and go on.

A team of streams, one for each worker of each shard, gives the rows of one stream that nobody disturbs.
"""

from __future__ import annotations

import json
from itertools import chain, zip_longest

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from packing_core import join_states, stream
from tests.packing_core.test_stream import contents, documents

CAPACITY = 20
EPOCHS = 3
OPTIONS = st.fixed_dictionaries(
    {
        "buffer": st.integers(1, 8),
        "max_age": st.none() | st.integers(8, 20),
        "buffer_tokens": st.sampled_from([None, 40]),
        "max_segments": st.sampled_from([None, 3]),
        "overflow": st.sampled_from(["split", "truncate", "drop", "overlap", "restart"]),
        "seed": st.sampled_from([None, 3]),
    }
)
KINDS = ("mixed", "best_fit", "sorted", "grouped", "curriculum", "equal cost", "with lengths")
LAYOUT = {"shards": st.integers(1, 3), "workers": st.integers(1, 3), "batch": st.integers(1, 4)}


class Unsteady(list):
    """Documents that are not to be had now and then: each place of ``lost`` raises once."""

    def __init__(self, given) -> None:
        super().__init__(given)
        self.lost: set[int] = set()

    def __getitem__(self, number):
        if number in self.lost:
            self.lost.remove(number)
            raise ConnectionError(f"lost at {number}")
        return super().__getitem__(number)


class Streams(RuleBasedStateMachine):
    @initialize(
        lengths=st.lists(st.integers(1, CAPACITY) | st.integers(1, 50), min_size=1, max_size=60),
        options=OPTIONS,
        kind=st.sampled_from(KINDS),
        as_function=st.booleans(),
        **LAYOUT,
    )
    def begin(self, lengths, options, kind, as_function, shards, workers, batch) -> None:
        if options["overflow"] == "drop":
            lengths = [*lengths, 1]
        self.source = Unsteady(document + 1 for document in documents(lengths))  # 0 is padding
        self.steps = shards if kind == "equal cost" else 1
        self.options = options | {"capacity": CAPACITY}
        if options["overflow"] in ("overlap", "restart"):
            self.options |= {"context": 2}
        if kind in ("sorted", "grouped", "curriculum"):
            keys = {} if kind == "curriculum" else {"keys": [n % 4 for n in range(len(lengths))]}
            self.options |= {"order": kind, "lengths": lengths, **keys}
        elif kind == "with lengths":
            self.options |= {"lengths": lengths}
        elif kind == "equal cost":
            self.options |= {"equal_cost": True}
        else:
            self.options |= {"strategy": kind}
        self.given = self._opened if as_function and "lengths" not in self.options else self.source
        calm = [stream(list(self.source), **self.options, shard=(i, self.steps)) for i in range(self.steps)]
        self.whole = [self._dealt([contents(one) for one in calm]) for _ in range(EPOCHS)]
        kept = {"truncate": [d[:CAPACITY] for d in self.source], "drop": [d for d in self.source if len(d) <= CAPACITY]}
        wanted = sorted(chain(*kept.get(options["overflow"], self.source)))
        for rows in self.whole:
            tokens = sorted(token for row in rows for token in row[0] if token)
            assert (sorted(set(tokens)) if "context" in self.options else tokens) == wanted
        self.epoch = self.turn = self.done = 0
        self.ended = False
        self._team(shards, workers, batch)

    def _opened(self, start):
        return (self.source[number] for number in range(start, len(self.source)))

    def _dealt(self, of_shard):
        """The rows of shards one by one, without those of padding at the end."""
        return [row for row in chain(*zip_longest(*of_shard)) if row is not None and np.any(row)]

    def _stream(self, shard, worker):
        part = {"shard": (shard, self.shards), "worker": (worker, self.workers), "rows_per_batch": self.batch}
        return stream(self.given, **self.options, **part)

    def _team(self, shards, workers, batch, state=None) -> None:
        self.shards, self.workers, self.batch, self.turn = shards, workers, batch, 0
        self.team = [[self._stream(i, w) for w in range(workers)] for i in range(shards)]
        for one in chain(*self.team) if state is not None else ():
            one.load_state_dict(json.loads(json.dumps(state)))
        self._count_from(self.done)

    def _count_from(self, done) -> None:
        """Row r of the epoch belongs to shard r modulo their number."""
        self.next = [done + (i - done) % self.shards for i in range(self.shards)]

    def _again(self, shard, worker) -> None:
        """The process of a worker begins anew, from its own state."""
        self.source.lost.clear()  # which reads some documents, to know them again
        fresh = self._stream(shard, worker)
        fresh.load_state_dict(json.loads(json.dumps(self.team[shard][worker].state_dict())))
        self.team[shard][worker] = fresh

    def _took(self, shard, rows) -> None:
        for row in rows:
            place = self.next[shard]
            self.next[shard] += self.shards
            expected = self.whole[self.epoch]
            assert row == expected[place] if place < len(expected) else not np.any(row), place

    @precondition(lambda self: not self.ended)
    @rule(batches=st.integers(1, 3), one_by_one=st.booleans(), anew=st.booleans(), fails=st.booleans())
    def take(self, batches, one_by_one, anew, fails) -> None:
        """Every shard takes as many batches from its workers in turn, whatever fails on the way."""

        def collate(made):
            nonlocal fails
            if fails:
                fails = False
                raise MemoryError
            return contents(made.single_rows())

        for _ in range(batches):
            counts = set()
            for shard, streams in enumerate(self.team):
                while True:
                    try:
                        one = streams[self.turn]
                        if one_by_one and self.workers == self.batch == 1:
                            rows = contents([row for row in [next(one, None)] if row is not None])
                        else:
                            rows = next(one.batches(self.batch, collate), [])
                        break
                    except (ConnectionError, MemoryError):
                        if anew:
                            self._again(shard, self.turn)
                self._took(shard, rows)
                counts.add(len(rows))
            (count,) = counts  # as many on every shard
            self.done += count * self.shards
            self.turn = (self.turn + 1) % self.workers
            if not count:
                self.ended = True
                assert self.done >= len(self.whole[self.epoch])
                return

    @precondition(lambda self: not self.ended and self.shards == self.workers == 1)
    @rule()
    def take_a_chunk(self) -> None:
        while True:
            try:
                chunk = next(self.team[0][0].chunks(), None)
                break
            except ConnectionError:
                pass
        rows = [] if chunk is None else contents(chunk.single_rows())
        self._took(0, rows)
        self.done += len(rows)

    @rule(place=st.integers(0, 59))
    def lose(self, place) -> None:
        self.source.lost.add(place % len(self.source))

    @rule(of_shard=st.integers(0, 2), **LAYOUT)
    def stop_and_go_on(self, of_shard, shards, workers, batch) -> None:
        """The joined state of the workers of any shard loads onto any number of shards and workers."""
        self.source.lost.clear()
        states = [join_states([one.state_dict() for one in streams]) for streams in self.team]
        assert {state["rows"] for state in states} == {self.done}
        shards = self.shards if "equal_cost" in self.options else shards
        self._team(shards, workers, batch, states[of_shard % len(states)])

    @rule()
    def begin_every_worker_anew(self) -> None:
        for shard in range(self.shards):
            for worker in range(self.workers):
                self._again(shard, worker)

    @precondition(lambda self: self.ended and self.epoch < EPOCHS - 1)
    @rule()
    def begin_the_next_epoch(self) -> None:
        self.source.lost.clear()
        for one in chain(*self.team):
            assert next(one, None) is None
            iter(one)
        self.epoch, self.turn, self.done, self.ended = self.epoch + 1, 0, 0, False
        self._count_from(0)

    @invariant()
    def all_are_in_the_same_epoch(self) -> None:
        assert {one.epoch for one in chain(*self.team)} == {self.epoch}


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=60, stateful_step_count=12, derandomize=True)
