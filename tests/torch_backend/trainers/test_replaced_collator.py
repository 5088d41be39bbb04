"""A trainer's collator that packing replaces: all that it trains and adds is carried on, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from packing_core.errors import PackingError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.trainers.test_enable_packing import enabled, padded
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, datasets, llama
from torch_backend import audit, with_boundaries

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
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    streamed = enabled(plain(tmp_path, halves, model, data.to_iterable_dataset()), capacity=CAPACITY)
    built = enabled(plain(tmp_path, halves, model, data), capacity=CAPACITY)
    for batch in (
        next(iter(built.get_train_dataloader())),
        next(iter(streamed.get_train_dataloader())),
        built.data_collator([{"input_ids": x, "labels": x} for x in IDS[:5]]),
    ):
        found = documents_of(batch, "token_type_ids")
        assert found == {ids: [int(i >= len(ids) // 2) for i in range(len(ids))] for ids in found} and len(found) > 2
        assert batch["token_type_ids"].dtype == torch.int64


class Weighted(transformers.Trainer):
    """Weights the documents of a classifier, as users do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        weights, labels = inputs.pop("weights"), inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        loss = (weights * losses).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


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


def test_columns_are_carried_as_the_collator_gives_them(tmp_path: Any) -> None:
    def stacked(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**by_length(features), "weights": torch.tensor([feature["weights"] for feature in features])}

    data = {"input_ids": IDS, "labels": [0] * 100, "weights": [0.5 * len(ids) for ids in IDS]}
    built = plain(tmp_path, stacked, classifier("qwen3"), data, Weighted, remove_unused_columns=False)
    found = documents_of(next(iter(enabled(built, capacity=CAPACITY).get_train_dataloader())), "weights")
    assert found == {ids: 0.5 * len(ids) for ids in found} and len(found) > 1
    left_out = {"text": ["words"] * 100, "weight": [1.0] * 100, "marks": IDS}
    data = {"input_ids": IDS, "labels": IDS, **left_out}
    built = enabled(plain(tmp_path, pads, data=data, remove_unused_columns=False), capacity=CAPACITY)
    assert not left_out.keys() & set(next(iter(built.get_train_dataloader())))

    def sometimes(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pads(features)
        odd = features[0]["input_ids"] == IDS[0]
        return {**batch, "marks": torch.ones_like(batch["input_ids"])} if odd else batch

    with pytest.raises(PackingError, match="sometimes does not add marks to training example 1, unlike to other"):
        enabled(plain(tmp_path, sometimes), capacity=CAPACITY)


def prompt_of_document(number: int) -> Any:
    def masks_one(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pads(features)
        for labels, feature in zip(batch["labels"], features, strict=True):
            labels[:2] = -100 if feature["input_ids"] == IDS[number] else labels[:2]
        return batch

    return masks_one


@pytest.mark.parametrize("streamed", [False, True])
def test_a_difference_that_no_sample_holds_is_found_before_its_document_is_trained(
    tmp_path: Any, streamed: bool
) -> None:
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    data = data.to_iterable_dataset() if streamed else data
    if not streamed:
        with pytest.raises(PackingError, match="token 1 of training example 99 has the label -100 there and"):
            enabled(plain(tmp_path, prompt_of_document(99), data=data), capacity=CAPACITY)
    number = 90 if streamed else 10  # beyond the first 64 of a stream, and between those of a data set
    built = enabled(plain(tmp_path, prompt_of_document(number), data=data, max_steps=20), capacity=CAPACITY)
    with pytest.raises(PackingError, match=f"token 1 of training example {number} has the label -100 there and"):
        built.train()
    truncated = plain(tmp_path, pads, data=data, max_steps=3)  # compared as far as they are trained
    enabled(truncated, capacity=10, overflow="truncate").train()
    assert truncated.state.global_step == 3


def test_columns_have_the_dtype_that_stock_collators_give_them(tmp_path: Any) -> None:
    """Tokenisers' masks and types lie in data sets as int8, which no embedding takes."""
    kinds = [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in IDS]
    int8 = datasets.List(datasets.Value("int8"))
    features = {"input_ids": datasets.List(datasets.Value("int32")), "token_type_ids": int8, "attention_mask": int8}
    features = datasets.Features({**features, "label": datasets.Value("int64")})
    columns = {"input_ids": IDS, "token_type_ids": kinds, "attention_mask": [[1] * len(ids) for ids in IDS]}
    data = datasets.Dataset.from_dict({**columns, "label": [0] * 100}, features=features)
    from tests.torch_backend.trainers.test_trainer import tiny_tokenizer

    collator = transformers.DataCollatorWithPadding(tiny_tokenizer())
    built = enabled(plain(tmp_path, collator, classifier("bert"), data, max_steps=1), capacity=CAPACITY)
    (batch, *_) = built.get_train_dataloader()
    assert batch["token_type_ids"].dtype == torch.int64
    found = documents_of(batch, "token_type_ids")
    assert found == {ids: [int(i >= len(ids) // 2) for i in range(len(ids))] for ids in found}
    built.train()


class ReadsMask(transformers.Trainer):
    """A loss of a user's own that leaves padding out by the mask."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        mask, outputs = inputs["attention_mask"], model(**inputs)
        self.real = int(mask.sum())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_loss_of_the_users_own_finds_the_mask_that_its_collator_gave(tmp_path: Any) -> None:
    options = {"max_steps": 1, "per_device_train_batch_size": 50, "gradient_accumulation_steps": 1}
    built = enabled(plain(tmp_path, pads, kind=ReadsMask, **options), capacity=CAPACITY)
    built.train()
    assert built.real == sum(map(len, IDS)), "all documents are in one batch, and only their tokens count"


def test_tokens_that_a_collator_hides_and_trains_or_documents_that_it_joins_are_refused(tmp_path: Any) -> None:
    def hides(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pads([{name: x + [8, 9] for name, x in feature.items()} for feature in features])
        return {**batch, "attention_mask": (batch["input_ids"] != 0) & (torch.cumsum(batch["labels"] == 8, 1) == 0)}

    message = f"hides: token {len(IDS[0])} of training example 0 has attention_mask 0 and the label 8"
    with pytest.raises(PackingError, match=message):
        enabled(plain(tmp_path, hides), capacity=CAPACITY)

    def joins(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = [token for feature in features for token in feature.pop("input_ids")]
        [feature.pop("seq_lengths") for feature in features]
        return {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None]}

    with pytest.raises(PackingError, match="the examples hold 4 documents by their lengths, and the collator marks 1"):
        with_boundaries(joins)([{"input_ids": [4, 5, 6, 7], "seq_lengths": [2, 2]} for _ in range(2)])


@pytest.mark.parametrize("of_the_data", [False, True], ids=["the collator's", "the data set's"])
def test_padding_that_a_collator_trains_is_left_out_and_said_to_be(tmp_path: Any, of_the_data: bool) -> None:
    def trains_padding(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = pads([{name: x + [0] for name, x in feature.items()} for feature in features])
        return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}

    data, collator = None, trains_padding
    if of_the_data:  # as a tokenizer pads to max_length, and labels are a copy
        rows = [ids + [0] * (24 - len(ids)) for ids in IDS]
        data = {"input_ids": rows, "labels": rows, "attention_mask": [[int(x != 0) for x in row] for row in rows]}
        collator = transformers.default_data_collator
    with pytest.warns(UserWarning, match="labels are 0 where attention_mask is 0"):
        enabled(plain(tmp_path, collator, data=data), capacity=CAPACITY)


def pops(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Takes its examples apart and pads them in place, as many collators do."""
    ids, labels = ([feature.pop(name) for feature in features] for name in ("input_ids", "labels"))
    masks, longest = [[1] * len(x) for x in ids], max(map(len, ids))
    for sequences, fill in ((ids, 0), (labels, -100), (masks, 0)):
        for sequence in sequences:
            sequence.extend([fill] * (longest - len(sequence)))
    return {name: torch.tensor(x) for name, x in zip(("input_ids", "labels", "attention_mask"), (ids, labels, masks))}


def test_a_collator_that_takes_its_examples_apart_trains_what_one_does_that_copies_them(tmp_path: Any) -> None:
    def trained(collator: Any) -> Any:
        examples = [{"input_ids": list(x), "labels": list(x)} for x in IDS]  # the same objects in every epoch
        data = {"train_dataset": examples, "eval_dataset": examples[:8], "data_collator": collator}
        options = arguments(transformers.TrainingArguments, tmp_path, max_steps=-1, num_train_epochs=2)
        built = enabled(transformers.Trainer(llama(), options, **data), capacity=CAPACITY)
        assert audit(built).verdict == "exact"
        built.train()
        return built.evaluate()["eval_loss"], list(built.model.parameters())

    (loss, ours), (expected, theirs) = trained(pops), trained(pads)
    assert loss == expected and all(map(torch.equal, ours, theirs))
