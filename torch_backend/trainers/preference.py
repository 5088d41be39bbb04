"""``enable_packing`` for TRL's trainers whose loss reads each document: DPO, KTO, reward models, GRPO and RLOO.

A built trainer -> checks of its class, arguments and data -> its model and its reference model are patched, and their
padded calls run packed (:mod:`torch_backend.hf.unpadding`) -> its collator tells the documents' lengths. The
documents of a micro-batch, for DPO and reward models both answers of every pair, share one row without padding. The
loss, the metrics, generation and the loop are the trainer's own, so every loss type keeps its meaning. Where nothing
forbids it, the layers are compiled for these calls (:mod:`torch_backend.steps.dynamic_compile`).

TRL's trainers that compare a student with a teacher, GKD, GOLD and distillation: a padded micro-batch, with answers
from the data or generated -> one row of its documents -> both models -> their divergence over the vocabulary, a chunk
of logits at a time (:mod:`torch_backend.losses.distillation`) -> divided by the trainer's own divisor. Lengths are read
from the device once for each micro-batch, because answers may have been generated since its collator made it.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.hf.anatomy.layers import find_batch_dependent
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.anatomy.vision import vision_of
from torch_backend.hf.inputs import forests
from torch_backend.hf.inputs.prefixes import Sharing
from torch_backend.hf.inputs.trl_trainers import kind_of, rows_of_example
from torch_backend.hf.patch import state_of
from torch_backend.hf.router import SWITCH, asks_for_router_loss
from torch_backend.hf.unpadding import IDS, LENGTHS, LengthsCollator, Padded, unpad_calls, with_lengths
from torch_backend.losses.distillation import divergence_and_entropy
from torch_backend.ops.divisor import Divisor, quotient
from torch_backend.steps.dynamic_compile import CompiledCalls
from torch_backend.steps.eligibility import named_level
from torch_backend.steps.fast_backward import GRAPH, LAYERS, LOSS
from torch_backend.trainers.callbacks import add_noise_by_document, without_waiting
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.over_ranks import ScoresOverRanks, context_mesh
from torch_backend.trainers.port import TrainerPort, models_of

logger = logging.getLogger(__name__)

# Columns that TRL computes ahead.
REFERENCE = ("ref_logps", "ref_KL_logps", "ref_chosen_logps", "ref_rejected_logps")


class ScoredPort(TrainerPort):
    """Packing in a trainer whose loss reads log-probabilities or scores of documents."""

    has_logprobs = True  # by TRL's own fused output layer, and not scores
    shares = True  # common beginnings of documents
    other_model = "reference"
    loss = "the trainer's own"

    def plan(self) -> None:
        trainer, share_prefix = self.trainer, self.request.share_prefix
        self.check_options(has_rows=False, shares=self.shares)
        self.request.refuse(
            f"{self.name} puts the documents of each micro-batch into one row of their length",
            way_out="leave it out, and set per_device_train_batch_size",
        )
        self.mesh = context_mesh(trainer, self.why_whole)
        if self.has_logprobs and not hasattr(import_module("trl.trainer.utils"), "add_fused_lm_head"):
            raise UnsupportedError(
                f"{self.name} of this TRL computes log-probabilities from padded logits: install trl 1.16 or newer"
            )
        columns = getattr(trainer.train_dataset, "column_names", None) or ()
        if getattr(trainer, "_is_vision_dataset", False) or {"image", "images"} & set(columns):
            self.refuse_images()
        self.refuse_virtual_tokens()
        if self.mesh is not None and share_prefix is True:
            raise UnsupportedError(f"documents that are cut over ranks share no prefixes: {forests.WAY_OUT}")
        if share_prefix is True:
            self.refuse_shared()
        self.share_prefix: Sharing = share_prefix if self.shares and self.mesh is None else False

    def why_whole(self) -> str | None:
        """Explains why the ranks of a group cannot hold parts of documents and gather what the loss reads."""
        if getattr(self.trainer, "precompute_ref_logps", False):
            return (
                "TRL computed the reference's log-probabilities when the trainer was built, under accelerate's own "
                "context parallelism: leave precompute_ref_log_probs out"
            )
        if self.has_router_loss():
            return (
                "TRL computes a router's loss on the tokens of one rank: pass router_aux_loss_coef=0.0 to its arguments"
            )
        return None

    def has_router_loss(self) -> bool:
        """Returns whether calls of the trainer's models compute the loss of a router."""
        of_trainer = bool(getattr(self.trainer, "aux_loss_enabled", False))
        return of_trainer or any(asks_for_router_loss(causal_lm(model), {}) for model in models_of(self.trainer))

    def refuse_shared(self) -> None:
        """Raise if a model of the trainer cannot share common beginnings, as its first call would."""
        trainer, reason = self.trainer, forests.ROUTER_LOSS if self.has_router_loss() else None
        reason = reason or forests.why_no_attention(trainer.args.device, self.request.implementation)
        reason = reason or forests.why_not_in_training(causal_lm(trainer.model))
        for root in map(causal_lm, models_of(trainer)):
            forests.refuse(root, forests.why_no_forest(anatomy_of(root)) or reason)

    def refuse_images(self) -> None:
        """Raise if the model's family cannot train on the images of the data."""
        both_ways = vision_of(self.trainer.model).both_ways
        if both_ways is not None and both_ways.prefix:
            family = type(causal_lm(self.trainer.model)).__name__
            raise UnsupportedError(
                f"{self.name} does not mark where a prompt ends, and {family} sees all its tokens in both directions: "
                "leave the trainer as it is"
            )

    def install(self, changes: Changes) -> None:
        models = models_of(self.trainer)
        self.patch(models, changes, self.mesh)
        for model in models:
            unpad_calls(model, share_prefix=self.share_prefix)
        refused = why_not_layers(self.trainer) if self.request.fast else "fast=False"
        changes.set("packed_step", PreferenceStep(models, refused, self.other_model, self.loss))
        changes.wrap("training_step", without_waiting(changes).step)
        add_noise_by_document(changes)
        self.change_batches(changes)

    def change_batches(self, changes: Changes) -> None:
        """Let the trainer's batches carry the lengths of their documents, and its loss be the mean over a step."""
        trainer = self.trainer
        # accelerate would let the first rank read for all and concatenate batches, which plain ints cannot be.
        changes.set("dispatch_batches", False, of=trainer.accelerator.dataloader_config)
        changes.set("data_collator", LengthsCollator(trainer.data_collator, ids=self.share_prefix is not False))
        changes.wrap("compute_loss", _packed_loss)
        _MeanOverStep(changes)
        _renew_reference(changes)
        if self.mesh is not None:
            ScoresOverRanks(changes, self.mesh.size())


