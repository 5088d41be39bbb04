"""One number per document from one per token of a packed batch, and back.

A batch's ``packed_lengths`` and ``packed_documents``, which the collators make on the host -> the flat indexes of each
document's tokens in reading order, copied to the device once -> gather -> one result per document. The shape of the
result is known on the host, so nothing waits for the device. No sum is made with atomics: results repeat to the bit,
and no other document has a part in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from packing_core.batches.documents import REDUCTIONS, Reduction
from packing_core.batches.keys import BatchKey
from packing_core.errors import LayoutError, PackingError
from packing_core.storage.segment_indexing import indexes
from torch_backend.segments import to_device


def reduce(values: Tensor, batch: Mapping[str, Any], how: Reduction, *, where: Tensor | None = None) -> Tensor:
    """Reduces values per token to one per document of a packed batch, differentiable.

    Padding never counts. Pieces of a document that was split are one document, in reading order. A document without a
    token that counts gets 0 and sends no gradient.

    Args:
        values: [B, S, ...] or [B * S, ...], on any device.
        batch: of a packed collator, with ``packed_lengths`` and ``packed_documents``.
        how: ``"sum"``, ``"mean"`` (over the tokens that count), ``"first"`` or ``"last"`` (of the tokens that count).
        where: bool [B, S] or [B * S], the tokens that count; all real ones if None. Trained tokens are
            ``batch["labels"] != -100``.

    Returns:
        [documents, ...] in source order: the order of the features that :class:`torch_backend.PackedCollator` was
        given, or rising document ids of the rows of a ``PackedDataset``. Sums and means are float32 at least; sums of
        one number per token are made in float64.

    Raises:
        LayoutError: the batch does not say which document each segment belongs to, or shapes contradict it.
        PackingError: there is no such ``how``.

    >>> from torch_backend import PackedCollator
    >>> batch = PackedCollator(capacity=4)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}, {"input_ids": [1]}])
    >>> batch["input_ids"].tolist()
    [[7, 8, 9, 1], [5, 6, 0, 0]]
    >>> reduce(batch["input_ids"], batch, "sum").tolist()
    [11.0, 24.0, 1.0]
    """
    if how not in REDUCTIONS:
        raise PackingError(f"how must be one of {', '.join(map(repr, REDUCTIONS))}; got {how!r}")
    tokens, lengths = document_tokens(batch)
    flat = _per_token(values, batch, "values")
    places = to_device(torch.from_numpy(tokens), flat.device)
    ends = to_device(torch.from_numpy(np.append(0, np.cumsum(lengths))), flat.device)
    taken = flat.index_select(0, places)
    counted = None
    before = ends  # tokens that count before each document, and at last all
    if where is not None:
        counted = _per_token(where, batch, "where").to(flat.device).index_select(0, places)
        if counted.dtype != torch.bool or counted.ndim != 1:
            raise LayoutError(f"where must be bool [B, S] or [B * S], got {where.dtype} {list(where.shape)}")
        before = torch.nn.functional.pad(counted.cumsum(0), (1, 0)).index_select(0, ends)
    counts = before.diff().view(-1, *[1] * (taken.ndim - 1))
    if how in ("sum", "mean"):
        if counted is not None:
            taken = torch.where(counted.view(-1, *[1] * (taken.ndim - 1)), taken, 0)
        total = _sums(taken, ends)
        return total / counts.clamp(min=1) if how == "mean" else total
    rank = before[:-1] if how == "first" else before[1:] - 1  # of the token among those that count
    if counted is not None:
        rank = torch.searchsorted(counted.cumsum(0), rank + 1)
    picked = taken.index_select(0, rank.clamp(0, max(0, len(tokens) - 1))) if len(lengths) else taken
    return torch.where(counts > 0, picked, 0)


def spread(values: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Returns each document's value at each of its tokens, 0 in padding: the adjoint of a :func:`reduce` by sum.

    Tokens that several documents share get 0.

    Args:
        values: [documents, ...] in source order.
        batch: as for :func:`reduce`, with ``input_ids`` [B, S].

    Returns:
        [B, S, ...] in the dtype of the values, differentiable.

    Raises:
        LayoutError: there is not one value per document, or the batch does not say what its documents are.
    """
    tokens, lengths = document_tokens(batch)
    if values.ndim < 1 or len(values) != len(lengths):
        raise LayoutError(f"values must be [{len(lengths)}, ...], one per document, got {list(values.shape)}")
    shape = batch["input_ids"].shape
    document = np.full(shape.numel(), len(lengths))
    document[tokens] = np.repeat(np.arange(len(lengths)), lengths)
    document[np.bincount(tokens, minlength=len(document)) > 1] = len(lengths)  # tokens that documents share
    padded = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    at_token = padded.index_select(0, to_device(torch.from_numpy(document), values.device))
    return at_token.view(*shape, *values.shape[1:])


def document_tokens(batch: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N] the flat index of every real token, document by document; int64 [D] the tokens of each document.

    Raises:
        LayoutError: the batch does not say which document each segment belongs to.
    """
    lengths, documents = batch.get(BatchKey.LENGTHS), batch.get(BatchKey.DOCUMENTS)
    if lengths is None or documents is None:
        raise LayoutError(
            "the batch does not say which document each segment belongs to (packed_lengths, packed_documents): let "
            "PackedCollator build it, or wrap its collator in with_boundaries; if a document is in the batch twice, "
            "make a batch of its own of the rows that repeat it"
        )
    order = np.array([segment for document in documents for segment in document], np.int64)
    of_segment = np.asarray(lengths, np.int64)
    counts = np.array([sum(lengths[segment] for segment in document) for document in documents], np.int64)
    return indexes((np.cumsum(of_segment) - of_segment)[order], of_segment[order]), counts


def _sums(values: Tensor, ends: Tensor) -> Tensor:
    """The sum of each run of ``values`` [N, ...] between two of the ``ends`` [D+1], one run after the other."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    wide = torch.float64 if values.ndim == 1 else dtype  # thousands of log-probabilities have to keep their differences
    if not len(values):
        return values.new_zeros(len(ends) - 1, *values.shape[1:], dtype=dtype)
    sums = torch.segment_reduce(values.to(wide).reshape(len(values), -1), "sum", offsets=ends, axis=0, unsafe=True)
    return sums.to(dtype).view(-1, *values.shape[1:])


def _per_token(x: Tensor, batch: Mapping[str, Any], name: str) -> Tensor:
    """[T, ...] of a tensor that has one entry per token."""
    shape = batch["input_ids"].shape
    if x.shape[:2] == shape:
        return x.flatten(0, 1)
    if x.shape[:1] == (shape.numel(),):
        return x
    raise LayoutError(f"{name} must be [{shape[0]}, {shape[1]}, ...] or [{shape.numel()}, ...], got {list(x.shape)}")
