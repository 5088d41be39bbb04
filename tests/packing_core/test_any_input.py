"""Generated inputs: whatever a person gives a public function, a result that is right comes back, or an error of ours.

``CROSSPACK_EXAMPLES=20000 python -m pytest tests/packing_core/test_any_input.py`` looks for longer.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packing_core import (
    Cost,
    PackedBatch,
    PackedDataset,
    PackingError,
    PackPlan,
    Ragged,
    balance,
    context_plan,
    pack,
    plan,
    stream,
)
from packing_core.batches.columns import TRAINED

EXAMPLES = int(os.environ.get("CROSSPACK_EXAMPLES", "40"))
ANY = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))

KINDS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "b1", "c8", "S2", "U2", "O", "M8[s]"]
DTYPES = st.sampled_from([order + kind for kind in KINDS for order in "<>"])
NUMBERS = st.one_of(st.integers(0, 9), st.integers(-5, 300), st.sampled_from([2**31 + 5, 2**63, 2**70, -(2**40), 0.5]))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.sampled_from([2**70, -1, 0, np.int8(3), np.float32(2), np.array(4), np.array([4]), (), {}, [[]], {1}, object]),
)


@st.composite
def arrays(draw, length=None):
    """An array of any dtype, byte order and stride; numbers wrap to the dtype before it is used."""
    length = draw(st.integers(0, 9)) if length is None else length
    step = draw(st.sampled_from([1, 1, 2, -1]))
    values = draw(st.lists(st.integers(0, 120), min_size=length * abs(step), max_size=length * abs(step)))
    with np.errstate(all="ignore"):
        array = np.array(values, np.int64).astype(draw(DTYPES))[::step]
    if draw(st.integers(0, 9)) == 0:
        array = np.ma.array(array, mask=draw(st.booleans()))
    return array


@st.composite
def collections(draw):
    """Sequences in any form: well-formed more often than not."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=5))
    form = draw(st.sampled_from(["alike", "lists", "any", "matrix", "flat", "arrow", "odd"]))
    if form == "alike":
        dtype = draw(DTYPES)
        return [np.arange(n).astype(dtype) for n in lengths] if dtype[1] not in "SUM" else [["a"] * n for n in lengths]
    if form == "lists":
        return [draw(st.lists(NUMBERS, min_size=n, max_size=n)) for n in lengths]
    if form == "any":
        return [draw(st.one_of(arrays(n), st.lists(NUMBERS, max_size=4), ODD)) for n in lengths]
    if form == "matrix":
        matrix = np.arange(draw(st.integers(0, 40))).astype(draw(st.sampled_from(["<i4", ">i8", "f4"])))
        width = draw(st.integers(1, 7))
        return matrix[: len(matrix) // width * width].reshape(-1, width)[:: draw(st.sampled_from([1, 2, -1])), ::2]
    if form == "arrow":
        rows = draw(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=4))))
        kind = draw(st.sampled_from([pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_view(pa.int8())]))
        return pa.chunked_array([pa.array(rows, kind)]).slice(draw(st.integers(0, 2)))
    if form == "odd":
        return draw(ODD)
    offsets = draw(st.one_of(arrays(), st.just(np.cumsum([0, *lengths])), st.lists(NUMBERS, max_size=4)))
    try:
        return Ragged(draw(arrays(sum(lengths))), offsets)
    except PackingError:
        return []


@st.composite
def options(draw, names):
    """Some of the options, right or odd."""
    right = {
        "strategy": st.sampled_from(["mixed", "best_fit", "first_fit", "sequential"]),
        "overflow": st.sampled_from(["error", "truncate", "split", "overlap", "restart", "drop"]),
        "context": st.integers(0, 6),
        "min_piece": st.integers(1, 4),
        "max_segments": st.one_of(st.none(), st.integers(1, 3)),
        "seed": st.one_of(st.none(), st.integers(0, 9)),
        "weighting": st.sampled_from(["token", "document"]),
        "pad_id": st.integers(-1, 9),
        "buffer": st.integers(1, 9),
        "buffer_tokens": st.integers(1, 40),
        "max_age": st.one_of(st.none(), st.integers(1, 30)),
        "shard": st.sampled_from([(0, 1), (1, 2)]),
    }
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    return {name: draw(ODD if draw(st.integers(0, 11)) == 0 else right[name]) for name in chosen}