class KtoPort(ScoredPort):
    """Packing in TRL's ``KTOTrainer``, which calls the model on two inputs of one batch."""

    def change_batches(self, changes: Changes) -> None:
        changes.wrap("_compute_kl_logps", _compute_kl_logps)
        super().change_batches(changes)


class RewardPort(ScoredPort):
    """Packing in TRL's ``RewardTrainer``, whose model scores each document at its last token."""

    has_logprobs = shares = False

    def why_whole(self) -> str | None:
        return "a reward model scores each of them at its last token, on a model that is not causal: leave cp_size out"

    def refuse_images(self) -> None:
        raise UnsupportedError(
            f"{self.name} of TRL {version('trl')} reads no images and would score answers without them: leave the "
            "column out"
        )


class PolicyPort(ScoredPort):
    """Packing in TRL's GRPO and RLOO trainers, which make their batches of the completions that they generate."""

    def why_whole(self) -> str | None:
        return f"{self.name} generates them, so the ranks of a group would have different ones: leave cp_size out"

    def change_batches(self, changes: Changes) -> None:
        """Check recorded rollouts alone: the trainer divides by the tokens of a step itself."""
        if getattr(self.trainer, "rollout_func", None) is not None:
            changes.wrap("rollout_func", _checked_rollouts)


class PreferenceStep:
    """Fast parts of a step, for ``explain(trainer)``; :class:`.CompiledCalls` make them so.

    Attributes:
        model: the one that is trained.
        parts: "loss", "layers", "layers of the reference" (or teacher) if there is one, and "graph"; "shared prefixes"
            and "columns" where there are such.
    """

    def __init__(
        self, models: list[Any], refused: str | None, other_model: str, loss: str, *, columns: object = None
    ) -> None:
        self.model, self.loss, self.columns = models[0], loss, columns
        names = (LAYERS, f"{LAYERS} of the {other_model}")
        self.calls = {name: CompiledCalls(model, refused) for name, model in zip(names, models, strict=False)}

    @property
    def parts(self) -> dict[str, str]:
        layers = {part: calls.layers + named_level(calls.model) for part, calls in self.calls.items()}
        parts = {LOSS: self.loss, **layers, GRAPH: next(iter(self.calls.values())).graph}
        state = state_of(causal_lm(self.model))
        prefixes = None if state is None or state.unpadding is None else state.unpadding.prefixes
        more = {"shared prefixes": prefixes, "columns": self.columns}
        return parts | {name: str(x) for name, x in more.items() if x is not None}


