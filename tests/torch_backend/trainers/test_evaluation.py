"""eval_loss is the mean over the trained tokens of the evaluation set, whatever its batches, and compares."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.torch_backend.models import in_float64
from tests.torch_backend.ranks import everyones, on_ranks
from tests.torch_backend.steps import test_packed_step, test_sft_step
from tests.torch_backend.steps.test_packed_step import own_loss, routed
from tests.torch_backend.trainers.test_trainer import CAPACITY, arguments, datasets, documents, gpt_oss, llama
from torch_backend import disable_packing, enable_packing

EVALUATED = 13


def per_document(model: torch.nn.Module, data: datasets.Dataset, first: int = 1) -> float:
    """The mean loss of all targets in float64, each document by itself; ``first`` is the first token with a target."""
    alone, total, count = in_float64(copy.deepcopy(model)).eval(), 0.0, 0
    for ids, labels in zip(data["input_ids"], data["labels"], strict=True):
        with torch.no_grad():
            logits = alone(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        targets = torch.tensor(labels[first:])
        total += float(F.cross_entropy(logits[: len(targets)], targets, ignore_index=-100, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def metrics(prediction: Any) -> dict[str, float]:
    return {"mean": float(prediction.predictions.mean())}


def trainer_of(model: torch.nn.Module, folder: Path, data: Any, *, fast: bool = True, **options: Any) -> Any:
    """A trainer that evaluates ``data``, after enable_packing."""
    given = arguments(transformers.TrainingArguments, folder, **options)
    trainer = transformers.Trainer(model, given, train_dataset=documents(), eval_dataset=data)
    return enable_packing(trainer, capacity=CAPACITY, verify=False, fast=fast)


TRAINERS: dict[str, Any] = {
    "Trainer": partial(test_packed_step.built, fast=True),
    "Trainer, fast=False": partial(test_packed_step.built, fast=False),
    "Trainer, metrics": partial(test_packed_step.built, fast=True, compute_metrics=metrics),
    "Trainer, router": partial(test_packed_step.built, fast=True, make=routed),
    "Trainer, tokens of one device": partial(test_packed_step.built, fast=False, average_tokens_across_devices=False),
    "SFTTrainer": partial(test_sft_step.built, fast=True),
    "SFTTrainer, fast=False": partial(test_sft_step.built, fast=False),
    "SFTTrainer, router": partial(test_sft_step.built, fast=True, make=gpt_oss, router_aux_loss_coef=0.5),
    "SFTTrainer, TRL's packing": partial(test_sft_step.built, fast=True, packing=True, max_length=CAPACITY),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_it_is_that_of_the_documents_alone_whatever_the_batch_size(name: str, tmp_path: Path) -> None:
    data = documents(EVALUATED).remove_columns("comment")
    for size in (1, 2, 3):
        trainer = TRAINERS[name](tmp_path, per_device_eval_batch_size=size)
        wanted = per_document(trainer.model, data)
        found = trainer.evaluate(data)
        assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6), size
        assert found["eval_loss_per_batch"] != pytest.approx(wanted, rel=1e-6), size


def test_its_names_follow_data_sets_and_prefixes_and_it_chooses_the_best_model(tmp_path: Path, caplog: Any) -> None:
    data = documents(EVALUATED)
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(
        llama(),
        tmp_path,
        {"held": data, "out": data.select(range(3))},
        metric_for_best_model="eval_held_loss",
        load_best_model_at_end=True,
        **options,
    )
    trainer.train()
    logged = [entry["eval_held_loss"] for entry in trainer.state.log_history if "eval_held_loss" in entry]
    assert trainer.state.best_metric == min(logged)
    wanted = per_document(trainer.model, data)
    assert min(logged) == pytest.approx(wanted, rel=1e-6)
    found = trainer.evaluate(data, metric_key_prefix="mine")
    assert found["mine_loss"] == pytest.approx(wanted, rel=1e-6) and "mine_loss_per_batch" in found
    found = trainer.predict(data)
    assert found.metrics["test_loss"] == pytest.approx(wanted, rel=1e-6) and "test_loss_per_batch" in found.metrics
    assert len(found.predictions) == EVALUATED
    assert caplog.text.count("is the mean over all trained tokens") == 1
    assert not trainer.model._forward_hooks


def test_it_is_the_trainers_own_again_without_packing(tmp_path: Path) -> None:
    trainer = trainer_of(llama(), tmp_path, documents(EVALUATED), per_device_eval_batch_size=1)
    assert "eval_loss_per_batch" in trainer.evaluate()
    disable_packing(trainer)
    assert not {"evaluation_loop", "prediction_step"} & vars(trainer).keys()
    assert "eval_loss_per_batch" not in trainer.evaluate()


@pytest.mark.parametrize("own", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": own_loss}])
def test_a_loss_that_is_not_the_cross_entropy_keeps_transformers_mean(own: dict[str, Any], tmp_path: Path) -> None:
    trainer = test_packed_step.built(tmp_path, True, **own)
    assert "eval_loss_per_batch" not in trainer.evaluate()


def test_a_batch_without_targets_does_not_count(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[5, 6, 7], [-100, -100]]})
    model = llama()
    for fast in (True, False):
        trainer = trainer_of(model, tmp_path, data, fast=fast, per_device_eval_batch_size=1)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(per_document(model, data), rel=1e-6)


def test_nothing_is_read_back_for_a_batch(tmp_path: Path) -> None:
    """A tensor on the meta device has no values to read."""
    trainer = trainer_of(llama(), tmp_path, documents(2))
    mean = trainer.evaluation_loop.args[0].func.__self__
    mean.sums, loss, labels = [], torch.ones((), device="meta"), torch.ones(1, 4, dtype=torch.int64, device="meta")
    for batch in ({"labels": labels}, {"shift_labels": labels, "num_items_in_batch": loss}):
        mean.waits = True
        mean._add(trainer.model, (), batch, {"loss": loss})
    assert [x.is_meta for x in mean.sums] == [True, True]


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_rank(name: str, folder: Path, count: int, size: int) -> tuple[float, float]:
    """The evaluation on this rank, which no other one differs from, and the truth."""
    trainer = TRAINERS[name](folder, per_device_eval_batch_size=size)
    data = documents(count).remove_columns("comment")
    found = trainer.evaluate(data)["eval_loss"]
    assert set(everyones(found)) == {found}
    return found, per_document(trainer.model, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Trainer", "Trainer, metrics", "SFTTrainer, router", "SFTTrainer, TRL's packing"])
@pytest.mark.parametrize(("count", "size"), [(5, 2), (7, 1), (10, 2), (1, 1)])
def test_ranks_count_each_document_once(name: str, count: int, size: int, tmp_path: Path) -> None:
    """The last batches are filled with the first documents: after five, one rank has one again and the other two."""
    found, wanted = on_ranks(on_rank, name, tmp_path, count, size)
    assert found == pytest.approx(wanted, rel=1e-6)