WHOLE = ("error", "split", "overlap", "restart")  # under these no token is lost
CAPACITIES = st.one_of(st.integers(1, 24), st.integers(1, 24), st.integers(1, 24), ODD)
PLAN_OPTIONS = ["strategy", "overflow", "context", "min_piece", "max_segments", "seed"]
STREAM_OPTIONS = [
    "buffer",
    "buffer_tokens",
    "max_age",
    "seed",
    "shard",
    "overflow",
    "context",
    "min_piece",
    "max_segments",
    "pad_id",
]


def holds(batch: PackedBatch, documents: list[list]) -> None:
    """Checks that a batch gives back the documents, or the beginnings of them."""
    for number, tokens in batch.unpack().items():
        assert tokens.tolist() == documents[number][: len(tokens)]
    for name in ("segment_ids", "position_ids", "seq_idx", "attention_mask", "targets", "loss_weights"):
        assert getattr(batch, name).shape == batch.input_ids.shape
    assert batch.attention_mask.sum() == batch.n_tokens
    assert pickle.loads(pickle.dumps(batch)).unpack().keys() == batch.unpack().keys()
    for emit in (batch.kernel_view, *(lambda name=name: batch.to_dict(name) for name in ("hf", "trl", "grain"))):
        try:
            emit()
        except PackingError:
            continue


@ANY
@given(collections())
def test_ragged_reads_exactly_or_refuses(sequences) -> None:
    try:
        ragged = Ragged.of(sequences)
    except PackingError:
        return
    again = pickle.loads(pickle.dumps(ragged))
    given = sequences.to_pylist() if isinstance(sequences, pa.ChunkedArray) else sequences
    for mine, theirs, copied in zip(ragged, given, again, strict=True):
        assert np.asarray(mine).tolist() == np.asarray(theirs).tolist() == copied.tolist()
    assert ragged.lengths.tolist() == [len(document) for document in ragged] and ragged.dtype.isnative


@ANY
@given(st.one_of(arrays(), st.lists(NUMBERS, max_size=6), ODD), CAPACITIES, options(PLAN_OPTIONS))
def test_a_plan_holds_every_token_once_or_is_refused(lengths, capacity, chosen) -> None:
    try:
        made = plan(lengths, capacity, **chosen)
    except PackingError:
        return
    replace(made, check=True)
    if chosen.get("overflow", "error") in WHOLE:
        own = made.length - made.context if len(made.context) else made.length
        assert np.bincount(made.source, own).tolist() == np.asarray(lengths).tolist()


@ANY
@given(collections(), CAPACITIES, options([*PLAN_OPTIONS, "pad_id", "weighting"]), st.data())
def test_packs_give_the_documents_back_or_are_refused(sequences, capacity, chosen, data) -> None:
    beside = {}
    for name in data.draw(st.lists(st.sampled_from(["labels", "loss_mask", "prompt_lengths", "columns"]), unique=True)):
        beside[name] = data.draw(st.one_of(st.just(sequences), collections(), arrays(), ODD))
        beside[name] = {"x": beside[name]} if name == "columns" and data.draw(st.booleans()) else beside[name]
    try:
        documents = [document.tolist() for document in Ragged.of(sequences)]
        dataset = PackedDataset(sequences, capacity, **beside, **chosen)
        batch = dataset[:]
    except PackingError:
        return
    holds(batch, documents)
    kept = {number: len(tokens) for number, tokens in batch.unpack().items()}
    if chosen.get("overflow", "error") in WHOLE:
        assert kept == {number: len(document) for number, document in enumerate(documents)}
    assert all(min(document, default=0) >= 0 for document in documents if chosen.get("overflow") != "drop")
    index = data.draw(st.one_of(arrays(), st.integers(-9, 9), st.lists(NUMBERS, max_size=3), ODD))
    try:
        holds(dataset[index], documents)
    except PackingError:
        return


