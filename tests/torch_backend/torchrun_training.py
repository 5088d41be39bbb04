"""Run by ``torchrun`` in test_torchrun: two optimizer steps of packed training; rank 0 writes what came out.

Arguments: the folder to write to, rows per rank and microbatch, microbatches per step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from tests.torch_backend.test_trainer import CAPACITY, arguments, documents, gpt_oss
from tests.torch_backend.torchrun import leave
from torch_backend.training.trainer import enable_packing

DOCUMENTS = 48  # 16 rows in the order of the documents: 2 steps of 8 rows


class Counting(transformers.Trainer):
    """Notes what the loss of every step is divided by."""

    counts: tuple[int, ...] = ()

    def get_batch_samples(self, *args, **kwargs):
        batches, count = super().get_batch_samples(*args, **kwargs)
        self.counts += (int(count),)
        return batches, count


def main(folder: Path, rows_at_once: int, accumulation: int) -> None:
    model = gpt_oss()
    given = arguments(transformers.TrainingArguments, folder)
    given.per_device_train_batch_size, given.gradient_accumulation_steps = rows_at_once, accumulation
    given.max_steps = 2
    given.train_sampling_strategy = "sequential"
    trainer = Counting(model, given, train_dataset=documents(DOCUMENTS))
    enable_packing(trainer, capacity=CAPACITY, verify=False)
    trainer.train()
    if trainer.accelerator.is_main_process:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        torch.save({"model": model.state_dict(), "losses": losses, "counts": trainer.counts}, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    leave()
