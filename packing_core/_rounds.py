"""A round of a stream: which rows of its plan leave, and the batches that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core._pending import Pending, columns_of
from packing_core.batch import PackedBatch
from packing_core.dataset import pack
from packing_core.errors import LayoutError
from packing_core.plan import PackPlan

Int64 = NDArray[np.int64]

WASTE = 5e-4  # of the slots of the rows that leave a round; the rest waits for documents that fill it


def leaving(rows: PackPlan, most_pieces: int, most_tokens: int, old: NDArray[np.bool_]) -> Int64:
    """The rows that leave now: all that are full, enough of them, and all with a piece that is too old.

    Args:
        rows: the plan of all that is pending.
        most_pieces, most_tokens: what may stay pending.
        old: [P] which pieces of the plan must leave.
    """
    tokens = rows.row_tokens
    fullest = np.argsort(-tokens, kind="stable")
    free = np.cumsum((rows.capacity - tokens[fullest]).astype(np.float64))
    within = np.flatnonzero(free <= WASTE * rows.capacity * np.arange(1, rows.n_rows + 1))
    full = int(within[-1]) + 1 if len(within) else 0
    leaves = np.zeros(rows.n_rows, np.bool_)
    leaves[fullest[: max(full, _enough(np.diff(rows.row_offsets), fullest, most_pieces))]] = True
    leaves[fullest[: _enough(tokens, fullest, most_tokens)]] = True
    leaves |= np.logical_or.reduceat(old, rows.row_offsets[:-1])
    return np.flatnonzero(leaves)


def _enough(amount: Int64, order: Int64, most: int) -> int:
    """How many rows leave in this order, 1 at least, so that at most ``most`` of the amount stays."""
    gone = np.cumsum(amount[order])
    return int(np.searchsorted(gone, gone[-1] - most)) + 1


def make_rows(pending: Pending, rows: PackPlan, numbers: Int64, options: dict[str, Any]) -> PackedBatch:
    """Rows ``numbers`` of a plan of what is pending; ``options`` are those of ``pack``.

    Raises:
        LayoutError: a document is not what ``pack`` takes; the error says which one of the stream it is.
    """
    chosen = rows.select(numbers)
    ids, starts = pending.ids[chosen.source], pending.starts[chosen.source]
    contents = [pending.contents[i] for i in chosen.source.tolist()]
    local = PackPlan(
        chosen.row_offsets,
        np.arange(len(contents)),
        np.zeros(len(contents), np.int64),
        chosen.length,
        capacity=rows.capacity,
        alignment=rows.alignment,
        n_documents=len(contents),
        check=False,
    )
    try:
        batch = pack(**columns_of(contents, ids), capacity_or_plan=local, **options)
    except LayoutError:
        for number, content in zip(ids.tolist(), contents, strict=True):
            try:
                pack(**columns_of([content], ids[:1]), capacity_or_plan=rows.capacity, **options)
            except LayoutError as error:
                raise LayoutError(f"document {number} of the stream: {error}") from None
        raise
    return replace(batch, sources=ids, starts=starts)
