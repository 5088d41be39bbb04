"""The loss of a trainer: transformers', TRL's or custom, with TRL's logs and warnings where a custom one differs.

Batches of a training step of an ``SFTTrainer`` -> :class:`StepMetrics` counts their tokens -> ``num_tokens`` of its
log. TRL counts in ``compute_loss``, which a CUDA graph does not call, and there it waits for the GPU in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from packing_core.batches.keys import BatchKey
from packing_core.budget import FLOAT32, NARROW
from packing_core.errors import LayoutError, PackingError
from packing_core.extras import require
from packing_core.storage.ragged import Ragged
from torch_backend.auditing.trainer import as_before
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.additions import computes_its_own
from torch_backend.hf.anatomy.heads import head_of, takes_next_token_loss
from torch_backend.hf.anatomy.structure import causal_lm, in_mode
from torch_backend.hf.index_loss import index_coefficient
from torch_backend.hf.inputs.guard import Guard
from torch_backend.hf.patch import context_of, state_of
from torch_backend.hf.router import asks_for_router_loss
from torch_backend.ops.divisor import part_of_mean
from torch_backend.segments import to_device
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.replaced import ReplacingCollator

require("transformers", extra="hf")

from transformers import Trainer, TrainerCallback  # noqa: E402

logger = logging.getLogger(__name__)

_LOOKED_AT = 4  # packed batches whose gradients are looked at
COUNT = "num_items_in_batch"  # the argument by which transformers hands the step's targets to a loss
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


def is_stock(trainer: Any, method: str) -> bool:
    """Returns whether a trainer's method is that of transformers."""
    return getattr(type(trainer), method) is getattr(Trainer, method) and method not in trainer.__dict__


def is_of_sft(trainer: Any, method: str) -> bool:
    """Returns whether a method of a trainer's class is the one that TRL's ``SFTTrainer`` defines."""
    owner = next(kind for kind in type(trainer).__mro__ if method in vars(kind))
    return owner.__module__.split(".")[0] == "trl" and owner.__name__ == "SFTTrainer"


def router_coefficient(trainer: Any) -> float | None:
    """Returns by what TRL multiplies the auxiliary loss of a router, whatever the model's own; None if it adds none."""
    return float(trainer.router_aux_loss_coef) if getattr(trainer, "aux_loss_enabled", False) else None


class TrainerLoss:
    """The loss of a trainer: that of transformers, that of TRL's ``SFTTrainer``, or somebody's own.

    Attributes:
        of_trl: whether its ``compute_loss`` is that of TRL's ``SFTTrainer``.
        own: whether its ``compute_loss`` is neither that nor transformers'.
        function: of a loss of somebody's own, the ``compute_loss`` or ``compute_loss_func``; None of another.
        name: of that function in messages.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.of_trl = is_of_sft(trainer, "compute_loss") and "compute_loss" not in trainer.__dict__
        self.own = not (self.of_trl or is_stock(trainer, "compute_loss"))
        self.function = trainer.compute_loss if self.own else trainer.compute_loss_func
        self.name = f"{type(trainer).__name__}.compute_loss" if self.own else "compute_loss_func"

    def why_not_known(self) -> str | None:
        """Explains why the loss is not the cross entropy of the targets, smoothed or not."""
        if self.own:
            return f"{type(self.trainer).__name__} computes its loss itself (compute_loss)"
        if self.function is not None:
            return "compute_loss_func reads them"
        kind = getattr(self.trainer.args, "loss_type", "nll") if self.of_trl else "nll"
        return None if kind in ("nll", "chunked_nll") else f"loss_type={kind!r} is a loss of TRL's own"

    def why_logits(self) -> str | None:
        """Explains why the loss needs logits, as far as the trainer decides it."""
        if (reason := self.why_not_known()) is not None:
            return reason
        model = self.trainer.model
        adds_router_loss = router_coefficient(self.trainer) is not None
        adds_router_loss |= asks_for_router_loss(causal_lm(model), {})
        if index_coefficient(causal_lm(model)):
            return "the model adds the loss of its indexers to each microbatch in full"
        if adds_router_loss and context_of(model) is None:  # over ranks our loss adds it
            return "the trainer adds the router's auxiliary loss of each microbatch in full"
        return None if self.trainer.label_smoother is None else "label smoothing reads them"


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

    That is a loss per example or over the size of the batch, which takes a row for one example, or that of a module
    around the model whose layers do.
    """
    trainer, name = loss.trainer, loss.name
    root = causal_lm(trainer.model)
    around = _around(trainer.model, root)
    if (head_of(root) != "next token" and around is None) or context_of(root) is not None:
        return
    if around is not None and loss.function is None:
        name = f"the loss of {type(around).__name__}"
    elif loss.function is None:
        if takes_next_token_loss(root) and type(root).__module__.startswith("transformers."):
            return
        name = f"the loss of {type(root).__name__}"
    if isinstance(trainer.data_collator, ReplacingCollator) and len(trainer.data_collator.replaced.shortest) > 1:
        changes.add_callback(_ComparedLoss(trainer, name))


def _around(model: nn.Module, root: nn.Module) -> nn.Module | None:
    """Returns the first module of somebody's own that stands around a transformers model; None if none does."""
    inside = set(root.modules())
    return next((m for m in model.modules() if m not in inside and computes_its_own(type(m))), None)


class _ComparedLoss(TrainerCallback):
    """Compares a loss on a few documents in a batch of the replaced collator and on the same documents packed."""

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
                "example, as a mean of the means of examples, a sum over the size of the batch, a value of the last "
                "token or a layer along the row does, or it trains first tokens, whose labels are -100 in rows. Sum "
                "over the tokens of labels and divide by %s, or take values for each document (packed_lengths), to "
                "train the same packed",
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


def padding_loss(compute_loss: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
    """As ``compute_loss``; a batch of padding alone, which fills up the last step of ranks, trains nothing.

    A loss of somebody's own that divides by its targets would be 0 / 0 there, and so would all gradients: it gets one
    target, and what the model returns no gradient.
    """
    if inputs.get(BatchKey.DOCUMENTS) != ():
        return compute_loss(model, inputs, *args, **options)
    labels = inputs.get("labels")
    if labels is not None and labels.ndim > 1 and labels.shape[1] > 1:
        inputs = {**inputs, "labels": labels.clone()}
        inputs["labels"][:, 1] = 0
    with model.register_forward_hook(_stop_gradients):
        result = compute_loss(model, inputs, *args, **options)
    loss, *outputs = result if isinstance(result, tuple) else (result,)
    loss = part_of_mean(loss, torch.zeros((), device=loss.device))
    return (loss, *outputs) if isinstance(result, tuple) else loss


def _stop_gradients(model: Any, args: Any, output: Any) -> None:
    """Makes gradients of what a model returns 0, also where they are not finite."""
    for x in tree_leaves(output):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(torch.zeros_like)


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
