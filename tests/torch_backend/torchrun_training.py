"""Run by ``torchrun`` in test_torchrun: two optimizer steps of packed training; rank 0 writes what came out.

Arguments: the folder to write to, rows per rank and microbatch, microbatches per step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.torch_backend.models import tiny
from tests.torch_backend.test_trainer import CAPACITY, arguments, documents, gpt_oss
from tests.torch_backend.torchrun import leave
from torch_backend.training.trainer import enable_packing

DOCUMENTS = 48  # 16 rows in the order of the documents: 2 steps of 8 rows
FAMILIES = ("qwen3", "gpt_oss", "qwen3_5_text", "bloom")  # rotary and plain attention, sinks, recurrent layers, ALiBi


class Counting(transformers.Trainer):
    """Notes what the loss of every step is divided by."""

    counts: tuple[int, ...] = ()

    def get_batch_samples(self, *args, **kwargs):
        batches, count = super().get_batch_samples(*args, **kwargs)
        self.counts += (int(count),)
        return batches, count


def untrained(family: str) -> torch.nn.Module:
    return gpt_oss() if family == "gpt_oss" else tiny(family)


def train(family: str, folder: Path, rows_at_once: int, accumulation: int) -> dict[str, Any]:
    model = untrained(family)
    given = arguments(transformers.TrainingArguments, folder)
    given.per_device_train_batch_size, given.gradient_accumulation_steps = rows_at_once, accumulation
    given.max_steps, given.max_grad_norm = 2, 0.5
    given.train_sampling_strategy = "sequential"
    trainer = Counting(model, given, train_dataset=documents(DOCUMENTS))
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"model": model.state_dict(), "losses": losses, "counts": trainer.counts}


def main(folder: Path, rows_at_once: int, accumulation: int) -> None:
    found = {family: train(family, folder, rows_at_once, accumulation) for family in FAMILIES}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    leave()
