"""``enable_packing`` for TRL's trainers whose loss reads each document: DPO, KTO, reward models, GRPO and RLOO.

A built trainer -> checks of its class, arguments and data -> its model and its reference model are patched, and their
padded calls run packed (:mod:`torch_backend.hf.inputs.unpadding`) -> its collator tells the documents' lengths. The
documents of a micro-batch, for DPO and reward models both answers of every pair, share one row without padding. The
loss, the metrics, generation and the loop are the trainer's own, so every loss type keeps its meaning. Where nothing
forbids it, the layers are compiled for these calls (:mod:`torch_backend.steps.dynamic_compile`).
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from packing_core.errors import PackingError, UnsupportedError
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.anatomy.vision import vision_of
from torch_backend.hf.edits.rotary import find_batch_dependent
from torch_backend.hf.inputs.forests import WAY_OUT
from torch_backend.hf.inputs.prefixes import Sharing
from torch_backend.hf.inputs.trl_trainers import generates, kind_of, rows_of_example
from torch_backend.hf.inputs.unpadding import IDS, LENGTHS, LengthsCollator, unpad_calls
from torch_backend.hf.patch import refuse_context_of, state_of
from torch_backend.ops.divisor import Divisor
from torch_backend.patching import patch, unpatch
from torch_backend.steps.dynamic_compile import CompiledCalls
from torch_backend.steps.explaining import named_level
from torch_backend.steps.fast_backward import GRAPH, LAYERS, LOSS
from torch_backend.trainers.over_ranks import WITHOUT_RANKS, ScoresOverRanks, context_mesh
from torch_backend.trainers.row_options import RowOptions

logger = logging.getLogger(__name__)

# Columns that TRL computes ahead.
REFERENCE = ("ref_logps", "ref_KL_logps", "ref_chosen_logps", "ref_rejected_logps")


def enable_unpadding(
    trainer: Any,
    *,
    options: RowOptions,
    implementation: Any,
    verify: bool,
    fast: bool,
    share_prefix: Sharing,
) -> None:
    """Run every forward of a preference, reward or policy trainer packed; see the module.

    Raises:
        UnsupportedModelError: the model or the reference model cannot be made exact.
        UnsupportedError: the trainer's model, data or arguments rule packing out.
        PackingError: an option of rows is given, which has no effect.
    """
    _refuse_row_options(trainer, options)
    mesh = context_mesh(trainer, fast=fast)
    _refuse(trainer)
    if mesh is not None:
        if share_prefix is True:
            raise UnsupportedError(f"documents that are cut over ranks share no prefixes: {WAY_OUT}")
        share_prefix = False
    models = [m for m in (trainer.model, getattr(trainer, "ref_model", None)) if m is not None]
    if mesh is None:
        for model in models:
            refuse_context_of(model, WITHOUT_RANKS)
    patched: list[Any] = []
    try:
        for model in models:
            patched += [] if state_of(causal_lm(model)) else [model]
            patch(model, implementation=implementation, verify=verify, mesh=mesh)
    except PackingError:
        for model in patched:
            unpatch(model)
        raise
    for model in models:
        unpad_calls(model, share_prefix=share_prefix)
    trainer.packed_step = PreferenceStep(models, _why_not_layers(trainer) if fast else "fast=False")
    if generates(trainer):
        return
    # accelerate would let the first rank read for all and concatenate batches, which plain ints cannot be.
    trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.data_collator = LengthsCollator(trainer.data_collator, ids=share_prefix is not False)
    _MeanOverStep(trainer)
    if kind_of(trainer) == "KTOTrainer":
        _tell_lengths_of_kl(trainer)
    _renew_reference(trainer)
    if mesh is not None:
        ScoresOverRanks(trainer, mesh.size())


def _refuse(trainer: Any) -> None:
    """Raise for settings that packed calls do not support."""
    name = type(trainer).__name__
    utilities = import_module("trl.trainer.utils")
    if kind_of(trainer) != "RewardTrainer" and not hasattr(utilities, "add_fused_lm_head"):
        raise UnsupportedError(
            f"{name} of this TRL computes log-probabilities from padded logits: install trl 1.16 or newer"
        )
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    if getattr(trainer, "_is_vision_dataset", False) or {"image", "images"} & set(columns):
        _refuse_images(trainer)
    for config in (getattr(trainer.model, "peft_config", None) or {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedError(
                f"{name} trains a {config.peft_type} adapter, whose virtual tokens every document of a row would need: "
                "use LoRA"
            )


def _refuse_images(trainer: Any) -> None:
    """Raise for trainers and families that cannot train on the images of their data."""
    name = type(trainer).__name__
    if kind_of(trainer) == "RewardTrainer":
        raise UnsupportedError(
            f"{name} of TRL {version('trl')} reads no images and would score answers without them: leave the column out"
        )
    both_ways = vision_of(trainer.model).both_ways
    if both_ways is not None and both_ways.prefix:
        raise UnsupportedError(
            f"{name} does not mark where a prompt ends, and {type(causal_lm(trainer.model)).__name__} sees all its "
            "tokens in both directions: leave the trainer as it is"
        )


class PreferenceStep:
    """Fast parts of a step, for ``explain(trainer)``; :class:`.CompiledCalls` make them so.

    Attributes:
        model: the one that is trained.
        parts: "loss", "layers", "layers of the reference" if there is one, and "graph".
    """

    def __init__(self, models: list[Any], refused: str | None) -> None:
        self.model = models[0]
        names = (LAYERS, f"{LAYERS} of the reference")
        self.calls = {name: CompiledCalls(model, refused) for name, model in zip(names, models, strict=False)}

    @property
    def parts(self) -> dict[str, str]:
        layers = {part: calls.layers + named_level(calls.model) for part, calls in self.calls.items()}
        parts = {LOSS: "the trainer's own", **layers, GRAPH: "no CUDA graph: rows differ in length"}
        state = state_of(causal_lm(self.model))
        prefixes = None if state is None or state.unpadding is None else state.unpadding.prefixes
        return parts if prefixes is None else parts | {"shared prefixes": str(prefixes)}


def _why_not_layers(trainer: Any) -> str | None:
    """Explains why the layers of a trainer's models are not compiled."""
    args = trainer.args
    if args.torch_compile:
        return "torch_compile=True compiles the model as a whole"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed partitions the model"
    if trainer.is_fsdp_enabled:
        return "FSDP gathers parameters in the calls of layers"
    return "activations are offloaded" if getattr(args, "activation_offloading", False) else None


