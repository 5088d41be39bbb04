"""Context parallelism: the tokens of a row are split over devices, and segments cross the cuts.

Data flows segment ids -> `balance_tokens` (on the host: which chunk of the row goes to which device) ->
`reorder_tokens` -> `context_attention`, in which each device's queries meet the keys of all devices: gathered at once,
or passed around a ring and merged. Shape letters: B rows, S tokens of a row, P chunks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_backend.attention import merge_attention, segment_attention
from packing_core.errors import LayoutError, PackingError

METHODS = ("all_gather_kv", "ring")


def balance_tokens(
    segment_ids: np.ndarray, shards: int, *, chunks: int = 2, causal: bool = True, window: int | None = None
) -> np.ndarray:
    """Deal the chunks of rows to shards so that each has about as many visible pairs of query and key.

    Chunks are dealt from the most expensive on to the shard that has least so far and room left. Attention between
    documents costs nothing, so that the plain causal zigzag would be wrong here.

    Args:
        segment_ids: integer [B, S] on the host, 0 for padding; all rows get one order.
        shards: devices of the context axis.
        chunks: of each shard; more of them balance better and make smaller kernels.
        causal, window: as of the attention.

    Returns:
        int32 [P], P = shards x chunks: the first token of each chunk in the row, in the order of the shards. For
        `reorder_tokens` and `context_attention`.

    Raises:
        LayoutError: the tokens do not divide into the chunks.
    """
    ids = np.asarray(segment_ids)
    rows, tokens = ids.shape
    parts = shards * chunks
    if tokens % parts:
        raise LayoutError(f"{tokens} tokens a row do not divide into {shards} shards of {chunks} chunks: pad the rows")
    at = np.arange(tokens)
    opens = np.concatenate([np.ones((rows, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    begin = np.maximum.accumulate(np.where(opens, at, 0), axis=1)
    closes = np.concatenate([opens[:, 1:], np.ones((rows, 1), bool)], axis=1)
    end = np.minimum.accumulate(np.where(closes, at + 1, tokens)[:, ::-1], axis=1)[:, ::-1]
    end = np.minimum(end, at + 1) if causal else end
    if window is not None:
        begin, end = np.maximum(begin, at - window + 1), np.minimum(end, at + window)
    cost = np.where(ids > 0, end - begin, 0).sum(axis=0).reshape(parts, -1).sum(axis=1)
    loads, dealt = np.zeros(shards), [[] for _ in range(shards)]  # type: tuple[np.ndarray, list[list[int]]]
    for chunk in np.argsort(-cost, kind="stable"):
        shard = min((s for s in range(shards) if len(dealt[s]) < chunks), key=lambda s: (loads[s], s))
        dealt[shard].append(int(chunk))
        loads[shard] += cost[chunk]
    return np.concatenate([sorted(each) for each in dealt]).astype(np.int32) * (tokens // parts)


def reorder_tokens(batch: Mapping[str, Any], chunk_starts: np.ndarray) -> dict[str, Any]:
    """The arrays [B, S, ...] of a batch with their tokens in the order of the chunks.

    Positions and shifted targets travel with their tokens; nothing but attention looks at a token's neighbours.
    """
    tokens = next(iter(batch.values())).shape[1]
    order = (np.asarray(chunk_starts)[:, None] + np.arange(tokens // len(chunk_starts))).reshape(-1)
    return {name: array[:, order] for name, array in batch.items()}


def context_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    mesh: Mesh,
    axis: str = "context",
    rows: str | tuple[str, ...] | None = None,
    heads: str | None = None,
    method: str = "all_gather_kv",
    chunk_starts: jax.Array | np.ndarray | None = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """`segment_attention` of rows whose tokens are split over an axis of ``mesh``; differentiable.

    Args:
        q, k, v, segment_ids: as of `segment_attention`, whole or already sharded; inside ``jit`` too. Every segment
            of a row has an id of its own.
        mesh: holds ``axis``, over which tokens are split.
        rows: the axis or axes over which rows are split too.
        heads: the axis over which heads are split too.
        method: "all_gather_kv" gathers all keys and values on each device: one collective, memory of whole rows of
            keys. "ring" passes them around: memory of two shards of keys.
        chunk_starts: [P], what `balance_tokens` returned, for tokens in the order of `reorder_tokens`; new values never
            recompile. None for tokens in their natural order, which leaves devices idle.
        sinks: [N], as of `segment_attention`.
        options: ``causal``, ``window``, ``softcap``, ``scale``, ``implementation`` of `segment_attention`.

    Returns:
        [B, S, N, E], split as q.

    Raises:
        LayoutError: the tokens do not divide over the axis, or the chunks do not.
        PackingError: an unknown method, or an axis that the mesh lacks.
    """
    if method not in METHODS:
        raise PackingError(f"method is {method!r}: pass {' or '.join(METHODS)}")
    if axis not in mesh.shape:
        raise PackingError(f"the mesh has no axis {axis!r}, only {', '.join(mesh.axis_names)}: name the context axis")
    shards, tokens = mesh.shape[axis], q.shape[1]
    starts = np.arange(shards) * (tokens // shards) if chunk_starts is None else chunk_starts
    if tokens % shards or len(starts) % shards or tokens % len(starts):
        raise LayoutError(
            f"{tokens} tokens in {len(starts)} chunks do not divide over the {shards} devices of axis {axis!r}: "
            "pad the rows to a multiple"
        )
    local = partial(_gathered if method == "all_gather_kv" else _ring, axis=axis, shards=shards, options=options)
    by_head, by_token = P(rows, axis, heads), P(rows, axis)
    run = jax.shard_map(
        partial(_with_sinks, local),
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, by_token, P(), P(heads)),
        out_specs=by_head,
        check_vma=False,  # a kernel's outputs carry no varying axes
    )
    return run(q, k, v, segment_ids, jnp.asarray(starts, jnp.int32), sinks)


def _with_sinks(
    local: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, sinks: Any
) -> Any:
    out, lse = local(q, k, v, ids, starts)
    if sinks is not None:  # what the sink leaves of every weight, as in segment_attention
        out = out * jax.nn.sigmoid(lse - sinks.astype(jnp.float32))[..., None]
    return out.astype(q.dtype)


def _gathered(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, *, axis: str, shards: int, options: Any
) -> tuple[jax.Array, jax.Array]:
    """Each device's queries, chunk by chunk, against all keys in their natural order."""
    chunks = len(starts) // shards
    natural = jnp.argsort(starts)

    def whole(x: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x, axis, axis=1, tiled=True)
        parts = gathered.reshape(x.shape[0], len(starts), -1, *x.shape[2:])
        return jnp.take(parts, natural, axis=1).reshape(gathered.shape)

    keys, values, key_ids = whole(k), whole(v), whole(ids)
    mine = lax.dynamic_slice_in_dim(starts, lax.axis_index(axis) * chunks, chunks)
    parts = [
        segment_attention(
            q_chunk, keys, values, id_chunk, kv_segment_ids=key_ids, q_offset=mine[i], return_lse=True, **options
        )
        for i, (q_chunk, id_chunk) in enumerate(zip(_cut(q, chunks), _cut(ids, chunks), strict=True))
    ]
    out, lse = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    return out, lse


