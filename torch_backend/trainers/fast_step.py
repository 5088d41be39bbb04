"""The fast training step inside somebody else's ``Trainer``: what ``enable_packing`` puts in place of three methods.

``training_step`` of the trainer -> :class:`torch_backend.steps.fast_backward.Gradients` -> the trainer's own
``training_step``, through compiled layers and as a CUDA graph where nothing forbids them -> ``compute_loss`` of
transformers -> the loss without logits in place of the model's. So accumulation, scaling, autocast and everything after
the backward remain the trainer's. What cannot take the fast path takes the one that the trainer has without it.

TRL's ``SFTTrainer`` trains by the same step, because its ``loss_type="nll"`` is the loss of transformers. Its other
losses and its evaluation stay its own (:mod:`.own_loss`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packing_core import PackedDataset
from packing_core.errors import UnsupportedError, UnsupportedModelError
from packing_core.extras import require
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.structure import causal_lm, with_values
from torch_backend.hf.patch import context_of, install, state_of
from torch_backend.losses.causal_lm import LOSS_WEIGHTS, causal_lm_loss
from torch_backend.ops.divisor import quotient
from torch_backend.steps.eligibility import fast_loss_refused, why_not_compiled
from torch_backend.steps.fast_backward import (
    GRAPH,
    LAYERS,
    LOSS,
    Batch,
    Choice,
    Gradients,
    StepInputs,
    run_layers,
)
from torch_backend.steps.fixed_shapes import FixedShapes
from torch_backend.steps.memory_fit import FittedLevel, StepMemory, tokens_of
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.dataloader import rows_of
from torch_backend.trainers.epoch_rows import EpochRows

require("transformers", extra="hf")

from transformers import Trainer  # noqa: E402

from torch_backend.trainers.callbacks import without_waiting  # noqa: E402
from torch_backend.trainers.over_ranks import (  # noqa: E402
    WEIGHTS_REFUSED,
    OverRanks,
    gather_means,
    refuse_outputs,
)
from torch_backend.trainers.own_loss import (  # noqa: E402
    LEFT_OUT,
    LEFT_OUT_OVER_RANKS,
    StepMetrics,
    TrainerLoss,
    is_of_sft,
    is_stock,
    packed_lengths,
)


class PackedStep:
    """Replaces ``training_step``, ``compute_loss`` of transformers or TRL, and ``prediction_step`` of transformers.

    Attributes:
        parts: which of "loss", "layers" and "graph" use the fast path, and why the others do not; for an ``SFTTrainer``
            also "metrics", if it does not log all that it logs without the fast step.
        compile, capture, fixed: as of :class:`Gradients`; set them before the first step. Without ``fixed``, shapes are
            those of the trainer's rows.
    """

    def __init__(self, changes: Changes, loss: TrainerLoss, *, chooses_memory: bool = False) -> None:
        self.trainer = trainer = changes.trainer
        self.stock_step = trainer.training_step
        self.stock_loss = trainer.compute_loss
        self.refused = loss.why_logits()
        self.loss_only = False
        self.compile: Choice = "auto"
        self.capture: Choice = "auto"
        self.fixed: FixedShapes | None = None
        self.in_place_of_compile = False  # of the whole model, torch_compile=True
        self.fitted = FittedLevel(chooses=chooses_memory)
        self.gradients: Gradients | None = None
        self.size = 0  # of the batches that it was made for
        context = context_of(trainer.model)
        copies = 1 if context is None else context.ranks
        self.metrics = StepMetrics(changes, copies) if loss.of_trl else None
        self.over_ranks = None if context is None else OverRanks(changes, context, self.metrics)
        self.losses = without_waiting(changes)
        changes.set("training_step", self.training_step)
        if self.refused is None or self.over_ranks is not None:
            changes.set("compute_loss", self.compute_loss)
            if is_stock(trainer, "prediction_step"):
                changes.wrap("prediction_step", self.prediction_step)
        if trainer.args.torch_compile or trainer.args.use_liger_kernel:
            changes.wrap("prepare_model", self._prepare_model, of=trainer.accelerator)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.trainer.model
        return model

    @property
    def parts(self) -> dict[str, str]:
        if self.gradients is not None:
            parts = dict(self.gradients.parts)
        else:
            parts = dict.fromkeys((LOSS, LAYERS, GRAPH), "decided at the first step")
            if self.refused is not None:
                parts[LOSS] = f"with logits: {self.refused}"
        if self.in_place_of_compile:
            parts[LAYERS] += ", one by one, in place of the model as a whole (torch_compile=True)"
        if self.metrics is not None and self.refused is None:
            parts["metrics"] = LEFT_OUT if self.over_ranks is None else LEFT_OUT_OVER_RANKS
        if (memory := self.memory.describe()) is not None:
            parts["memory"] = memory
        return parts

    @property
    def memory(self) -> StepMemory:
        args = self.trainer.args
        cast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        return StepMemory(self.model, self.trainer.optimizer, cast, args.gradient_accumulation_steps > 1)

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """As ``Trainer.training_step``."""
        model.train()  # a graph replays kernels, not this
        if callable(getattr(self.trainer.optimizer, "train", None)):
            self.trainer.optimizer.train()
        size = self.trainer._train_batch_size  # auto_find_batch_size reduces it
        fresh = self.gradients is None or self.gradients.model is not model or size != self.size
        if fresh:
            self.fitted.tokens = 0
        fresh |= self.fitted.fit(self.memory, tokens_of(inputs))
        if fresh:
            self.size, self.gradients = size, self._gradients(model)
        if self.metrics is not None:
            inputs = self.metrics.count(inputs)
        if self.over_ranks is not None:
            inputs = self.over_ranks.cut(inputs, model)
        last = self.trainer.accelerator.sync_gradients
        assert self.gradients is not None
        with self.memory.naming_the_level(inputs):
            loss: Tensor = self.gradients(StepInputs(inputs, num_items_in_batch), last=last)
        return self.losses(loss if self.over_ranks is None else self.over_ranks.divisor.average(loss))

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As ``compute_loss`` of the trainer; without logits, unless its outputs or TRL's metrics are wanted."""
        logits_wanted = return_outputs and not self.loss_only
        if self.over_ranks is not None:
            if logits_wanted:
                refuse_outputs(self.over_ranks.context.ranks)
            if not self.model.training:
                gather_means(self.trainer, self.over_ranks.context.ranks)
                if self.metrics is not None:
                    self.metrics.log_evaluation()
            of_part: Any = self.over_ranks.in_place_of(model)
            part = self.over_ranks.cut(inputs, model)
            return Trainer.compute_loss(self.trainer, of_part, part, return_outputs, num_items_in_batch)
        if self.metrics is not None and not self.model.training:
            self.metrics.update()
            logits_wanted = True
        if self.refused is None and not logits_wanted and inputs.get("labels") is not None:
            loss = partial(Trainer.compute_loss, self.trainer)
            try:
                return loss(_without_logits(model), inputs, return_outputs, num_items_in_batch)
            except UnsupportedModelError as refusal:
                self.refused = str(refusal)  # if it is not about the loss, the next line raises it again
        return self.stock_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self,
        stock_prediction: Any,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As ``Trainer.prediction_step``, which asks for outputs even if it uses the loss alone."""
        with with_values([(self, "loss_only", prediction_loss_only)]):
            return stock_prediction(model, inputs, prediction_loss_only, ignore_keys)

    def _gradients(self, model: nn.Module) -> Gradients:
        trainer = self.trainer
        whole = trainer.args.torch_compile and not self.in_place_of_compile
        layers = "torch_compile=True compiles the model as a whole" if whole else _why_not_layers(trainer)
        graph = layers or _why_not_graph(trainer) or (self.refused and "the loss is the trainer's own")
        return Gradients(
            model,
            lambda inputs: self.stock_step(model, dict(inputs.batch), inputs.targets),  # and that compute_loss
            partial(self._choose, model),
            compile=self.compile,
            capture=self.capture,
            no_layers=layers,
            no_graph=graph,
            fixed=self.fixed or _fixed_shapes(trainer),
            fits_whole=replace(self.memory, model=model).fits_whole,
        )

    def _prepare_model(self, prepare: Any, model: nn.Module, *args: Any, **options: Any) -> Any:
        """As ``Accelerator.prepare_model``, which would compile the model as a whole, also if its layers can be.

        Liger's forward of a model was set when training began, after the patch, and is wrapped from here on.
        """
        state = state_of(causal_lm(model))
        if state is not None and not state.in_force:
            install(model, state.implementation)
        if not self.trainer.args.torch_compile:
            return prepare(model, *args, **options)
        trainer, plugin = self.trainer, self.trainer.accelerator.state.dynamo_plugin
        self.in_place_of_compile = (_why_not_layers(trainer) or why_not_compiled(trainer.model)) is None
        backend = type(plugin.backend).NO if self.in_place_of_compile else plugin.backend
        with with_values([(plugin, "backend", backend)]):
            return prepare(model, *args, **options)

    def _choose(self, model: nn.Module, batch: Batch, forward: bool) -> str | None:
        inputs = self.trainer._prepare_inputs(dict(batch))
        with self.trainer.compute_loss_context_manager():
            if self.refused is None:
                self.refused = fast_loss_refused(model, inputs)
                if self.refused is not None and self.over_ranks is not None:
                    raise UnsupportedError(
                        f"ranks that hold parts of documents need the loss without logits: {self.refused}"
                    )
            if self.refused is not None and forward:
                with self.trainer.accelerator.autocast():
                    run_layers(model, inputs)
        return self.refused


def _without_logits(model: nn.Module) -> Any:
    """Returns a replacement for the model in the trainer, which returns the loss alone."""

    def call(num_items_in_batch: Any = None, **inputs: Any) -> dict[str, Tensor]:
        if LOSS_WEIGHTS in inputs:
            raise UnsupportedError(WEIGHTS_REFUSED)
        total, weight = causal_lm_loss(model, inputs)
        return {"loss": quotient(total, weight) if num_items_in_batch is None else total / num_items_in_batch}

    return call


def _why_not_layers(trainer: Any) -> str | None:
    """Explains why the layers of a trainer's model are not compiled."""
    args, collator = trainer.args, trainer.data_collator
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed partitions the model"
    if args.neftune_noise_alpha is not None:
        return "the noise of NEFTune depends on the documents of a batch"
    if getattr(args, "activation_offloading", False):
        return "activations are offloaded"
    if not isinstance(collator, PackedCollator) and _tokens(trainer) is None:
        return "the collator's rows have no fixed length"
    return None


