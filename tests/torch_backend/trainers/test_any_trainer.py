"""Trainer settings, collators, heads, data and losses in all pairs: each step is that of its documents alone.

The documents that a step trained are read from its batches; their labels, types and weights from the data set, by the
collator that the trainer had. ``CROSSPACK_EXAMPLES=200 CROSSPACK_SEED=1`` adds so many random cases.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from conformance.pairwise import pairwise
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import error
from tests.torch_backend.trainers.test_trainer import arguments, datasets, llama, tiny_tokenizer
from torch_backend.trainers.enable_packing import enable_packing

CLASSES = 3
COUNT = 22
FACTORS: dict[str, tuple[Any, ...]] = {
    "head": ("next token", "token", "document", "masked token"),
    "collator": ("stock", "own", "adds"),
    "data": ("dataset", "list", "stream", "padded int8"),
    "loss": ("model", "trainer", "function"),
    "rows": ((3, 1), (2, 2), (1, 4)),  # per micro-batch, micro-batches
    "overflow": ("error", "drop", "truncate"),
    "columns": ("used", "all"),  # remove_unused_columns
    "fast": (True, False),
    "checkpointing": (False, True),
}


def cases() -> list[dict[str, Any]]:
    rng = np.random.default_rng(int(os.environ.get("CROSSPACK_SEED", 0)))
    more = int(os.environ.get("CROSSPACK_EXAMPLES", 0))
    random = [{name: values[rng.integers(len(values))] for name, values in FACTORS.items()} for _ in range(more)]
    return [*pairwise(FACTORS), *random]


def named(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items()).replace(" ", "")


def model_of(head: str) -> Any:
    if head == "next token":
        return llama()
    if head == "document":
        return classifier("qwen3")
    if head == "token":
        return encoder("bert", transformers.AutoModelForTokenClassification)
    return encoder("bert", transformers.AutoModelForMaskedLM)


def documents(head: str, seed: int) -> list[dict[str, Any]]:
    """Documents of 2 to 16 tokens and two of 40, whose first third is a prompt or has no label."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate([*rng.integers(2, 17, COUNT - 2), 40, 40]):
        ids = [5 + number, *rng.integers(5, 60, length - 1).tolist()]  # no two are equal
        classes = [token % 2 for token in ids] if head == "token" else ids
        skipped = len(ids) // 3
        labels: Any = [-100] * skipped + classes[skipped:]
        found.append({"input_ids": ids, "labels": sum(ids) % CLASSES if head == "document" else labels})
    return found


def stored(examples: list[dict[str, Any]], kind: str, unused: bool) -> Any:
    if unused:
        examples = [{**example, "text": f"document {n}"} for n, example in enumerate(examples)]
    if kind == "list":
        return examples
    if kind != "padded int8":
        made = datasets.Dataset.from_list(examples)
        return made.to_iterable_dataset() if kind == "stream" else made
    padded = []
    for example in examples:
        room = -len(example["input_ids"]) % 4
        tokens = {
            "input_ids": example["input_ids"] + [0] * room,
            "attention_mask": [1] * len(example["input_ids"]) + [0] * room,
        }
        labels = example["labels"]
        padded.append({**example, **tokens, "labels": labels if isinstance(labels, int) else labels + [-100] * room})
    made = datasets.Dataset.from_list(padded)
    return made.cast_column("attention_mask", datasets.List(datasets.Value("int8")))


class Own:
    """Pads as a user's collator does; ``adds`` what its model or its loss reads beside tokens."""

    def __init__(self, head: str, adds: bool) -> None:
        self.head, self.adds = head, adds

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(x["input_ids"]) for x in features)
        ids, mask = torch.zeros(2, len(features), width, dtype=torch.long)
        labels = torch.full((len(features), width), -100)
        for row, x in enumerate(features):
            length = len(x["input_ids"])
            ids[row, :length] = torch.as_tensor(x["input_ids"])
            mask[row, :length] = torch.as_tensor(x.get("attention_mask", [1] * length))
            if self.head != "document":
                labels[row, :length] = torch.as_tensor(x["labels"])
        if self.head == "document":
            labels = torch.tensor([x["labels"] for x in features])
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if not self.adds:
            return batch
        if self.head == "document":
            return {**batch, "weights": mask.sum(1).sqrt()}
        if self.head == "next token":
            return {**batch, "weights": 1 + ids % 4 / 4}
        return {**batch, "token_type_ids": (mask.cumsum(1) > mask.sum(1, keepdim=True) / 2).long() * mask}


def collator_of(head: str, kind: str) -> Any:
    if kind != "stock":
        return Own(head, kind == "adds")
    if head == "document":
        return transformers.DataCollatorWithPadding(tiny_tokenizer())
    if head == "token":
        return transformers.DataCollatorForTokenClassification(tiny_tokenizer())
    return transformers.DataCollatorForSeq2Seq(tiny_tokenizer())


