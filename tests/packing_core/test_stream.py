"""stream: nothing lost or doubled, full rows, bounded memory and age, and a resume that continues exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packing_core.errors import CapacityError, LayoutError, PackingError
from packing_core.planning.plan import plan
from packing_core.streaming.stream import stream


def documents(lengths) -> list[np.ndarray]:
    """Document i holds tokens 1000 i, 1000 i + 1, ..., so that every token says where it is from."""
    return [np.arange(length) + 1000 * i for i, length in enumerate(lengths)]


def segments(rows) -> list[tuple[int, ...]]:
    """The tokens of every segment of every row, in order."""
    return [
        tuple(row.input_ids.reshape(-1)[at : at + n].tolist())
        for row in rows
        for at, n in zip(row.flat_starts.tolist(), row.lengths.tolist(), strict=True)
    ]


def contents(rows) -> list[list[int]]:
    return [row.input_ids.tolist() for row in rows]


LENGTHS = np.random.default_rng(0).integers(1, 17, 60)
OPTIONS = {"buffer": 12, "max_age": 24, "seed": 3}


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60),
    buffer=st.integers(1, 16),
    shards=st.integers(1, 4),
    seed=st.none() | st.integers(0, 3),
)
def test_every_document_is_in_one_row_of_one_shard_and_shards_are_equal(lengths, buffer, shards, seed) -> None:
    given_documents = documents(lengths)
    rows = [list(stream(given_documents, 20, buffer=buffer, seed=seed, shard=(i, shards))) for i in range(shards)]
    assert len({len(of_shard) for of_shard in rows}) == 1
    found = [segment for of_shard in rows for segment in segments(of_shard)]
    assert sorted(found) == sorted(tuple(d.tolist()) for d in given_documents)
    assert sum(row.n_segments == 0 for of_shard in rows for row in of_shard) < shards


def test_sources_count_the_documents_of_the_whole_source() -> None:
    given_documents = documents(LENGTHS)
    for row in stream(given_documents, 20, **OPTIONS):
        for document, tokens in row.unpack().items():
            assert tokens.tolist() == given_documents[document].tolist()


def test_a_resume_reads_only_from_the_oldest_pending_document() -> None:
    source, opened = documents(LENGTHS), []

    def open_at(start):
        opened.append(start)
        return iter(source[start:])

    stopped = stream(open_at, 20, **OPTIONS)
    for _ in range(15):
        next(stopped)
    state = stopped.state_dict()
    continued = stream(open_at, 20, **OPTIONS)
    continued.load_state_dict(state)
    assert contents(continued) == contents(stopped)
    assert opened == [0, min([number for number, _ in state["pending"]], default=state["cursor"])]
    assert opened[1] > 0 and state["cursor"] - opened[1] <= OPTIONS["max_age"]


def test_no_document_waits_longer_than_max_age_and_no_more_than_buffer_are_held() -> None:
    lengths = np.random.default_rng(1).integers(7, 11, 500)  # two never fit into 13, so most rows stay unfilled
    packed = PackStreamSpy(documents(lengths), 13, buffer=10, max_age=30)
    for row in packed:
        assert packed.read - min(row.sources) <= 30
        assert packed.held <= 10


def test_a_document_waits_for_sixteen_buffers_by_default() -> None:
    def read_before_the_first_leaves(**options) -> int:
        # 7 + 10 never fit into 10: the first document waits as long as it may
        packed = PackStreamSpy(documents([7] + [10] * 100), 10, buffer=2, **options)
        return next(packed.read for row in packed if 0 in row.sources)

    ages = [read_before_the_first_leaves(max_age=age) for age in (31, 32, 33)]
    assert ages == sorted(set(ages))
    assert read_before_the_first_leaves() == ages[1]


@pytest.mark.parametrize(("capacity", "tokens"), [(2**18, 2**24), (2**18 + 1, 2**24 + 64)])
def test_by_default_a_buffer_has_2_to_the_24_tokens_or_64_rows(capacity, tokens) -> None:
    assert stream([[1]], capacity).state_dict()["buffer_tokens"] == tokens
    assert stream([[1]], capacity).state_dict()["buffer"] == 8192


class PackStreamSpy:
    """A stream whose source counts what was read."""

    def __init__(self, source, capacity, **options) -> None:
        def counted(start):
            for document in source[start:]:
                self.read += 1
                yield document

        self.read = 0
        self.packed = stream(counted, capacity, **options)

    def __iter__(self):
        return iter(self.packed)

    @property
    def held(self) -> int:
        return len(self.packed._reader.pending.ids)


@pytest.mark.parametrize("tail", [1.0, 1.3])
def test_rows_of_a_stream_are_full(tail) -> None:
    rng = np.random.default_rng(0)
    capacity, mean = (2048, 270) if tail == 1.0 else (65_536, 3000)
    lengths = np.clip(rng.lognormal(np.log(mean) - tail**2 / 2, tail, 60_000), 1, capacity).astype(np.int64)
    tokens = np.zeros(capacity, np.int32)
    chunks = list(stream([tokens[:n] for n in lengths], capacity).chunks())
    efficiency = sum(c.n_tokens for c in chunks) / sum(c.input_ids.size for c in chunks)
    assert efficiency >= 0.999
    assert sum(c.n_tokens for c in chunks) == lengths.sum()


def test_mixed_rows_of_a_stream_are_full_and_mixed() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(270) - 0.9**2 / 2, 0.9, 30_000), 1, 2048).astype(int)
    tokens = np.zeros(2048, np.int32)
    deviation = {}
    for strategy in ("best_fit", "mixed"):
        chunks = list(stream([tokens[:n] for n in lengths], 2048, strategy=strategy, seed=0).chunks())
        assert sum(c.n_tokens for c in chunks) / sum(c.input_ids.size for c in chunks) >= 0.999
        counts = np.concatenate([np.bincount(c.rows, minlength=len(c)) for c in chunks])
        deviation[strategy] = counts.std() / counts.mean()
    assert deviation["mixed"] < 0.5 < deviation["best_fit"]


def test_best_fit_rows_of_a_stream_are_those_of_a_plan() -> None:
    lengths = np.random.default_rng(0).integers(1, 17, 60)
    rows = list(stream(documents(lengths), 20, strategy="best_fit", seed=None))
    assert [row.sources.tolist() for row in rows] == plan(lengths, 20, strategy="best_fit", seed=None).to_lists()


def test_rows_of_a_stream_are_mixed_by_default() -> None:
    source = documents(LENGTHS)
    given = {s: contents(stream(source, 20, strategy=s, **OPTIONS)) for s in ("mixed", "best_fit")}
    assert contents(stream(source, 20, **OPTIONS)) == given["mixed"] != given["best_fit"]


def test_a_round_lets_half_a_buffer_go_so_that_planning_stays_cheap() -> None:
    lengths = np.random.default_rng(1).integers(7, 11, 500)  # no row is ever full
    packed = stream(documents(lengths), 13, buffer=20)
    list(packed)
    assert packed.state_dict()["round"] <= 500 / 10 + 1


def test_rows_keep_to_max_segments() -> None:
    assert max(row.n_segments for row in stream(documents(LENGTHS), 32, max_segments=2, **OPTIONS)) == 2


def test_a_state_of_a_version_with_alignment_loads_where_segments_touch() -> None:
    state = stream(documents(LENGTHS), 32, **OPTIONS).state_dict()
    assert state["alignment"] == 1
    with pytest.raises(PackingError, match="taken with alignment=8 and this stream has alignment=1"):
        stream(documents(LENGTHS), 32, **OPTIONS).load_state_dict(state | {"alignment": 8})


def test_the_pieces_of_a_split_document_say_where_they_start() -> None:
    found = {}
    for row in stream(documents([10, 3]), 4, overflow="split"):
        found |= {(d, s): n for d, s, n in zip(*(a.tolist() for a in (row.sources, row.starts, row.lengths)))}
    assert found == {(0, 0): 4, (0, 4): 4, (0, 8): 2, (1, 0): 3}


def test_epochs_differ_by_the_seed_and_hold_the_same_documents() -> None:
    packed = stream(documents(LENGTHS), 20, **OPTIONS)
    first, second = list(packed), list(packed)
    assert contents(first) != contents(second)
    assert sorted(segments(first)) == sorted(segments(second))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("buffer", [1, 8])
def test_a_state_of_an_epochs_end_goes_on_with_the_next_epoch(buffer, index) -> None:
    # three rows: shard 1 ends with one of padding
    ended, continued = (stream(documents([20] * 3), 20, buffer=buffer, shard=(index, 2)) for _ in range(2))
    rows = contents(ended)
    continued.load_state_dict(ended.state_dict())
    assert list(continued) == []
    assert contents(continued) == rows


def test_columns_travel_with_the_tokens() -> None:
    source = [
        {"input_ids": d, "labels": d + 1, "prompt_length": len(d) // 2, "weight": d / 1000.0}
        for d in documents(LENGTHS)
    ]
    for row in stream(source, 20, **OPTIONS):
        for number, tokens in row.unpack("labels").items():
            assert tokens.tolist() == source[number]["labels"].tolist()
        for number, tokens in row.unpack("weight").items():
            assert tokens.tolist() == source[number]["weight"].tolist()
        for trained in row.unpack("loss_mask").values():
            assert trained.tolist() == [i >= len(trained) // 2 for i in range(len(trained))]


def test_an_empty_row_at_the_end_has_the_columns_of_the_others_and_trains_nothing() -> None:
    source = [{"input_ids": d, "labels": d} for d in documents([20, 20, 20])]
    rows = [list(stream(source, 20, shard=(i, 2))) for i in (0, 1)]
    empty = rows[1][-1]
    assert empty.n_segments == 0 and empty.labels is not None
    assert (empty.targets == -100).all() and not empty.attention_mask.any()
    few = list(stream(source[:1], 20, shard=(1, 2)))
    assert len(few) == 1 and few[0].n_segments == 0 and few[0].labels is not None


@pytest.mark.parametrize(
    ("overflow", "wanted"),
    [
        ("split", [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (1000,)]),
        ("truncate", [(0, 1, 2, 3), (1000,)]),
        ("drop", [(1000,)]),
    ],
)
def test_documents_longer_than_a_row(overflow, wanted) -> None:
    packed = stream(documents([10, 1]), 4, overflow=overflow)
    assert sorted(segments(list(packed))) == wanted
    assert packed.truncated == ([0] if overflow == "truncate" else [])
    assert packed.dropped == ([0] if overflow == "drop" else [])


@pytest.mark.parametrize("overflow", ["split", "truncate"])
def test_columns_and_prompts_are_cut_with_their_document(overflow) -> None:
    lengths, prompts = [10, 3, 5], [6, 1, 5]
    source = [
        {"input_ids": d, "labels": d + 1, "prompt_length": p} for d, p in zip(documents(lengths), prompts, strict=True)
    ]
    kept: dict[int, list[tuple[int, int, bool]]] = {0: [], 1: [], 2: []}
    for row in stream(source, 4, overflow=overflow):
        pieces = (row.unpack(name) for name in ("input_ids", "labels", "loss_mask"))
        for document, *columns in zip(row.unpack(), *(piece.values() for piece in pieces), strict=True):
            kept[document] += zip(*(column.tolist() for column in columns), strict=True)
    for document, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        whole = [(1000 * document + t, 1000 * document + t + 1, t >= prompt) for t in range(length)]
        assert sorted(kept[document]) == (whole if overflow == "split" else whole[:4])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: list(stream([[1, 2], []], 4)), PackingError, "document 1 is empty: leave empty documents out"),
        (
            lambda: list(stream([[1], [1] * 9], 4)),
            CapacityError,
            'document 1 has 9 tokens and capacity is 4: pass overflow="split"',
        ),
        (lambda: list(stream([], 4)), PackingError, "the source has no document to pack: give it one at least"),
        (lambda: stream(3, 4), PackingError, r"pass a sequence of documents, a function open\(start\)"),
        (
            lambda: stream(iter([[1]]), 4).state_dict(),
            PackingError,
            "a list_iterator, which can be read once: to go on",
        ),
        (lambda: stream([[1]], 4, shard=(2, 2)), PackingError, r"shard is \(2, 2\): pass \(index, count\)"),
        (lambda: stream([[1]], 4, shard=(0, 2.0)), PackingError, r"shard is \(0, 2.0\): pass \(index, count\)"),
        (lambda: stream([[1]], 4, seed=-1), PackingError, "seed must be an integer of at least 0, or None"),
        (lambda: stream([[1]], 4, buffer=0), PackingError, "buffer must be an integer of at least 1, got 0"),
        (lambda: stream([[1]], 4, overflow="cut"), PackingError, "overflow must be one of 'error', 'truncate'"),
        (lambda: stream([[1]], 4, strategy="first_fit"), PackingError, "strategy must be one of 'mixed', 'best_fit'"),
        (lambda: stream([[1]], 4, max_segments=0), PackingError, "max_segments must be an integer of at least 1"),
        (lambda: stream([[1]], 4).load_state_dict({}), PackingError, r"the state has no 'capacity': pass what state_d"),
        (lambda: stream([[1]], 4, buffer=8, max_age=7), PackingError, "max_age is 7 and buffer 8"),
        (lambda: stream([[1]], 0), CapacityError, "capacity must be an integer of at least 1"),
        (
            lambda: list(stream([{"input_ids": [1], "labels": [1]}, {"input_ids": [2]}], 4)),
            LayoutError,
            "document . has input_ids(, labels)? and the first one has input_ids(, labels)?: give every document",
        ),
    ],
)
def test_bad_input_says_what_and_the_way_out(call, kind, text) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_a_state_of_another_stream_or_source_is_refused() -> None:
    stopped = stream(documents(LENGTHS), 20, **OPTIONS)
    for _ in range(20):
        next(stopped)
    state = stopped.state_dict()
    with pytest.raises(PackingError, match="the state was taken with capacity=20 and this stream has capacity=24"):
        stream(documents(LENGTHS), 24, **OPTIONS).load_state_dict(state)
    with pytest.raises(PackingError, match="was pending and the source ends before it: give the source that it had"):
        stream(documents(LENGTHS[:5]), 20, **OPTIONS).load_state_dict(state)


def test_a_generator_is_read_once() -> None:
    source = documents(LENGTHS)
    rows = stream((document for document in source), 20, **OPTIONS)
    assert contents(rows) == contents(stream(source, 20, **OPTIONS))
    with pytest.raises(PackingError, match="source is a generator, which can be read once: to go on in it or to read"):
        list(rows)


def test_an_iterable_is_read_from_its_start_to_go_on() -> None:
    class Again:
        def __iter__(self):
            return iter(source)

    source = documents(LENGTHS)
    whole = contents(stream(source, 20, **OPTIONS))
    stopped, continued = stream(Again(), 20, **OPTIONS), stream(Again(), 20, **OPTIONS)
    assert contents(next(stopped) for _ in range(9)) == whole[:9]
    continued.load_state_dict(stopped.state_dict())
    assert contents(continued) == whole[9:]
    assert sorted(segments(continued)) == sorted(tuple(d.tolist()) for d in source)
