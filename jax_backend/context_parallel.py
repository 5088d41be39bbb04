"""Context parallelism: the tokens of a row are split over devices, and segments cross the cuts.

Data flows segment ids -> `balance_tokens` (on the host: which chunk of the row goes to which device) ->
`reorder_tokens` -> `context_attention`, in which every device numbers the segments of whole rows, and its queries meet
the keys of all devices: gathered at once, or passed around a ring and merged. Shape letters: B rows, S tokens of a row,
P chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_backend.attention import merge_attention, segment_attention
from jax_backend.placement import over_devices
from jax_backend.segments import checked_ids, find_segments, is_concrete, run_numbers
from jax_backend.strictness import aligned, widened
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

    Raises:
        LayoutError: the chunks are not those of `balance_tokens`.
    """
    tokens = next(iter(batch.values())).shape[1]
    _check_starts(chunk_starts, tokens)
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
        q, k, v, segment_ids: as of `segment_attention`, whole or already sharded; inside ``jit`` too.
        mesh: holds ``axis``, over which tokens are split.
        rows: the axis or axes over which rows are split too.
        heads: the axis over which heads are split too.
        method: "all_gather_kv" gathers all keys and values on each device: one collective, memory of whole rows of
            keys. "ring" passes them around: memory of two shards of keys.
        chunk_starts: [P], what `balance_tokens` returned, for tokens in the order of `reorder_tokens`; new values never
            recompile, and traced ones that are no such order make all outputs NaN. None for tokens in their natural
            order, which leaves devices idle.
        sinks: [N], as of `segment_attention`.
        options: ``causal``, ``window``, ``softcap``, ``scale``, ``implementation`` of `segment_attention`.

    Returns:
        [B, S, N, E], split as q. Gradients of keys and values are added over devices and chunks in float32 and rounded
        once to the dtype of k and v; those of queries likewise.

    Raises:
        LayoutError: the tokens do not divide over the axis, or the chunks do not, or (concrete values) the chunks are
            not those of `balance_tokens`.
        PackingError: an unknown method, or an axis that the mesh lacks.
    """
    if not isinstance(mesh, Mesh):
        raise PackingError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}: make one with "
            f"jax.make_mesh((jax.device_count(),), ({axis!r},))"
        )
    if method not in METHODS:
        raise PackingError(f"method is {method!r}: pass {' or '.join(METHODS)}")
    if axis not in mesh.shape:
        raise PackingError(f"the mesh has no axis {axis!r}, only {', '.join(mesh.axis_names)}: name the context axis")
    shards, tokens = mesh.shape[axis], q.shape[1]
    starts = np.arange(shards) * (tokens // shards) if chunk_starts is None else chunk_starts
    if np.ndim(starts) != 1:
        raise LayoutError(f"chunk_starts must have shape [P], got {np.shape(starts)}: one order serves all rows")
    if tokens % shards or len(starts) % shards or tokens % len(starts):
        raise LayoutError(
            f"{tokens} tokens in {len(starts)} chunks do not divide over the {shards} devices of axis {axis!r}: "
            "pad the rows to a multiple"
        )
    _check_starts(starts, tokens)
    segment_ids = checked_ids("segment_ids", segment_ids, q.shape[:2])
    local = partial(_gathered if method == "all_gather_kv" else _ring, axis=axis, shards=shards, options=options)
    by_head, by_token = P(rows, axis, heads), P(rows, axis)
    run = over_devices(
        partial(_with_sinks, local, axis),
        mesh,
        in_specs=(by_head, by_head, by_head, by_token, P(), P(heads)),
        out_specs=by_head,
    )
    return run(q, k, v, segment_ids, jnp.asarray(starts, jnp.int32), sinks)


def _with_sinks(
    local: Any, axis: str, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, sinks: Any
) -> Any:
    out, lse = local(q, k, v, ids, starts)
    if sinks is not None:  # what the sink leaves of every weight, as in segment_attention
        out = out * jax.nn.sigmoid(lse - aligned(sinks.astype(jnp.float32), lse.ndim))[..., None]
    chunks = jnp.sort(starts) == jnp.arange(len(starts)) * (ids.shape[1] * lax.axis_size(axis) // len(starts))
    return (out * jnp.where(chunks.all(), 1.0, jnp.nan)).astype(q.dtype)


def _check_starts(starts: Any, tokens: int) -> None:
    """Raises if known values do not name every chunk of the row once."""
    size = max(tokens // len(starts), 1)
    if is_concrete(starts) and not np.array_equal(np.sort(starts), np.arange(0, tokens, size)):
        raise LayoutError(
            f"chunk_starts must hold the first token of each of {len(starts)} chunks of {size} tokens, each chunk "
            f"once, got {np.asarray(starts).tolist()}: pass what balance_tokens returned for these rows"
        )


def _numbered(ids: jax.Array, starts: jax.Array, axis: str) -> jax.Array:
    """One number for each segment of the whole rows in their natural order, int32 [B, S], 0 for padding.

    An id may come again in a row, and only the whole row shows that these are two segments.
    """
    return run_numbers(find_segments(_whole(ids, starts, axis)))


def _whole(x: jax.Array, starts: jax.Array, axis: str) -> jax.Array:
    """The tokens of all devices in their natural order."""
    gathered = lax.all_gather(x, axis, axis=1, tiled=True)
    parts = gathered.reshape(x.shape[0], len(starts), -1, *x.shape[2:])
    return jnp.take(parts, jnp.argsort(starts), axis=1).reshape(gathered.shape)


def _widened(x: jax.Array) -> jax.Array:
    """x in float32: narrowed again where it is used, so that the gradients of all uses are added in float32."""
    return x.astype(widened(x.dtype))


def _moved(move: Callable[..., jax.Array], x: jax.Array, dtype: Any, *others: jax.Array) -> jax.Array:
    """``move(x, *others)``, linear in x, between devices: values travel in ``dtype``, gradients in the dtype of x."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def forward(x: jax.Array, *others: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return move(x.astype(dtype), *others).astype(like.dtype), others

    def backward(others: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        (moved,) = jax.linear_transpose(lambda x: move(x, *others), like)(gradient)
        return moved, *(None for _ in others)

    run = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    run.defvjp(forward, backward)
    return run(x, *others)


def _gathered(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, *, axis: str, shards: int, options: Any
) -> tuple[jax.Array, jax.Array]:
    """Each device's queries, chunk by chunk, against all keys in their natural order."""
    chunks = len(starts) // shards
    numbers = _numbered(ids, starts, axis)
    keys, values = (_moved(partial(_whole, axis=axis), _widened(each), each.dtype, starts) for each in (k, v))
    mine = lax.dynamic_slice_in_dim(starts, lax.axis_index(axis) * chunks, chunks)
    parts = []
    for chunk, start in zip(_cut(q, chunks), mine, strict=True):
        own = _chunk_of(numbers, start, chunk)
        attended = segment_attention(
            chunk,
            keys.astype(k.dtype),
            values.astype(v.dtype),
            own,
            kv_segment_ids=numbers,
            q_offset=start,
            return_lse=True,
            **options,
        )
        parts.append(attended)
    out, lse = (jnp.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    return out, lse


def _ring(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, starts: jax.Array, *, axis: str, shards: int, options: Any
) -> tuple[jax.Array, jax.Array]:
    """Each device's queries against one device's keys at a time, while the keys travel around."""
    chunks = len(starts) // shards
    mine = lax.dynamic_slice_in_dim(starts, lax.axis_index(axis) * chunks, chunks)
    numbers = _numbered(ids, starts, axis)
    queries = list(zip(_cut(_widened(q), chunks), mine, strict=True))
    to_next = partial(lax.ppermute, axis_name=axis, perm=[(i, (i + 1) % shards) for i in range(shards)])
    attend = partial(_attend, numbers=numbers, dtypes=(q.dtype, k.dtype, v.dtype), options=options)

    def meet(visitors: Any) -> Any:
        keys, values, key_starts = visitors
        others = list(zip(_cut(keys, chunks), _cut(values, chunks), key_starts, strict=True))
        return [_merged(attend(query, other) for other in others) for query in queries]

    def hop(carry: Any, _: None) -> tuple[Any, None]:
        found, (keys, values, key_starts) = carry
        visitors = (_moved(to_next, keys, k.dtype), _moved(to_next, values, v.dtype), to_next(key_starts))
        met = meet(visitors)
        return ([_merged(pair) for pair in zip(found, met, strict=True)], visitors), None

    own = (_widened(k), _widened(v), mine)
    (found, _), _ = lax.scan(hop, (meet(own), own), length=shards - 1)
    out, lse = (jnp.concatenate(each, axis=1) for each in zip(*found, strict=True))
    return out, lse


def _attend(query: Any, key: Any, *, numbers: jax.Array, dtypes: Any, options: Any) -> tuple[jax.Array, jax.Array]:
    (q, query_start), (k, v, key_start) = query, key
    q, k, v = (x.astype(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
    ids, key_ids = _chunk_of(numbers, query_start, q), _chunk_of(numbers, key_start, k)
    out, lse = segment_attention(
        q, k, v, ids, kv_segment_ids=key_ids, q_offset=query_start - key_start, return_lse=True, **options
    )
    return out.astype(jnp.float32), lse  # merged in float32 and rounded once


def _chunk_of(numbers: jax.Array, start: jax.Array, tokens: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(numbers, start, tokens.shape[1], axis=1)


def _merged(parts: Any) -> tuple[jax.Array, jax.Array]:
    whole, *others = parts
    for part in others:
        whole = merge_attention(whole, part)
    return whole


def _cut(x: jax.Array, chunks: int) -> list[jax.Array]:
    return jnp.split(x, chunks, axis=1)
