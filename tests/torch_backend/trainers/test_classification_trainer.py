"""enable_packing in a Trainer that classifies documents or tokens: each step is that of the documents alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import torch_backend
from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.models import error
from tests.torch_backend.trainers.test_trainer import arguments, datasets
from torch_backend.trainers import inspection
from torch_backend.trainers.enable_packing import enable_packing

CAPACITY = 48
CLASSES = 3


class Padding:
    """A user's collator: pads documents to the longest, their labels beside them."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(feature["input_ids"]) for feature in features)
        ids = torch.zeros(len(features), width, dtype=torch.long)
        for row, feature in zip(ids, features, strict=True):
            row[: len(feature["input_ids"])] = torch.tensor(feature["input_ids"])
        labels = torch.tensor([feature["label"] for feature in features])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def data(count: int = 30) -> Any:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 64, length).tolist() for length in rng.integers(3, 21, count)]
    return datasets.Dataset.from_dict({"input_ids": ids, "label": [sum(x) % CLASSES for x in ids]})


def trainer(tmp_path: Any, **options: Any) -> Any:
    args = arguments(transformers.TrainingArguments, tmp_path, per_device_eval_batch_size=7, **options)
    return transformers.Trainer(
        classifier("qwen3"),
        args,
        data_collator=Padding(),
        train_dataset=data(),
        eval_dataset=data(16),
    )


def one_document(features: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of equal documents, of which a stock trainer has one."""
    return {name: torch.tensor([x[name] for x in features]) for name in ("input_ids", "labels")}


def summed(output: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """The mean over the step. By itself, transformers adds up the means of a step's micro-batches of classifiers."""
    logits = output["logits"].view(-1, CLASSES)
    return torch.nn.functional.cross_entropy(logits, labels.view(-1), reduction="sum") / num_items_in_batch


def headed(what: str, family: str, path: Any, **options: Any) -> Any:
    """A stock trainer that classifies documents or tokens, all of them in one step and each in a batch of its own."""
    examples = data(11)
    if what == "tokens":
        labels = [[token % CLASSES for token in ids] for ids in examples["input_ids"]]
        examples = examples.remove_columns("label").add_column("labels", labels)
    else:
        examples = examples.rename_column("label", "labels")
    args = arguments(transformers.TrainingArguments, path)
    args.max_steps, args.per_device_train_batch_size, args.gradient_accumulation_steps = 1, 1, len(examples)
    for name, value in options.items():
        setattr(args, name, value)
    model = classifier(family, auto=HEADS[what])
    return transformers.Trainer(
        model, args, data_collator=one_document, train_dataset=examples, compute_loss_func=None if options else summed
    )


HEADS = {
    "documents": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
}


def test_what_a_classifier_could_not_train_exactly_is_refused(tmp_path: Any) -> None:
    for overflow in ("split", "restart"):
        with pytest.raises(PackingError, match=f'"{overflow}" cuts documents, and the model classifies whole ones'):
            enable_packing(trainer(tmp_path), capacity=8, overflow=overflow)
    built = trainer(tmp_path)
    with pytest.raises(UnsupportedError, match=r"use audit\(trainer.model\)"):
        torch_backend.audit(built)
    stock = built.data_collator
    built.data_collator = lambda features: {**stock(features), "labels": stock(features)["labels"] * 0}
    with pytest.raises(PackingError, match=r"training example 0 has the label \[0\] there and \[2\] when packed"):
        enable_packing(built, capacity=CAPACITY, verify=False)
    built.data_collator, built.train_dataset = stock, data().to_iterable_dataset()
    with pytest.raises(PackingError, match="a stream cannot carry one label per document"):
        enable_packing(built, capacity=CAPACITY, verify=False)
    masking = SimpleNamespace(data_collator=SimpleNamespace(whole_word_mask=True), model=None)
    with pytest.raises(PackingError, match="whole_word_mask=True reads the words of padded examples: leave it out"):
        inspection._masking_collator(masking)


def test_make_train_step_takes_labels_of_documents() -> None:
    model = torch_backend.patch(classifier("qwen3"), verify=False)
    examples = [{"input_ids": x["input_ids"], "labels": x["label"]} for x in data(12)]
    collate = torch_backend.PackedCollator(model, capacity=CAPACITY)
    whole, weights = collate(examples), {n: p.detach().clone() for n, p in model.named_parameters()}
    step = torch_backend.make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = step(whole)
    assert first["tokens"] == 12
    stepped = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False)
    again = step([collate(examples[:5]), collate(examples[5:])])
    assert error(again["loss"], first["loss"]) <= 1e-6
    assert all(error(p.detach(), stepped[n]) <= 1e-5 for n, p in model.named_parameters())