class _MeanOverStep:
    """Makes the loss of a step the mean over its examples, however many each micro-batch holds.

    TRL takes the mean of every micro-batch, and transformers the mean of those. An example of a short micro-batch, such
    as the last one of an epoch, would weigh more than another. Each loss is therefore multiplied by the number of its
    examples over the mean number per micro-batch of the step, all ranks together.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rows_of_example = rows_of_example(trainer)
        self.stock_samples, self.stock_loss = trainer.get_batch_samples, trainer.compute_loss
        self.mean: float | None = None
        trainer.get_batch_samples, trainer.compute_loss = self.get_batch_samples, self.compute_loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.get_batch_samples``."""
        batches, items = self.stock_samples(*args, **kwargs)
        counts = torch.tensor([sum(map(self._examples, batches)), len(batches)], device=self.trainer.accelerator.device)
        examples, micro_batches = Divisor().total(counts).tolist()
        self.mean = examples / micro_batches if micro_batches else None
        return batches, items

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """As ``Trainer.compute_loss``."""
        examples = self._examples(inputs)
        found = self.stock_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if self.mean is None or examples == self.mean or not self.trainer.model.training:
            return found
        weight = examples / self.mean
        return (found[0] * weight, *found[1:]) if return_outputs else found * weight

    def _examples(self, batch: Any) -> int:
        return len(batch["input_ids"]) // self.rows_of_example


def _tell_lengths_of_kl(trainer: Any) -> None:
    """KTO calls the model on two inputs of one batch, and hands all other keys to both calls."""
    stock = trainer._compute_kl_logps

    def compute(model: Any, batch: Any) -> Any:
        return stock(model, {**batch, **{name: batch.get("KL_" + name) for name in (LENGTHS, IDS)}})

    trainer._compute_kl_logps = compute


def _renew_reference(trainer: Any) -> None:
    """Compute the reference's log-probabilities again, packed, where padding has made them wrong.

    TRL computes them when the trainer is built, on padded batches. These are right unless the model's rotary
    frequencies depend on the longest document of a batch.
    """
    if not getattr(trainer, "precompute_ref_logps", False) or not find_batch_dependent(causal_lm(trainer.model)):
        return
    logger.info("%s: computing the reference's log-probabilities again, packed", type(trainer).__name__)
    args = trainer.args

    def renewed(dataset: Any, name: str, batch_size: int) -> Any:
        bare = dataset.remove_columns([c for c in REFERENCE if c in dataset.column_names])
        return trainer._precompute_ref_logps(bare, name, args.precompute_ref_batch_size or batch_size)

    trainer.train_dataset = renewed(trainer.train_dataset, "train", args.per_device_train_batch_size)
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, dict):
        trainer.eval_dataset = {k: renewed(d, k, args.per_device_eval_batch_size) for k, d in evaluation.items()}
    elif evaluation is not None:
        trainer.eval_dataset = renewed(evaluation, "eval", args.per_device_eval_batch_size)


def _refuse_row_options(trainer: Any, options: RowOptions) -> None:
    """Raise for options of rows, which a preference trainer does not have."""
    if options.given is not None:
        raise PackingError(
            f"{type(trainer).__name__} puts the documents of each micro-batch into one row of their length, so "
            f"{options.given} has no effect: leave it out, and set per_device_train_batch_size"
        )
