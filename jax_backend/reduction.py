"""One number per document from one per token of a packed batch, and back, under ``jit`` and ``grad``.

``to_batch`` says of every token which document it is of and where in it it stands. Data flows values [B, S, ...] ->
segment sums over those numbers -> [documents, ...] in source order. The number of documents is static; results of
documents that a batch does not have are 0. Shape letters: B rows, S tokens of a row, T = B * S, N documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from packing_core.documents import REDUCTIONS, Reduction
from packing_core.errors import LayoutError, PackingError


def reduce(
    values: jax.Array,
    batch: Mapping[str, Any],
    how: Reduction,
    *,
    documents: int,
    where: jax.Array | None = None,
) -> jax.Array:
    """One value per document of a packed batch, from one per token, differentiable.

    Padding never counts. Pieces of a document that was split are one document, in reading order. A document without a
    token that counts gets 0 and sends no gradient.

    Args:
        values: [B, S, ...] or [B * S, ...].
        batch: of :func:`jax_backend.to_batch`, with ``document_ids`` and ``document_positions`` [B, S].
        how: ``"sum"``, ``"mean"`` (over the tokens that count), ``"first"`` or ``"last"`` (of the tokens that count).
        documents: N, static: at least as many as the batch holds. If it holds more, every floating result is NaN.
        where: bool [B, S] or [B * S], the tokens that count; all real ones if None. Trained tokens stand where
            ``batch["loss_weights"] > 0``, one before the token that they predict, as everything in such a batch.

    Returns:
        [N, ...] in source order; sums and means are float32 at least.

    Raises:
        LayoutError: the batch does not say what its documents are, or shapes contradict it.
        PackingError: there is no such ``how``, or ``documents`` is below 1.
    """
    if how not in REDUCTIONS:
        raise PackingError(f"how must be one of {', '.join(map(repr, REDUCTIONS))}; got {how!r}")
    ids_T, positions_T = _documents(batch, documents)
    flat = _per_token(values, batch, "values")
    counted_T = ids_T >= 0
    if where is not None:
        counted_T &= _per_token(where, batch, "where").astype(bool)
    nowhere = jnp.where(counted_T, ids_T, documents)  # the result of the last number is dropped

    def per_document(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, nowhere, documents + 1)[:documents]

    mask = counted_T.reshape(-1, *[1] * (flat.ndim - 1))
    counts = per_document(counted_T.astype(jnp.int32)).reshape(-1, *[1] * (flat.ndim - 1))
    if how in ("sum", "mean"):
        total = per_document(jnp.where(mask, flat, 0).astype(jnp.promote_types(flat.dtype, jnp.float32)))
        found = total / jnp.maximum(counts, 1) if how == "mean" else total
    else:
        extreme = jax.ops.segment_min if how == "first" else jax.ops.segment_max
        wanted = extreme(positions_T, nowhere, documents + 1)
        chosen = counted_T & (positions_T == wanted[nowhere])
        kept = jnp.where(chosen.reshape(mask.shape), flat, 0)
        found = per_document(kept).astype(flat.dtype)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found
    return jnp.where(ids_T.max() < documents, found, jnp.nan)


def spread(values: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """[B, S, ...]: each document's value at each of its tokens, 0 in padding; values [N, ...] in source order.

    Raises:
        LayoutError: the batch does not say what its documents are.
    """
    ids_T, _ = _documents(batch, len(values))
    at_token = jnp.where((ids_T >= 0).reshape(-1, *[1] * (values.ndim - 1)), values[ids_T], 0)
    return at_token.reshape(*batch["document_ids"].shape, *values.shape[1:])


def _documents(batch: Mapping[str, Any], documents: int) -> tuple[jax.Array, jax.Array]:
    if documents < 1:
        raise PackingError(f"documents must be at least 1, the most that a batch holds; got {documents}")
    ids, positions = batch.get("document_ids"), batch.get("document_positions")
    if ids is None or positions is None:
        raise LayoutError(
            "the batch does not say what its documents are (document_ids, document_positions): make it with "
            "jax_backend.to_batch; a batch that holds a document twice cannot say so, take the rows on their own"
        )
    return jnp.asarray(ids).reshape(-1), jnp.asarray(positions).reshape(-1)


def _per_token(x: jax.Array, batch: Mapping[str, Any], name: str) -> jax.Array:
    """[T, ...] of an array that has one entry per token."""
    shape = batch["document_ids"].shape
    if x.shape[:2] == shape:
        return x.reshape(-1, *x.shape[2:])
    if x.shape[:1] == (shape[0] * shape[1],):
        return x
    raise LayoutError(f"{name} must be [{shape[0]}, {shape[1]}, ...] or [{shape[0] * shape[1]}, ...], got {x.shape}")
