"""One number per document from one per token of a packed batch, and back, under ``jit`` and ``grad``.

``to_batch`` says of every token which document it is of and where in it it stands. Data flows values [B, S, ...] ->
tokens in the order of documents and positions -> sums that stay inside a document -> [documents, ...] in source order.
Nothing is added by a scatter: on a GPU that adds with atomics, in another order every time. So results and gradients
repeat to the bit on every device, and those of a document do not depend on the others or on where it is packed. The
number of documents is static; results of documents that a batch does not have are 0. Shape letters: B rows, S tokens of
a row, T = B * S, N documents; T' is T in the order of documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_backend.placement import spec_of, takes_explicit_axes
from jax_backend.strictness import widened
from packing_core.batches.documents import REDUCTIONS, Reduction
from packing_core.errors import LayoutError, PackingError


@takes_explicit_axes(lambda given: PartitionSpec())
def reduce(
    values: jax.Array,
    batch: Mapping[str, Any],
    how: Reduction,
    *,
    documents: int,
    where: jax.Array | None = None,
) -> jax.Array:
    """Reduces values per token to one per document of a packed batch, differentiable.

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
    if not ids_T.size:
        wide = widened(flat.dtype) if how in ("sum", "mean") else flat.dtype
        return jnp.zeros((documents, *flat.shape[1:]), wide)
    counted_T = ids_T >= 0
    if where is not None:
        counted_T &= _per_token(where, batch, "where").astype(bool)
    tokens = _sort(jnp.where(counted_T, ids_T, documents), positions_T, documents)
    if how in ("sum", "mean"):
        found = _totals(flat.astype(widened(flat.dtype)), tokens)
        if how == "mean":
            found /= jnp.maximum(tokens.counts_N, 1).astype(found.dtype).reshape(-1, *[1] * (flat.ndim - 1))
    else:
        wanted = tokens.starts_N + (tokens.counts_N - 1 if how == "last" else 0)
        found = _take(flat, tokens.order_T[wanted], tokens.counts_N > 0)
    if not jnp.issubdtype(found.dtype, jnp.inexact):
        return found
    return jnp.where(ids_T.max() < documents, found, jnp.nan)


@takes_explicit_axes(lambda given: spec_of(given["batch"]["document_ids"]))
def spread(values: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """[B, S, ...]: each document's value at each of its tokens, 0 in padding; values [N, ...] in source order.

    Raises:
        LayoutError: the batch does not say what its documents are.
    """
    values = jnp.asarray(values)
    ids_T, positions_T = _documents(batch, len(values))
    if jnp.issubdtype(values.dtype, jnp.inexact):
        at_token = _spread(values, ids_T, positions_T)
    else:
        at_token = _at_tokens(values, ids_T)
    return at_token.reshape(*batch["document_ids"].shape, *values.shape[1:])


class _Sorted(NamedTuple):
    """Positions of each document's tokens once they are sorted by document and position."""

    order_T: jax.Array  # T' -> T
    offsets_T: jax.Array  # of a sorted token in its document
    starts_N: jax.Array  # T' of a document's first token
    counts_N: jax.Array  # its tokens


def _sort(ids_T: jax.Array, positions_T: jax.Array, documents: int) -> _Sorted:
    """Tokens of documents 0..N-1 in their order; those with a larger number come last and are of no document."""
    places_T = jnp.arange(len(ids_T))
    ids_T, _, order_T = jax.lax.sort((ids_T, positions_T, places_T), num_keys=2)
    bounds = jnp.searchsorted(ids_T, jnp.arange(documents + 1))
    offsets_T = places_T - bounds.at[ids_T].get(mode="clip")
    return _Sorted(order_T, offsets_T, bounds[:-1], jnp.diff(bounds))


def _totals(values_T: jax.Array, tokens: _Sorted) -> jax.Array:
    """[N, ...]: each document's sum, by doubling: after step k a token holds the sum of the last 2**k up to itself.

    Which numbers are added to which depends on their distance from the document's end alone (Hillis and Steele, "Data
    parallel algorithms", 1986), and the error grows with the logarithm of the length.
    """
    sums_T = values_T.at[tokens.order_T].get(unique_indices=True)
    offsets_T = tokens.offsets_T.reshape(-1, *[1] * (values_T.ndim - 1))

    def double(k: jax.Array, sums_T: jax.Array) -> jax.Array:
        return sums_T + jnp.where(offsets_T >= 1 << k, jnp.roll(sums_T, 1 << k, axis=0), 0)

    sums_T = jax.lax.fori_loop(0, (len(values_T) - 1).bit_length(), double, sums_T)
    return _take(sums_T, tokens.starts_N + tokens.counts_N - 1, tokens.counts_N > 0)


def _take(values_T: jax.Array, places_N: jax.Array, exists_N: jax.Array) -> jax.Array:
    """[N, ...]: the values at different places, 0 where there is none. The gradient adds at no place twice."""
    outside_N = len(values_T) + jnp.arange(len(places_N))
    places_N = jnp.where(exists_N, places_N, outside_N)
    return values_T.at[places_N].get(mode="fill", fill_value=0, unique_indices=True)


def _at_tokens(values_N: jax.Array, ids_T: jax.Array) -> jax.Array:
    real_T = (ids_T >= 0).reshape(-1, *[1] * (values_N.ndim - 1))
    return jnp.where(real_T, values_N[ids_T], jnp.zeros((), values_N.dtype))


@jax.custom_jvp
def _spread(values_N: jax.Array, ids_T: jax.Array, positions_T: jax.Array) -> jax.Array:
    """:func:`_at_tokens` whose gradient is :func:`_totals`; that of an indexing adds with a scatter."""
    return _at_tokens(values_N, ids_T)


@_spread.defjvp
def _spread_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    values_N, ids_T, positions_T = primals
    tokens = _sort(jnp.where(ids_T >= 0, ids_T, len(values_N)), positions_T, len(values_N))
    wide = widened(values_N.dtype)
    at_tokens = jax.ShapeDtypeStruct((len(ids_T), *values_N.shape[1:]), wide)
    (tangent_T,) = jax.linear_transpose(lambda x: _totals(x, tokens), at_tokens)(tangents[0].astype(wide))
    return _spread(*primals), tangent_T.astype(values_N.dtype)


def _documents(batch: Mapping[str, Any], documents: int) -> tuple[jax.Array, jax.Array]:
    if documents < 1:
        raise PackingError(f"documents must be at least 1, the most that a batch holds; got {documents}")
    ids, positions = batch.get("document_ids"), batch.get("document_positions")
    if ids is None or positions is None:
        raise LayoutError(
            "the batch does not say what its documents are (document_ids, document_positions): make it with "
            "jax_backend.to_batch; if a document is in it twice, make a batch of its own of the rows that repeat it"
        )
    return jnp.asarray(ids).reshape(-1), jnp.asarray(positions).reshape(-1)


def _per_token(x: jax.Array, batch: Mapping[str, Any], name: str) -> jax.Array:
    """[T, ...] of an array that has one entry per token."""
    x = jnp.asarray(x)
    shape = batch["document_ids"].shape
    if x.shape[:2] == shape:
        return x.reshape(-1, *x.shape[2:])
    if x.shape[:1] == (shape[0] * shape[1],):
        return x
    raise LayoutError(f"{name} must be [{shape[0]}, {shape[1]}, ...] or [{shape[0] * shape[1]}, ...], got {x.shape}")
