"""Context parallelism inside a ``Trainer``: groups of ranks get the same rows, and each rank trains a part of them.

``ParallelismConfig(cp_size=N)`` of accelerate -> :func:`context_mesh`, over which the model is patched -> :class:`
OverRanks`, which cuts each batch of a step and computes this rank's part of the loss. Accelerate deals the rows to the
groups, wraps the model and averages gradients over all ranks. Its own context parallelism is turned off: it replaces
attention masks by ``is_causal``, so the documents of a row would see each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import UnsupportedError
from torch_backend.context_parallel.group import ContextGroup
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.inputs.boundaries import refuse_split_rows
from torch_backend.hf.patch import context_of, cut_over_ranks, refuse_context_of
from torch_backend.hf.router import SWITCH, asks_for_router_loss
from torch_backend.losses.causal_lm import LOSS_WEIGHTS, causal_lm_loss, loss_and_router_loss
from torch_backend.ops.divisor import Divisor
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.own_loss import StepMetrics, TrainerLoss, router_coefficient
from torch_backend.trainers.port import models_of

WITHOUT_RANKS = "enable_packing(trainer) without ParallelismConfig(cp_size=...)"
WEIGHTS_REFUSED = (
    'a Trainer divides its loss by the number of targets, and rows with weighting="document" weigh them: '
    'train by crosspack.make_train_step(model, optimizer), or pack with weighting="token"'
)


def context_mesh(trainer: Any, why_whole: Callable[[], str | None], models: Sequence[Any] | None = None) -> Any:
    """Returns the ranks over which a trainer cuts its rows, as a mesh of one dimension; None without any.

    Args:
        why_whole: explains why its loss needs whole documents; None if it does not.
        models: that are patched; None for those that every trainer may have.

    Raises:
        UnsupportedError: the trainer's loss or arguments do not compute over ranks.
        UnsupportedModelError: its model was patched with a mesh, and its rows are not dealt to groups of ranks.
    """
    parallelism = trainer.accelerator.parallelism_config
    refuse_split_rows(parallelism, kinds=("sequence",))
    size = trainer.get_cp_size() if hasattr(trainer, "get_cp_size") else getattr(parallelism, "cp_size", 1)
    if size == 1:
        for model in models_of(trainer) if models is None else models:
            refuse_context_of(model, WITHOUT_RANKS)
        return None
    if (reason := why_whole() or _why_not_arguments(trainer)) is not None:
        raise UnsupportedError(f"context parallelism (cp_size={size}) cuts documents over ranks, and {reason}")
    if getattr(parallelism, "cp_enabled", False):
        return trainer.accelerator.torch_device_mesh["cp"]
    context = context_of(trainer.model)
    assert context is not None  # a trainer that says so itself has patched its model
    return context.mesh


def why_not_rows(trainer: Any, loss: TrainerLoss, *, fast: bool) -> str | None:
    """Explains why a trainer's loss is not computed from parts of rows; None if it is."""
    if not fast:
        return "the trainer's own step runs whole ones: leave fast=False out"
    if (reason := loss.why_not_known()) is not None:
        return f"every rank computes its part of the loss without the logits of others: {reason}"
    if not trainer.args.average_tokens_across_devices:
        return "their targets are counted on all ranks: leave average_tokens_across_devices=False out"
    return None


def _why_not_arguments(trainer: Any) -> str | None:
    """Explains which argument or component of a trainer needs whole documents; None if none does."""
    args, parallelism = trainer.args, trainer.accelerator.parallelism_config
    if trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None:
        return "no rank has the logits of whole ones: leave compute_metrics and preprocess_logits_for_metrics out"
    if args.neftune_noise_alpha is not None:
        return "NEFTune's noise depends on their lengths: leave neftune_noise_alpha out"
    if args.torch_compile:
        return "their pieces differ in every batch: leave torch_compile out"
    counts = getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False)
    if counts and not hasattr(trainer, "_track_num_input_tokens"):
        return (
            "in this transformers each rank would count all of their tokens: leave include_num_input_tokens_seen out, "
            "or install a newer transformers"
        )
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed averages gradients over ranks of its own choice: use DDP or FSDP2"
    if getattr(parallelism, "tp_enabled", False):
        return f"tensor parallelism beside it is not tested: leave tp_size={parallelism.tp_size} out"
    return None


