"""Run by ``torchrun`` in test_deepspeed: Trainer under ZeRO-2 and ZeRO-3 on two ranks; rank 0 writes what came out.

Argument: the folder to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.torch_backend.models import tiny
from tests.torch_backend.test_trainer import CAPACITY, arguments, documents
from tests.torch_backend.torchrun import leave
from torch_backend.training.trainer import enable_packing

DOCUMENTS = 48
CASES = {f"ZeRO-{stage}, {family}": (stage, family) for family in ("qwen3", "bloom") for stage in (2, 3)}


def train(family: str, folder: Path, stage: int | None = None) -> dict[str, Any]:
    """Two steps of 8 rows: of one process in two microbatches of 4, of two ranks in two of 2 each."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    given = arguments(transformers.TrainingArguments, folder, **({} if stage is None else {"deepspeed": config}))
    given.per_device_train_batch_size = 4 if stage is None else 2
    given.max_steps = 2
    given.train_sampling_strategy = "sequential"
    trainer = transformers.Trainer(tiny(family), given, train_dataset=documents(DOCUMENTS))
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"model": weights(trainer.model, stage), "losses": losses}


def weights(model: Any, stage: int | None) -> dict[str, torch.Tensor]:
    if stage != 3:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, (stage, family) in CASES.items():
        try:
            found[name] = train(family, folder, stage)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
