"""From documents or packed rows to the batches that a patched model takes.

Documents, or rows of a ``PackedDataset`` -> :class:`PackedCollator` -> a dict of fresh CPU tensors under the names that
Hugging Face models take, plus plain Python values that device movers leave alone. Somebody else's collator ->
:func:`with_boundaries` -> the same, from whatever that collator marks boundaries with. A ``PackedDataset`` is a
map-style dataset as it is: ``DataLoader(PackedDataset(...), batch_size=2, collate_fn=PackedCollator(model))``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packing_core import PackedBatch, pack
from packing_core.batch import IGNORE_INDEX
from packing_core.errors import LayoutError
from packing_core.views import KernelView

Batch = dict[str, Any]


class PackedCollator:
    """Packs a list of documents, or takes rows that are packed, and emits what a patched model needs.

    Args:
        model: whose ``config.pad_token_id`` fills padding; optional.
        capacity: tokens of a row, into which the documents of each batch are packed. None puts them one after the
            other into a single row without padding, so the number of tokens changes from batch to batch.
        padding_free: rows that come packed are put together into one row without their padding.
        max_seqlen, bucket: fixed sizes for compiled kernels, see ``PackedBatch.kernel_view``.
        plan_options: ``overflow``, ``max_segments`` and the other options of ``packing_core.plan``.

    A feature is a mapping with ``input_ids`` and optionally ``labels`` (unshifted, -100 where nothing is trained),
    ``loss_mask`` or ``prompt_length``; or a ``PackedBatch``; or a packed row with ``seq_lengths`` beside its ids.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        capacity: int | None = None,
        padding_free: bool = False,
        max_seqlen: int | None = None,
        bucket: int = 1,
        **plan_options: Any,
    ) -> None:
        config = getattr(model, "config", None)
        self.pad_id = int(getattr(config, "pad_token_id", None) or 0)
        self.capacity = capacity
        self.padding_free = padding_free
        self.max_seqlen = max_seqlen
        self.bucket = bucket
        self.plan_options = {"seed": None, **plan_options}

    def __call__(self, features: PackedBatch | Sequence[Any]) -> Batch:
        """One batch.

        Returns:
            ``input_ids``, ``labels``, ``position_ids`` int64 [B, S]; ``seq_idx`` int32 [B, S]; ``cu_seq_lens_q`` and
            ``_k`` int32 [N+1] over the B * S tokens, padding in segments of its own; ints ``max_length_q`` and ``_k``;
            ``packed_lengths``, the segments' lengths as a tuple; and the user's own columns [B, S].
        """
        if isinstance(features, PackedBatch):
            return self._emit(features)
        if len(features) == 0:
            raise LayoutError("there are no features to collate")
        if isinstance(features[0], PackedBatch):
            return self._emit(concatenate(features))
        return self._emit(self._pack(features))

    def _emit(self, batch: PackedBatch) -> Batch:
        make = batch.padding_free if self.padding_free else batch.kernel_view
        view = make(max_seqlen=self.max_seqlen, bucket=self.bucket)
        return _to_torch(view, rows=1 if self.padding_free else len(batch))

    def _pack(self, features: Sequence[Mapping[str, Any]]) -> PackedBatch:
        documents = [document for feature in features for document in documents_of(feature)]
        columns: dict[str, Any] = {name: [d[name] for d in documents] for name in documents[0]}
        capacity = self.capacity or sum(len(ids) for ids in columns["input_ids"])
        options = self.plan_options if self.capacity else {"strategy": "sequential", "seed": None}
        prompts = columns.pop("prompt_length", None)
        return pack(
            columns.pop("input_ids"),
            capacity,
            labels=columns.pop("labels", None),
            loss_mask=columns.pop("loss_mask", None),
            prompt_lengths=prompts,
            columns=columns,
            pad_id=self.pad_id,
            **options,
        )


def with_boundaries(collator: Callable[[Any], Mapping[str, Any]]) -> Callable[[Any], Batch]:
    """``collator`` with the segments of its batches carried, read on the host from whatever it marks them with.

    In this order: ``cu_seq_lens_q``; ``segment_ids`` (0 is padding); an ``attention_mask`` of segment numbers 1, 2, 3
    (0 is padding); ``position_ids`` that restart. The labels at segment starts and at padding become -100, because
    no token of the segment predicts them.

    Raises (when called):
        LayoutError: the batch marks its boundaries in none of these ways.
    """

    def collate(features: Any) -> Batch:
        batch = dict(collator(features))
        ids = batch["input_ids"]
        starts, padding = _segment_starts(batch, ids)
        starts[:, 0] = True
        lengths = np.diff(np.append(np.flatnonzero(starts), starts.size))
        if isinstance(batch.get("labels"), Tensor):
            batch["labels"] = batch["labels"].masked_fill(torch.from_numpy(starts | padding), IGNORE_INDEX)
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            batch["attention_mask"] = (mask != 0).to(mask.dtype)
        return {"input_ids": ids, **batch, **_metadata(lengths, ids.shape)}

    return collate


