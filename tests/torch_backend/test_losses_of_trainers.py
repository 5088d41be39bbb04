"""Losses of a trainer's own: those that train across the boundaries of documents are named."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor
from torch.nn import functional as F

import torch_backend
from tests.torch_backend.models import PLAIN_SGD
from tests.torch_backend.test_trainer import CAPACITY, documents, llama, sft
from torch_backend.trainers.enable_packing import enable_packing

NAMED = (
    "{} trains what the last token of segment 0 predicts. Where it shifts input_ids, .* take the targets from labels"
)


def next_tokens(logits: Tensor, targets: Tensor, count: Any) -> Tensor:
    """The loss of tokens [B, S] that are shifted here, as in any script for unpacked batches."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / count


class OfTokens(transformers.Trainer):
    """Trains ``input_ids``, of which those at document starts are targets too."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return next_tokens(model(**inputs).logits, inputs["input_ids"], num_items_in_batch)


class OfLabels(transformers.Trainer):
    """Trains ``labels``, with a penalty on the logits of what is trained."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits, trained = model(**inputs).logits, inputs["labels"][:, 1:] != -100
        penalty = (logits[:, :-1].logsumexp(-1).square() * trained).sum() / num_items_in_batch
        return next_tokens(logits, inputs["labels"], num_items_in_batch) + penalty / 1000


def of_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return next_tokens(outputs.logits, labels, num_items_in_batch)


def of_most_likely(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Trains what the model finds most likely for the next token, at every token."""
    return next_tokens(outputs.logits, outputs.logits.argmax(-1), num_items_in_batch)


def trained(trainer: Any) -> Any:
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    enable_packing(trainer, capacity=CAPACITY, verify=False)  # nothing is said twice
    trainer.train()
    return trainer


def trainer_of(tmp_path: Path, kind: Any = transformers.Trainer, smoothing: float = 0.0, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(str(tmp_path), **PLAIN_SGD, label_smoothing_factor=smoothing)
    return kind(llama(), arguments, train_dataset=documents(), **options)


def messages(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "the last token of segment" in record.getMessage()]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"kind": OfTokens}, "OfTokens.compute_loss"), ({"compute_loss_func": of_most_likely}, "compute_loss_func")],
    ids=["compute_loss", "compute_loss_func"],
)
def test_a_loss_that_trains_last_tokens_is_named_once(
    tmp_path: Path, caplog: Any, options: dict[str, Any], name: str
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = trained(trainer_of(tmp_path, **options))
    (message,) = messages(caplog)
    assert re.match(NAMED.format(name), message)
    if name != "compute_loss_func":
        assert torch_backend.audit(trainer).verdict == "contaminated"


@pytest.mark.parametrize(
    "options",
    [{"kind": OfLabels}, {"compute_loss_func": of_labels}, {"smoothing": 0.1}],
    ids=["compute_loss", "compute_loss_func", "label smoothing"],
)
def test_a_loss_of_labels_is_exact_and_not_named(tmp_path: Path, caplog: Any, options: dict[str, Any]) -> None:
    caplog.set_level(logging.WARNING)
    trainer = trained(trainer_of(tmp_path, **options))
    assert not messages(caplog)
    assert torch_backend.audit(trainer).verdict == "exact"


def test_a_loss_of_an_sft_trainer_is_looked_at_too(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    options: dict[str, Any] = {"packing": True, "max_length": CAPACITY, "bf16": False}
    trainer = sft(llama(), tmp_path, documents(), **options)
    trainer.compute_loss_func = of_most_likely
    enable_packing(trainer, verify=False).train()
    assert len(messages(caplog)) == 1
