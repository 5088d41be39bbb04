"""Streams read by several workers on several shards: every row once, in order, and a resume on any number of both."""

from __future__ import annotations

from itertools import chain, zip_longest

import numpy as np
import pytest

from packing_core import LayoutError, PackingError, join_states, stream
from tests.packing_core.test_stream import contents, documents

LENGTHS = np.random.default_rng(0).integers(1, 17, 70)
OPTIONS = {"buffer": 12, "max_age": 24, "seed": 3}
SOURCE = documents(LENGTHS)


def test_states_that_do_not_belong_together_are_refused() -> None:
    streams = [stream(SOURCE, 20, worker=(w, 3), rows_per_batch=2, **OPTIONS) for w in range(3)]
    for worker in (0, 1, 2, 0):
        next(streams[worker].batches(2))
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


def test_wrong_lengths_are_found_when_the_document_is_read() -> None:
    wrong = [*LENGTHS[:-1], LENGTHS[-1] + 1]
    with pytest.raises(LayoutError, match=rf"document 69 has {LENGTHS[-1]} tokens and lengths says {LENGTHS[-1] + 1}"):
        list(stream(SOURCE, 20, lengths=wrong, **OPTIONS))
    with pytest.raises(PackingError, match="there are 69 lengths and 70 documents"):
        stream(SOURCE, 20, lengths=wrong[:-1])
    with pytest.raises(PackingError, match="source is a list_iterator and lengths are given: pass a sequence"):
        stream(iter(SOURCE), 20, lengths=LENGTHS)
