"""``enable_packing(trainer)``: packing inside a trainer that somebody else built, and ``disable_packing``.

A built trainer -> the port of its kind (:func:`port_of`) -> a plan, or a refusal, before anything is changed -> the
models are patched, and the trainer is changed through :class:`.changes.Changes`, which take all of it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from packing_core.errors import PackingError
from packing_core.hints import hinted
from packing_core.planning.plan import Order, Overflow
from torch_backend.hf.float8 import Precision
from torch_backend.hf.inputs.sentence_trainers import sentence_trainer
from torch_backend.hf.inputs.trl_trainers import has_tree_rows, kind_of
from torch_backend.steps.memory import Memory
from torch_backend.trainers.changes import changing, take_back
from torch_backend.trainers.embeddings import EmbeddingPort
from torch_backend.trainers.port import PackingRequest, TrainerPort
from torch_backend.trainers.preference import DistillationPort, KtoPort, PolicyPort, RewardPort, ScoredPort
from torch_backend.trainers.rows_port import RowsPort
from torch_backend.trainers.tree_rows import TreePort

Trainer = TypeVar("Trainer")

# the port of each trainer of TRL whose padded calls run packed
_SCORED: dict[str | None, type[TrainerPort]] = {
    "DPOTrainer": ScoredPort,
    "KTOTrainer": KtoPort,
    "RewardTrainer": RewardPort,
    "GRPOTrainer": PolicyPort,
    "RLOOTrainer": PolicyPort,
    "GKDTrainer": DistillationPort,
    "GOLDTrainer": DistillationPort,
    "DistillationTrainer": DistillationPort,
}


def port_of(trainer: Any) -> type[TrainerPort]:
    """Returns the kind of port for a trainer; the only place that asks whose trainer it is."""
    if sentence_trainer(trainer) is not None:
        return EmbeddingPort
    return TreePort if has_tree_rows(trainer) else _SCORED.get(kind_of(trainer), RowsPort)


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
    precision: Precision | None = None,
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
    (:mod:`torch_backend.trainers.preference`), as do its GKD, GOLD and distillation trainers with their teacher. Its
    AsyncGRPOTrainer, whose rows share prefixes by themselves, keeps everything but its attention
    (:mod:`torch_backend.trainers.tree_rows`). Sentence-transformers' trainers run the columns of each batch as one row
    (:mod:`torch_backend.trainers.embeddings`).

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
        precision: ``"float8"`` and others, as in :func:`torch_backend.make_train_step`; of the trained model and its
            reference, also in evaluation. A second call without it, and ``disable_packing``, take it back.

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
    if share_prefix not in (True, False, "auto"):
        raise PackingError(f'share_prefix is {share_prefix!r}: pass True, False or "auto"')
    rows = PackingRequest.changed(
        capacity=capacity,
        overflow=overflow,
        context=context,
        min_piece=min_piece,
        max_segments=max_segments,
        order=order,
        keys=keys,
        weights=weights,
        equal_cost=equal_cost,
    )
    request = PackingRequest(rows, implementation, verify, fast, memory, share_prefix, precision)
    port = port_of(trainer)(trainer, request)
    with changing(trainer) as changes:
        port.plan()
        changes.set("_eval_dataloaders", {})  # those that persistent workers keep have the collator of before
        port.install(changes)
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
    if take_back(trainer):
        port_of(trainer).uninstall(trainer)
    return trainer