def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The rows of several batches of one capacity, in order.

    Raises:
        LayoutError: the batches differ in what they hold.
    """
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    for batch in batches:
        same = (batch.capacity, batch.alignment, batch.weighting, set(batch.columns)) == (
            first.capacity,
            first.alignment,
            first.weighting,
            set(first.columns),
        )
        if not same or any((getattr(batch, n) is None) != (getattr(first, n) is None) for n in ("labels", "loss_mask")):
            raise LayoutError("packed rows of different capacities or columns cannot make one batch")

    def joined(name: str) -> NDArray[Any] | None:
        arrays = [getattr(batch, name) for batch in batches]
        return None if arrays[0] is None else np.concatenate(arrays)

    row_offsets = np.cumsum([0, *(len(batch) for batch in batches)])
    return PackedBatch(
        input_ids=np.concatenate([batch.input_ids for batch in batches]),
        cu_seqlens=np.cumsum(np.concatenate([np.zeros(1, np.int64), *(batch.lengths for batch in batches)])),
        rows=np.concatenate([batch.rows + offset for batch, offset in zip(batches, row_offsets, strict=False)]),
        sources=np.concatenate([batch.sources for batch in batches]),
        starts=np.concatenate([batch.starts for batch in batches]),
        labels=joined("labels"),
        loss_mask=joined("loss_mask"),
        columns={name: np.concatenate([batch.columns[name] for batch in batches]) for name in first.columns},
        alignment=first.alignment,
        pad_id=first.pad_id,
        weighting=first.weighting,
    )


def _to_torch(view: KernelView, rows: int) -> Batch:
    def tensor(array: NDArray[Any], dtype: Any = None) -> Tensor:
        return torch.from_numpy(np.array(array, dtype)).view(rows, -1)

    cu_seqlens = torch.from_numpy(view.cu_seqlens.copy())
    return {
        "input_ids": tensor(view.input_ids, np.int64),
        "labels": tensor(view.targets, np.int64),
        "position_ids": tensor(view.position_ids, np.int64),
        "seq_idx": tensor(view.seq_idx),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": view.max_seqlen,
        "max_length_k": view.max_seqlen,
        "packed_lengths": view.lengths,
        **{name: tensor(array) for name, array in view.columns.items()},
    }


def _metadata(lengths: NDArray[np.int64], shape: torch.Size) -> Batch:
    cu_seqlens = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return {
        "position_ids": torch.from_numpy(positions).view(shape),
        "seq_idx": torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)).view(shape),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
        "packed_lengths": tuple(lengths.tolist()),
    }


def _segment_starts(batch: Batch, ids: Tensor) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool [B, S] each: where a run of equal marks begins, and what is marked as padding."""
    starts, padding = np.zeros(ids.shape, np.bool_), np.zeros(ids.shape, np.bool_)
    boundaries, mask = batch.get("cu_seq_lens_q"), batch.get("attention_mask")
    if boundaries is not None:
        marks = np.asarray(boundaries)
        starts.reshape(-1)[marks[marks < starts.size]] = True
        return starts, padding
    if batch.get("segment_ids") is not None:
        numbers = np.asarray(batch.pop("segment_ids"))
    elif isinstance(mask, Tensor) and mask.ndim == 2 and int(mask.max()) > 1:
        numbers = np.asarray(mask)
    elif isinstance(batch.get("position_ids"), Tensor):
        positions = np.asarray(batch["position_ids"])
        starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        return starts, padding
    else:
        raise LayoutError(
            "the batch marks no boundaries: with_boundaries reads cu_seq_lens_q, segment_ids, an attention_mask of "
            f"segment numbers or position_ids that restart, and the collator gave {', '.join(batch)}"
        )
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts, numbers == 0


def documents_of(feature: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The documents of a feature: itself, or the pieces that its ``seq_lengths`` cut."""
    columns = {name: np.asarray(value) for name, value in feature.items() if name != "attention_mask"}
    if "input_ids" not in columns:
        raise LayoutError(f"a feature has no input_ids, only {', '.join(feature)}: tokenise before collating")
    lengths = columns.pop("seq_lengths", None)
    if lengths is None:
        return [columns]
    if int(lengths.sum()) != len(columns["input_ids"]):
        raise LayoutError(
            f"seq_lengths add up to {int(lengths.sum()):,} and input_ids has {len(columns['input_ids']):,}"
        )
    cuts = np.cumsum(lengths)[:-1]
    pieces = {name: np.split(value, cuts) for name, value in columns.items()}
    return [{name: pieces[name][d] for name in pieces} for d in range(len(lengths))]
