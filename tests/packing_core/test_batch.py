"""PackedBatch: everything derived equals its definition, documents come back, contradictions are named."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing_core import (
    CapacityError,
    LayoutError,
    PackedBatch,
    PackedDataset,
    PackingError,
    concatenate,
    pack,
)
from tests.packing_core.packings import by_definition, packings

DERIVED = ("segment_ids", "position_ids", "attention_mask", "boundaries", "targets", "loss_weights")


def packed(packing, **options):
    return pack(packing.documents, packing.plan, **packing.arrays, **options)


@settings(max_examples=80)
@given(packings(), st.sampled_from(["token", "document"]))
def test_every_array_is_what_its_definition_says(packing, weighting):
    batch = packed(packing, weighting=weighting, pad_id=9)
    expected = by_definition(packing, weighting, pad_id=9)
    for name in ("input_ids", *DERIVED):
        np.testing.assert_allclose(getattr(batch, name), expected[name], rtol=1e-6, err_msg=name)
    if "columns" in packing.arrays:
        np.testing.assert_array_equal(batch.columns["reward"], expected["reward"])
    real = expected["segment_ids"] > 0
    assert batch.n_tokens == real.sum()
    assert batch.efficiency == real.mean()
    assert [batch.sources[s] for s in range(batch.n_segments)] == packing.plan.source.tolist()


@settings(max_examples=80)
@given(packings(beside=False))
def test_seq_idx_numbers_segments_from_0_and_no_padding_shares_a_number_with_them(packing):
    batch = packed(packing)
    for seq_idx, segment_ids in zip(batch.seq_idx, batch.segment_ids):
        real = segment_ids > 0
        np.testing.assert_array_equal(seq_idx[real], segment_ids[real] - 1)
        assert not set(seq_idx[real]) & set(seq_idx[~real])
        runs = np.flatnonzero(np.diff(np.concatenate([[1], real, [1]])))  # first and end of each run of padding
        numbers = [set(seq_idx[a:b]) for a, b in zip(runs[::2], runs[1::2])]
        assert all(len(number) == 1 for number in numbers)
        assert len(set().union(*numbers)) == len(numbers)
        if not real[-1]:
            assert seq_idx[-1] == segment_ids.max()


def test_dtypes_and_shapes():
    batch = pack([np.array([1, 2, 3], np.uint16), np.array([4], np.uint16)], 4, columns={"x": [[0.5] * 3, [1.5]]})
    dtypes = {"input_ids": "uint16", "segment_ids": "int32", "position_ids": "int32", "seq_idx": "int32"}
    dtypes |= {"attention_mask": "bool", "boundaries": "bool", "targets": "int32", "loss_weights": "float32"}
    for name, dtype in dtypes.items():
        array = getattr(batch, name)
        assert (array.shape, str(array.dtype)) == ((1, 4), dtype), name
    assert batch.columns["x"].dtype == np.float64
    for name in ("cu_seqlens", "rows", "sources", "starts", "lengths", "segment_starts", "flat_starts"):
        assert getattr(batch, name).dtype == np.int64, name


@pytest.mark.parametrize(
    ("dtype", "targets"),
    [("uint8", "int16"), ("uint16", "int32"), ("int32", "int32"), ("uint32", "int64"), ("uint64", "int64")],
)
def test_targets_hold_every_id_and_the_ignored_label(dtype, targets):
    largest = min(np.iinfo(dtype).max, np.iinfo(np.int64).max)
    batch = pack([np.array([1, largest], dtype)], 2)
    assert batch.targets.dtype == targets
    assert batch.targets.tolist() == [[-100, largest]]


def test_every_array_is_read_only():
    batch = pack(
        [[1, 2, 3], [4, 5]],
        4,
        labels=[[1, 2, 3], [4, 5]],
        loss_mask=[[1, 0, 1], [1, 1]],
        columns={"x": [[1, 2, 3], [4, 5]]},
    )
    names = ("input_ids", "labels", "loss_mask", "cu_seqlens", "rows", "sources", "starts", "seq_idx", *DERIVED)
    for made in (batch, pickle.loads(pickle.dumps(batch))):  # with what was derived above, or without
        for array in [getattr(made, name) for name in names] + [made.columns["x"]]:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    with pytest.raises(AttributeError):
        batch.input_ids = np.zeros((1, 4), int)


def test_the_callers_arrays_stay_writable():
    ids, bounds = np.zeros((1, 4), int), np.array([0, 4])
    PackedBatch(ids, bounds, *(np.zeros(1, int) for _ in range(3)))
    ids[:] = 1
    bounds[1] = 3


@settings(max_examples=60)
@given(packings(overflow=("error", "split")))
def test_unpack_gives_documents_back_exactly(packing):
    batch = packed(packing)
    back = batch.unpack()
    assert list(back) == list(range(len(packing.documents)))
    assert [tokens.tolist() for tokens in back.values()] == packing.documents
    for name in ("labels", "loss_mask"):
        if name in packing.arrays:
            given_back = [tokens.tolist() for tokens in batch.unpack(name).values()]
            if name == "loss_mask" and "prompt_lengths" in packing.arrays:
                continue  # the two masks are one in the batch
            assert given_back == packing.arrays[name]
    if "columns" in packing.arrays:
        assert [list(tokens) for tokens in batch.unpack("reward").values()] == packing.arrays["columns"]["reward"]


@settings(max_examples=60)
@given(packings(overflow=("truncate", "drop"), beside=False))
def test_unpack_gives_what_was_kept_with_ids(packing):
    back = packed(packing).unpack()
    dropped = set(packing.plan.dropped.tolist())
    assert list(back) == [i for i in range(len(packing.documents)) if i not in dropped]
    for i, tokens in back.items():
        kept = packing.documents[i][: packing.plan.capacity]
        assert tokens.tolist() == kept


@settings(max_examples=60)
@given(packings(), st.data())
def test_some_rows_are_a_batch_of_their_own(packing, data):
    batch = packed(packing, pad_id=7)
    rows = data.draw(st.lists(st.integers(-len(batch), len(batch) - 1), max_size=6))
    first = data.draw(st.integers(-2, len(batch)))
    for chosen in (rows, slice(first, first + 3), slice(None, None, -1)):
        part = batch[chosen]
        for name in ("input_ids", "segment_ids", "position_ids", "seq_idx", "targets", "loss_weights"):
            expected = getattr(batch, name)[chosen if isinstance(chosen, slice) else np.array(chosen, int)]
            np.testing.assert_array_equal(getattr(part, name), expected, err_msg=name)
        assert part.pad_id == 7
    assert np.shares_memory(batch[0:1].input_ids, batch.input_ids)
    np.testing.assert_array_equal(batch[-1].input_ids, batch.input_ids[-1:])
    with pytest.raises(IndexError):
        batch[len(batch)]


@settings(max_examples=60)
@given(packings(), st.data())
def test_parts_of_a_batch_make_the_batch_again(packing, data):
    batch = packed(packing, pad_id=7)
    cut = data.draw(st.integers(0, len(batch)))
    whole = concatenate([batch[:cut], batch[cut:]])
    for name in ("input_ids", "segment_ids", "position_ids", "seq_idx", "targets", "sources", "starts", "rows"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(batch, name), err_msg=name)
    assert (whole.pad_id, whole.weighting) == (7, batch.weighting)


def test_joined_batches_keep_what_their_documents_have():
    columns, values = {"weight": [[1.0, 2.0], [3.0]]}, {"score": [5, 6]}
    first, second = (
        pack([[1, 2], [3]], 2, seed=None, labels=[[1, -100], [3]], columns=columns, per_document=values)
        for _ in range(2)
    )
    joined = concatenate([first, second[1]])
    assert joined.labels.tolist() == [[1, -100], [3, -100], [3, -100]]
    assert joined.columns["weight"].tolist() == [[1, 2], [3, 0], [3, 0]]
    assert joined.per_document["score"].tolist() == [5, 6, 6] and joined.sources.tolist() == [0, 1, 1]
    with pytest.raises(LayoutError, match="document 1 is in this batch twice"):
        joined.unpack()


def test_documents_of_one_id_in_two_data_sets_do_not_share_a_weight():
    first, second = (pack([[1, 2, 3], [4, last]], 5, weighting="document", seed=None) for last in (5, 6))
    assert first.loss_weights.tolist() == [[0, 0.5, 0.5, 0, 1]]
    with pytest.raises(LayoutError, match="have the number 1, and would share one weight: pack the data sets"):
        concatenate([first, second]).loss_weights  # noqa: B018
    assert first[[0, 0]].loss_weights.tolist() == [[0, 0.25, 0.25, 0, 0.5]] * 2
    split = pack([[1, 2, 3, 4, 5]], 3, overflow="split", weighting="document", seed=None)
    np.testing.assert_allclose(np.sort(concatenate([split[1], split[0]]).loss_weights.ravel()), [0, 0, 0] + [1 / 3] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 3}, "batch 1 has capacity 3 and batch 0 2: pack both alike"),
        ({"pad_id": 9}, "batch 1 has pad_id 9 and batch 0 0"),
        ({"weighting": "document"}, "batch 1 has weighting document and batch 0 token"),
        ({"labels": [[1, 2], [3]]}, "batch 1 has labels given and batch 0 missing"),
        ({"columns": {"weight": [[1, 2], [3]]}}, r"batch 1 has columns \['weight'\] and batch 0 \[\]"),
        ({"per_document": {"x": [1, 2]}}, r"batch 1 has per_document {'x': \[\]} and batch 0 {}"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_batches_of_two_kinds_are_not_joined(options, message):
    documents = [[1, 2], [3]]
    with pytest.raises(LayoutError, match=message):
        concatenate([pack(documents, 2), pack(documents, options.pop("capacity", 2), **options)])


def test_what_is_no_batch_is_not_joined():
    batch = pack([[1]], 2)
    for wrong, kinds in (([], "no batch"), ([batch, {}], "PackedBatch, dict"), (None, "NoneType")):
        with pytest.raises(LayoutError, match=f"takes a list of one or more PackedBatch objects, got {kinds}"):
            concatenate(wrong)
    assert concatenate(batch) is batch


def test_a_batch_weighs_on_in_its_parts():
    batch = pack([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], 8, weighting="document", seed=None)
    assert [part.weighting for part in (batch[:1], batch[[1]])] == ["document"] * 2
    # The targets of documents 0, 1 and 2: 4 of weight 1/4, 1, 2 of weight 1/2.
    assert sorted(batch.padding_free().loss_weights[batch.padding_free().loss_weights > 0].tolist()) == (
        [0.25] * 4 + [0.5] * 2 + [1.0]
    )


def fields(**changes):
    # rows:  1 2 3 | 4 5 . .   and   6 . . . . . .
    given = {
        "input_ids": np.array([[1, 2, 3, 4, 5, 0, 0], [6, 0, 0, 0, 0, 0, 0]]),
        "cu_seqlens": np.array([0, 3, 5, 6]),
        "rows": np.array([0, 0, 1]),
        "sources": np.array([0, 1, 2]),
        "starts": np.array([0, 0, 0]),
    }
    return given | changes


BAD = [
    ({"input_ids": np.zeros(4, int)}, LayoutError, r"input_ids has shape \[4\]: pass \[rows, capacity\]"),
    ({"input_ids": np.zeros((2, 7))}, LayoutError, "input_ids has dtype float64: pass integers"),
    ({"labels": np.zeros((2, 7), np.uint8)}, LayoutError, "labels has dtype uint8: pass signed integers"),
    ({"loss_mask": np.zeros((2, 7), int)}, LayoutError, "loss_mask has dtype int64: pass bool"),
    ({"labels": np.zeros((2, 6), int)}, LayoutError, r"labels has shape \[2, 6\] and input_ids \[2, 7\]"),
    ({"columns": {"x": np.zeros((1, 7))}}, LayoutError, r"columns\['x'\] has shape \[1, 7\]"),
    ({"columns": {"x": np.full((2, 7), "a")}}, LayoutError, r"columns\['x'\] has dtype <U1: pass numbers"),
    (
        {"cu_seqlens": np.array([0.0, 3.0, 5.0, 6.0])},
        LayoutError,
        r"cu_seqlens is float64 \[4\]: pass integers in one dimension",
    ),
    ({"rows": np.zeros((3, 1), int)}, LayoutError, r"rows is int64 \[3, 1\]"),
    ({"cu_seqlens": np.zeros(0, int)}, LayoutError, "cu_seqlens marks -1 segments"),
    ({"sources": np.array([0, 1])}, LayoutError, "sources has 2 entries and cu_seqlens marks 3 segments"),
    ({"cu_seqlens": np.array([1, 3, 5, 6])}, LayoutError, "cu_seqlens must start at 0 and strictly increase"),
    ({"cu_seqlens": np.array([0, 3, 3, 6])}, LayoutError, "must start at 0 and strictly increase: padding"),
    ({"rows": np.array([1, 0, 1])}, LayoutError, r"rows must never decrease and stay in 0\.\.1: sort"),
    ({"rows": np.array([0, 1, 2])}, LayoutError, r"stay in 0\.\.1"),
    ({"rows": np.array([-1, 0, 1])}, LayoutError, r"stay in 0\.\.1"),
    ({"sources": np.array([0, -1, 2])}, LayoutError, r"sources\[1\] is -1: documents and tokens count from 0"),
    ({"starts": np.array([0, -1, 2])}, LayoutError, r"starts\[1\] is -1: documents"),
    ({"weighting": "row"}, PackingError, "weighting must be one of 'token', 'document'; got 'row'"),
    (
        {"cu_seqlens": np.array([0, 3, 8, 9])},
        CapacityError,
        r"segment 1 \(document 1\) ends at token 8 of row 0 and capacity is 7: move it to another row",
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD)
def test_contradicting_fields_are_named(changes, kind, message):
    PackedBatch(**fields())
    with pytest.raises(kind, match=message):
        PackedBatch(**fields(**changes))


def test_unpack_names_what_it_cannot_give():
    with pytest.raises(
        LayoutError, match="no per-token array 'lables': it has input_ids, labels, loss_mask, x and the"
    ):
        pack([[1, 2]], 2, columns={"x": [[1, 2]]}).unpack("lables")
    with pytest.raises(LayoutError, match="no per-token array 'labels'"):
        pack([[1, 2]], 2).unpack("labels")
    twice = PackedBatch(**fields(sources=np.array([0, 1, 1])))
    with pytest.raises(
        LayoutError, match="document 1 is in this batch twice: take the rows it repeats in on their own"
    ):
        twice.unpack()


def test_lists_are_taken_and_a_batch_shows_its_size():
    batch = PackedBatch([[1, 2, 3, 0]], [0, 2, 3], [0, 0], [0, 1], [0, 0], labels=[[1, 2, 3, -100]])
    assert batch.segment_ids.tolist() == [[1, 1, 2, 0]]
    assert repr(batch) == "PackedBatch(1 rows of 4, 2 segments, 3 tokens, efficiency 0.7500)"
    shown = repr(PackedDataset([[1, 2], [3]], 4))
    assert shown.startswith("PackedDataset(Ragged(2 sequences, 3 tokens, int64), PackPlan(1 rows of 4")
