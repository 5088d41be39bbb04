"""A trainer's collator that packing replaces: all that it trains and adds is carried on, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from packing_core.errors import PackingError
from tests.torch_backend.models import error
from tests.torch_backend.test_document_heads import classifier
from tests.torch_backend.test_enable_packing import enabled, padded
from tests.torch_backend.test_encoders import encoder
from tests.torch_backend.test_trainer import CAPACITY, arguments, datasets, llama

RNG = np.random.default_rng(0)
IDS = [RNG.integers(3, 64, length).tolist() for length in RNG.integers(3, 21, 100)]


def plain(path: Any, collator: Any, model: Any = None, data: Any = None, kind: Any = transformers.Trainer, **args: Any):
    columns = {"input_ids": IDS, "labels": IDS} if data is None else data
    train = datasets.Dataset.from_dict(columns) if isinstance(columns, dict) else columns
    options = arguments(transformers.TrainingArguments, path, **args)
    return kind(llama() if model is None else model, options, data_collator=collator, train_dataset=train)


def pads(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return padded(features, 0)


def halves(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Adds a segment of its own to each token: 0 in the first half of a document, 1 in the second."""
    batch = pads(features)
    kinds = torch.zeros_like(batch["input_ids"])
    for row, feature in zip(kinds, features, strict=True):
        row[len(feature["input_ids"]) // 2 : len(feature["input_ids"])] = 1
    return {**batch, "token_type_ids": kinds}


def by_length(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Adds a weight per document."""
    labels = torch.tensor([feature["labels"] for feature in features])
    weights = torch.tensor([float(len(feature["input_ids"])) for feature in features])
    return {**pads(features), "labels": labels, "weights": weights}


def documents_of(batch: dict[str, Any], name: str) -> dict[tuple[int, ...], Any]:
    """The tokens of each document in a packed batch -> its values of a key, per token or per document."""
    tokens = batch["input_ids"].flatten().split(batch["packed_lengths"])
    values = batch[name]
    if values.ndim == 2:
        parts = values.flatten().split(batch["packed_lengths"])
        return {tuple(tokens[s].tolist()): parts[s].tolist() for (s,) in batch["packed_documents"]}
    segments = batch["packed_documents"]
    return {tuple(tokens[s].tolist()): value for (s,), value in zip(segments, values.tolist(), strict=True)}


def test_what_a_collator_adds_to_each_token_reaches_the_model_of_packed_documents(tmp_path: Any) -> None:
    model = encoder("bert", transformers.AutoModelForMaskedLM)
    built = enabled(plain(tmp_path, halves, model, {"input_ids": IDS, "labels": IDS}), capacity=CAPACITY)
    for batch in (
        next(iter(built.get_train_dataloader())),
        built.data_collator([{"input_ids": x, "labels": x} for x in IDS[:5]]),
    ):
        found = documents_of(batch, "token_type_ids")
        assert found == {ids: [int(i >= len(ids) // 2) for i in range(len(ids))] for ids in found} and len(found) > 2
        assert batch["token_type_ids"].dtype == torch.int64


def test_a_stream_gets_what_the_collator_adds_to_each_token(tmp_path: Any) -> None:
    model = encoder("bert", transformers.AutoModelForMaskedLM)
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS}).to_iterable_dataset()
    built = enabled(plain(tmp_path, halves, model, data), capacity=CAPACITY)
    found = documents_of(next(iter(built.get_train_dataloader())), "token_type_ids")
    assert found == {ids: [int(i >= len(ids) // 2) for i in range(len(ids))] for ids in found} and len(found) > 2


class Weighted(transformers.Trainer):
    """Weights the documents of a classifier, as users do."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights, labels = inputs.pop("weights"), inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        loss = (weights * losses).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def test_a_weight_that_a_collator_gives_each_document_is_carried_to_the_loss(tmp_path: Any) -> None:
    labels = [sum(ids) % 3 for ids in IDS]
    data = {"input_ids": IDS, "labels": labels}
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    built = enabled(plain(tmp_path, by_length, classifier("qwen3"), data, Weighted, **options), capacity=CAPACITY)
    (batch, *_) = built.get_train_dataloader()
    found = documents_of(batch, "weights")
    assert found == {ids: float(len(ids)) for ids in found} and len(found) > 1
    built.train()
    truth, total = classifier("qwen3"), torch.zeros(())
    for ids in found:
        logits = truth(input_ids=torch.tensor([ids])).logits
        total = total + len(ids) * torch.nn.functional.cross_entropy(logits, torch.tensor([sum(ids) % 3]))
    (total / len(found)).backward()
    for (name, ours), theirs in zip(built.model.named_parameters(), truth.parameters(), strict=True):
        if theirs.grad is not None:
            assert error(ours.detach(), (theirs - 0.1 * theirs.grad).detach()) <= 1e-5, name


def test_a_column_with_a_number_per_document_is_carried_too(tmp_path: Any) -> None:
    def stacked(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**by_length(features), "weights": torch.tensor([feature["weights"] for feature in features])}

    data = {"input_ids": IDS, "labels": [0] * 100, "weights": [0.5 * len(ids) for ids in IDS]}
    built = plain(tmp_path, stacked, classifier("qwen3"), data, Weighted, remove_unused_columns=False)
    (batch, *_) = enabled(built, capacity=CAPACITY).get_train_dataloader()
    found = documents_of(batch, "weights")
    assert found == {ids: 0.5 * len(ids) for ids in found} and len(found) > 1


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (lambda ids: {"pixel_values": torch.zeros(len(ids), 3, 2, 2)}, r"pixel_values of shape \[1, 3, 2, 2\]"),
        (lambda ids: {"weights": torch.ones(len(ids))}, r"weights of shape \[1\] .* one value per token: give it so"),
        (lambda ids: {"attention_mask": torch.ones(len(ids), 1, 9, 9)}, r"attention_mask of shape \[1, 1, 9, 9\]"),
        (lambda ids: {"text": ["a"] * len(ids)}, r"text of shape \[1\]"),
        (
            lambda ids: {"position_ids": torch.arange(ids.shape[1]).expand_as(ids) + 2},
            "other position_ids than 0, 1, 2",
        ),
        (lambda ids: {"loss_mask": torch.ones_like(ids)}, "makes loss_mask, which packing reads from the data set"),
    ],
)
def test_what_cannot_be_carried_is_refused(tmp_path: Any, added: Any, message: str) -> None:
    def adds(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pads(features)
        return {**batch, **added(batch["input_ids"])}

    with pytest.raises(PackingError, match=f"adds .*{message}"):
        enabled(plain(tmp_path, adds, remove_unused_columns=False), capacity=CAPACITY)


def test_a_key_that_some_documents_lack_is_refused(tmp_path: Any) -> None:
    def sometimes(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pads(features)
        odd = features[0]["input_ids"] == IDS[0]
        return {**batch, "marks": torch.ones_like(batch["input_ids"])} if odd else batch

    with pytest.raises(PackingError, match="sometimes does not add marks to training example 1, unlike to other"):
        enabled(plain(tmp_path, sometimes), capacity=CAPACITY)


def test_columns_that_the_collator_leaves_out_are_not_read(tmp_path: Any) -> None:
    data = {"input_ids": IDS, "labels": IDS, "text": ["words"] * 100, "weight": [1.0] * 100, "marks": IDS}
    built = enabled(plain(tmp_path, pads, data=data, remove_unused_columns=False), capacity=CAPACITY)
    assert not {"text", "weight", "marks"} & set(next(iter(built.get_train_dataloader())))


def prompt_of_document(number: int) -> Any:
    def masks_one(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pads(features)
        for labels, feature in zip(batch["labels"], features, strict=True):
            labels[:2] = -100 if feature["input_ids"] == IDS[number] else labels[:2]
        return batch

    return masks_one


def test_a_difference_far_into_the_data_set_is_found_at_the_call(tmp_path: Any) -> None:
    with pytest.raises(PackingError, match="token 1 of training example 99 has the label -100 there and"):
        enabled(plain(tmp_path, prompt_of_document(99)), capacity=CAPACITY)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_difference_that_no_sample_holds_is_found_before_its_document_is_trained(
    tmp_path: Any, streamed: bool
) -> None:
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    data = data.to_iterable_dataset() if streamed else data
    number = 90 if streamed else 10  # beyond the first 64 of a stream, and between those of a data set
    built = enabled(plain(tmp_path, prompt_of_document(number), data=data, max_steps=20), capacity=CAPACITY)
    with pytest.raises(PackingError, match=f"token 1 of training example {number} has the label -100 there and"):
        built.train()


def test_documents_that_are_truncated_are_compared_as_far_as_they_are_trained(tmp_path: Any) -> None:
    built = plain(tmp_path, pads, max_steps=20)
    enabled(built, capacity=10, overflow="truncate").train()
    assert built.state.global_step == 20


def test_columns_have_the_dtype_that_stock_collators_give_them(tmp_path: Any) -> None:
    """Tokenisers' masks and types lie in data sets as int8, which no embedding takes."""
    kinds = [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in IDS]
    int8 = datasets.List(datasets.Value("int8"))
    features = {"input_ids": datasets.List(datasets.Value("int32")), "token_type_ids": int8, "attention_mask": int8}
    features = datasets.Features({**features, "label": datasets.Value("int64")})
    columns = {"input_ids": IDS, "token_type_ids": kinds, "attention_mask": [[1] * len(ids) for ids in IDS]}
    data = datasets.Dataset.from_dict({**columns, "label": [0] * 100}, features=features)
    from tests.torch_backend.test_trainer import tiny_tokenizer

    collator = transformers.DataCollatorWithPadding(tiny_tokenizer())
    built = enabled(plain(tmp_path, collator, classifier("bert"), data, max_steps=1), capacity=CAPACITY)
    (batch, *_) = built.get_train_dataloader()
    assert batch["token_type_ids"].dtype == torch.int64
    found = documents_of(batch, "token_type_ids")
    assert found == {ids: [int(i >= len(ids) // 2) for i in range(len(ids))] for ids in found}
    built.train()


class ReadsMask(transformers.Trainer):
    """A loss of a user's own that leaves padding out by the mask."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mask, outputs = inputs["attention_mask"], model(**inputs)
        self.real = int(mask.sum())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_loss_of_the_users_own_finds_the_mask_that_its_collator_gave(tmp_path: Any) -> None:
    options = {"max_steps": 1, "per_device_train_batch_size": 50, "gradient_accumulation_steps": 1}
    built = enabled(plain(tmp_path, pads, kind=ReadsMask, **options), capacity=CAPACITY)
    built.train()
    assert built.real == sum(map(len, IDS)), "all documents are in one batch, and only their tokens count"