class OverRanks:
    """This rank's part of the batches and losses of a trainer.

    Args:
        changes: of a trainer whose model is patched with a mesh; its own context parallelism is turned off.
        context: the group of ranks.
        metrics: of an ``SFTTrainer``; None for other trainers.
    """

    def __init__(self, changes: Changes, context: ContextGroup, metrics: StepMetrics | None = None) -> None:
        trainer = changes.trainer
        self.trainer, self.context, self.metrics = trainer, context, metrics
        self.divisor = Divisor(context.group)
        self.coefficient = None if metrics is None else router_coefficient(trainer)
        self.smoothing = 0.0 if trainer.label_smoother is None else float(trainer.label_smoother.epsilon)
        changes.set("label_smoother", None)  # which reads the logits of whole rows
        prepare_for_groups(changes, context.ranks)
        changes.set("model_accepts_loss_kwargs", True)  # so that it counts the targets of a step

    def cut(self, batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Returns this rank's part of a batch."""
        if LOSS_WEIGHTS in batch:
            raise UnsupportedError(WEIGHTS_REFUSED)
        return cut_over_ranks(model, batch if self.coefficient is None else {**batch, SWITCH: True})

    def in_place_of(self, model: nn.Module) -> Any:
        """Returns a replacement for the model in ``Trainer.compute_loss``, which returns the loss alone.

        It takes this rank's part of a batch. The loss is this rank's part of the sum, divided by the targets that the
        trainer has counted on all ranks. Without their number it is such that the mean over the group is the loss of
        the batch. In evaluation every rank of the group returns that mean. A router's loss is added for each
        microbatch, as transformers does; TRL takes the mean over microbatches and groups.
        """

        def call(num_items_in_batch: Any = None, **inputs: Any) -> dict[str, Tensor]:
            total, weight, addend = self._loss(model, inputs)
            if num_items_in_batch is None:
                loss = self.divisor.mean(total, self.divisor.total(weight)) + addend
            else:
                loss = total / num_items_in_batch + addend / self._times_added()
            return {"loss": loss if model.training else self.divisor.average(loss)}

        return call

    def _times_added(self) -> int:
        """Counts how often a step adds a router's loss that counts once, after the trainer multiplies by its ranks."""
        if self.coefficient is None:
            return self.context.ranks
        ranks: int = self.trainer.accelerator.num_processes
        steps: int = self.trainer.current_gradient_accumulation_steps
        return ranks * steps

    def _loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | float]:
        """The sum over the rank's targets, their number, and a router's loss of all ranks, which each rank has."""
        if self.smoothing:
            return *self._smoothed_loss(model, batch), 0.0  # where transformers and TRL leave the router's loss out too
        if not asks_for_router_loss(causal_lm(model), batch):
            return *causal_lm_loss(model, batch), 0.0
        total, count, addend, router_loss = loss_and_router_loss(model, batch)
        if self.metrics is None or self.coefficient is None:
            return total, count, addend
        self.metrics.add_router_loss(router_loss)
        return total, count, self.coefficient * router_loss

    def _smoothed_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The sum of transformers' ``LabelSmoother`` over the rank's targets, and their number."""
        targets = batch["shift_labels"].flatten()
        inputs = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
        output = model(**inputs, use_cache=False)
        if self.metrics is not None and self.coefficient is not None:
            self.metrics.add_router_loss(output["aux_loss"])
        logits = output["logits"].flatten(0, 1).float()
        total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self.smoothing)
        return total, (targets != IGNORE_INDEX).sum()


class ScoresOverRanks:
    """Batches and losses of a trainer of TRL whose padded calls run packed and cut over ranks.

    Every rank of a group has the log-probabilities of the group's documents, computes the trainer's own loss of them
    and logs it. For what it gathers of other ranks a group is one process.
    """

    def __init__(self, changes: Changes, ranks: int) -> None:
        self.trainer, self.ranks = changes.trainer, ranks
        prepare_for_groups(changes, ranks)
        changes.wrap("compute_loss", self.compute_loss)

    def compute_loss(
        self, stock_loss: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """As ``Trainer.compute_loss``."""
        if return_outputs:
            refuse_outputs(self.ranks)
        if not self.trainer.model.training:
            gather_means(self.trainer, self.ranks)
        accelerator = self.trainer.accelerator
        accelerator.gather = partial(_of_each_group, accelerator, self.ranks)
        try:
            return stock_loss(model, inputs, **kwargs)
        finally:
            del accelerator.gather


def _of_each_group(accelerator: Any, ranks: int, data: Any) -> Any:
    """Replaces ``Accelerator.gather``: what the first rank of each group has, because the others have the same."""
    groups = accelerator.num_processes // ranks

    def first(x: Tensor) -> Tensor:
        return x.unflatten(0, (groups, ranks, -1))[:, 0].flatten(0, 1)

    gathered = type(accelerator).gather(accelerator, data)
    return tuple(map(first, gathered)) if isinstance(gathered, tuple) else first(gathered)


def prepare_for_groups(changes: Changes, ranks: int) -> None:
    """Turn off accelerate's own context parallelism in a trainer, and count the batches of a group once."""
    changes.set("_prepare_context_parallel_inputs", lambda model, inputs: (nullcontext, inputs))
    changes.set("_prepare_cp", lambda *objects: objects, of=changes.trainer.accelerator)
    changes.wrap("floating_point_ops", lambda count, inputs: count(inputs) / ranks)  # the trainer adds up all ranks'
    if hasattr(changes.trainer, "_track_num_input_tokens"):
        changes.wrap("_track_num_input_tokens", _track_once, changes.trainer, ranks)


def _track_once(track: Any, trainer: Any, ranks: int, inputs: Any) -> None:
    """As ``Trainer._track_num_input_tokens``, which adds up the inputs of all ranks."""
    before = trainer.state.num_input_tokens_seen
    track(inputs)
    trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // ranks


def gather_means(trainer: Any, ranks: int) -> None:
    """Let an evaluation weigh the mean loss of each batch of all groups by its documents.

    By itself transformers weighs a last batch of fewer documents less than the others, because every rank of a
    group has its loss, and of several groups it takes the first one's part of that loss for the mean.
    """
    trainer.gather_function = partial(_means, trainer.accelerator, ranks)


def refuse_outputs(ranks: int) -> None:
    """Raise for a prediction of logits, of which every rank has a part.

    Raises:
        UnsupportedError
    """
    raise UnsupportedError(
        f"documents are cut over {ranks} ranks, and no rank has the logits of whole ones: pass "
        "prediction_loss_only=True, or predict with a model that is patched without a mesh"
    )


def _means(accelerator: Any, ranks: int, losses: Tensor) -> Tensor:
    """Replaces ``Accelerator.gather_for_metrics`` for losses: the mean of all groups, once for each document."""
    gathered, state = accelerator.gather(losses), accelerator.gradient_state
    last = state.end_of_dataloader and state.remainder > 0
    return gathered.mean().repeat(state.remainder if last else len(gathered) // ranks)
