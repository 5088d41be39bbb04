"""Documents of a packed batch: their tokens, and numbers per token turned into numbers per document.

A batch knows segments, and of each segment its document and where it starts there. Data flows batch ->
:func:`segments_by_document` -> the tokens of each document in reading order -> one result per document. Results are in
source order: by rising document id, whatever rows the segments stand in.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.stored import StoredBatch
from packing_core.errors import LayoutError
from packing_core.planning.pieces import choice
from packing_core.storage.arrays import NUMBERS, Array, Int64, as_array
from packing_core.storage.forest import leaves, lineage
from packing_core.storage.segment_indexing import copy_runs, indexes, offsets_of

Reduction = Literal["sum", "mean", "last", "first"]
REDUCTIONS = get_args(Reduction)


def segments_by_document(batch: StoredBatch) -> tuple[Int64, Int64, Int64]:
    """The segments of each document in reading order; a segment that several documents share is in each of them.

    Returns:
        int64 [D] the documents' ids, rising; int64 [>= S] segment numbers, those of one document after the other; int64
        [D] how many of them each document has, at least one.

    Raises:
        LayoutError: the batch holds the same tokens of a document twice.
    """
    if batch.parents is not None:
        return _paths(batch, batch.parents)
    _, begins, counts = batch.own
    order = np.lexsort((begins, batch.sources))
    sources, starts, lengths = batch.sources[order], begins[order], counts[order]
    again = (np.diff(sources) == 0) & (starts[1:] < (starts + lengths)[:-1])
    if again.any():
        twice = int(sources[int(np.argmax(again))])
        raise LayoutError(
            f"document {twice} is in this batch twice: take the rows it repeats in on their own, or pack the data sets "
            "that it comes from as one"
        )
    ids, counts = np.unique(sources, return_counts=True)
    return ids, order, counts


def unpack(batch: StoredBatch, array: Array) -> dict[int, Array]:
    """The tokens of a per-token array [R, capacity] by document, whose pieces are put together again."""
    ids, order, counts = segments_by_document(batch)
    begins, _, own = batch.own
    lengths = own[order]
    at = offsets_of(lengths)
    tokens = np.empty(at[-1], array.dtype)
    copy_runs(tokens, at[:-1], array.reshape(-1), begins[order], lengths)
    parts = np.split(tokens, at[offsets_of(counts)[1:-1]])  # one, of no tokens, where there is no document
    return dict(zip(ids.tolist(), parts, strict=False))


def reduce(batch: StoredBatch, values: Any, how: Reduction, where: Any) -> Array:
    """One value per document; see :meth:`PackedBatch.reduce`."""
    choice("how", how, REDUCTIONS)
    flat = _per_token(batch, "values", values)
    tokens, lengths = _tokens(batch)
    taken = flat[tokens]
    counted = np.ones(len(tokens), np.bool_) if where is None else _per_token(batch, "where", where, "b")[tokens]
    if counted.ndim != 1:
        raise LayoutError(f"where must be [R, capacity] or [T], one bool per token, got {list(np.shape(where))}")
    before = offsets_of(counted)[offsets_of(lengths)]
    counts = np.diff(before)
    per_document = (slice(None), *[None] * (taken.ndim - 1))
    if how in ("sum", "mean"):
        kept = np.where(counted[per_document], taken, 0).astype(np.float64)
        total: Array = np.add.reduceat(kept, np.cumsum(lengths) - lengths) if len(lengths) else kept
        return total / np.maximum(counts, 1)[per_document] if how == "mean" else total
    rank = before[:-1] if how == "first" else before[1:] - 1  # of the token among those that count
    place = np.append(np.flatnonzero(counted), 0)[np.where(counts > 0, rank, -1)]
    picked = taken[place] if len(taken) else taken
    return np.where((counts > 0)[per_document], picked, np.zeros_like(picked))


def spread(batch: StoredBatch, values: Any) -> Array:
    """Each document's value at each of its tokens; see :meth:`PackedBatch.spread`."""
    tokens, lengths = _tokens(batch)
    array = as_array(values, "values", NUMBERS)
    if array.ndim < 1 or len(array) != len(lengths):
        raise LayoutError(f"values must be [{len(lengths)}, ...], one per document, got {list(array.shape)}")
    out = np.zeros((batch.input_ids.size, *array.shape[1:]), array.dtype)
    out[tokens] = np.repeat(array, lengths, axis=0)
    out[_shared(batch)] = 0
    return out.reshape(*batch.input_ids.shape, *array.shape[1:])


def document_ids(batch: StoredBatch) -> NDArray[np.int32]:
    """int32 [R, capacity]: the place of each token's document among the documents of the batch; -1 in padding."""
    tokens, lengths = _tokens(batch)
    out = np.full(batch.input_ids.size, -1, np.int32)
    out[tokens] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    out[_shared(batch)] = -1
    return out.reshape(batch.input_ids.shape)


def _paths(batch: StoredBatch, parents: Int64) -> tuple[Int64, Int64, Int64]:
    """:func:`segments_by_document` of a forest: each leaf ends the document that it is of."""
    ends = leaves(parents)
    ends = ends[np.argsort(batch.sources[ends], kind="stable")]
    ids = batch.sources[ends]
    if (again := np.diff(ids) == 0).any():
        raise LayoutError(
            f"document {ids[int(np.argmax(again))]} ends in two segments of this batch: take the rows it repeats in on "
            "their own"
        )
    paths = [lineage(parents, int(end)) for end in ends]
    return (
        ids,
        np.array([s for path in paths for s in path], np.int64),
        np.array([len(path) for path in paths], np.int64),
    )


def _shared(batch: StoredBatch) -> Int64:
    """int64: flat indexes of the tokens of segments that others continue, which are of several documents."""
    if batch.parents is None:
        return np.zeros(0, np.int64)
    inner = np.setdiff1d(np.arange(batch.n_segments), leaves(batch.parents))
    return indexes(batch.flat_starts[inner], batch.lengths[inner])


def _tokens(batch: StoredBatch) -> tuple[Int64, Int64]:
    """int64 the flat index of every token but context, document by document; int64 [D] tokens of each document."""
    _, order, counts = segments_by_document(batch)
    begins, _, own = batch.own
    lengths = own[order]
    per_document = np.add.reduceat(lengths, np.cumsum(counts) - counts) if len(counts) else lengths
    return indexes(begins[order], lengths), per_document


def _per_token(batch: StoredBatch, name: str, values: Any, kinds: str = NUMBERS) -> Array:
    """[T, ...] of an array that has one entry per token."""
    array = as_array(values, name, kinds)
    shape, size = batch.input_ids.shape, batch.input_ids.size
    if array.shape[:2] == shape:
        return array.reshape(size, *array.shape[2:])
    if array.shape[:1] == (size,):
        return array
    raise LayoutError(f"{name} must be [{shape[0]}, {shape[1]}, ...] or [{size}, ...], got {list(array.shape)}")
