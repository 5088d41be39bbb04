"""Packing inside the trainers that people use: a ``Trainer`` or an ``SFTTrainer`` that somebody else built.

A built trainer -> :func:`enable_packing` -> its model is patched, and its collator carries the segments of every batch.
Documents in a ``datasets.Dataset`` -> :func:`pack_dataset` -> packed rows in a ``datasets.Dataset``, for trainers that
take nothing else. Neither touches the trainer's loop, loss, optimizer or arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from packing_core import PackedBatch, PackedDataset, Ragged
from packing_core.errors import LayoutError, PackingError
from packing_core.extras import require
from torch_backend.collate import PackedCollator, with_boundaries
from torch_backend.hf.boundaries import refuse_split_rows
from torch_backend.patching import patch

Trainer = TypeVar("Trainer")

# Columns of a tokenised dataset that say which tokens are trained, as TRL names them; all of them must agree.
MASK_COLUMNS = ("loss_mask", "completion_mask", "assistant_masks")
# What the collator reads besides the model's own arguments; trainers drop columns that the model does not take.
COLLATED_COLUMNS = ("seq_lengths", "loss_mask", "prompt_length")
# How batches of several documents a row mark them; see with_boundaries.
BOUNDARY_KEYS = ("cu_seq_lens_q", "segment_ids", "position_ids")
ROWS_AT_ONCE = 1024


def enable_packing(
    trainer: Trainer,
    *,
    capacity: int | None = None,
    implementation: str | Sequence[str] = "auto",
    verify: bool = True,
) -> Trainer:
    """Make a trainer train packed documents without contamination; call it once, between building and ``train()``.

    Its model is patched in place. A collator that packs already (TRL's under ``packing=True`` or ``padding_free=True``,
    transformers' ``DataCollatorWithFlattening``, axolotl's) keeps doing so and its batches carry their segments from
    now on; any other is replaced by :class:`~torch_backend.PackedCollator`. Labels at segment starts are -100, so
    ``num_items_in_batch`` counts only targets that something predicts.

    Args:
        trainer: a ``transformers.Trainer`` or a subclass of it, with its model, also one under PEFT.
        capacity: tokens of a row, where the collator is replaced; None puts a batch's documents into one row.
        implementation, verify: as in :func:`torch_backend.patch`.

    Returns:
        ``trainer`` itself.

    Raises:
        UnsupportedModelError: the model cannot be made exact.
        UnsupportedError: the trainer splits rows over ranks (context or sequence parallelism).
        PackingError: the trainer has no model or collator of its own, or ``capacity`` has nothing to say.
    """
    model, collator = getattr(trainer, "model", None), getattr(trainer, "data_collator", None)
    if model is None or collator is None:
        raise PackingError(
            f"{type(trainer).__name__} has no model or no data_collator: pass a built transformers.Trainer"
        )
    any_trainer: Any = trainer
    refuse_split_rows(any_trainer.accelerator.parallelism_config)
    patch(model, implementation=implementation, verify=verify)
    any_trainer._set_signature_columns_if_needed()
    any_trainer._signature_columns += [name for name in COLLATED_COLUMNS if name not in any_trainer._signature_columns]
    packs = _packs(collator, _first_feature(any_trainer))
    if packs and capacity is not None:
        raise PackingError(
            f"{type(collator).__name__} packs by itself, so capacity={capacity:,} has no effect: leave it out"
        )
    any_trainer.data_collator = with_boundaries(collator) if packs else PackedCollator(model, capacity=capacity)
    # accelerate would let the first rank read for all and concatenate batches, which plain ints cannot be.
    any_trainer.accelerator.dataloader_config.dispatch_batches = False
    return trainer


def pack_dataset(dataset: Any, capacity: int, **plan_options: Any) -> Any:
    """Pack a tokenised dataset into one of rows, for trainers that insist on a ``datasets.Dataset``.

    Args:
        dataset: a ``datasets.Dataset`` with ``input_ids``, and optionally ``labels`` (unshifted, -100 where nothing is
            trained) or masks under the names ``loss_mask``, ``completion_mask``, ``assistant_masks``.
        capacity: tokens a row can hold.
        plan_options: ``overflow``, ``strategy``, ``seed`` and the other options of ``packing_core.plan``.

    Returns:
        A ``datasets.Dataset`` of packed rows without padding: ``input_ids``, ``labels`` (-100 at segment starts) and
        ``seq_lengths``, as TRL's own collator reads them under ``SFTConfig(padding_free=True, max_length=None)``.

    Raises:
        LayoutError: there is no ``input_ids``.
        PackingError: what ``packing_core.plan`` and ``packing_core.pack`` raise.
    """
    datasets = require("datasets", extra="hf")
    if "input_ids" not in dataset.column_names:
        raise LayoutError(f"the dataset has no input_ids, only {', '.join(dataset.column_names)}: tokenise it first")
    dataset = dataset.with_format("arrow")
    arrow = {name: dataset[:][name] for name in dataset.column_names if name in ("input_ids", "labels", *MASK_COLUMNS)}
    masks = [Ragged.of(arrow[name], name=name).flat() for name in MASK_COLUMNS if name in arrow]
    packed = PackedDataset(
        arrow["input_ids"], capacity, labels=arrow.get("labels"), loss_mask=_both(masks), **plan_options
    )

    def rows() -> Any:
        for first in range(0, len(packed), ROWS_AT_ONCE):
            columns = packed[first : first + ROWS_AT_ONCE].to_dict("trl")
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    numbers = datasets.List(datasets.Value("int64"))
    features = datasets.Features({"input_ids": numbers, "labels": numbers, "seq_lengths": numbers})
    return datasets.Dataset.from_list(list(rows()), features=features)


def _both(masks: list[Ragged]) -> Ragged | None:
    """One mask that is true where all are."""
    if not masks:
        return None
    values = masks[0].values != 0
    for mask in masks[1:]:
        values = values & (mask.values != 0)
    return Ragged(values, masks[0].offsets, name="loss_mask")


def _first_feature(trainer: Any) -> Any:
    """What the trainer's collator is given for the first row of the training data."""
    first = next(iter(trainer.train_dataset))
    if not (isinstance(first, Mapping) and trainer.args.remove_unused_columns):
        return first
    return {name: value for name, value in first.items() if name in trainer._signature_columns}


def _packs(collator: Any, feature: Any) -> bool:
    """Whether the collator puts documents into one row, seen from what it makes of one feature given twice."""
    if isinstance(feature, PackedBatch):
        return isinstance(collator, PackedCollator)
    batch = collator([dict(feature), dict(feature)])
    mask = batch.get("attention_mask")
    numbered = mask is not None and mask.ndim == 2 and int(mask.max()) > 1
    return numbered or len(batch["input_ids"]) == 1 or any(name in batch for name in BOUNDARY_KEYS)
