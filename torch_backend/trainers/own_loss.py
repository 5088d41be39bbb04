"""Classifies a trainer's loss (transformers, TRL, custom), and warns where a custom one differs on packed rows."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.budget import FLOAT32, NARROW
from packing_core.errors import LayoutError, PackingError
from packing_core.extras import require
from torch_backend.auditing.trainer import as_before
from torch_backend.hf.anatomy.heads import head_of, takes_next_token_loss
from torch_backend.hf.anatomy.structure import causal_lm, in_mode
from torch_backend.hf.index_loss import index_coefficient
from torch_backend.hf.inputs.guard import Guard
from torch_backend.hf.patch import context_of, state_of
from torch_backend.hf.router import asks_for_router_loss
from torch_backend.segments import to_device
from torch_backend.trainers import sft
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.replaced import ReplacingCollator

require("transformers", extra="hf")

from transformers import Trainer, TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)

_LOOKED_AT = 4  # packed batches whose gradients are looked at
COUNT = "num_items_in_batch"  # the argument by which transformers hands the step's targets to a loss


def is_stock(trainer: Any, method: str) -> bool:
    """Returns whether a trainer's method is that of transformers."""
    return getattr(type(trainer), method) is getattr(Trainer, method) and method not in trainer.__dict__


class TrainerLoss:
    """The loss of a trainer: that of transformers, that of TRL's ``SFTTrainer``, or somebody's own.

    Args:
        trainer: nothing of it is changed.

    Attributes:
        of_trl: whether its ``compute_loss`` is that of TRL's ``SFTTrainer``.
        own: whether its ``compute_loss`` is neither that nor transformers'.
        function: of a loss of somebody's own, the ``compute_loss`` or ``compute_loss_func``; None of another.
        name: of that function in messages.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.of_trl = sft.defines(trainer, "compute_loss") and "compute_loss" not in trainer.__dict__
        self.own = not (self.of_trl or is_stock(trainer, "compute_loss"))
        self.function = trainer.compute_loss if self.own else trainer.compute_loss_func
        self.name = f"{type(trainer).__name__}.compute_loss" if self.own else "compute_loss_func"

    def why_not_known(self) -> str | None:
        """Explains why the loss is not the cross entropy of the targets, smoothed or not."""
        if self.own:
            return f"{type(self.trainer).__name__} computes its loss itself (compute_loss)"
        if self.function is not None:
            return "compute_loss_func reads them"
        return sft.why_logits(self.trainer) if self.of_trl else None

    def why_logits(self) -> str | None:
        """Explains why the loss needs logits, as far as the trainer decides it."""
        if (reason := self.why_not_known()) is not None:
            return reason
        model = self.trainer.model
        adds_router_loss = sft.router_coefficient(self.trainer) is not None
        adds_router_loss |= asks_for_router_loss(causal_lm(model), {})
        if index_coefficient(causal_lm(model)):
            return "the model adds the loss of its indexers to each microbatch in full"
        if adds_router_loss and context_of(model) is None:  # over ranks our loss adds it
            return "the trainer adds the router's auxiliary loss of each microbatch in full"
        return None if self.trainer.label_smoother is None else "label smoothing reads them"


def check_losses(changes: Changes, loss: TrainerLoss) -> None:
    """Let a trainer tell where a loss of somebody's own is another one on packed rows."""
    warn_of_last_tokens(loss)
    warn_of_rows(changes, loss)


def warn_of_last_tokens(loss: TrainerLoss) -> None:
    """Log once where a loss of the trainer's own trains what the last tokens of documents predict.

    The next token is another document's there, so labels are -100; a loss that shifts ``input_ids`` trains it. It is
    seen by the gradient of the logits in the first packed batches. Losses of hidden states are not seen.
    """
    root = causal_lm(loss.trainer.model)
    if loss.function is None or context_of(root) is not None:
        return
    watched = any(getattr(hook, "func", None) is _watch_last_tokens for hook in root._forward_hooks.values())
    if head_of(root) == "next token" and not watched:
        root.register_forward_hook(partial(_watch_last_tokens, loss.name), with_kwargs=True)