def summed(logits: torch.Tensor, labels: torch.Tensor, head: str, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of the losses of tokens or documents, as one writes it for padded batches."""
    if head == "next token":
        logits, labels = logits[:, :-1], labels[:, 1:]
        weights = None if weights is None else weights[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=-100)
    return losses.sum() if weights is None else (losses * weights.flatten()).sum()


def trainer_of(head: str, loss: str) -> tuple[type[transformers.Trainer], Any]:
    """The class of a trainer, and its ``compute_loss_func``."""

    class OwnLoss(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
            inputs = dict(inputs)
            weights, labels = inputs.pop("weights", None), inputs.pop("labels")
            outputs = model(**inputs)
            total = summed(outputs.logits, labels, head, weights) / num_items_in_batch
            return (total, outputs) if return_outputs else total

    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return summed(outputs.logits, labels, head) / num_items_in_batch

    return (OwnLoss if loss == "trainer" else transformers.Trainer), (function if loss == "function" else None)


def alone(
    model: Any, collator: Any, example: dict[str, Any], head: str, length: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits, summed loss and number of targets of the first tokens of one example in a batch of its own."""
    batch = dict(collator([{name: x for name, x in example.items() if name != "text"}]))
    real = batch["attention_mask"][0].bool()
    kept = {name: x[:, real][:, :length] if x.ndim == 2 else x for name, x in batch.items()}
    labels, weights = kept.pop("labels"), kept.pop("weights", None)
    logits = model(**{name: x for name, x in kept.items() if name != "attention_mask"}).logits
    targets = labels[:, 1:] if head == "next token" else labels
    return logits[0], summed(logits, labels, head, weights), int((targets != -100).sum())


@pytest.mark.parametrize("case", cases(), ids=named)
def test_a_step_and_its_predictions_are_those_of_the_documents_alone(case: dict[str, Any], tmp_path: Any) -> None:
    assert check(case, cases().index(case), tmp_path), "no row held several documents"


def check(case: dict[str, Any], seed: int, folder: Any) -> bool:
    """Trains one step, and compares it and predictions with the documents alone.

    Returns:
        Whether a row of the step held several documents.
    """
    head, overflow, (rows, micro_batches) = case["head"], case["overflow"], case["rows"]
    data_kind = "dataset" if head == "document" and case["data"] == "stream" else case["data"]  # refused, see there
    weighted = case["collator"] == "adds" and head in ("next token", "document")
    kind, function = trainer_of(head, "trainer" if weighted else case["loss"])  # which reads the weights
    examples = documents(head, seed)
    unused = case["columns"] == "all" and case["collator"] != "stock"  # stock collators cannot make tensors of texts
    data, collator = stored(examples, data_kind, unused), collator_of(head, case["collator"])
    args = arguments(
        transformers.TrainingArguments,
        folder,
        max_steps=1,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=micro_batches,
        remove_unused_columns=case["columns"] == "used",
        gradient_checkpointing=case["checkpointing"],
    )
    evaluation = stored(examples[:8], "list" if data_kind == "stream" else data_kind, unused)
    built = kind(
        model_of(head),
        args,
        data_collator=collator,
        train_dataset=data,
        eval_dataset=evaluation,
        compute_loss_func=function,
    )
    capacity = 48 if overflow == "error" else 30
    enable_packing(built, capacity=capacity, overflow=overflow, verify=False, fast=case["fast"])

    truth = model_of(head)
    kept = stored(examples, "dataset" if data_kind in ("stream", "list") else data_kind, unused=False)
    predicted = built.predict(evaluation).predictions
    for number in range(8):
        logits, _, _ = alone(truth.eval(), collator, kept[number], head, 99)
        found = predicted[number] if head == "document" else predicted[number, : len(logits)]
        assert error(torch.from_numpy(found), logits.detach()) <= 1e-4

    seen: list[Any] = []
    packing = built.data_collator
    built.data_collator = lambda features: seen.append(packing(features)) or seen[-1]
    built.train()
    total, targets, trained = torch.zeros(()), 0, 0
    for batch in seen[:micro_batches]:
        tokens = batch["input_ids"].flatten().split(batch["packed_lengths"])
        for (segment,) in batch["packed_documents"]:
            ids = tokens[segment].tolist()
            cut = overflow == "truncate" and len(ids) == capacity
            (number,) = [n for n, x in enumerate(examples) if x["input_ids"][: capacity if cut else None] == ids]
            _, loss, count = alone(truth.train(), collator, kept[number], head, len(ids))
            total, targets, trained = total + loss, targets + count, trained + 1
    (total / targets).backward()
    assert built.state.log_history[0]["loss"] == pytest.approx(float(total.detach()) / targets, rel=1e-3)
    for (name, ours), theirs in zip(built.model.named_parameters(), truth.parameters(), strict=True):
        if theirs.grad is not None:
            step = theirs.detach() - 0.1 * theirs.grad
            assert error(ours.detach() - theirs.detach(), step - theirs.detach()) <= 2e-3, name
            assert error(ours.detach(), step) <= 1e-5, name
    return trained > rows * micro_batches
