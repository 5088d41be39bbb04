"""TRL's part of the training step of an ``SFTTrainer``: the fast ones of its losses, and its logs.

The rows that TRL packed -> their lengths, which fix the shapes of all batches, and a warning where they have much room.
Batches of a training step -> :class:`StepMetrics` counts their tokens -> ``num_tokens`` of the trainer's log. TRL
counts in ``compute_loss``, which a CUDA graph does not call, and there it waits for the GPU in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from packing_core.storage.ragged import Ragged
from torch_backend.collate import PackedCollator
from torch_backend.trainers.changes import Changes

logger = logging.getLogger(__name__)

LENGTHS = "seq_lengths"  # the column in which TRL's packing keeps the lengths of a row's documents
FULL = 0.95  # rows that are less full than this are worth a warning
LEFT_OUT = (
    "TRL's entropy and mean_token_accuracy need logits, so evaluation logs them and training does not: "
    "enable_packing(trainer, fast=False) logs them in training too"
)

LEFT_OUT_OVER_RANKS = (
    "TRL's entropy and mean_token_accuracy need the logits of whole documents, which are cut over ranks, so neither "
    "training nor evaluation logs them"
)


def defines(trainer: Any, method: str) -> bool:
    """Returns whether a method of a trainer's class is the one that TRL's ``SFTTrainer`` defines."""
    owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
    return owner.__module__.split(".")[0] == "trl" and owner.__name__ == "SFTTrainer"


def why_logits(trainer: Any) -> str | None:
    """Explains why the loss of an ``SFTTrainer`` is not the one of transformers; None if it is."""
    kind = getattr(trainer.args, "loss_type", "nll")
    if kind not in ("nll", "chunked_nll"):
        return f"loss_type={kind!r} is a loss of TRL's own"
    return None


def router_coefficient(trainer: Any) -> float | None:
    """Returns by what TRL multiplies the auxiliary loss of a router, whatever the model's own; None if it adds none."""
    return float(trainer.router_aux_loss_coef) if getattr(trainer, "aux_loss_enabled", False) else None


def packed_lengths(trainer: Any) -> Ragged | None:
    """The lengths of the documents in each row that TRL has packed; None where it packs none."""
    data = trainer.train_dataset
    packs = getattr(trainer.args, "packing", False) and hasattr(data, "__len__") and hasattr(data, "with_format")
    if not packs or LENGTHS not in data.column_names:
        return None
    return Ragged.of(data.select_columns([LENGTHS]).with_format("arrow")[:][LENGTHS], name=LENGTHS)


def warn_of_room(trainer: Any) -> None:
    """Log how full TRL's rows are, if they are not: fixed shapes compute the room that is left."""
    lengths, longest = packed_lengths(trainer), getattr(trainer.args, "max_length", None)
    if lengths is None or longest is None:
        return
    full = float(lengths.flat().values.sum()) / (len(lengths) * longest)
    if full < FULL:
        logger.warning(
            "TRL's rows of %d tokens are %.0f%% full, because it packs 1,000 documents at a time: with "
            "SFTConfig(packing=False) enable_packing packs the whole data set",
            *(longest, 100 * full),
        )


class StepMetrics:
    """``num_tokens`` of an ``SFTTrainer``: tokens trained on so far, on all ranks, padding not counted.

    It logs ``aux_loss`` too, of the microbatches whose router's loss is handed to :meth:`add_router_loss`.

    Args:
        changes: of the trainer.
        context_ranks: ranks that get the same rows, beside those of tensor parallelism.
    """

    def __init__(self, changes: Changes, context_ranks: int = 1) -> None:
        self.trainer = trainer = changes.trainer
        self.total = trainer._total_train_tokens
        self.copies = getattr(trainer, "_tp_size", 1) * context_ranks
        self.new: int | Tensor = 0  # counted since the last update
        self.router_losses: list[Tensor] = []  # since the last log
        changes.wrap("log", self.log)
        collator = trainer.data_collator
        self.counts_by_mask = isinstance(collator, PackedCollator) and not collator.marks_padding
        if self.counts_by_mask:
            changes.set("marks_padding", True, of=collator)

    def count(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Count a batch, and return it without the mask that was made for this alone."""
        mask = batch.get("attention_mask")
        self.new = self.new + (batch["input_ids"].numel() if mask is None else (mask != 0).sum())
        return {name: x for name, x in batch.items() if not (self.counts_by_mask and name == "attention_mask")}

    def update(self) -> None:
        """Tell the trainer of what was counted since the last time; it waits for the GPU."""
        if isinstance(self.new, int) and self.new == 0:
            return
        accelerator = self.trainer.accelerator
        new = torch.as_tensor(self.new, device=accelerator.device)
        self.total += int(accelerator.reduce(new)) // self.copies
        self.new = 0
        self.trainer._total_train_tokens = self.total
        self.trainer._metrics["train"]["num_tokens"] = [self.total]

    def log_evaluation(self) -> None:
        """Let an evaluation log the tokens that were trained on so far, as TRL's ``compute_loss`` does."""
        self.update()
        self.trainer._metrics["eval"]["num_tokens"] = [self.total]

    def add_router_loss(self, loss: Tensor) -> None:
        """Remember the auxiliary loss of a microbatch, which every rank of a group has."""
        self.router_losses.append(loss.detach())

    def log(self, stock_log: Any, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As ``SFTTrainer.log``."""
        self.update()
        if self.router_losses:
            mode = "train" if self.trainer.model.training else "eval"
            means = self.trainer.accelerator.reduce(torch.stack(self.router_losses), "mean")
            self.trainer._metrics[mode]["aux_loss"] += means.tolist()
            self.router_losses = []
        stock_log(logs, *args, **options)
