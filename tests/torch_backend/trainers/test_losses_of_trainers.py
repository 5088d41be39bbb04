"""Losses of a trainer's own: those that train across the boundaries of documents are named."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

import torch_backend
from packing_core.errors import PackingError
from tests.torch_backend.models import PLAIN_SGD
from tests.torch_backend.trainers.test_replaced_collator import IDS, pads
from tests.torch_backend.trainers.test_trainer import CAPACITY, datasets, documents, llama, sft
from torch_backend.trainers import own_loss
from torch_backend.trainers.enable_packing import enable_packing

NAMED = (
    "{} trains what the last token of segment 0 predicts. Where it shifts input_ids, .* take the targets from labels"
)


def next_tokens(logits: Tensor, targets: Tensor, count: Any) -> Tensor:
    """The loss of tokens [B, S] that are shifted here, as in any script for unpacked batches."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum") / count


class OfTokens(transformers.Trainer):
    """Trains ``input_ids``, of which those at document starts are targets too."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        return next_tokens(model(**inputs).logits, inputs["input_ids"], num_items_in_batch)


class OfLabels(transformers.Trainer):
    """Trains ``labels``, with a penalty on the logits of what is trained."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
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
    return kind(llama(), arguments, **{"train_dataset": documents(), **options})


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


# Losses that take a row for one example.


def padding() -> dict[str, Any]:
    """Documents of unequal lengths, and a collator that pads them."""
    data = datasets.Dataset.from_dict({"input_ids": IDS, "labels": IDS})
    return {"train_dataset": data, "data_collator": pads}


def of_examples(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over examples of the mean over their tokens."""
    return torch.stack([F.cross_entropy(x[:-1], y[1:]) for x, y in zip(outputs.logits, labels, strict=True)]).mean()


def over_the_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return next_tokens(outputs.logits, labels, len(labels))


def of_last_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits[:, -1].square().mean()


def of_all_means(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over tokens, without a count."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Pooled(transformers.Trainer):
    """Trains the mean of the hidden states of each example."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        return hidden.mean(1).square().mean()


def compared(caplog: Any) -> list[str]:
    return [x.getMessage() for x in caplog.records if "takes a row for one example" in x.getMessage()]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"compute_loss_func": of_examples}, "compute_loss_func"),
        ({"compute_loss_func": over_the_batch}, "compute_loss_func"),
        ({"compute_loss_func": of_last_logits}, "compute_loss_func"),
        ({"kind": Pooled}, "Pooled.compute_loss"),
        ({}, "the loss of LlamaForCausalLM"),
    ],
    ids=["mean of means", "over the size of the batch", "last logits", "pooled states", "the model's"],
)
def test_a_loss_per_example_is_named_once_with_both_numbers(
    tmp_path: Path, caplog: Any, options: dict[str, Any], name: str
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = trainer_of(tmp_path, **padding(), **options)
    if not options:
        trainer.model.loss_function = lambda logits, labels, **_: next_tokens(logits, labels, len(labels))
    for _ in range(2):
        enable_packing(trainer, capacity=CAPACITY, verify=False, fast="kind" not in options)
    trainer.train()
    (message,) = compared(caplog)
    numbers = re.match(rf"{name} is (\S+) on \d documents that are packed and (\S+) on a batch that \w+ pads", message)
    assert numbers is not None, message
    packed, padded = map(float, numbers.groups())
    assert abs(packed - padded) > 1e-4 * max(abs(packed), abs(padded))


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": OfLabels}, {"compute_loss_func": of_labels}, {"compute_loss_func": of_all_means}],
    ids=["transformers'", "compute_loss", "compute_loss_func", "mean over tokens"],
)
def test_a_loss_of_tokens_is_not_named_and_trains_as_without_the_comparison(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.WARNING)
    first = trained(noisy(tmp_path, **options))
    assert not compared(caplog)
    monkeypatch.setattr(own_loss, "warn_of_rows", lambda changes, loss: None)
    second = trained(noisy(tmp_path, **options))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    modes = [[module.training for module in each.model.modules()] for each in (first, second)]
    assert modes[0] == modes[1]


def noisy(tmp_path: Path, **options: Any) -> Any:
    """A trainer whose model draws random numbers in training."""
    trainer = trainer_of(tmp_path, **padding(), **options)
    trainer.model.config.attention_dropout = 0.0
    for layer in trainer.model.model.layers:
        layer.mlp.register_forward_hook(lambda module, _, output: F.dropout(output, 0.2, module.training))
    return trainer


