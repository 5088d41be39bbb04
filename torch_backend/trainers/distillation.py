"""``enable_packing`` for TRL's trainers that compare a student with a teacher beside it: GKD, GOLD, distillation.

A padded micro-batch, with answers from the data or generated -> one row of its documents -> both models -> their
divergence over the vocabulary, a chunk of logits at a time (:mod:`torch_backend.losses.distillation`) -> divided by the
trainer's own divisor. Data, generation, metrics and the loop are the trainer's. Lengths are read from the device once
for each micro-batch, because answers may have been generated since its collator made it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.trl_trainers import kind_of
from torch_backend.hf.inputs.unpadding import Padded
from torch_backend.hf.router import SWITCH, asks_for_router_loss
from torch_backend.losses.distillation import divergence_and_entropy
from torch_backend.ops.divisor import quotient
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.preference import ScoredPort

_OF_THE_LOSS = ("compute_loss", "_compute_loss", "generalized_jsd_loss")


class DistillationPort(ScoredPort):
    """Packing in a trainer whose loss is the divergence of its model from its ``teacher_model``."""

    has_logprobs = shares = False
    other_model = "teacher"
    loss = "without logits, a chunk of both models' at a time"

    def plan(self) -> None:
        trainer = self.trainer
        for name in _OF_THE_LOSS:
            method = getattr(type(trainer), name, None)
            if method is not None and not method.__module__.startswith("trl."):
                raise UnsupportedError(
                    f"{self.name}.{name} is not TRL's, and packing would compute TRL's loss in its place: leave it "
                    "unpacked, or train by causal_lm_divergence(student, teacher, batch) in a loop of your own"
                )
        if getattr(trainer, "use_uld_loss", False):
            raise UnsupportedError(
                f"{self.name} with use_uld_loss=True aligns the tokens of two tokenisers, so its models share no "
                "rows: leave it unpacked"
            )
        if getattr(trainer.args, "packing", False):
            raise UnsupportedError(
                f"the collator of {self.name} loses the boundaries of TRL's rows: leave packing=True out"
            )
        if trainer.teacher_model is None:
            raise UnsupportedError(f"{self.name} has no teacher_model to run on the same rows: pass it one")
        super().plan()

    def why_whole(self) -> str | None:
        return f"{self.name} reads the lengths of whole ones on each rank: leave cp_size out"

    def refuse_images(self) -> None:
        raise UnsupportedError(f"{self.name} packed gives its models no images: leave the column out, or it unpacked")

    def change_batches(self, changes: Changes) -> None:
        """Compute the loss of a padded micro-batch on one row."""
        trainer = self.trainer
        if kind_of(trainer) == "DistillationTrainer":  # what its compute_loss calls inside of the model's wrappers
            changes.set("_forward_redirection", partial(_loss_and_entropy, trainer))
        else:  # the temperature of GKD is that of generation alone
            temperature = 1.0 if kind_of(trainer) == "GKDTrainer" else trainer.temperature
            changes.wrap("compute_loss", _loss, trainer, temperature)


def _loss(
    stock_loss: Any,
    trainer: Any,
    temperature: float,
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
) -> Any:
    """As ``compute_loss`` of GKD and GOLD; where the outputs are asked for, whose logits are read, it is theirs."""
    if return_outputs:
        return stock_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
    padded = inputs["input_ids"], inputs["attention_mask"], inputs["labels"]
    total, count, _ = _of_one_row(trainer, model, *padded, temperature=temperature)
    return _divided(total, count, num_items_in_batch)


def _loss_and_entropy(
    trainer: Any, model: Any, unwrapped: Any, method: Any, student: Any, inputs: Any, num_items_in_batch: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``DistillationTrainer._compute_loss`` called through the wrappers of its model."""
    trained = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    labels = inputs["completion_ids"].masked_fill(trained == 0, IGNORE_INDEX)
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    labels = torch.cat([torch.full_like(inputs["prompt_ids"], IGNORE_INDEX), labels], 1)
    total, count, entropy = _of_one_row(trainer, model, ids, mask, labels, temperature=trainer.temperature)
    return _divided(total, count, num_items_in_batch), entropy, count


def _of_one_row(
    trainer: Any, model: Any, ids: Tensor, mask: Tensor, labels: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed divergence of a padded micro-batch [B, S], the number of its targets, and the summed entropy."""
    real, trained = mask != 0, labels[:, 1:] != IGNORE_INDEX
    begins = real & ~torch.nn.functional.pad(real[:, :-1], (1, 0))
    lengths, pieces, targets = torch.stack([real.sum(1), begins.sum(1), trained.sum(1)]).tolist()  # one read
    if max(pieces) > 1:
        raise LayoutError(f"attention_mask leaves out tokens inside row {pieces.index(max(pieces))} of the batch")
    padded = Padded.of(mask, tuple(lengths))
    batch: dict[str, Any] = {"input_ids": padded.row(ids), "labels": padded.labels(labels)}
    batch |= {BatchKey.LENGTHS: padded.lengths, BatchKey.TARGETS: sum(targets)}
    if any(asks_for_router_loss(causal_lm(each), {}) for each in (model, trainer.teacher_model)):
        batch[SWITCH] = False  # TRL adds no loss of a router
    teacher = trainer.teacher_model.eval()
    return divergence_and_entropy(model, teacher, batch, beta=trainer.beta, temperature=temperature)


def _divided(total: Tensor, count: Tensor, of_step: Any) -> Tensor:
    """Returns a micro-batch's part of the mean over the step, or its own mean where no step counts its targets."""
    return quotient(total, count if of_step is None else torch.as_tensor(of_step, device=total.device))
