"""Packing in a ``transformers.Trainer`` and what derives from it, TRL's ``SFTTrainer`` among them.

A built trainer -> a plan, or a refusal (:mod:`.inspection`) -> its model is patched, its documents are packed into rows
(:mod:`.epoch_rows`), and its collator carries the segments of every batch. The trainer's loop, loss, optimizer and
arguments stay as they are. What is different for an ``SFTTrainer`` is its loss (:class:`.own_loss.TrainerLoss`).

Figures are as without packing. What the model makes of rows [B, S, ...] -> the values of each document -> [documents,
longest, ...], padded with -100 as transformers pads, in the order of the data. ``compute_metrics``, ``predict`` and
``preprocess_logits_for_metrics`` receive these, and so they do of inputs (``include_for_metrics``), with their mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from packing_core.batches.columns import READ
from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError, UnsupportedError
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.heads import labels_documents, targets_among, trains_first_token
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.inputs.trl_trainers import why_per_example
from torch_backend.steps.memory import AUTO_OVER_RANKS
from torch_backend.trainers.callbacks import SameLoss, add_noise_by_document
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.dataloader import use_rows
from torch_backend.trainers.evaluation import TokenMean, why_per_batch
from torch_backend.trainers.fast_step import PackedStep
from torch_backend.trainers.inspection import generates_in_evaluation, inspect
from torch_backend.trainers.own_loss import TrainerLoss, padding_loss, warn_of_last_tokens, warn_of_room, warn_of_rows
from torch_backend.trainers.port import TrainerPort
from torch_backend.trainers.replaced import ReplacingCollator


class RowsPort(TrainerPort):
    """Packing in a trainer whose loss is one of tokens."""

    def plan(self) -> None:
        trainer, request = self.trainer, self.request
        if reason := why_per_example(trainer):
            raise UnsupportedError(
                f"{self.name} {reason}, and would take all documents of a row for one example: leave it unpacked; "
                "enable_packing serves transformers.Trainer and TRL's SFT, DPO, KTO, reward, GRPO, RLOO, "
                "GKD, GOLD and distillation trainers"
            )
        needed = ("model", "data_collator", "accelerator", "_set_signature_columns_if_needed")
        if any(getattr(trainer, field, None) is None for field in needed):
            raise PackingError(f"{self.name} is not a transformers.Trainer: pass one that is built, with its model")
        self.check_options(has_rows=request.fast)
        self.loss = TrainerLoss(trainer)
        self.rows = inspect(trainer, self.loss, request)
        self.why_per_batch = why_per_batch(self.loss)
        if request.memory == "auto" and self.rows.mesh is not None:
            raise UnsupportedError(AUTO_OVER_RANKS)

    def install(self, changes: Changes) -> None:
        trainer, request, plan = self.trainer, self.request, self.rows
        self.patch([trainer.model], changes, plan.mesh)
        changes.set("packing_plan", plan)
        changes.set("_signature_columns", [*dict.fromkeys((*trainer._signature_columns, *READ))])
        changes.set("data_collator", plan.collator)
        if labels_documents(trainer.model) or trains_first_token(trainer.model):
            changes.set("model_accepts_loss_kwargs", True)  # a patched classifier divides by the step's targets
        changes.wrap("_get_num_items_in_batch", _count_targets, trainer)
        # a loss that does not divide by the step's targets would be 0 / 0, or divided by one batch more
        divides = self.loss.function is None and bool(trainer.model_accepts_loss_kwargs)
        use_rows(changes, plan.rows, whole_steps=divides)
        warn_of_room(trainer)
        warn_of_last_tokens(self.loss)
        warn_of_rows(changes, self.loss)
        if self.loss.function is not None:
            changes.wrap("compute_loss", padding_loss)
        add_noise_by_document(changes)
        if request.fast:
            changes.set("packed_step", PackedStep(changes, self.loss, chooses_memory=request.memory == "auto"))
        elif self.loss.of_trl and isinstance(plan.collator, PackedCollator):
            changes.set("marks_padding", True, of=plan.collator)  # or TRL would count the tokens of one row alone
        if self.why_per_batch is None:
            TokenMean(changes)
        changes.wrap("prediction_step", _predict, trainer)
        changes.wrap("_track_num_input_tokens", _track_tokens)
        if generates_in_evaluation(trainer) and isinstance(plan.collator, ReplacingCollator):
            for name in ("get_eval_dataloader", "get_test_dataloader"):
                changes.wrap(name, _dataloader_by, trainer, plan.collator.replaced.padded)
        SameLoss(changes)


def _count_targets(count: Callable[..., Any], trainer: Any, batches: list[Any], device: Any) -> Any:
    """Counts targets as ``Trainer`` does, which takes -100 for a missing label in a regression too.

    A step without a target has one, so that its loss is 0 and not 0 / 0, which would make all weights NaN.
    """
    if labels_documents(trainer.model):
        config = causal_lm(trainer.model).config
        trained = [targets_among(batch["labels"], config, of_documents=True) for batch in batches if "labels" in batch]
        batches = [{"labels": torch.where(targets, 0, IGNORE_INDEX)} for targets in trained]
    targets = count(batches, device)
    return torch.where(targets == 0, 1, targets) if isinstance(targets, Tensor) else targets


def _dataloader_by(make: Any, trainer: Any, collator: Any, *args: Any, **options: Any) -> Any:
    with with_values([(trainer, "data_collator", collator)]):
        return make(*args, **options)


def _predict(
    prediction_step: Any,
    trainer: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None = None,
    **options: Any,
) -> Any:
    """As ``Trainer.prediction_step``. A classifier predicts by document already, and its inputs are rows."""
    loss, logits, labels = prediction_step(model, inputs, prediction_loss_only, ignore_keys, **options)
    if not labels_documents(trainer.model):
        logits, labels = by_document(logits, inputs), by_document(labels, inputs)
    # the loop reads inputs from the batch after this call
    if "inputs" in trainer.args.include_for_metrics and inputs.get(BatchKey.DOCUMENTS):
        mask = torch.ones_like(inputs["input_ids"].as_subclass(Tensor))
        values = {name: by_document(value, inputs) for name, value in {**inputs, "attention_mask": mask}.items()}
        values["attention_mask"] = values["attention_mask"].clamp(min=0)
        inputs.clear()
        inputs.update({name: value for name, value in values.items() if name not in BatchKey.ALL})
    return loss, logits, labels


def _track_tokens(track: Any, inputs: Any) -> None:
    """As ``Trainer._track_num_input_tokens``, which without a mask takes for padding what its tokenizer pads with."""
    packed = isinstance(inputs, Mapping) and inputs.get(BatchKey.LENGTHS) and inputs.get(BatchKey.DOCUMENTS)
    if packed and inputs.get("attention_mask") is None:
        lengths, documents = inputs[BatchKey.LENGTHS], inputs[BatchKey.DOCUMENTS]
        real = sum(lengths[segment] for segment in {segment for numbers in documents for segment in numbers})
        inputs = {**inputs, "attention_mask": torch.tensor(real)}  # of which the sum is taken
    track(inputs)


def by_document(values: Any, batch: Mapping[str, Any]) -> Any:
    """Tensors [B, S, ...], also inside tuples and mappings, as [documents, longest, ...]; all others as they are."""
    if isinstance(values, tuple | list):
        return type(values)(by_document(value, batch) for value in values)
    if isinstance(values, Mapping):
        return {name: by_document(value, batch) for name, value in values.items()}
    lengths, documents = batch.get(BatchKey.LENGTHS), batch.get(BatchKey.DOCUMENTS)
    if not isinstance(values, Tensor) or not documents or values.shape[:2] != batch["input_ids"].shape:
        return values
    segments = values.flatten(0, 1).split(lengths)
    whole = [torch.cat([segments[number] for number in numbers]) for numbers in documents]
    return pad_sequence(whole, batch_first=True, padding_value=IGNORE_INDEX)