class Around(nn.Module):
    """A head of somebody's own on a decoder: of next tokens, of tokens, behind a layer along the row, of the last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.model = kind, llama().model
        self.config, width = self.model.config, self.model.config.hidden_size
        self.along = nn.LSTM(width, width, batch_first=True) if kind == "along the row" else None
        self.head = nn.Linear(width, self.config.vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **others).last_hidden_state
        logits = self.head(hidden if self.along is None else self.along(hidden)[0])
        targets = labels if self.kind == "tokens" else labels.roll(-1, 1).index_fill(1, torch.tensor(-1), -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss + hidden[:, -1, 0].square().mean() if self.kind == "last" else loss, "logits": logits}


@pytest.mark.parametrize("kind", ["next tokens", "tokens", "along the row", "last"])
def test_a_module_around_the_model_is_named_unless_its_loss_is_one_of_next_tokens(
    tmp_path: Path, caplog: Any, kind: str
) -> None:
    caplog.set_level(logging.WARNING)
    arguments = transformers.TrainingArguments(str(tmp_path), **PLAIN_SGD)
    trained(transformers.Trainer(Around(kind), arguments, **padding()))
    assert [x.partition(" is ")[0] for x in compared(caplog)] == ["the loss of Around"] * (kind != "next tokens")


def test_a_loss_that_reads_boundaries_is_compared_with_nothing(tmp_path: Path, caplog: Any) -> None:
    class OfDocuments(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
            documents = len(inputs["packed_documents"])
            return next_tokens(model(**inputs).logits, inputs["labels"], documents)

    caplog.set_level(logging.INFO)
    trained(trainer_of(tmp_path, kind=OfDocuments, **padding()))
    assert not compared(caplog)
    assert "OfDocuments.compute_loss was not compared with itself on a padded batch: 'packed_documents'" in caplog.text


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_without_a_target_trains_nothing(tmp_path: Path, fast: bool) -> None:
    """Its loss is 0, and not 0 / 0."""
    ids = [list(range(1, CAPACITY + 1))] * 2
    data = datasets.Dataset.from_dict({"input_ids": ids, "labels": [ids[0], [-100] * CAPACITY]})

    def trained_steps(count: int) -> tuple[dict[str, Tensor], list[float]]:
        options = PLAIN_SGD | {"max_steps": count, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
        options |= {"train_sampling_strategy": "sequential", "logging_nan_inf_filter": False}
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        trainer = transformers.Trainer(llama(), arguments, train_dataset=data)
        enable_packing(trainer, capacity=CAPACITY, verify=False, fast=fast).train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return trainer.model.state_dict(), losses

    (before, _), (after, losses) = trained_steps(1), trained_steps(2)
    assert losses[0] > 0 and losses[1] == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


class OfMeans(OfLabels):
    """Divides by its own count of targets, as scripts do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        loss = of_means(output := model(**inputs), inputs["labels"])
        return (loss, output) if return_outputs else loss


class OfHeads(OfMeans):
    """Calls the decoder and the head itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs=False, num_items_in_batch: Any = None) -> Any:
        inputs = dict(inputs)
        labels, hidden = inputs.pop("labels"), model.model(**inputs).last_hidden_state
        loss = of_means(output := CausalLMOutput(logits=model.lm_head(hidden)), labels)
        return (loss, output) if return_outputs else loss


def of_means(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    mask, logits = labels[:, 1:] != -100, outputs.logits[:, :-1]
    losses = logits.logsumexp(-1) - logits.gather(-1, (labels[:, 1:] * mask)[..., None])[..., 0]
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "options",
    [{"kind": OfMeans}, {"kind": OfHeads}, {"compute_loss_func": of_means}],
    ids=["method", "decoder and head", "function"],
)
def test_a_batch_of_padding_alone_trains_nothing_by_a_loss_that_divides_by_its_targets(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Such batches fill up the last step of ranks."""
    trainer = enable_packing(trainer_of(tmp_path, **options), capacity=CAPACITY, verify=False)
    rows, gradients = trainer.packing_plan.rows, []
    for numbers in ([0], [0, -1], [-1]):
        batch = trainer.data_collator(rows.__getitems__(numbers))
        loss = trainer.training_step(trainer.model, batch, torch.tensor(1))
        gradients.append([p.grad.clone() for p in trainer.model.parameters()])
        trainer.model.zero_grad()
    assert loss == 0 and not any(x.any() for x in gradients[-1])
    torch.testing.assert_close(gradients[0], gradients[1])
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert loss == 0 and outputs.logits.isfinite().all()


def doubled(compute_loss: Any, *args: Any, **options: Any) -> Any:
    result = compute_loss(*args, **options)
    return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result


@pytest.mark.parametrize("name", ["compute_loss", "compute_loss_func", "label_smoother"])
def test_a_loss_that_is_set_later_is_refused_until_packing_is_enabled_again(tmp_path: Path, name: str) -> None:
    def with_loss(trainer: Any) -> Any:
        losses = {"compute_loss_func": of_labels, "label_smoother": LabelSmoother(epsilon=0.5)}
        setattr(trainer, name, losses.get(name) or partial(doubled, trainer.compute_loss))
        return trainer

    data = {"eval_dataset": documents(4)}
    want = trained(with_loss(trainer_of(tmp_path, **data)))
    trainer = with_loss(enable_packing(trainer_of(tmp_path, **data), capacity=CAPACITY))
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(PackingError, match=rf"^{name} was exchanged after enable_packing.trainer.: call it again$"):
            run()
    got = trained(trainer)
    for a, b in zip(got.model.parameters(), want.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    got, want = got.evaluate(), want.evaluate()
    assert got.keys() == want.keys() and got["eval_loss"] == pytest.approx(want["eval_loss"], rel=1e-5)
