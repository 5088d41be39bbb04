"""Run by ``torchrun`` in test_preference: one step of DPO on packed pairs; rank 0 writes the weights.

Arguments: the folder to write to, pairs per rank and micro-batch, micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.torch_backend.test_preference import dpo
from tests.torch_backend.torchrun import leave
from torch_backend.training.trainer import enable_packing


def main(folder: Path, pairs_at_once: int, accumulation: int) -> None:
    options = {"per_device_train_batch_size": pairs_at_once, "gradient_accumulation_steps": accumulation}
    trainer = enable_packing(dpo(folder, **options), verify=False)
    trainer.train()
    if trainer.accelerator.is_main_process:
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        torch.save({"model": trainer.model.state_dict(), "loss": loss}, folder / "result.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    leave()
