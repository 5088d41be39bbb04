"""The evaluation loss of a trainer, as the mean over the trained tokens of the whole evaluation set.

Each batch -> the loss in the output of its model's call, without a router's, times what it was divided by -> sums that
stay on the device -> one sum over the ranks at the end -> ``eval_loss``, equal whatever the batches are. Transformers'
own number, a mean of the means of batches, is ``eval_loss_per_batch`` beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import LENGTHS
from packing_core.batches.stored import IGNORE_INDEX
from torch_backend.hf.anatomy.heads import head_of, takes_next_token_loss
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.router import coefficient_of
from torch_backend.losses.causal_lm import loss_in
from torch_backend.ops.divisor import Divisor, part_of_mean
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.own_loss import COUNT, TrainerLoss

logger = logging.getLogger(__name__)
LABELS = ("labels", "shift_labels")
EXAMPLES = "documents of each example"  # in a batch of an evaluation, until its step takes them out


def why_per_batch(loss: TrainerLoss) -> str | None:
    """Explains why ``eval_loss`` remains transformers' mean over batches; None if it does not."""
    trainer, root = loss.trainer, causal_lm(loss.trainer.model)
    if (reason := loss.why_not_known()) is not None:
        return reason
    if trainer.label_smoother is not None:
        return "labels are smoothed"
    head, step = head_of(root), type(trainer).prediction_step
    if head not in ("token", "masked token") and not (head == "next token" and takes_next_token_loss(root)):
        return f"the loss of {type(root).__name__} is not one of tokens, or of its own"
    if step.__module__.split(".")[0] not in ("transformers", "trl") or "prediction_step" in vars(trainer):
        return f"{type(trainer).__name__} has a prediction_step of its own"
    return None


class TokenMean:
    """Adds up the losses of the tokens that an evaluation predicts; replaces ``eval_loss`` of its metrics."""

    def __init__(self, changes: Changes) -> None:
        self.trainer = changes.trainer
        self.sums: list[Tensor] | None = None  # of each batch of an evaluation, its loss and its targets
        self.hook: Any = None
        self.waits = False  # for the loss of a batch
        self.said = False
        changes.wrap("prediction_step", self.prediction_step)
        changes.wrap("evaluation_loop", self.evaluation_loop)

    def prediction_step(self, step: Any, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        """As ``Trainer.prediction_step``, with the loss of the batch added up."""
        if self.sums is None:
            return step(model, inputs, *args, **options)
        if self.hook is None:
            self.hook = model.register_forward_hook(self._add, with_kwargs=True)
        self.waits = True
        try:
            return step(model, self._without_repeated(inputs), *args, **options)
        finally:
            self.waits = False

    def evaluation_loop(
        self, loop: Any, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **options: Any
    ) -> Any:
        """As ``Trainer.evaluation_loop``."""
        self.sums, loader = [], getattr(dataloader, "base_dataloader", dataloader)
        own = getattr(loader, "collate_fn", None)
        if counts := Divisor().ranks > 1 and isinstance(loader, DataLoader):
            loader.collate_fn = CountedDocuments(own)
        try:
            output = loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **options)
            total, count = self._over_ranks(self.sums)
        finally:
            self.sums = None
            if counts:
                loader.collate_fn = own
            if self.hook is not None:
                self.hook.remove()
            self.hook = None
        name, metrics = f"{metric_key_prefix}_loss", output.metrics
        if name in metrics and count:
            metrics[f"{name}_per_batch"], metrics[name] = metrics[name], total / count
            if not self.said:
                logger.warning(
                    "%s is the mean over all trained tokens, %.6g, and %s_per_batch transformers' mean of the means of "
                    "batches, %.6g",
                    *(name, metrics[name], name, metrics[f"{name}_per_batch"]),
                )
            self.said = True
        return output

    def _add(self, model: nn.Module, args: Any, batch: dict[str, Any], output: Any) -> None:
        labels, shifted = (batch.get(name) for name in LABELS)
        if self.sums is None or not self.waits or (labels is None and shifted is None):
            return
        self.waits, root = False, causal_lm(model)
        targets: Any = labels if shifted is None else shifted
        if shifted is None and head_of(root) == "next token":
            targets = targets[..., 1:]
        count = (targets != IGNORE_INDEX).sum()
        if getattr(output, "log_probs", None) is not None:  # of TRL's own forward, 0 where nothing is trained
            total = -output.log_probs.detach().sum()
        else:
            loss = loss_in(output).detach()
            if getattr(output, "aux_loss", None) is not None:  # which is defined over a batch
                loss = loss - (coefficient_of(root) or 0.0) * output.aux_loss.detach().to(loss.device)
            divisor = torch.as_tensor(count if batch.get(COUNT) is None else batch[COUNT], device=loss.device)
            total = part_of_mean(loss, divisor)
        self.sums.append(torch.stack([total.float().to(count.device), count]))

    def _over_ranks(self, sums: list[Tensor]) -> tuple[float, float]:
        """Returns the sum of the losses and the number of targets of all ranks; it waits for the GPU."""
        both, divisor = torch.stack(sums or [torch.zeros(2)]).cpu().double().sum(0), Divisor()
        if divisor.ranks > 1:
            both = divisor.total(both.to(self.trainer.accelerator.device))
        total, count = both.tolist()
        return total, count

    def _without_repeated(self, inputs: Any) -> Any:
        """A batch without the labels of the examples by which accelerate fills the last batches of all ranks."""
        counts = inputs.pop(EXAMPLES, ())
        loader, state = self.trainer.callback_handler.eval_dataloader, self.trainer.accelerator.gradient_state
        sampler: Any = getattr(loader, "batch_sampler", None)
        ranks = getattr(sampler, "num_processes", 1)
        if ranks == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        size = loader.total_batch_size // ranks
        real = min(max(state.remainder - sampler.process_index * size, 0), size)
        masked = {name: x.clone() for name, x in inputs.items() if name in LABELS and isinstance(x, Tensor)}
        documents, lengths = inputs.get(BatchKey.DOCUMENTS) or (), inputs.get(BatchKey.LENGTHS)
        for labels in masked.values():
            if documents and len(documents) == sum(counts):
                segments = labels.view(-1).split(lengths)
                for number in (n for document in documents[sum(counts[:real]) :] for n in document):
                    segments[number].fill_(IGNORE_INDEX)
            elif len(labels) == size:
                labels[real:] = IGNORE_INDEX
        return {**inputs, **masked}


class CountedDocuments:
    """A collator whose batches tell how many documents each of their examples holds."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        lengths = [next((x[name] for name in LENGTHS if name in x), 0) for x in features if isinstance(x, Mapping)]
        return {**batch, EXAMPLES: tuple(np.size(each) for each in lengths)}
