"""``enable_packing(trainer)``: packing inside a ``Trainer`` or an ``SFTTrainer`` that somebody else built.

A built trainer -> a plan, or a refusal, before anything is changed (:mod:`.inspection`) -> its model is patched, its
documents are packed into rows (:mod:`.epoch_rows`), and its collator carries the segments of every batch. The trainer's
loop, loss, optimizer and arguments stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from packing_core.batches.columns import READ
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError, UnsupportedError
from packing_core.hints import hinted
from packing_core.planning.plan import Order, Overflow
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.heads import labels_documents, targets_among, trains_first_token
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.hf.explaining import SHARERS
from torch_backend.hf.inputs.trl_trainers import has_tree_rows, kind_of
from torch_backend.patching import patch, unpatch
from torch_backend.steps.dynamic_compile import run_plain_layers
from torch_backend.steps.memory import AUTO_OVER_RANKS, Level, Memory, check_level, hold_level, release_level
from torch_backend.steps.memory_fit import FittedLevel
from torch_backend.trainers import preference, sft
from torch_backend.trainers.dataloader import use_rows
from torch_backend.trainers.fast_step import speed_up
from torch_backend.trainers.inspection import PackingPlan, inspect
from torch_backend.trainers.neftune import add_noise_by_document
from torch_backend.trainers.own_loss import warn_of_last_tokens, warn_of_means, warn_of_rows
from torch_backend.trainers.predictions import evaluate_unpacked, generates_in_evaluation, predict_documents
from torch_backend.trainers.replaced import ReplacingCollator
from torch_backend.trainers.row_options import RowOptions
from torch_backend.trainers.tree_rows import TreeRows, serve_tree_rows

Trainer = TypeVar("Trainer")
_CHANGES = "_crosspack_changes"
_ABSENT = object()


@hinted()
def enable_packing(
    trainer: Trainer,
    capacity: int | None = None,
    *,
    overflow: Overflow = "error",
    context: int | None = None,
    min_piece: int = 1,
    max_segments: int | None = None,
    order: Order = "random",
    keys: str | None = None,
    weights: Mapping[Any, float] | None = None,
    equal_cost: bool = False,
    implementation: str | Sequence[str] = "auto",
    verify: bool = True,
    fast: bool = True,
    memory: Memory | None = None,
    share_prefix: bool | Literal["auto"] = "auto",
) -> Trainer:
    """Make a trainer train packed documents without contamination; call it between building and ``train()``.

    Its model is patched in place, and so is every model that ``model_init`` makes later. A collator that packs (TRL's
    under ``packing=True`` or ``padding_free=True``, transformers' ``DataCollatorWithFlattening``, axolotl's) is wrapped
    in :func:`torch_backend.with_boundaries`. Any other is replaced, if packing trains the same tokens and can carry
    what the collator adds (:mod:`.replaced`).
    A second call undoes the first: the new options hold, and what was set in the meantime is packed.
    Labels at segment starts are -100, so ``num_items_in_batch`` counts only targets that something predicts.

    Where the collator is replaced, the whole training set is packed, again in each epoch by the trainer's seed
    (:mod:`torch_backend.trainers.epoch_rows`). A batch is ``per_device_train_batch_size`` rows of ``capacity`` tokens,
    so ``len(dataloader)`` and every option that counts steps count rows. All lengths are checked at this call. A stream
    (``IterableDataset``) is packed as its documents come. If a trainer makes its dataloader or sampler itself, or its
    dataset does not tell its lengths, the documents of each batch are packed together, and a warning says so.
    Evaluation puts the documents of a batch into one row; one that generates (``predict_with_generate``) is not packed.

    Under accelerate's ``ParallelismConfig(cp_size=N)`` the documents of each row are cut over N ranks
    (:mod:`torch_backend.trainers.over_ranks`), as by ``patch(model, mesh=...)``, and so are those of TRL's DPO and KTO.

    TRL's DPO, KTO, reward, GRPO and RLOO trainers keep their batches, and their forwards run without padding
    (:mod:`torch_backend.trainers.preference`). Its AsyncGRPOTrainer, whose rows share prefixes by themselves, keeps
    everything but its attention (:mod:`torch_backend.trainers.tree_rows`).

    Args:
        trainer: a ``transformers.Trainer`` or a subclass of it, with its model, also one under PEFT, and with training
            or evaluation data.
        capacity: tokens of a row, by default ``max_length`` of the trainer's arguments, else the model's
            ``max_position_embeddings``; which of them it is, is logged.
        overflow: what to do with a document longer than ``capacity``, as in ``packing_core.plan``.
        context, min_piece, max_segments: as in ``packing_core.plan``.
        order: the order in which the documents of an epoch are trained, as in ``packing_core.plan``; a run that is
            killed resumes in it. ``keys`` is the name of the column of the training data that holds each document's
            key, ``weights`` the weight of each key.
        equal_cost: makes the rows of each step for its ranks, as in ``packing_core.planning.epochs.plan_epoch``, where
            the slowest rank would take more than 2% longer than the mean.
        implementation, verify: as in :func:`torch_backend.patch`.
        fast: train without logits, through compiled layers and as a CUDA graph, each where nothing forbids it
            (:mod:`.fast_step`); of TRL's preference, reward and policy trainers the layers alone
            (:mod:`torch_backend.steps.dynamic_compile`). ``explain(trainer)`` says what is fast and why the rest is
            not. False leaves the training step as it is.
        memory: what each layer keeps between forward and backward, as in :func:`torch_backend.make_train_step`, in
            place of the trainer's ``gradient_checkpointing``. None leaves that in force: True is ``"full"``.
        share_prefix: TRL's DPO, KTO, GRPO, GMPO and RLOO trainers compute a common beginning of a micro-batch's
            documents, such as the prompt of several answers, once. ``"auto"`` does so for beginnings of 64 tokens and
            more, in calls where it saves a tenth of the work or more, and where the model, its attention and its
            dropout allow it: the work of segments of n tokens after b tokens of their ancestors is
            ``a sum(n) + s sum(n (n + 2 b))``, a token and an attention pair by ``Cost.from_config(model.config)``. True
            shares 16 tokens and more, and raises where the model cannot. Token ids are read from the device for it.
            False shares nothing. ``explain(trainer)`` says how many tokens it saved, or why none.

    Returns:
        ``trainer`` itself.

    Raises:
        UnsupportedModelError: the model cannot be made exact.
        UnsupportedError: the trainer computes its loss per example, or its rows hold cut documents, or sequence
            parallelism splits them over ranks, or context parallelism does and the trainer's loss or an argument does
            not compute over ranks.
        LayoutError: the data are not tokenised, or a collator that packs does not mark its documents.
        CapacityError: a document is longer than ``capacity``, and ``overflow`` does not say what to do with it.
        PackingError: what is passed is no trainer or has no data, ``capacity`` has no effect, or the present collator
            trains other tokens than packing would.
    """
    any_trainer: Any = trainer
    rows = RowOptions(capacity, overflow, context, min_piece, max_segments, order, keys, weights, equal_cost)
    if has_tree_rows(trainer):
        beside = {"memory": memory, "share_prefix": None if share_prefix in (True, "auto") else share_prefix}
        idle = (f"{name}={value!r}" for name, value in beside.items() if value is not None)
        serve_tree_rows(any_trainer, implementation, rows.given or next(idle, None))
        return trainer
    if memory is not None:
        check_level(any_trainer.model, memory)
        if memory == "auto" and (kind_of(trainer) is not None or not fast):
            raise UnsupportedError(
                'memory="auto" follows from rows that the fast step trains, and here it trains none: name a level, '
                'memory="full" for example'
            )
    if share_prefix not in (True, False, "auto"):
        raise PackingError(f'share_prefix is {share_prefix!r}: pass True, False or "auto"')
    with _in_place_of_last_call(any_trainer):
        if kind_of(trainer) is not None:
            preference.enable_unpadding(
                any_trainer,
                options=rows,
                implementation=implementation,
                verify=verify,
                fast=fast,
                share_prefix=share_prefix,
            )
        else:
            if share_prefix is True:
                raise UnsupportedError(f"{type(trainer).__name__} shares no prefixes: {SHARERS}")
            plan = inspect(any_trainer, options=rows, fast=fast)
            if memory == "auto" and plan.mesh is not None:
                raise UnsupportedError(AUTO_OVER_RANKS)
            options: Any = {"implementation": implementation, "verify": verify, "mesh": plan.mesh}
            patch(any_trainer.model, **options)
            if any_trainer.model_init is not None:  # train() makes another model
                any_trainer.call_model_init = partial(_patched_model_init, any_trainer.call_model_init, **options)
            _apply(any_trainer, plan, fast=fast)
        if memory is not None:
            _use_memory(any_trainer, memory)
    return trainer


@hinted()
def disable_packing(trainer: Trainer) -> Trainer:
    """Give a trainer back as it was before :func:`enable_packing`; without effect on any other.

    Restores its methods, arguments, data, collator and callbacks, and unpatches its models, whose layers then run
    uncompiled. Weights, the optimizer and whatever was set since keep their values.

    Args:
        trainer: of any kind that :func:`enable_packing` takes.

    Returns:
        ``trainer`` itself.
    """
    any_trainer: Any = trainer
    if isinstance(rows := getattr(trainer, "packed_step", None), TreeRows):
        rows.withdraw()
        del any_trainer.packed_step
    elif hasattr(trainer, _CHANGES):
        with _in_place_of_last_call(any_trainer):
            pass
        delattr(trainer, _CHANGES)
        for model in filter(None, (any_trainer.model, getattr(trainer, "ref_model", None))):
            run_plain_layers(model)
            release_level(model)
            unpatch(model)
    return trainer


@contextmanager
def _in_place_of_last_call(trainer: Any) -> Iterator[None]:
    """Takes back what the last call changed, and notes what changes inside; where that raises, nothing has changed.

    Attributes that were set since the last call keep their values.
    """
    accelerator, handler = (getattr(trainer, name, None) for name in ("accelerator", "callback_handler"))
    parts = trainer, getattr(trainer, "args", None), accelerator, getattr(accelerator, "dataloader_config", None)
    holders = [part for part in parts if hasattr(part, "__dict__")]
    callbacks = [] if handler is None else handler.callbacks
    last = [dict(vars(holder)) for holder in holders], list(callbacks)
    attributes, added = getattr(trainer, _CHANGES, ((), ()))
    for holder, name, before, after in attributes:
        if vars(holder).get(name, _ABSENT) is after:
            _set(holder, name, before)
    callbacks[:] = [callback for callback in callbacks if callback not in added]
    bare = [dict(vars(holder)) for holder in holders], list(callbacks)
    try:
        yield
    except BaseException:
        for holder, values in zip(holders, last[0], strict=True):
            for name in vars(holder).keys() | values.keys():
                _set(holder, name, values.get(name, _ABSENT))
        callbacks[:] = last[1]
        raise
    changed = [
        (holder, name, before.get(name, _ABSENT), after)
        for holder, before in zip(holders, bare[0], strict=True)
        for name, after in vars(holder).items()
        if before.get(name, _ABSENT) is not after
    ]
    setattr(trainer, _CHANGES, (changed, [callback for callback in callbacks if callback not in bare[1]]))


def _set(holder: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        vars(holder).pop(name, None)
    else:
        vars(holder)[name] = value


def _apply(trainer: Any, plan: PackingPlan, *, fast: bool) -> None:
    """Change a trainer, whose model is patched, as planned."""
    trainer.packing_plan = plan
    trainer._signature_columns = [*dict.fromkeys((*trainer._signature_columns, *READ))]
    trainer.data_collator = plan.collator
    if labels_documents(trainer.model) or trains_first_token(trainer.model):
        trainer.model_accepts_loss_kwargs = True  # a patched classifier divides its loss by the step's targets
    if labels_documents(trainer.model):
        trainer._get_num_items_in_batch = partial(_count_targets, trainer, trainer._get_num_items_in_batch)
    use_rows(trainer, plan.rows)
    # accelerate would let the first rank read for all and concatenate batches, which plain ints cannot be.
    trainer.accelerator.dataloader_config.dispatch_batches = False
    sft.warn_of_room(trainer)
    warn_of_means(trainer)
    warn_of_last_tokens(trainer)
    warn_of_rows(trainer)
    add_noise_by_document(trainer)
    if fast:
        speed_up(trainer)
    elif sft.defines(trainer, "compute_loss") and isinstance(plan.collator, PackedCollator):
        plan.collator.marks_padding = True  # or TRL would count the tokens of one row alone
    predict_documents(trainer)
    if generates_in_evaluation(trainer) and isinstance(plan.collator, ReplacingCollator):
        evaluate_unpacked(trainer, plan.collator.replaced.padded)


def _count_targets(trainer: Any, count: Callable[..., Any], batches: list[Any], device: Any) -> Any:
    """Counts targets as ``Trainer`` does, which takes -100 for a missing label in a regression too."""
    config = causal_lm(trainer.model).config
    labels = [targets_among(each["labels"], config, of_documents=True) for each in batches if "labels" in each]
    return count([{"labels": torch.where(found, 0, IGNORE_INDEX)} for found in labels], device)


def _use_memory(trainer: Any, memory: Memory) -> None:
    """Set the level of a trainer's model, and of every model that ``model_init`` makes later."""
    level: Level = "none" if memory == "auto" else memory
    if memory == "auto":
        trainer.packed_step.fitted = FittedLevel()
    hold_level(trainer.model, level)
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # train() would set its own over it
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, False)
    if trainer.model_init is not None:
        trainer.call_model_init = partial(_model_init_with, trainer.call_model_init, level)


def _model_init_with(call_model_init: Any, level: Level, trial: Any = None) -> Any:
    """As ``Trainer.call_model_init``; the layers of the model that it makes keep what ``level`` says."""
    model = call_model_init(trial)
    hold_level(model, level)
    return model


def _patched_model_init(call_model_init: Any, trial: Any = None, **options: Any) -> Any:
    """As ``Trainer.call_model_init``; the model that it makes is patched."""
    return patch(call_model_init(trial), **options)
