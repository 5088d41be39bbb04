"""Run by ``torchrun`` in test_distributed_post_training: one step of every trainer; rank 0 writes the weights.

Argument: the folder to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.torch_backend.test_classification_trainer import headed
from tests.torch_backend.test_preference import dpo
from tests.torch_backend.test_reward import reward
from tests.torch_backend.test_scored_trainers import kto, policy, same_completions
from tests.torch_backend.torchrun import leave
from torch_backend.trainers.enable_packing import enable_packing

# Eight pairs, eight examples, eight completions of two prompts: two micro-batches on each of two ranks.
HALVED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CAPACITY = 48
TRAINERS = ("DPO", "KTO", "REWARD", "GRPO", "RLOO", "documents", "tokens")


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
    return headed(name, "qwen3", folder, **options)


def packed(name: str, folder: Path) -> Any:
    if name in ("documents", "tokens"):
        trainer = build(name, folder, per_device_train_batch_size=1)
        enable_packing(trainer, capacity=CAPACITY, verify=False)
        trainer.args.gradient_accumulation_steps = len(trainer.get_train_dataloader())  # all of them in one step
        return trainer
    return enable_packing(build(name, folder, **HALVED), verify=False)


def main(folder: Path) -> None:
    found = {}
    for name in TRAINERS:
        trainer = packed(name, folder)
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        found[name] = {"model": trainer.model.state_dict(), "loss": loss}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
