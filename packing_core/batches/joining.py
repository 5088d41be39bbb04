"""Rows of several batches, as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.batch import PackedBatch
from packing_core.errors import LayoutError


def concatenate(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The rows of several batches of one capacity, in order.

    Raises:
        LayoutError: the batches differ in what they hold.
    """
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    per_document = set(first.per_document)
    for batch in batches:
        same = (batch.capacity, batch.alignment, batch.weighting, set(batch.columns), set(batch.per_document)) == (
            first.capacity,
            first.alignment,
            first.weighting,
            set(first.columns),
            per_document,
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
        per_document={name: np.concatenate([batch.per_document[name] for batch in batches]) for name in per_document},
        alignment=first.alignment,
        pad_id=first.pad_id,
        weighting=first.weighting,
    )
