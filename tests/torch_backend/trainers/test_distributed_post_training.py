"""Preferences, policies and classifiers on two ranks: the update is that of every document alone in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.preference import divide
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.scored_trainers import dpo, kto, policy, reward, same_completions
from tests.torch_backend.trainers.test_classification_trainer import headed
from tests.torch_backend.trainers.test_distillation_trainers import on_policy
from torch_backend.trainers.enable_packing import enable_packing

pytestmark = pytest.mark.slow  # starts processes that train

# As many pairs or completions in one process, in a single micro-batch.
WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
# Eight pairs, eight examples, eight completions of two prompts: two micro-batches on each of two ranks.
HALVED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CAPACITY = 48
TRAINERS = ("DPO", "KTO", "REWARD", "GRPO", "RLOO", "DISTILLATION", "documents", "tokens")


def build(name: str, folder: Path, **options: Any) -> Any:
    """An untrained trainer of one step, by what it trains."""
    if name == "DPO":
        return dpo(folder, **options)
    if name == "KTO":
        return kto(folder, loss_type="apo_zero_unpaired", **options)  # the other loss has a mean of each micro-batch
    if name == "REWARD":
        return reward(folder, count=8, **options)
    if name in ("GRPO", "RLOO"):
        trainer = policy(name, folder, **options)
        same_completions(trainer.model)
        return trainer
    if name == "DISTILLATION":
        trainer = on_policy(folder, max_completion_length=20, **options)
        same_completions(trainer.model, of_a_prompt=1)
        return trainer
    return headed(name, "qwen3", folder, **options)


def packed(name: str, folder: Path) -> Any:
    if name in ("documents", "tokens"):
        trainer = build(name, folder, per_device_train_batch_size=1)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        trainer.args.gradient_accumulation_steps = len(trainer.get_train_dataloader())  # all of them in one step
        return trainer
    return enable_packing(build(name, folder, **HALVED), verify=False)


def on_rank(name: str, folder: Path) -> dict[str, Any]:
    trainer = packed(name, folder)
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return {"model": trainer.model.state_dict(), "loss": loss}


@pytest.mark.parametrize("name", TRAINERS)
def test_two_ranks_train_as_every_document_alone(name: str, tmp_path: Path) -> None:
    ranks = on_ranks(on_rank, name, tmp_path)
    trainer = build(name, tmp_path, **(WHOLE if name.isupper() else {}))
    if name.isupper():
        divide(trainer)
    before = {key: x.clone() for key, x in trainer.model.state_dict().items()}
    trainer.train()
    # The loss of RLOO is 0 before the first update, whose advantages cancel.
    assert ranks["loss"] == pytest.approx(trainer.state.log_history[0]["loss"], rel=1e-5, abs=1e-6)
    for key, weight in trainer.model.state_dict().items():
        difference = (ranks["model"][key] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
        assert difference <= 1e-5, f"{key}: {difference:.1e}"
    assert any(not torch.equal(weight, before[key]) for key, weight in trainer.model.state_dict().items())
