"""Streams read by several workers on several shards: every row once, in order, and a resume on any number of both."""

from __future__ import annotations

import json
from itertools import chain, zip_longest

import numpy as np
import pytest

from packing_core import LayoutError, PackingError, join_states, pack, stream
from tests.packing_core.test_stream import contents, documents, segments

LENGTHS = np.random.default_rng(0).integers(1, 17, 70)
OPTIONS = {"buffer": 12, "max_age": 24, "seed": 3}
SOURCE = documents(LENGTHS)


def workers_of(shard, workers, batch, state=None):
    """The streams of the workers of a shard."""
    made = [
        stream(SOURCE, 20, shard=shard, worker=(w, workers), rows_per_batch=batch, **OPTIONS) for w in range(workers)
    ]
    for one in made:
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
    return made


def in_turn(streams, batch, most=None):
    """Batches as a DataLoader takes them, one from each worker in turn."""
    taken, waiting = [], [one.batches(batch) for one in streams]
    while waiting and (most is None or len(taken) < most):
        made = next(waiting[0], None)
        waiting = waiting[1:] + (waiting[:1] if made is not None else [])
        if made is not None:
            taken.append(made)
    return taken


def rows_of(batches) -> list[list[list[int]]]:
    return [[row] for made in batches for row in made.input_ids.tolist()]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("workers", "batch"), [(1, 4), (2, 1), (3, 2), (5, 3)])
def test_workers_in_turn_give_the_rows_of_the_shard_in_their_order(shards, workers, batch) -> None:
    whole = contents(stream(SOURCE, 20, **OPTIONS))
    of_shard = [rows_of(in_turn(workers_of((i, shards), workers, batch), batch)) for i in range(shards)]
    assert len({len(rows) for rows in of_shard}) == 1
    dealt = [row for row in chain(*zip_longest(*of_shard)) if np.count_nonzero(row)]
    assert dealt == whole


