"""Batches under the names, dtypes and shifts that other ecosystems already read: one function per convention.

Hugging Face models shift inside, so they and TRL are given labels at the token itself, -100 at segment starts. JAX
ecosystems are given shifted pairs: the target at token t is token t + 1 of the same segment, and the last token of a
segment, which predicts nothing, weighs 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from packing_core.batches.derived import DerivedBatch
from packing_core.batches.keys import BatchKey
from packing_core.batches.views import as_int32, kernel_view
from packing_core.errors import LayoutError, UnsupportedError
from packing_core.storage.arrays import Array


def to_dict(batch: DerivedBatch, convention: str) -> dict[str, Any]:
    """The batch under one convention; the user's columns keep their names, dtypes and places (they are never shifted).

    ``"hf"``: what ``transformers.DataCollatorWithFlattening`` emits with all its options, rows one after the other with
    their padding as segments of its own, T = rows * capacity: ``input_ids``, ``labels``, ``position_ids`` int64 [1, T],
    ``seq_idx`` int32 [1, T], ``cu_seq_lens_q`` and ``_k`` int32 [K+1], ``max_length_q`` and ``_k`` int.

    ``"trl"``: the columns of a dataset that ``SFTTrainer(padding_free=True)`` collates itself: ``input_ids``,
    ``labels`` and ``seq_lengths``, a list of one int64 array per row each, no padding.

    ``"grain"``: what ``grain`` packing emits for the features ``inputs`` and ``targets``: those two,
    ``*_segment_ids``, ``*_positions`` int32 [R, capacity] (0 = padding), shifted, and ``loss_weights`` float32.

    ``"maxtext"``: what MaxText's train step reads: ``inputs``, ``targets``, ``*_segmentation``, ``*_position`` int32
    [R, capacity], shifted; its loss counts where ``targets_segmentation`` is not 0, so that is 0 at all other targets.

    Raises:
        UnsupportedError: no such convention, or one without weights for a batch weighted per document.
        LayoutError: a column has the name of one of the convention's arrays.
        CapacityError: token ids or labels do not fit the convention's dtype.
    """
    if not isinstance(convention, str) or convention not in CONVENTIONS:
        raise UnsupportedError(f"there is no convention {convention!r}: pass one of {', '.join(CONVENTIONS)}")
    if batch.parents is not None:
        raise UnsupportedError(
            f'the convention "{convention}" has no place for parents, and segments of this batch continue others: pack '
            "without shared prefixes (pack), or let PackedCollator(model, share_prefix=True) build the batch"
        )
    if batch.weighting != "token" and convention != "grain":
        raise UnsupportedError(
            f'the convention "{convention}" has no place for weights and this batch has weighting="{batch.weighting}": '
            f'pack with weighting="token", or use batch.loss_weights in a loss of your own'
        )
    arrays = CONVENTIONS[convention](batch)
    if taken := sorted(arrays.keys() & batch.columns.keys()):
        raise LayoutError(
            f'columns[{taken[0]!r}] has the name of an array of the convention "{convention}": choose another name'
        )
    return arrays | dict(_columns(batch, convention))


def _hf(batch: DerivedBatch) -> dict[str, Any]:
    view = kernel_view(batch)
    return {
        "input_ids": view.input_ids.astype(np.int64)[None],
        "labels": view.targets.astype(np.int64)[None],
        "position_ids": view.position_ids.astype(np.int64)[None],
        BatchKey.NUMBERS: view.seq_idx[None],
        BatchKey.BOUNDARIES: view.cu_seqlens,
        BatchKey.KEY_BOUNDARIES: view.cu_seqlens,
        BatchKey.LONGEST: view.max_seqlen,
        BatchKey.KEY_LONGEST: view.max_seqlen,
    }


def _trl(batch: DerivedBatch) -> dict[str, Any]:
    return {
        "input_ids": _real_tokens(batch, batch.input_ids.astype(np.int64)),
        "labels": _real_tokens(batch, batch.targets.astype(np.int64)),
        "seq_lengths": np.split(batch.lengths, np.searchsorted(batch.rows, np.arange(1, len(batch)))),
    }


def _grain(batch: DerivedBatch) -> dict[str, Any]:
    arrays, weights = _pairs(batch, "segment_ids", "positions")
    return arrays | {"loss_weights": weights}


def _maxtext(batch: DerivedBatch) -> dict[str, Any]:
    arrays, weights = _pairs(batch, "segmentation", "position")
    return arrays | {"targets_segmentation": np.where(weights != 0, arrays["inputs_segmentation"], 0)}


CONVENTIONS: dict[str, Callable[[DerivedBatch], dict[str, Any]]] = {
    "hf": _hf,
    "trl": _trl,
    "grain": _grain,
    "maxtext": _maxtext,
}


def _pairs(batch: DerivedBatch, numbers: str, positions: str) -> tuple[dict[str, Array], Array]:
    """Inputs and targets int32 with their segments, and weights float32, [R, capacity] each.

    Targets and weights are one token earlier, 0 where nothing is trained. The weight of a segment's first token is 0,
    so shifting whole rows brings nothing across a boundary.

    Args:
        numbers, positions: what the convention calls segment ids and positions, behind ``inputs_`` and ``targets_``.
    """
    targets, weights = np.zeros(batch.input_ids.shape, np.int32), np.zeros(batch.input_ids.shape, np.float32)
    weights[:, :-1] = batch.loss_weights[:, 1:]
    np.copyto(targets[:, :-1], as_int32(batch.targets, "targets")[:, 1:], where=weights[:, :-1] != 0)
    arrays = {"inputs": as_int32(batch.input_ids, "input_ids"), "targets": targets}
    for name, array in ((numbers, batch.segment_ids), (positions, batch.position_ids)):
        arrays |= {f"inputs_{name}": array, f"targets_{name}": array}
    return arrays, weights


def _columns(batch: DerivedBatch, convention: str) -> list[tuple[str, Any]]:
    """The user's columns in the shape of the convention's other arrays."""
    if convention == "hf":
        return [(name, array.reshape(1, -1)) for name, array in batch.columns.items()]
    if convention == "trl":
        return [(name, _real_tokens(batch, array)) for name, array in batch.columns.items()]
    return list(batch.columns.items())


def _real_tokens(batch: DerivedBatch, array: Array) -> list[Array]:
    """The row's real tokens, one array per row."""
    return [row[mask] for row, mask in zip(array, batch.attention_mask)]
