"""Batches under the names, dtypes and shifts that other ecosystems already read. One function per convention.

Shifted conventions pair the input at token t with the target at token t, which is token t + 1 of the same segment; the
last token of a segment predicts nothing, and its weight is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from packing_core.errors import UnsupportedError

if TYPE_CHECKING:
    from packing_core.batch import PackedBatch


def to_dict(batch: PackedBatch, convention: str) -> dict[str, Any]:
    """The batch under one convention; the user's columns keep their names and dtypes.

    Raises:
        UnsupportedError: no such convention.
    """
    if convention not in CONVENTIONS:
        raise UnsupportedError(f"no convention {convention!r}: pass one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[convention](batch)


def _hf(batch: PackedBatch) -> dict[str, Any]:
    view = batch.kernel_view()
    return {
        "input_ids": batch.input_ids.astype(np.int64),
        "labels": batch.targets.astype(np.int64),
        "position_ids": batch.position_ids.astype(np.int64),
        "cu_seq_lens_q": view.cu_seqlens,
        "cu_seq_lens_k": view.cu_seqlens,
        "max_length_q": view.max_seqlen,
        "max_length_k": view.max_seqlen,
        "seq_idx": batch.seq_idx,
        **batch.columns,
    }


def _trl(batch: PackedBatch) -> dict[str, Any]:
    bounds = np.searchsorted(batch.rows, np.arange(len(batch) + 1))
    rows = [batch[i].padding_free() for i in range(len(batch))]
    return {
        "input_ids": [row.input_ids for row in rows],
        "labels": [row.targets for row in rows],
        "seq_lengths": [batch.lengths[a:b] for a, b in pairwise(bounds)],
        **{name: [row.columns[name] for row in rows] for name in batch.columns},
    }


CONVENTIONS: dict[str, Callable[[PackedBatch], dict[str, Any]]] = {"hf": _hf, "trl": _trl}