def _ring(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, *, axis: str, shards: int, options: Any
) -> tuple[jax.Array, jax.Array]:
    """Each device's queries against one device's keys at a time, while the keys travel around."""
    chunks = len(starts) // shards
    mine = lax.dynamic_slice_in_dim(starts, lax.axis_index(axis) * chunks, chunks)
    queries = list(zip(_cut(q, chunks), _cut(ids, chunks), mine, strict=True))
    to_next = [(i, (i + 1) % shards) for i in range(shards)]

    def meet(visitors: Any) -> Any:
        keys = list(zip(*(_cut(x, chunks) for x in visitors[:3]), visitors[3], strict=True))
        return [_merged(_attend(query, key, options) for key in keys) for query in queries]

    def hop(carry: Any, _: None) -> tuple[Any, None]:
        found, visitors = carry
        visitors = jax.tree.map(lambda x: lax.ppermute(x, axis, to_next), visitors)
        met = meet(visitors)
        return ([_merged(pair) for pair in zip(found, met, strict=True)], visitors), None

    own = (k, v, ids, mine)
    (found, _), _ = lax.scan(hop, (meet(own), own), length=shards - 1)
    out, lse = (jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
    return out, lse


def _attend(query: Any, key: Any, options: Any) -> tuple[jax.Array, jax.Array]:
    (q, ids, query_start), (k, v, key_ids, key_start) = query, key
    out, lse = segment_attention(
        q, k, v, ids, kv_segment_ids=key_ids, q_offset=query_start - key_start, return_lse=True, **options
    )
    return out.astype(jnp.float32), lse  # merged in float32 and rounded once


def _merged(parts: Any) -> tuple[jax.Array, jax.Array]:
    whole, *others = parts
    for part in others:
        whole = merge_attention(whole, part)
    return whole


def _cut(x: jax.Array, chunks: int) -> list[jax.Array]:
    return jnp.split(x, chunks, axis=1)
