"""Conventions: each equals what the ecosystem's own packing or collating makes of the same documents."""

import numpy as np
import pytest
from hypothesis import given, settings

from packing_core import PackPlan, UnsupportedError, pack, plan
from tests.packing_core.packings import by_definition, packings

# rows:  1 2 3 4 5 | 6 7 8    and    9 9 9 9 | 4 4 . .
DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 9, 9, 9], [4, 4]]
LABELS = [[-100, -100, 3, 4, 5], [6, 7, -100], [9, 9, 9, 9], [4, 4]]


def packed(documents=DOCUMENTS, **arrays):
    return pack(documents, plan([len(d) for d in documents], 8, strategy="sequential", seed=None), **arrays)


def test_hf_is_what_the_flattening_collator_of_transformers_emits():
    from transformers import DataCollatorWithFlattening

    documents, labels = DOCUMENTS[:2], LABELS[:2]  # one full row: that collator knows no padding
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="np")
    theirs = collator([{"input_ids": d, "labels": list(x)} for d, x in zip(documents, labels)])
    ours = packed(documents, labels=labels).to_dict("hf")
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
        assert getattr(ours[name], "dtype", int) == getattr(value, "dtype", int), name


@settings(max_examples=40)
@given(packings())
def test_hf_boundaries_and_positions_tell_the_same_and_labels_stay_in_their_segments(packing):
    ours = pack(packing.documents, packing.plan, **packing.arrays).to_dict("hf")
    expected = by_definition(packing)
    starts = np.flatnonzero(ours["position_ids"][0] == 0)
    np.testing.assert_array_equal(starts, ours["cu_seq_lens_q"][:-1])
    np.testing.assert_array_equal(starts, np.flatnonzero(np.diff(ours["seq_idx"][0], prepend=-1)))
    assert np.diff(ours["cu_seq_lens_k"]).max() <= ours["max_length_q"] == ours["max_length_k"]
    np.testing.assert_array_equal(ours["labels"][0], expected["targets"].reshape(-1))
    assert (ours["labels"][0][starts] == -100).all()
    if "columns" in packing.arrays:
        np.testing.assert_array_equal(ours["reward"][0], expected["reward"].reshape(-1))


def test_trl_collates_its_rows_into_the_same_segments():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    batch = packed(labels=LABELS, columns={"x": DOCUMENTS})
    ours = batch.to_dict("trl")
    assert set(ours) == {"input_ids", "labels", "seq_lengths", "x"}
    assert [row.tolist() for row in ours["seq_lengths"]] == [[5, 3], [4, 2]]
    assert [row.tolist() for row in ours["x"]] == [row.tolist() for row in ours["input_ids"]]
    rows = [{name: column[r].tolist() for name, column in ours.items()} for r in range(2)]
    theirs = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)
    view = batch.padding_free()
    np.testing.assert_array_equal(theirs["input_ids"][0], view.input_ids)
    np.testing.assert_array_equal(theirs["labels"][0], view.targets)
    np.testing.assert_array_equal(theirs["position_ids"][0], view.position_ids)
    np.testing.assert_array_equal(theirs["cu_seq_lens_q"], view.cu_seqlens)
    np.testing.assert_array_equal(theirs["seq_idx"][0], view.seq_idx)
    assert theirs["max_length_q"] == view.max_seqlen


def test_grain_is_what_grains_packing_emits():
    import grain
    from grain.experimental import FirstFitPackIterDataset

    source = grain.MapDataset.source([{"inputs": np.array(d, np.int32)} for d in DOCUMENTS]).to_iter_dataset()
    theirs = list(
        FirstFitPackIterDataset(
            source,
            length_struct={"inputs": 12},
            num_packing_bins=2,
            shuffle_bins=False,
        )
    )
    # Grain keeps the order of arrival in the row; the plan is written down to have the same rows.
    ours = pack(DOCUMENTS, _rows([[0, 1, 2], [3]], 12)).to_dict("grain")
    assert len(theirs) == 2
    for name in theirs[0]:
        assert ours[name].dtype == theirs[0][name].dtype
        np.testing.assert_array_equal(ours[name], np.stack([row[name] for row in theirs]), err_msg=name)
    np.testing.assert_array_equal(ours["targets_segment_ids"], ours["inputs_segment_ids"])
    np.testing.assert_array_equal(ours["targets_positions"], ours["inputs_positions"])


def _rows(rows, capacity):
    source = np.array([i for row in rows for i in row])
    return PackPlan(
        row_offsets=np.cumsum([0, *map(len, rows)]),
        source=source,
        start=np.zeros_like(source),
        length=np.array([len(DOCUMENTS[i]) for i in source]),
        capacity=capacity,
        n_documents=len(DOCUMENTS),
    )


@settings(max_examples=40)
@given(packings())
def test_shifted_targets_are_the_next_token_of_the_same_segment_or_weigh_nothing(packing):
    batch = pack(packing.documents, packing.plan, **packing.arrays)
    expected = by_definition(packing)
    grain, maxtext = batch.to_dict("grain"), batch.to_dict("maxtext")
    rows, capacity = batch.input_ids.shape
    for r in range(rows):
        for t in range(capacity):
            target = expected["targets"][r, t + 1] if t + 1 < capacity else -100
            trained = target != -100
            assert grain["loss_weights"][r, t] == trained
            assert maxtext["targets_segmentation"][r, t] == (expected["segment_ids"][r, t] if trained else 0)
            assert grain["targets"][r, t] == maxtext["targets"][r, t] == (target if trained else 0)
    for name, ours in (
        ("inputs", expected["input_ids"]),
        ("inputs_segmentation", expected["segment_ids"]),
        ("inputs_position", expected["position_ids"]),
        ("targets_position", expected["position_ids"]),
    ):
        np.testing.assert_array_equal(maxtext[name], ours, err_msg=name)
    assert all(array.shape == (rows, capacity) for array in maxtext.values())


def test_document_weights_reach_grain_and_are_refused_where_there_is_no_place_for_them():
    batch = packed(weighting="document")
    weights = batch.to_dict("grain")["loss_weights"]
    assert weights.tolist() == [[0.25] * 4 + [0, 0.5, 0.5, 0], pytest.approx([1 / 3] * 3 + [0, 1, 0, 0, 0])]
    for convention in ("hf", "trl", "maxtext"):
        with pytest.raises(
            UnsupportedError, match=f'"{convention}" has no place for weights .* weighting="token", or use'
        ):
            batch.to_dict(convention)


def test_an_unknown_convention_is_named():
    with pytest.raises(UnsupportedError, match="no convention 'seqio': pass one of hf, trl, grain, maxtext"):
        packed().to_dict("seqio")