def _watch_last_tokens(name: str, root: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    logits, lengths, state = getattr(output, "logits", None), kwargs.get(BatchKey.LENGTHS), state_of(root)
    if not (root.training and isinstance(logits, Tensor) and logits.requires_grad and lengths and state is not None):
        return
    if logits.shape[:2].numel() == sum(lengths) and state.guard.begins("last tokens", _LOOKED_AT):
        logits.register_hook(partial(_check_last_tokens, name, lengths, state.guard))


def _check_last_tokens(name: str, lengths: tuple[int, ...], guard: Guard, gradient: Tensor) -> None:
    ends = to_device(torch.tensor(lengths).cumsum(0) - 1, gradient.device)

    def error(i: int) -> PackingError:
        return LayoutError(
            f"{name} trains what the last token of segment {i} predicts. Where it shifts input_ids, this is the first "
            "token of another document: take the targets from labels, which are -100 there. Where it is a penalty on "
            "the logits of all tokens, crosspack.audit(trainer) says whether documents stay apart"
        )

    def find() -> Tensor:
        return (gradient.flatten(0, 1).index_select(0, ends) != 0).any(1)

    guard.check("last tokens", find, error, warns=True)


def warn_of_rows(changes: Changes, loss: TrainerLoss) -> None:
    """Let training log, at its first step, that a loss of somebody's own is another one where documents are packed.

    That is a loss per example or over the size of the batch, which takes a row for one example.
    """
    trainer, name = loss.trainer, loss.name
    root = causal_lm(trainer.model)
    if head_of(root) != "next token" or context_of(root) is not None:
        return
    if loss.function is None:
        if takes_next_token_loss(root) and type(root).__module__.startswith("transformers."):
            return
        name = f"the loss of {type(root).__name__}"
    if isinstance(trainer.data_collator, ReplacingCollator) and len(trainer.data_collator.replaced.shortest) > 1:
        changes.add_callback(_ComparedLoss(trainer, name))


class _ComparedLoss(TrainerCallback):
    """Compares a loss on a few documents in a batch of the replaced collator and on the same documents packed.

    Args:
        trainer: nothing of it is changed.
        name: of its loss, in the message.
    """

    def __init__(self, trainer: Any, name: str) -> None:
        self.trainer = trainer
        self.name = name
        self.compared = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.compared or not isinstance(self.trainer.data_collator, ReplacingCollator):
            return
        self.compared = True
        try:
            packed, padded = self._losses()
        except Exception as error:  # such as that of a loss that reads the boundaries of packed batches
            logger.info("%s was not compared with itself on a padded batch: %s", self.name, error)
            return
        dtypes = {p.dtype for p in self.trainer.model.parameters()}
        exact = dtypes <= {torch.float32, torch.float64} and self.trainer.accelerator.mixed_precision == "no"
        if abs(packed - padded) > (FLOAT32 if exact else NARROW) * max(abs(packed), abs(padded)):
            collator = self.trainer.data_collator.replaced
            logger.warning(
                "%s is %.6g on %d documents that are packed and %.6g on a batch that %s pads: it takes a row for one "
                "example, as a mean of the means of examples, a sum over the size of the batch or a value of the last "
                "token does. Sum over the tokens of labels and divide by %s, or take values for each document "
                "(packed_lengths), to train the same packed",
                *(self.name, packed, len(collator.shortest), padded, collator.name, COUNT),
            )

    def _losses(self) -> tuple[float, float]:
        """Returns the loss of packed and of padded documents, in evaluation, with one number of targets."""
        trainer, collator = self.trainer, self.trainer.data_collator
        examples = collator.replaced.shortest
        batches = [trainer._prepare_inputs(dict(collate(examples))) for collate in (collator, collator.replaced.padded)]
        model, eager = trainer.model_wrapped, torch.compiler.set_stance("force_eager")
        with as_before(trainer), in_mode(model, training=False), torch.random.fork_rng(), torch.no_grad(), eager:
            count = trainer._get_num_items_in_batch(batches[:1], trainer.args.device)
            with trainer.compute_loss_context_manager():
                losses = [trainer.compute_loss(model, dict(x), num_items_in_batch=count) for x in batches]
        packed, padded = (float(loss) for loss in losses)
        return packed, padded
