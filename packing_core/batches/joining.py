"""Joins the rows of several batches into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.batch import PackedBatch
from packing_core.errors import LayoutError
from packing_core.storage.forest import ROOT


def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Joins the rows of several batches into one batch, in order; the inverse of slicing one.

    Documents keep their ids, so batches of different data sets may hold different documents of one id.
    :meth:`PackedBatch.unpack`, ``reduce``, ``spread`` and, with ``weighting="document"``, ``loss_weights`` then raise.
    ``loss_weights`` counts a document whose row comes twice as one.

    Args:
        batches: of one capacity, padding token and weighting, with the same labels, masks and columns.

    Raises:
        LayoutError: there are none, or they differ in one of these.

    >>> from packing_core import pack
    >>> batch = pack([[1, 2, 3], [4], [5, 6]], 4, seed=None)
    >>> concatenate([batch[1], batch[0]]).input_ids.tolist()
    [[5, 6, 0, 0], [1, 2, 3, 4]]
    """
    batches = list(batches) if isinstance(batches, Sequence) else [batches]
    if not batches or not all(isinstance(batch, PackedBatch) for batch in batches):
        kinds = ", ".join(sorted({type(batch).__name__ for batch in batches})) or "no batch"
        raise LayoutError(f"concatenate takes a list of one or more PackedBatch objects, got {kinds}")
    first = batches[0]
    if len(batches) == 1:
        return first
    for number, batch in enumerate(batches):
        for name, value in _kind(batch).items():
            if value != (wanted := _kind(first)[name]):
                raise LayoutError(f"batch {number} has {name} {value} and batch 0 {wanted}: pack both alike")

    def joined(name: str) -> Any:
        arrays = [getattr(batch, name) for batch in batches]
        return None if arrays[0] is None else np.concatenate(arrays)

    def joined_dict(name: str) -> dict[str, NDArray[Any]]:
        return {key: np.concatenate([getattr(batch, name)[key] for batch in batches]) for key in getattr(first, name)}

    row_offsets = np.cumsum([0, *(len(batch) for batch in batches)])
    segment_offsets = np.cumsum([0, *(batch.n_segments for batch in batches)]).tolist()
    return PackedBatch(
        input_ids=joined("input_ids"),
        cu_seqlens=np.cumsum(np.concatenate([np.zeros(1, np.int64), *(batch.lengths for batch in batches)])),
        rows=np.concatenate([batch.rows + offset for batch, offset in zip(batches, row_offsets, strict=False)]),
        sources=joined("sources"),
        starts=joined("starts"),
        labels=joined("labels"),
        loss_mask=joined("loss_mask"),
        columns=joined_dict("columns"),
        per_document=joined_dict("per_document"),
        pad_id=first.pad_id,
        weighting=first.weighting,
        parents=_parents(batches, segment_offsets),
        context=joined("context"),
        restarts=first.restarts,
    )


def _parents(batches: Sequence[PackedBatch], segment_offsets: Sequence[int]) -> NDArray[np.int64] | None:
    """Parents of all segments, None if no batch has any; those of a batch without are roots."""
    if all(batch.parents is None for batch in batches):
        return None
    parts = [np.full(batch.n_segments, ROOT) if batch.parents is None else batch.parents for batch in batches]
    return np.concatenate(
        [np.where(part < 0, part, part + by) for part, by in zip(parts, segment_offsets, strict=False)]
    )


def _kind(batch: PackedBatch) -> dict[str, Any]:
    """Returns what two batches must have in common, under the names that messages use."""
    return {
        **{name: getattr(batch, name) for name in ("capacity", "pad_id", "weighting", "restarts")},
        **{
            name: "given" if getattr(batch, name) is not None else "missing"
            for name in ("labels", "loss_mask", "context")
        },
        "columns": sorted(batch.columns),
        "per_document": {name: list(array.shape[1:]) for name, array in sorted(batch.per_document.items())},
    }