def test_a_score_of_minus_100_is_a_target_wherever_targets_are_counted(tmp_path: Any) -> None:
    """In a step, in parts of a step, and in a trainer's own count, as in the loss of the model."""
    scores = [float(x) for x in range(12)]
    scores[2] = -100.0
    examples = [{"input_ids": x["input_ids"], "labels": y} for x, y in zip(data(12), scores, strict=True)]
    stock = classifier("qwen3", "regression")
    alone = [stock(torch.tensor([x["input_ids"]]), labels=torch.tensor([x["labels"]])).loss.detach() for x in examples]
    want = torch.stack(alone).mean()
    model = torch_backend.patch(classifier("qwen3", "regression"), verify=False)
    collate = torch_backend.PackedCollator(model, capacity=CAPACITY)
    parts = [collate(examples[:5]), collate(examples[5:])]
    assert error(sum(model(**part, num_items_in_batch=torch.tensor(12)).loss.detach() for part in parts), want) <= 1e-5
    step = torch_backend.make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert step.evaluate(parts)["tokens"] == 12
    found = step(parts)
    assert found["tokens"] == 12 and error(found["loss"], want) <= 1e-5
    built = trainer(tmp_path)
    built.model = classifier("qwen3", "regression")
    built.train_dataset = built.eval_dataset = datasets.Dataset.from_list(
        [{"input_ids": x["input_ids"], "label": x["labels"]} for x in examples]
    )
    enable_packing(built, capacity=CAPACITY, verify=False)
    assert built._get_num_items_in_batch(parts, torch.device("cpu")) == 12


def test_masked_language_models_train_as_their_documents_alone(tmp_path: Any) -> None:
    from tests.torch_backend.hf.test_encoders import encoder

    class Tokens:
        """Tokeniser with the attributes that the collator reads: 0 is padding, 1 and 2 are special, 4 hides a token."""

        mask_token, pad_token, padding_side, pad_token_id = "[MASK]", "[PAD]", "right", 0

        def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
            return [int(token < 3) for token in ids]

        def convert_tokens_to_ids(self, token: str) -> int:
            return 4

        def pad(self, features: list[Any], return_tensors: str, pad_to_multiple_of: Any) -> dict[str, Any]:
            batch = Padding()([{**x, "label": 0} for x in features])
            return {name: x for name, x in batch.items() if name != "labels"}

    masking = transformers.DataCollatorForLanguageModeling(Tokens(), mask_replace_prob=1.0, random_replace_prob=0.0)
    documents = data(24).remove_columns("label")
    args = arguments(transformers.TrainingArguments, tmp_path)
    model = encoder("bert", transformers.AutoModelForMaskedLM)
    built = transformers.Trainer(model, args, data_collator=masking, train_dataset=documents)
    enable_packing(built, capacity=CAPACITY, verify=False)
    seen, collator = [], built.data_collator
    built.data_collator = lambda rows: seen.append(collator(rows)) or seen[-1]
    built.train()
    truth = encoder("bert", transformers.AutoModelForMaskedLM)
    sums, count = [], 0
    for batch in seen[:2]:  # the two micro-batches of the first step
        assert not (batch["labels"][batch["input_ids"] < 3] != -100).any()
        assert (batch["input_ids"][batch["labels"] != -100] == 4).all()
        flat = [batch[name].flatten().split(batch["packed_lengths"]) for name in ("input_ids", "labels")]
        for (segment,) in batch["packed_documents"]:
            logits = truth(input_ids=flat[0][segment][None]).logits[0]
            sums.append(torch.nn.functional.cross_entropy(logits, flat[1][segment], reduction="sum"))
            count += int((flat[1][segment] != -100).sum())
    want = float(torch.stack(sums).sum().detach()) / count
    assert built.state.log_history[0]["loss"] == pytest.approx(want, rel=1e-4)
