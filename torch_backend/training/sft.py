"""What is TRL's own in the training step of an ``SFTTrainer``: which of its losses is fast, and what it logs.

Batches of a training step -> :class:`Metrics` counts their tokens -> ``num_tokens`` of the trainer's log. TRL counts in
``compute_loss``, which a CUDA graph does not call, and there it waits for the GPU in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_backend.collate import PackedCollator

LEFT_OUT = (
    "TRL's entropy and mean_token_accuracy need logits, so evaluation logs them and training does not: "
    "enable_packing(trainer, fast=False) logs them in training too"
)


def defines(trainer: Any, method: str) -> bool:
    """Whether a method of a trainer's class is the one that TRL's ``SFTTrainer`` defines."""
    owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
    return owner.__module__.split(".")[0] == "trl" and owner.__name__ == "SFTTrainer"


def why_logits(trainer: Any) -> str | None:
    """Why the loss of an ``SFTTrainer`` is not the one of transformers; None if it is."""
    kind = getattr(trainer.args, "loss_type", "nll")
    if kind not in ("nll", "chunked_nll"):
        return f"loss_type={kind!r} is a loss of TRL's own"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the trainer adds the router's auxiliary loss of each microbatch in full"
    return None


class Metrics:
    """``num_tokens`` of an ``SFTTrainer``: tokens trained on so far, on all ranks, padding not counted."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.stock_log = trainer.log
        self.total = trainer._total_train_tokens
        self.new: Tensor | None = None
        trainer.log = self.log
        collator = trainer.data_collator
        self.counts_by_mask = isinstance(collator, PackedCollator) and not collator.marks_padding
        if self.counts_by_mask:
            collator.marks_padding = True

    def count(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Count a batch, and return it without the mask that was made for this alone."""
        mask, ids = batch.get("attention_mask"), batch["input_ids"]
        tokens = torch.tensor(ids.numel(), device=ids.device) if mask is None else (mask != 0).sum()
        self.new = tokens if self.new is None else self.new + tokens
        return {name: x for name, x in batch.items() if not (self.counts_by_mask and name == "attention_mask")}

    def update(self) -> None:
        """Tell the trainer of what was counted since the last time; it waits for the GPU."""
        if self.new is None:
            return
        accelerator = self.trainer.accelerator
        on_device = self.new.to(accelerator.device)
        self.total += int(accelerator.reduce(on_device)) // getattr(self.trainer, "_tp_size", 1)
        self.new = None
        self.trainer._total_train_tokens = self.total
        self.trainer._metrics["train"]["num_tokens"] = [self.total]

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As ``SFTTrainer.log``."""
        self.update()
        self.stock_log(logs, *args, **options)
