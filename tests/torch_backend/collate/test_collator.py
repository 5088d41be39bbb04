"""PackedCollator: what a batch holds, for each way that documents and rows arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
)

import torch_backend
from packing_core import PackedDataset
from packing_core.batches.joining import concatenate
from packing_core.errors import CapacityError, KeywordError, LayoutError, PackingError
from tests.processes import limited
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import tiny
from torch_backend import PackedCollator, with_boundaries

DOCUMENTS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]


def rows(batch: dict[str, Any], name: str) -> list[list[int]]:
    return batch[name].tolist()


def test_documents_stand_one_after_the_other_in_one_row() -> None:
    batch = PackedCollator()(DOCUMENTS)
    # row: 1 2 3 | 4 5 | 6
    assert rows(batch, "input_ids") == [[1, 2, 3, 4, 5, 6]]
    assert rows(batch, "labels") == [[-100, 2, 3, -100, 5, -100]]
    assert rows(batch, "position_ids") == [[0, 1, 2, 0, 1, 0]]
    assert rows(batch, "seq_idx") == [[0, 0, 0, 1, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5, 6]
    assert batch["max_length_q"] == batch["max_length_k"] == 3
    assert batch["packed_lengths"] == (3, 2, 1)


def test_documents_are_packed_into_rows_of_the_capacity() -> None:
    batch = PackedCollator(capacity=4, strategy="best_fit")(DOCUMENTS)
    # best fit: 1 2 3 6 | 4 5 . .    padding is cut so that none of its pieces is longer than the longest segment
    assert rows(batch, "input_ids") == [[1, 2, 3, 6], [4, 5, 0, 0]]
    assert rows(batch, "labels") == [[-100, 2, 3, -100], [-100, 5, -100, -100]]
    assert batch["packed_lengths"] == (3, 1, 2, 2)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6, 8]


def test_dtypes_and_what_device_movers_leave_alone() -> None:
    batch = PackedCollator()(DOCUMENTS)
    assert next(iter(batch)) == "input_ids"  # accelerate takes the first tensor for the batch size
    assert {k: v.dtype for k, v in batch.items() if isinstance(v, Tensor)} == {
        **dict.fromkeys(["input_ids", "labels", "position_ids"], torch.int64),
        **dict.fromkeys(["seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"], torch.int32),
    }
    assert type(batch["max_length_q"]) is int
    assert type(batch["packed_lengths"]) is tuple and all(type(n) is int for n in batch["packed_lengths"])


def test_tensors_are_fresh_and_writable() -> None:
    collate = PackedCollator()
    first = collate(DOCUMENTS)
    first["labels"].fill_(7)
    assert (collate(DOCUMENTS)["labels"] != 7).all()
    assert first["cu_seq_lens_q"].data_ptr() != first["cu_seq_lens_k"].data_ptr()


def test_labels_masks_and_prompts() -> None:
    labelled = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 9]}, {"input_ids": [4, 5], "labels": [4, 8]}]
    assert rows(PackedCollator()(labelled), "labels") == [[-100, -100, 9, -100, 8]]
    prompts = [{"input_ids": [1, 2, 3], "prompt_length": 2}, {"input_ids": [4, 5], "prompt_length": 0}]
    assert rows(PackedCollator()(prompts), "labels") == [[-100, -100, 3, -100, 5]]
    masked = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"input_ids": [4, 5], "loss_mask": [1, 0]}]
    assert rows(PackedCollator()(masked), "labels") == [[-100, -100, 3, -100, -100]]


def test_columns_of_the_user_come_along() -> None:
    batch = PackedCollator(capacity=4)([{"input_ids": [1, 2, 3], "reward": np.float32([0.5, 1.5, 2.5])}])
    assert rows(batch, "reward") == [[0.5, 1.5, 2.5, 0.0]]


def test_a_mask_is_emitted_only_for_models_that_may_have_a_router() -> None:
    features = [{"input_ids": [1, 2], "attention_mask": [1, 1]}]
    plain = SimpleNamespace(config=SimpleNamespace(pad_token_id=0))
    assert "attention_mask" not in PackedCollator(plain, capacity=3)(features)
    assert "attention_mask" not in PackedCollator()(features)
    assert "attention_mask" not in PackedCollator(capacity=3)(features)


@pytest.mark.parametrize("field", ["output_router_logits", "router_aux_loss_coef"])
@pytest.mark.parametrize("capacity", [None, 4])
def test_a_model_with_a_router_loss_always_gets_a_mask_of_padding(field: str, capacity: int | None) -> None:
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=0, **{field: 0}))
    batch = PackedCollator(model, capacity=capacity, strategy="sequential")(DOCUMENTS)
    want = [[1, 1, 1, 0], [1, 1, 1, 0]] if capacity else [[1] * 6]
    assert rows(batch, "attention_mask") == want
    assert batch["attention_mask"].dtype == torch.int64


def test_the_router_is_found_inside_wrappers_and_nested_configs() -> None:
    text = SimpleNamespace(pad_token_id=7, router_aux_loss_coef=0.1)
    nested = SimpleNamespace(config=SimpleNamespace(pad_token_id=None, get_text_config=lambda: text))
    batch = PackedCollator(SimpleNamespace(module=nested), capacity=4)([{"input_ids": [1, 2, 3]}])
    assert rows(batch, "input_ids") == [[1, 2, 3, 7]] and rows(batch, "attention_mask") == [[1, 1, 1, 0]]


def test_the_router_loss_is_that_of_the_real_tokens_whatever_the_capacity() -> None:
    model = torch_backend.patch(tiny("mixtral", output_router_logits=True), verify=False)
    documents = [{"input_ids": list(range(4, 4 + length))} for length in (5, 9, 3)]
    without_padding = model(**PackedCollator(model)(documents)).aux_loss
    for capacity in (24, 64):
        padded = model(**PackedCollator(model, capacity=capacity, strategy="sequential")(documents)).aux_loss
        assert torch.allclose(padded, without_padding, atol=1e-6), capacity


@pytest.mark.parametrize("options", [{}, {"capacity": 4}, {"capacity": 8, "bucket": 4}], ids=str)
def test_lengths_on_the_host_and_boundaries_say_the_same(options: dict[str, Any]) -> None:
    batch = PackedCollator(**options)(DOCUMENTS)
    lengths = batch["cu_seq_lens_q"].diff()
    assert tuple(lengths[lengths > 0].tolist()) == batch["packed_lengths"]
    assert sum(batch["packed_lengths"]) == batch["input_ids"].numel() == batch["cu_seq_lens_q"][-1]
    assert batch["seq_idx"].flatten().bincount().tolist() == list(batch["packed_lengths"])


def test_padding_takes_the_models_pad_token() -> None:
    model = SimpleNamespace(config=SimpleNamespace(pad_token_id=9))
    assert rows(PackedCollator(model, capacity=4)([{"input_ids": [1, 2, 3]}]), "input_ids") == [[1, 2, 3, 9]]
    assert PackedCollator(SimpleNamespace(config=SimpleNamespace(pad_token_id=None))).pad_id == 0


def test_a_packed_row_with_its_lengths_is_cut_into_its_documents() -> None:
    batch = PackedCollator()([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 2]}, {"input_ids": [6]}])
    assert batch["packed_lengths"] == (3, 2, 1)
    with pytest.raises(LayoutError, match="seq_lengths add up to 4 and input_ids has 5"):
        PackedCollator()([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [3, 1]}])


@pytest.mark.parametrize("workers", [0, 2])
@limited()
def test_a_packed_dataset_feeds_a_dataloader(workers: int) -> None:
    dataset = PackedDataset([d["input_ids"] for d in DOCUMENTS], 4, seed=None)
    loader = DataLoader(dataset, batch_size=2, collate_fn=PackedCollator(), num_workers=workers)
    (batch,) = list(loader)
    want = PackedCollator(capacity=4)(DOCUMENTS)
    assert batch.keys() == want.keys()
    assert all(np.array_equal(batch[name], want[name]) for name in want)


def test_rows_that_come_one_by_one_make_the_same_batch() -> None:
    dataset = PackedDataset([d["input_ids"] for d in DOCUMENTS], 4, seed=None)
    whole, joined = dataset[:], concatenate([dataset[0], dataset[1]])
    for name in ("input_ids", "cu_seqlens", "rows", "sources", "starts"):
        assert np.array_equal(getattr(whole, name), getattr(joined, name)), name
    one_by_one, together = PackedCollator()([dataset[0], dataset[1]]), PackedCollator()(dataset[:])
    assert all(np.array_equal(one_by_one[name], together[name]) for name in together)
    with pytest.raises(LayoutError, match="batch 1 has capacity 8 and batch 0 4: pack both alike"):
        PackedCollator()([dataset[0], PackedDataset([[1]], 8)[0]])


def test_padding_free_puts_rows_together() -> None:
    dataset = PackedDataset([d["input_ids"] for d in DOCUMENTS], 4, strategy="best_fit", seed=None)
    batch = PackedCollator(padding_free=True)(dataset[:])
    assert rows(batch, "input_ids") == [[1, 2, 3, 6, 4, 5]]
    assert batch["packed_lengths"] == (3, 1, 2)


def test_fixed_shapes_for_compiled_kernels() -> None:
    batch = PackedCollator(capacity=8, bucket=4, max_seqlen=6)(DOCUMENTS)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 8]
    assert batch["max_length_q"] == 6
    batch = PackedCollator(capacity=8, bucket=8, max_seqlen=6)(DOCUMENTS)
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 8, 8, 8, 8, 8]
    assert batch["packed_lengths"] == (3, 2, 1, 2)


def test_bad_features_raise() -> None:
    with pytest.raises(LayoutError, match="there are no features to collate"):
        PackedCollator()([])
    with pytest.raises(LayoutError, match="a feature has no input_ids, only text: tokenise before collating"):
        PackedCollator()([{"text": "a"}])
    with pytest.raises(CapacityError, match='document 0 has 3 tokens and capacity is 2: pass overflow="split"'):
        PackedCollator(capacity=2)(DOCUMENTS)
    split = PackedCollator(capacity=2, overflow="split", strategy="best_fit")
    assert split(DOCUMENTS)["packed_lengths"] == (2, 2, 1, 1)


def test_a_collator_of_ours_keeps_its_fixed_shapes_under_with_boundaries() -> None:
    """Read again, boundaries that are rounded up to a bucket would lose the empty segments at their end."""
    collator = PackedCollator(capacity=16, max_seqlen=8, bucket=8)
    features = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    assert len(with_boundaries(with_boundaries(collator))(features)["cu_seq_lens_q"]) == 9


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"max_length": 8}, "pass capacity="),
        ({"max_seq_length": 8}, "pass capacity="),
        ({"packing": True}, "leave it out, documents are packed in any case"),
        ({"nonsense": 1}, "it has model, capacity"),
        ({"capacity": 8, "pad_to_multiple_of": 8}, "leave it out, rows are always padded to the capacity"),
    ],
)
def test_an_unknown_option_is_answered_by_the_right_one(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(KeywordError, match=rf"PackedCollator\(\) has no argument '\w+': {hint}"):
        PackedCollator(**options)


@pytest.mark.parametrize("options", [{"overflow": "drop"}, {"max_segments": 2}, {"seed": 0}, {"strategy": "mixed"}])
def test_an_option_of_plans_without_a_capacity_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PackingError, match=f"{next(iter(options))}=.* has no effect without a capacity"):
        PackedCollator(**options)


def test_the_capacity_is_the_second_argument_and_no_model() -> None:
    assert PackedCollator(None, 8).capacity == 8
    with pytest.raises(PackingError, match=r"takes the model first and got 2048: pass PackedCollator\(model, 2048\)"):
        PackedCollator(2048)
    with pytest.raises(PackingError, match="capacity"):
        PackedCollator(capacity=0)


# -- labels of tokens --------------------------------------------------------------------------------------------------

TAGGED = [{"input_ids": [5, 6, 7], "labels": [1, 0, -100]}, {"input_ids": [8, 9], "labels": [2, 1]}]


def test_first_labels_are_kept_for_a_token_classifier_and_refused_where_nothing_says_that_it_is_one() -> None:
    model = encoder("bert", AutoModelForTokenClassification)
    kept = [1, 0, -100, 2, 1]
    rows = torch_backend.pack_dataset(datasets.Dataset.from_list(TAGGED), 5, seed=None, model=model)
    assert rows["labels"][:] == [kept]
    for features in (TAGGED, rows.to_list()):
        assert PackedCollator(model)(features)["labels"].tolist() == [kept]
    for call, way_out in (
        (lambda: PackedCollator()(TAGGED), r"crosspack.PackedCollator\(model\)"),
        (lambda: PackedCollator()(rows.to_list()), r"crosspack.PackedCollator\(model\)"),
        (lambda: torch_backend.pack_dataset(datasets.Dataset.from_list(TAGGED), 5), r"pack_dataset\(.*model=model\)"),
        (lambda: with_boundaries(DataCollatorWithFlattening())(TAGGED), r"PackedCollator\(model\) keeps them"),
        (lambda: with_boundaries(DataCollatorWithFlattening(), model)(TAGGED), r"PackedCollator\(model\) keeps them"),
        (lambda: with_boundaries(Rows())(TAGGED), r"with_boundaries\(collator, model\)"),
    ):
        with pytest.raises(LayoutError, match=f"begins with the token [58], whose label is [12]: .*{way_out}"):
            call()
    assert with_boundaries(Rows(), model)(TAGGED)["labels"].tolist() == [kept]


class Rows:
    """A collator that packs and masks nothing."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        joined = {name: torch.tensor([[x for each in features for x in each[name]]]) for name in features[0]}
        return {**joined, "seq_lengths": [[len(each["input_ids"]) for each in features]]}


def test_labels_that_train_no_first_token_need_no_model() -> None:
    """A tokeniser's first token is special, and has no class."""
    features = [{**each, "labels": [-100, *each["labels"][1:]]} for each in TAGGED]
    assert PackedCollator()(features)["labels"].tolist() == [[-100, 0, -100, -100, 1]]
    causal = tiny("qwen2")
    assert PackedCollator(causal)(TAGGED)["labels"].tolist() == [[-100, 0, -100, -100, 1]]


@pytest.mark.parametrize("other", [object(), [1], {"pad_token_id": 1}])
def test_what_is_neither_a_model_nor_a_config_is_refused(other):
    with pytest.raises(PackingError, match=rf"takes the model first and got a {type(other).__name__}: pass"):
        PackedCollator(other)


def test_a_config_says_what_fills_padding():
    config = tiny("qwen3").config
    config.pad_token_id = 7
    batch = PackedCollator(config, 4)([{"input_ids": [1, 2, 3]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7]]


def test_a_model_in_place_of_a_collator_is_refused():
    with pytest.raises(PackingError, match="with_boundaries takes a collator first and got a Qwen3ForCausalLM"):
        with_boundaries(tiny("qwen3"))