@pytest.mark.parametrize(("workers", "batch", "shards"), [(2, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize(("then_workers", "then_batch", "then_shards"), [(1, 1, 1), (4, 3, 3)])
def test_the_joined_state_goes_on_with_any_number_of_workers_and_shards(
    workers, batch, shards, then_workers, then_batch, then_shards
) -> None:
    whole = contents(stream(SOURCE, 20, **OPTIONS))
    for most in (0, 1, 2, 5, 8, 11):
        streams = workers_of((0, shards), workers, batch)
        done = len(rows_of(in_turn(streams, batch, most))) * shards
        state = join_states([one.state_dict() for one in streams])
        assert state["rows"] == done
        rest = [
            rows_of(in_turn(workers_of((i, then_shards), then_workers, then_batch, state), then_batch))
            for i in range(then_shards)
        ]
        remaining = whole[done:]
        for number, row in enumerate(remaining, done):
            assert rest[number % then_shards].pop(0) == row
        assert not any(np.count_nonzero(rows) for rows in rest)


def test_a_worker_goes_on_from_its_own_state() -> None:
    streams = workers_of((1, 2), 2, 2)
    expected = rows_of(in_turn(workers_of((1, 2), 2, 2), 2))
    first = rows_of(in_turn(streams, 2, 3))
    again = workers_of((1, 2), 2, 2)
    for one, state in zip(again, [s.state_dict() for s in streams], strict=True):
        one.load_state_dict(json.loads(json.dumps(state)))
    assert rows_of(in_turn(again[1:] + again[:1], 2)) == expected[len(first) :]  # worker 1 is next


def test_states_that_do_not_belong_together_are_refused() -> None:
    streams = workers_of((0, 1), 3, 2)
    in_turn(streams, 2, 4)
    states = [one.state_dict() for one in streams]
    with pytest.raises(PackingError, match="the states are of the workers 0, 1 of 3: pass one of each"):
        join_states(states[:2])
    with pytest.raises(PackingError, match="the state is of worker 0 of 3 with batches of 2 on 1 shards: join the st"):
        stream(SOURCE, 20, **OPTIONS).load_state_dict(states[0])
    with pytest.raises(PackingError, match="it was changed: pass it as state_dict"):
        join_states([{**states[0], "epoch": 1}, *states[1:]])
    other = stream(SOURCE, 20, worker=(0, 3), rows_per_batch=2, buffer=12, max_age=24, seed=4)
    with pytest.raises(PackingError, match="of different runs, they differ in seed"):
        join_states([other.state_dict(), *states[1:]])
    next(streams[2])
    with pytest.raises(PackingError, match="worker 1 gave 2 rows and would have given 3 of the first 9"):
        join_states([one.state_dict() for one in streams])


class Counting:
    """Documents that note which of them were read."""

    def __init__(self, given) -> None:
        self.given, self.read = given, []

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, number):
        self.read.append(number)
        return self.given[number]


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_with_lengths_a_shard_reads_its_own_documents_alone(overflow) -> None:
    whole = contents(stream(SOURCE, 12, overflow=overflow, **OPTIONS))
    taken, others = [], 0
    for index in range(4):
        source = Counting(SOURCE)
        packed = stream(source, 12, lengths=LENGTHS, overflow=overflow, shard=(index, 4), **OPTIONS)
        rows = list(packed)
        taken.append(contents(rows))
        own = {d for row in rows for d in row.sources.tolist()}
        others += len(set(source.read) - own)
    assert [row for row in chain(*zip_longest(*taken)) if np.count_nonzero(row)] == whole
    assert others <= 4 * 12  # those of one row, from which a shard learns what columns there are


def test_a_stream_with_lengths_resumes_exactly() -> None:
    whole = contents(stream(SOURCE, 20, **OPTIONS))
    stopped, continued = (stream(SOURCE, 20, lengths=LENGTHS, **OPTIONS) for _ in range(2))
    assert contents(next(stopped) for _ in range(7)) == whole[:7]
    continued.load_state_dict(stopped.state_dict())
    assert contents(continued) == whole[7:]
    plain = stream(SOURCE, 20, **OPTIONS)
    plain.load_state_dict(stopped.state_dict())
    assert contents(plain) == contents(stopped)


def test_wrong_lengths_are_found_when_the_document_is_read() -> None:
    wrong = [*LENGTHS[:-1], LENGTHS[-1] + 1]
    with pytest.raises(LayoutError, match=rf"document 69 has {LENGTHS[-1]} tokens and lengths says {LENGTHS[-1] + 1}"):
        list(stream(SOURCE, 20, lengths=wrong, **OPTIONS))
    with pytest.raises(PackingError, match="there are 69 lengths and 70 documents"):
        stream(SOURCE, 20, lengths=wrong[:-1])
    with pytest.raises(PackingError, match="source is a list_iterator and lengths are given: pass a sequence"):
        stream(iter(SOURCE), 20, lengths=LENGTHS)


def test_rows_one_by_one_are_those_of_the_batch() -> None:
    batch = pack(
        SOURCE,
        20,
        labels=SOURCE,
        prompt_lengths=[0] * 70,
        columns={"w": SOURCE},
        per_document={"label": np.arange(70)},
        alignment=2,
    )
    for first in (0, 3):
        for number, row in enumerate(batch.single_rows(first), first):
            same = batch[number]
            for name in ("input_ids", "labels", "loss_mask", "cu_seqlens", "rows", "sources", "starts", "targets"):
                got, wanted = getattr(row, name), getattr(same, name)
                assert np.array_equal(got, wanted) and got.dtype == wanted.dtype and not got.flags.writeable
            assert np.array_equal(row.columns["w"], same.columns["w"])
            assert np.array_equal(row.per_document["label"], same.per_document["label"])
            assert (row.alignment, row.pad_id, row.weighting) == (2, 0, "token")
        assert number == len(batch) - 1


def test_batches_are_the_rows() -> None:
    rows = contents(stream(SOURCE, 20, **OPTIONS))
    packed = stream(SOURCE, 20, **OPTIONS)
    assert rows_of([next(packed), *packed.batches(4)]) == rows
    assert {len(made) for made in list(stream(SOURCE, 20, **OPTIONS).batches(4))[:-1]} == {4}
    assert sorted(segments(stream(SOURCE, 20, **OPTIONS).batches(7))) == sorted(tuple(d.tolist()) for d in SOURCE)