def why_not_layers(trainer: Any) -> str | None:
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

    def __init__(self, changes: Changes) -> None:
        self.trainer = changes.trainer
        self.rows_of_example = rows_of_example(self.trainer)
        self.mean: float | None = None
        changes.wrap("get_batch_samples", self.get_batch_samples)
        changes.wrap("compute_loss", self.compute_loss)

    def get_batch_samples(self, stock_samples: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.get_batch_samples``."""
        batches, items = stock_samples(*args, **kwargs)
        counts, divisor = torch.tensor([sum(map(self._examples, batches)), len(batches)]), Divisor()
        if divisor.ranks > 1:
            counts = divisor.total(counts.to(self.trainer.accelerator.device))
        examples, micro_batches = counts.tolist()
        self.mean = examples / micro_batches if micro_batches else None
        return batches, items

    def compute_loss(
        self, stock_loss: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """As ``Trainer.compute_loss``."""
        examples = self._examples(inputs)
        loss = stock_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        if self.mean is None or examples == self.mean or not self.trainer.model.training:
            return loss
        weight = examples / self.mean
        return (loss[0] * weight, *loss[1:]) if return_outputs else loss * weight

    def _examples(self, batch: Any) -> int:
        return len(batch["input_ids"]) // self.rows_of_example


def _packed_loss(compute_loss: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
    """As ``compute_loss``, whose calls run packed, also on batches of a collator that was set since."""
    return compute_loss(model, with_lengths(inputs), *args, **options)


def _compute_kl_logps(compute: Any, model: Any, batch: Any) -> Any:
    """As ``KTOTrainer._compute_kl_logps``, which hands all other keys of a batch to both calls of the model."""
    return compute(model, {**batch, **{name: batch.get("KL_" + name) for name in (LENGTHS, IDS)}})


def _checked_rollouts(rollout: Any, prompts: Any, trainer: Any) -> Any:
    """As TRL's ``rollout_func``.

    Raises:
        LayoutError: an answer has no token, or not as many log-probabilities, or none where the trainer reads them.
    """
    rollouts = rollout(prompts, trainer)
    answers, logprobs = rollouts.get("completion_ids", ()), rollouts.get("logprobs")
    reads = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    for number, answer in enumerate(answers):
        if not len(answer):
            raise LayoutError(f"answer {number} of rollout_func has no token: give at least the end of text")
        if logprobs is None and reads:
            raise LayoutError(
                "the trainer compares its log-probabilities with those of a sampler, and rollout_func returned none: "
                "return its logprobs, or pass vllm_importance_sampling_correction=False"
            )
        if logprobs is not None and len(logprobs[number]) != len(answer):
            raise LayoutError(
                f"answer {number} of rollout_func has {len(answer)} tokens and {len(logprobs[number])} "
                "log-probabilities: return one for each token"
            )
    return rollouts


def _renew_reference(changes: Changes) -> None:
    """Compute the reference's log-probabilities again, packed, where padding has made them wrong.

    TRL computes them when the trainer is built, on padded batches. These are right unless the model's rotary
    frequencies depend on the longest document of a batch.
    """
    trainer = changes.trainer
    if not getattr(trainer, "precompute_ref_logps", False) or not find_batch_dependent(causal_lm(trainer.model)):
        return
    logger.info("%s: computing the reference's log-probabilities again, packed", type(trainer).__name__)
    args = trainer.args

    def renewed(dataset: Any, name: str, batch_size: int) -> Any:
        bare = dataset.remove_columns([c for c in REFERENCE if c in dataset.column_names])
        return trainer._precompute_ref_logps(bare, name, args.precompute_ref_batch_size or batch_size)

    changes.set("train_dataset", renewed(trainer.train_dataset, "train", args.per_device_train_batch_size))
    evaluation, size = trainer.eval_dataset, args.per_device_eval_batch_size
    if isinstance(evaluation, dict):
        changes.set("eval_dataset", {name: renewed(data, name, size) for name, data in evaluation.items()})
    elif evaluation is not None:
        changes.set("eval_dataset", renewed(evaluation, "eval", size))


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
