"""The columns of a dataset: what is trained, what is padding and where documents begin, alike for every reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from packing_core import pack
from packing_core.batches.columns import documents_of
from packing_core.errors import LayoutError, PackingError
from torch_backend import PackedCollator, pack_dataset, with_boundaries

datasets = pytest.importorskip("datasets", reason="pack_dataset takes and returns one")

Features = list[dict[str, Any]]


def by_collator(features: Features) -> list[tuple[list[int], list[int]]]:
    batch = PackedCollator()(features)
    ids, labels = (batch[name][0].split(batch["packed_lengths"]) for name in ("input_ids", "labels"))
    return [(x.tolist(), y.tolist()) for x, y in zip(ids, labels, strict=True)]


def by_dataset(features: Features) -> list[tuple[list[int], list[int]]]:
    documents = []
    for row in pack_dataset(datasets.Dataset.from_list(features), 16, strategy="sequential", seed=None):
        ids, labels = (torch.tensor(row[name]).split(row["seq_lengths"]) for name in ("input_ids", "labels"))
        documents += [(x.tolist(), y.tolist()) for x, y in zip(ids, labels, strict=True)]
    return documents


readers = pytest.mark.parametrize("read", [by_collator, by_dataset])
Reader = Callable[[Features], list[tuple[list[int], list[int]]]]


@readers
@pytest.mark.parametrize("column", ["loss_mask", "completion_mask", "assistant_masks"])
def test_every_mask_of_trained_tokens_is_honoured(read: Reader, column: str) -> None:
    features = [{"input_ids": [5, 6, 7, 8], column: [0, 0, 1, 1]}, {"input_ids": [9, 4], column: [0, 1]}]
    assert read(features) == [([5, 6, 7, 8], [-100, -100, 7, 8]), ([9, 4], [-100, 4])]


@readers
def test_masks_labels_and_prompts_all_have_to_agree(read: Reader) -> None:
    feature = {
        "input_ids": [5, 6, 7, 8, 9, 4],
        "labels": [5, 6, 7, 8, 9, -100],
        "completion_mask": [0, 1, 1, 1, 1, 1],
        "assistant_masks": [1, 1, 1, 0, 1, 1],
        "prompt_length": 2,
    }
    assert read([feature]) == [([5, 6, 7, 8, 9, 4], [-100, -100, 7, -100, 9, -100])]


@readers
@pytest.mark.parametrize(
    "column", [{}, {"labels": [-100, -100, 5, 6, 7, -100]}, {"completion_mask": [0, 0, 0, 0, 1, 0]}]
)
def test_padding_at_either_end_is_cut_off(read: Reader, column: dict[str, Any]) -> None:
    feature = {"input_ids": [0, 0, 5, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0], **column}
    second = -100 if "completion_mask" in column else 6
    assert read([feature]) == [([5, 6, 7], [-100, second, 7])]


@readers
def test_a_prompt_is_counted_from_the_first_real_token(read: Reader) -> None:
    feature = {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "prompt_length": 2}
    assert read([feature]) == [([5, 6, 7], [-100, -100, 7])]


@readers
@pytest.mark.parametrize(
    "column",
    [
        {"labels": [-100, 5, 6, 7, 8]},
        {"completion_mask": [0, 0, 1, 1, 1]},
        {"labels": [4, 5, 6, 7, 8], "loss_mask": [0, 0, 0, 1, 1]},
    ],
)
def test_tokens_that_a_mask_hides_and_labels_train_are_refused_by_name(read: Reader, column: dict[str, Any]) -> None:
    plain = {name: [1 if "mask" in name else 5] for name in column}
    features = [
        {"input_ids": [5], "attention_mask": [1], **plain},
        {"input_ids": [4, 5, 6, 7, 8], "attention_mask": [1, 1, 1, 0, 0], **column},
    ]
    with pytest.raises(
        LayoutError, match="token 3 of example 1 has attention_mask 0 and the label 7, which is trained"
    ):
        read(features)


@readers
def test_labels_copied_with_their_padding_train_the_document_alone_and_say_so(read: Reader) -> None:
    feature = {"input_ids": [4, 5, 6, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [4, 5, 6, 0, 0]}
    with pytest.warns(UserWarning, match="labels are 0 where attention_mask is 0, so training without packing learns"):
        assert read([feature]) == [([4, 5, 6], [-100, 5, 6])]


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_a_batch_whose_padding_is_trained_is_refused_by_name(name: str) -> None:
    labels = [5, 6, 7, 8, 3, 4] if name == "labels" else [6, -100, 8, 3, 4, -100]
    batch = {"input_ids": [[5, 6, 7, 8, 0, 0]], "attention_mask": [[1, 1, 2, 2, 0, 0]], name: [labels]}
    rows = with_boundaries(lambda features: {key: torch.tensor(x) for key, x in batch.items()})
    with pytest.raises(
        LayoutError, match=rf"token \d of the batch, by its {name}, has attention_mask 0 and the label 3"
    ):
        rows([])
    batch[name] = [[-100 if label in (3, 4) else label for label in labels]]
    assert rows([])["packed_lengths"] == (2, 2, 2)


@readers
def test_a_hole_in_an_attention_mask_is_refused(read: Reader) -> None:
    features = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}]
    with pytest.raises(LayoutError, match="token 1 of example 1 is padding inside a document"):
        read(features)


@readers
def test_an_example_of_padding_alone_is_refused(read: Reader) -> None:
    with pytest.raises(LayoutError, match="example 1 has no tokens but padding: drop it"):
        read([{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [0, 0], "attention_mask": [0, 0]}])


@readers
@pytest.mark.parametrize(
    "marks",
    [
        {"seq_lengths": [3, 2]},
        {"packed_seq_lengths": [3, 2]},
        {"segment_ids": [1, 1, 1, 2, 2]},
        {"seq_idx": [0, 0, 0, 1, 1]},
        {"attention_mask": [1, 1, 1, 2, 2]},
        {"position_ids": [0, 1, 2, 0, 1]},
        {"seq_lengths": [3, 2], "position_ids": [0, 1, 2, 0, 1], "attention_mask": [1, 1, 1, 1, 1]},
    ],
    ids=lambda marks: ", ".join(marks),
)
def test_a_packed_row_is_cut_into_its_documents(read: Reader, marks: dict[str, Any]) -> None:
    assert read([{"input_ids": [1, 2, 3, 4, 5], **marks}]) == [([1, 2, 3], [-100, 2, 3]), ([4, 5], [-100, 5])]


@readers
def test_segment_ids_that_count_from_zero_are_told_from_padding(read: Reader) -> None:
    with pytest.raises(LayoutError, match="segment_ids are 0, which is padding, up to token 1 of example 0.*seq_idx"):
        read([{"input_ids": [5, 6, 7, 8, 9], "segment_ids": [0, 0, 0, 1, 1]}])
    documents = read([{"input_ids": [0, 0, 7, 8, 9], "segment_ids": [0, 0, 1, 1, 2]}])
    assert [ids for ids, _ in documents] == [[7, 8], [9]]


def test_rows_whose_segment_ids_count_from_zero_are_told_from_padding() -> None:
    collate = with_boundaries(dict)
    ids, numbers = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), torch.tensor([[1, 1, 2, 2], [0, 0, 1, 1]])
    with pytest.raises(LayoutError, match="up to token 1 of row 1"):
        collate({"input_ids": ids, "segment_ids": numbers})


@readers
def test_a_packed_row_may_end_with_padding(read: Reader) -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5, 0], "seq_lengths": [3, 2], "attention_mask": [1, 1, 1, 1, 1, 0]}
    assert read([feature]) == [([1, 2, 3], [-100, 2, 3]), ([4, 5], [-100, 5])]


@readers
def test_positions_that_packing_would_lose_are_refused(read: Reader) -> None:
    message = "position_ids of example 0 do not count 0, 1, 2 from the start of each document"
    for positions in ([2, 3, 4], [0, 2, 1]):
        with pytest.raises(LayoutError, match=message):
            read([{"input_ids": [1, 2, 3], "position_ids": positions}])


@readers
def test_columns_of_other_lengths_are_refused(read: Reader) -> None:
    features = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3, 4, 5], "labels": [3, 4]}]
    with pytest.raises(LayoutError, match="example 1 has 2 labels and 3 input_ids"):
        read(features)


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos", "input_features"])
def test_rows_of_tokens_take_no_images(name: str) -> None:
    text = {"input_ids": [1, 2], name: None, "images": ["a column that is left out"]}
    shown = {**text, "input_ids": [3, 4], name: [[0.5, 1.0]]}
    says = f"example 1 has {name}, which rows of tokens do not hold: pass the examples to crosspack.PackedMediaDataset"
    for pack_all in (lambda data: pack(data, 8), lambda data: pack_dataset(datasets.Dataset.from_list(data), 8)):
        assert len(pack_all([text, {**text, name: []}])) == 1
        with pytest.raises(LayoutError, match=says):
            pack_all([text, shown])


def test_images_of_any_type_are_refused() -> None:
    says = "example 0 has pixel_values, which rows of tokens do not hold"
    for image in (0, torch.tensor(0.5), np.zeros((2, 2)), torch.zeros(1, 2), [[0.0, 1.0], [2.0]]):
        with pytest.raises(LayoutError, match=says):
            pack([{"input_ids": [1, 2], "pixel_values": image}], 8)
    assert len(pack([{"input_ids": [1, 2], "pixel_values": torch.zeros(0, 2)}], 8)) == 1
    columns = {"input_ids": datasets.List(datasets.Value("int64")), "pixel_values": datasets.Array2D((2, 2), "float32")}
    for image in ([[0.0, 1.0], [2.0, 3.0]], None):
        data = datasets.Dataset.from_list(
            [{"input_ids": [1, 2], "pixel_values": image}], features=datasets.Features(columns)
        )
        if image is None:
            assert len(pack_dataset(data, 8)) == 1
        else:
            with pytest.raises(LayoutError, match=says):
                pack_dataset(data, 8)


@readers
def test_prompts_of_a_packed_row_are_one_for_each_document(read: Reader) -> None:
    row = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}
    assert read([{**row, "prompt_length": [2, 0]}]) == [([1, 2, 3], [-100, -100, 3]), ([4, 5], [-100, 5])]
    with pytest.raises(LayoutError, match="prompt_length has 1 entry and there are 2 documents"):
        read([{**row, "prompt_length": 2}])


def test_an_example_without_a_column_that_others_have() -> None:
    labelled, plain = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": None}
    with pytest.raises(LayoutError, match="example 0 has no labels, which example 1 has: give it to all of them"):
        PackedCollator()([plain, labelled])
    for column, value in {
        "prompt_length": 1,
        "completion_mask": [0, 1],
        "loss_mask": [0, 1],
        "reward": [0.5, 1.0],
    }.items():
        with pytest.raises(LayoutError, match=f"example 1 has no {column}, which example 0 has"):
            PackedCollator()([{"input_ids": [5, 6], column: value}, {"input_ids": [8, 9]}])
    padded = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}
    assert [ids for ids, _ in by_collator([padded, {"input_ids": [8, 9]}])] == [[5, 6], [8, 9]]


def test_what_is_no_example_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"example 0 is a list: pass mappings with input_ids"):
        PackedCollator()([[1, 2, 3]])
    with pytest.raises(PackingError, match=r"input_ids\[0\] is text: tokenise it first"):
        PackedCollator()([{"input_ids": "text"}])


def test_documents_of_an_example_leave_its_marks_behind() -> None:
    first, second = documents_of({"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "attention_mask": [1, 1, 1]})
    assert first["input_ids"].tolist() == [1, 2] and second["input_ids"].tolist() == [3]
    assert first.keys() == {"input_ids"}
