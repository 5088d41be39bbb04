"""stream: nothing lost or doubled, full rows, bounded memory and age, and a resume that continues exactly."""

from __future__ import annotations

import numpy as np
import pytest

from packing_core.batches.columns import TRAINED
from packing_core.batches.dataset import pack
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


def test_a_state_of_a_version_with_alignment_loads_where_segments_touch() -> None:
    state = stream(documents(LENGTHS), 32, **OPTIONS).state_dict()
    assert state["alignment"] == 1
    with pytest.raises(PackingError, match="taken with alignment=8 and this stream has alignment=1"):
        stream(documents(LENGTHS), 32, **OPTIONS).load_state_dict(state | {"alignment": 8})


def test_an_empty_row_at_the_end_has_the_columns_of_the_others_and_trains_nothing() -> None:
    source = [{"input_ids": d, "labels": d} for d in documents([20, 20, 20])]
    rows = [list(stream(source, 20, shard=(i, 2))) for i in (0, 1)]
    empty = rows[1][-1]
    assert empty.n_segments == 0 and empty.labels is not None
    assert (empty.targets == -100).all() and not empty.attention_mask.any()
    few = list(stream(source[:1], 20, shard=(1, 2)))
    assert len(few) == 1 and few[0].n_segments == 0 and few[0].labels is not None


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


@pytest.mark.parametrize("names", [["completion_mask"], ["assistant_masks", "loss_mask"], list(TRAINED)], ids=len)
def test_a_stream_reads_the_masks_that_pack_reads(names: list[str]) -> None:
    random = np.random.default_rng(0)
    source = [
        {"input_ids": d.tolist(), **{name: random.integers(0, 2, len(d)).tolist() for name in names}}
        for d in documents(random.integers(1, 9, 30))
    ]
    whole = pack(source, 8).unpack("targets")
    streamed = next(stream(source, 8, buffer=30).chunks())
    assert not streamed.columns
    for number, targets in streamed.unpack("targets").items():
        assert targets.tolist() == whole[number].tolist()


@pytest.mark.parametrize("beside", [{}, {"assistant_masks": [1, 1, 1]}], ids=["alone", "beside another"])
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        ([1, 1], "not as many entries as input_ids"),
        ([0, 1, 2], "entries other than 0 and 1"),
        ([0, 1, 0.5], "entries other than 0 and 1"),
        (1, ""),
        ([1, [1], 1], ""),
        ([None, 1, 1], ""),
    ],
    ids=str,
)
def test_a_stream_refuses_what_is_no_mask_by_the_name_of_its_column(beside, mask, text: str) -> None:
    masked = {"input_ids": [1, 2, 3], "completion_mask": mask, **beside}
    with pytest.raises(LayoutError, match=f"document 1 of the stream: completion_mask.*{text}"):
        list(stream([{**masked, "completion_mask": [0, 1, 1]}, masked], 8))


def test_none_stands_for_a_column_that_a_document_of_a_stream_does_not_have() -> None:
    absent = dict.fromkeys(("labels", "prompt_length", *TRAINED))
    source = [{"input_ids": [1, 2, 3, 4, 5], **absent}, {"input_ids": [6, 7], **absent}]
    for made in (next(stream(source, 8).chunks()), pack(source, 8)):
        assert made.loss_mask is None and made.labels is None
    assert [row.n_tokens for row in stream(source, 2, overflow="split", seed=None)]
    with pytest.raises(LayoutError, match="document 1 has input_ids, loss_mask and the first one has input_ids: give"):
        list(stream([source[0], {**source[1], "loss_mask": [1, 1]}], 8, seed=None))


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