@ANY
@given(collections(), CAPACITIES, options(STREAM_OPTIONS), st.booleans(), st.data())
def test_streams_give_the_documents_back_or_are_refused(sequences, capacity, chosen, mappings, data) -> None:
    source = sequences
    if mappings and isinstance(sequences, list):
        masks = data.draw(st.lists(st.sampled_from(TRAINED), unique=True, max_size=2))
        source = [{"input_ids": document, "prompt_length": 1} for document in sequences]
        for document in source:
            whole = np.ones(np.size(document["input_ids"]), np.int64)
            document |= {name: data.draw(st.one_of(st.just(whole), arrays(len(whole)), ODD)) for name in masks}
    try:
        rows = list(stream(source, capacity, **chosen))
        documents = [np.asarray(document).tolist() for document in Ragged.of(sequences)]
    except PackingError:
        return
    for row in rows:
        for number, start, length in zip(row.sources.tolist(), *(a.tolist() for a in row.own[1:]), strict=True):
            tokens = row.unpack()[number]
            assert tokens.tolist()[-length:] == documents[number][start : start + length] or row.n_segments > 1
    if chosen.get("overflow", "error") in WHOLE and chosen.get("shard", (0, 1)) == (0, 1):
        assert sum(int(row.own[2].sum()) for row in rows) == sum(map(len, documents))


@ANY
@given(
    st.dictionaries(
        st.sampled_from(["epoch", "rows", "round", "rows_before", "cursor", "pending", "seed"]), ODD, min_size=1
    )
)
def test_states_are_loaded_or_refused(changes) -> None:
    source = [[i + 1] * 3 for i in range(12)]
    stopped = stream(source, 6, buffer=4)
    first = [next(stopped).input_ids.tolist() for _ in range(2)]
    state = stopped.state_dict()
    again = stream(source, 6, buffer=4)
    try:
        again.load_state_dict({**state, **changes})
    except PackingError:
        again.load_state_dict(state)
    assert first + [row.input_ids.tolist() for row in again] == [
        row.input_ids.tolist() for row in stream(source, 6, buffer=4)
    ]


@ANY
@given(st.one_of(st.integers(1, 4), ODD), st.one_of(st.integers(1, 4), ODD), st.one_of(st.none(), ODD), ODD)
def test_balanced_rows_are_trained_once_or_refused(world_size, rows_per_step, seed, factor) -> None:
    made = plan([3, 2, 4, 1, 1], 5)
    try:
        sharded = balance(made, world_size, rows_per_step=rows_per_step, seed=seed)
    except PackingError:
        return
    ranks = [sharded.rank(rank) for rank in range(sharded.world_size)]
    assert sorted(row for rank in ranks for step in rank for row in step.tolist()) == list(range(made.n_rows))
    try:
        Cost(tokens=factor)
        sharded.rank(factor)
    except PackingError:
        return


@ANY
@given(st.one_of(st.lists(NUMBERS, max_size=4), arrays(), ODD), st.one_of(st.integers(1, 4), ODD), st.booleans())
def test_tokens_are_cut_over_ranks_once_or_refused(lengths, ranks, contiguous) -> None:
    try:
        made = context_plan(lengths, ranks, contiguous=contiguous)
    except PackingError:
        return
    assert made.length.min() > 0 and made.length.sum() == made.lengths.sum()
    assert np.bincount(made.rank, minlength=made.ranks).min() > 0


@ANY
@given(st.lists(st.one_of(arrays(), st.lists(NUMBERS, max_size=4), ODD), min_size=5, max_size=5), st.booleans())
def test_batches_and_plans_of_any_fields_are_consistent_or_refused(parts, flat) -> None:
    ids, *segments = parts
    try:
        batch = PackedBatch(ids if flat else [ids], *segments)
    except PackingError:
        pass
    else:
        assert batch.attention_mask.sum() == batch.n_tokens
    try:
        made = PackPlan(*parts[:4], capacity=9, n_documents=9)
    except PackingError:
        return
    assert made.row_tokens.max() <= 9
    pack([[1] * 200] * 9, made).unpack()
