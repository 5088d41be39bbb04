"""What must hold of the arrays of a PackedBatch; each check names the array, the entry and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from packing_core.errors import CapacityError, LayoutError
from packing_core.planning.pieces import MOST_TOKENS
from packing_core.storage.arrays import NUMBERS, as_array, read_only
from packing_core.storage.segment_indexing import Array

if TYPE_CHECKING:
    from packing_core.batches.batch import PackedBatch


def per_token(name: str, given: Any, kinds: str, shape: tuple[int, ...] | None) -> Array:
    """A read-only view of an array of ``input_ids``' shape (None: this is them) and of one of the dtype kinds.

    Raises:
        LayoutError: it has another shape, or holds what is no number of these kinds.
    """
    array = np.ascontiguousarray(as_array(given, name, NUMBERS))
    if shape is None and (array.ndim != 2 or array.shape[1] < 1):
        raise LayoutError(f"{name} has shape {list(array.shape)}: pass [rows, capacity]")
    if shape is not None and array.shape != shape:
        raise LayoutError(f"{name} has shape {list(array.shape)} and input_ids {list(shape)}: they must agree")
    array = as_array(array, name, kinds)
    if array.dtype == np.uint64 and kinds == "iu" and array.size and array.max() > np.iinfo(np.int64).max:
        raise LayoutError(f"{name} holds {array.max():,}, which does not fit int64: pass token ids")
    return read_only(array)


def check_segments(batch: PackedBatch) -> None:
    """Check that the segments of a batch agree with each other, with its values per document and with its rows.

    Raises:
        LayoutError: they contradict each other.
        CapacityError: the segments of a row do not fit into it.
    """
    count = len(batch.cu_seqlens) - 1
    for name in ("rows", "sources", "starts"):
        if len(getattr(batch, name)) != count:
            raise LayoutError(
                f"{name} has {len(getattr(batch, name))} entries and cu_seqlens marks {count} segments: they must agree"
            )
    for name, values in batch.per_document.items():
        if values.ndim < 1 or len(values) != count:
            raise LayoutError(
                f"per_document[{name!r}] has shape {list(values.shape)} and cu_seqlens marks {count} segments: "
                "give one entry per segment, that of its document"
            )
    if count < 0 or batch.cu_seqlens[0] != 0 or (batch.cu_seqlens[1:] <= batch.cu_seqlens[:-1]).any():
        raise LayoutError("cu_seqlens must start at 0 and strictly increase: padding is no segment, leave it out")
    if count == 0:
        return
    if batch.cu_seqlens[-1] > batch.input_ids.size:
        raise CapacityError(
            f"cu_seqlens marks {batch.cu_seqlens[-1]:,} tokens and input_ids has {batch.input_ids.size:,}: they must "
            f"agree"
        )
    if batch.alignment > batch.capacity:
        raise CapacityError(f"alignment is {batch.alignment:,} and capacity {batch.capacity:,}: pass at most that")
    if batch.rows[0] < 0 or batch.rows[-1] >= len(batch) or (batch.rows[1:] < batch.rows[:-1]).any():
        raise LayoutError(f"rows must never decrease and stay in 0..{len(batch) - 1}: sort the segments by row")
    for name in ("sources", "starts"):
        if (lowest := getattr(batch, name)).min() < 0:
            raise LayoutError(f"{name}[{lowest.argmin()}] is {lowest.min()}: documents and tokens count from 0")
    if batch.starts.max() > MOST_TOKENS:
        raise LayoutError(f"starts[{batch.starts.argmax()}] is {batch.starts.max():,}: no document is that long")
    over = batch.segment_starts + batch.lengths > batch.capacity
    if over.any():
        s = int(np.argmax(over))
        raise CapacityError(
            f"segment {s} (document {batch.sources[s]}) ends at token {batch.segment_starts[s] + batch.lengths[s]:,} "
            f"of row {batch.rows[s]} and capacity is {batch.capacity:,}: move it to another row"
        )