def _why_not_graph(trainer: Any) -> str | None:
    """Explains why the training step of a trainer cannot be recorded as a CUDA graph."""
    args = trainer.args
    if type(trainer).training_step is not Trainer.training_step and not is_of_sft(trainer, "training_step"):
        return f"{type(trainer).__name__} has a training_step of its own"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP gathers parameters during the step"
    if trainer.accelerator.scaler is not None:
        return "float16 gradients are scaled by a factor that changes"
    if args.torch_empty_cache_steps is not None:
        return "torch_empty_cache_steps empties the cache during the step"
    return None


def _tokens(trainer: Any) -> int | None:
    """Tokens of the single row that TRL's packing makes of a batch, at most."""
    longest = getattr(trainer.args, "max_length", None) if getattr(trainer.args, "packing", False) else None
    return None if longest is None else longest * trainer._train_batch_size


def _fixed_shapes(trainer: Any) -> FixedShapes:
    """Shapes that fit every batch of a trainer, as far as its data tell their lengths."""
    size, data, rows = trainer._train_batch_size, trainer.train_dataset, rows_of(trainer)
    if isinstance(rows, EpochRows) or isinstance(data, PackedDataset):
        plan = rows.dealt(0).plan if isinstance(rows, EpochRows) else data.plan
        return FixedShapes.of_plans([plan], size, _tokens(trainer))
    if _tokens(trainer) is not None and (lengths := packed_lengths(trainer)) is not None:
        return FixedShapes.of_rows(lengths.flat().values.max(), lengths.lengths, size, _tokens(trainer))
    return FixedShapes(_tokens(trainer))
