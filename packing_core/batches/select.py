"""Some rows of a batch, or all without padding: the fields of the batch that holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.stored import StoredBatch
from packing_core.storage.arrays import Int64, frozen, read_only
from packing_core.storage.segment_indexing import chosen, indexes, offsets_of


def select(batch: StoredBatch, rows: int | slice | Int64 | list[int]) -> dict[str, Any]:
    """The fields of the batch of these rows, in the order asked for; a slice of neighbours copies no tokens.

    They need not be checked, as those of the batch were.
    """
    numbers = chosen(rows, len(batch))
    tokens = rows if isinstance(rows, slice) and rows.step in (None, 1) else numbers
    picked: slice | Int64
    if isinstance(tokens, slice):
        row = int(numbers[0]) if len(numbers) else 0
        first, last = np.searchsorted(batch.rows, (row, row + len(numbers))).tolist()
        picked, moved = slice(first, last), -first
        entries, of_segments = batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first], batch.rows[picked] - row
    else:
        begin, end = np.searchsorted(batch.rows, np.stack([numbers, numbers + 1]))
        counts = end - begin
        picked = indexes(begin, counts)
        moved = np.repeat(np.cumsum(counts) - counts - begin, counts)
        entries, of_segments = offsets_of(batch.lengths[picked]), np.repeat(np.arange(len(numbers)), counts)
    parents = _moved(batch, picked, moved)
    others = {"cu_seqlens": frozen(entries), "rows": frozen(of_segments), "parents": parents}
    return {entry.name: _part(batch, entry.name, tokens, picked) for entry in fields(batch)} | others


def single_rows(batch: StoredBatch, first: int = 0) -> Iterator[dict[str, Any]]:
    """The fields of ``batch[r]`` for each row r from ``first`` on, at a tenth of the cost.

    They are those of a batch that was checked, so what is made of them need not be checked.
    """
    names = [entry.name for entry in fields(batch)]
    alike = {name: getattr(batch, name) for name in ("pad_id", "weighting", "restarts")}
    whole = [name for name in ("input_ids", "labels", "loss_mask") if getattr(batch, name) is not None]
    absent = dict.fromkeys(set(names) - set(alike) - set(whole))
    bounds = np.searchsorted(batch.rows, np.arange(first, len(batch) + 1))
    zeros = read_only(np.zeros(int(np.diff(bounds).max(initial=0)), np.int64))
    tokens = [(name, getattr(batch, name)) for name in whole]
    cu_seqlens, sources, starts = batch.cu_seqlens, batch.sources, batch.starts
    columns, per_document, context = batch.columns.items(), batch.per_document.items(), batch.context
    for row, (begin, end) in enumerate(pairwise(bounds.tolist()), first):
        entries = cu_seqlens[begin : end + 1] - cu_seqlens[begin]
        made = absent | alike
        for name, array in tokens:
            made[name] = array[row : row + 1]
        made["cu_seqlens"], made["rows"] = frozen(entries), zeros[: end - begin]
        made["sources"], made["starts"] = sources[begin:end], starts[begin:end]
        made["columns"] = {name: array[row : row + 1] for name, array in columns}
        made["per_document"] = {name: array[begin:end] for name, array in per_document}
        made["parents"] = _moved(batch, slice(begin, end), -begin)
        made["context"] = None if context is None else context[begin:end]
        yield made


def without_padding(batch: StoredBatch) -> dict[str, Any]:
    """The fields of one row of all segments, as long as their tokens."""
    real = indexes(batch.flat_starts, batch.lengths)

    def flat(array: NDArray[Any] | None) -> NDArray[Any] | None:
        return None if array is None else array.reshape(1, -1)[:, real]

    given = {name: flat(getattr(batch, name)) for name in ("input_ids", "labels", "loss_mask")}
    columns = {name: flat(array) for name, array in batch.columns.items()}
    names = ("cu_seqlens", "sources", "starts", "pad_id", "weighting", "parents", "context", "restarts")
    kept = {name: getattr(batch, name) for name in names}
    return {**given, **kept, "columns": columns, "per_document": batch.per_document, "rows": np.zeros_like(batch.rows)}


def _moved(batch: StoredBatch, picked: slice | Int64, by: int | Int64) -> Int64 | None:
    """Parents of the picked segments, renumbered by adding ``by`` to the number of a segment."""
    if batch.parents is None:
        return None
    parents = batch.parents[picked]
    return read_only(np.where(parents < 0, parents, parents + by))


def _part(batch: StoredBatch, name: str, tokens: slice | Int64, picked: slice | Int64) -> Any:
    value = getattr(batch, name)
    places: Any = tokens if name in ("input_ids", "labels", "loss_mask", "columns") else picked
    if name in ("columns", "per_document"):
        return {key: frozen(array[places]) for key, array in value.items()}
    return frozen(value[places]) if isinstance(value, np.ndarray) else value
