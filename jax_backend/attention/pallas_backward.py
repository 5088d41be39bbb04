"""The backward kernels: dq per tile of queries, dk and dv per tile of keys. Neither accumulates with atomics: runs
repeat to the bit.

With ``p = exp(z - lse)`` recomputed from the forward's lse, ``dp = dout v^T`` and ``delta = sum(dout * out) - dlse``
per query,

    dz = p (dp - delta),  dq = scale dz k,  dk = scale dz^T q,  dv = p^T dout

(Dao 2023, arXiv:2307.08691, algorithm 2); under a softcap dz gains the factor ``1 - tanh^2``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_backend.attention.pallas_tiles import (
    PallasTile,
    base2_logits,
    dot,
    exp2,
    load_interval,
    load_numbers,
    load_rows,
    load_scalars,
    load_span,
    pack_rows,
    padded,
    plan_walk,
    store_rows,
    store_span,
)
from jax_backend.attention.request import LOG2E, Request
from jax_backend.segments import Interval


def grad_queries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    keys: Interval,
    request: Request,
    tiles: PallasTile,
    *,
    interpret: bool,
) -> jax.Array:
    """dq [B, S, N, D] in q's dtype.

    Args:
        lse, delta: float32 [B, S, N].
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    rows, queries, _, width = q.shape
    d, e = padded(width), padded(v.shape[-1])
    per_query = pl.BlockSpec((None, queries), lambda h, i, b: (b, 0))
    per_head = pl.BlockSpec((None, queries, request.group), lambda h, i, b: (b, 0, h))
    q_spec = pl.BlockSpec((None, queries, request.group, d), lambda h, i, b: (b, 0, h, 0))
    return pl.pallas_call(
        partial(_dq_kernel, request=request, tiles=tiles),
        grid=(request.kv_heads, pl.cdiv(queries, tiles.tokens(request.group)), rows),
        in_specs=[
            q_spec,
            pl.BlockSpec((None, request.keys, None, d), lambda h, i, b: (b, 0, h, 0)),
            pl.BlockSpec((None, request.keys, None, e), lambda h, i, b: (b, 0, h, 0)),
            pl.BlockSpec((None, queries, request.group, e), lambda h, i, b: (b, 0, h, 0)),
            per_head,
            per_head,
            per_query,
            per_query,
        ],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="segment_attention_dq",
    )(q, k, v, dout, lse, delta, *keys)


def grad_keys(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    queries: Interval,
    order: jax.Array,
    request: Request,
    tiles: PallasTile,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """dk [B, T, K, D] and dv [B, T, K, E] in k's dtype.

    Args:
        lse, delta: float32 [B, S, N].
        queries: the queries that see each key, int32 [B, T] and [B, T].
        order: of the tiles of keys, as ``heaviest_first`` gives it.
    """
    tokens, width = q.shape[1], q.shape[3]
    d, e = padded(width), padded(v.shape[-1])
    parts = tiles.parts
    per_key = pl.BlockSpec((None, request.keys), lambda h, b, j: (b, 0))
    per_row = pl.BlockSpec((None, None, tokens * request.group), lambda h, b, j: (b, h, 0))
    k_spec = pl.BlockSpec((None, request.keys, None, d), lambda h, b, j: (b, 0, h, 0))
    v_spec = pl.BlockSpec((None, request.keys, None, e), lambda h, b, j: (b, 0, h, 0))
    out = [
        pl.BlockSpec((None, None, request.keys, None, x), lambda h, b, j: (jax.lax.rem(j, parts), b, 0, h, 0))
        for x in (d, e)
    ]
    dk, dv = pl.pallas_call(
        partial(_dkv_kernel, request=request, tiles=tiles),
        grid=(request.kv_heads, order.shape[0], order.shape[1] * parts),
        in_specs=[
            pl.BlockSpec((None, order.shape[1]), lambda h, b, j: (b, 0)),
            pl.BlockSpec((None, tokens, request.group, d), lambda h, b, j: (b, 0, h, 0)),
            k_spec,
            v_spec,
            pl.BlockSpec((None, tokens, request.group, e), lambda h, b, j: (b, 0, h, 0)),
            per_row,
            per_row,
            per_key,
            per_key,
        ],
        out_specs=out,
        out_shape=[jax.ShapeDtypeStruct((parts, *x.shape), x.dtype if parts == 1 else jnp.float32) for x in (k, v)],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="segment_attention_dkv",
    )(order, q, k, v, dout, by_row(lse * LOG2E, request), by_row(delta, request), *queries)
    if parts == 1:
        return dk[0], dv[0]
    return dk.sum(axis=0).astype(k.dtype), dv.sum(axis=0).astype(v.dtype)


def by_row(x: jax.Array, request: Request) -> jax.Array:
    """Numbers per query and head [B, S, N] in the order of packed rows, [B, K, S * G]: a tile's lie side by side."""
    x = x.reshape(request.rows, request.queries, request.kv_heads, request.group)
    return x.swapaxes(1, 2).reshape(request.rows, request.kv_heads, -1)


def _dq_kernel(*refs: Any, request: Request, tiles: PallasTile) -> None:
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, begin_ref, end_ref, dq_ref = refs
    group, tokens = request.group, tiles.tokens(request.group)
    rows = tiles.packed_rows(group)
    token, member, inside = pack_rows(pl.program_id(1) * tokens, tokens, group, rows, request.queries)
    interval = load_interval(begin_ref, end_ref, token, inside)
    walk = plan_walk(interval, inside, tiles.keys, upward=True, window=request.window is not None)
    q = load_rows(q_ref, token, member, inside, request.head_dim)
    dout = load_rows(dout_ref, token, member, inside, request.value_dim)
    lse = load_scalars(lse_ref, token, member, inside) * LOG2E
    delta = load_scalars(delta_ref, token, member, inside)

    def step(index: jax.Array, dq: jax.Array, *, masked: bool) -> jax.Array:
        first = walk.first + index * tiles.keys
        key = first + jnp.arange(tiles.keys, dtype=jnp.int32)
        there = key < request.keys if masked else None
        k = load_span(k_ref, first, tiles.keys, request.head_dim, inside=there)
        v = load_span(v_ref, first, tiles.keys, request.value_dim, inside=there)
        raw, factor = base2_logits(dot(q, k, contract=(1, 1)), request)
        dp = dot(dout, v, contract=(1, 1))  # runs while p is taken from the first product
        p = exp2(raw * factor - lse[:, None], request)
        if masked:
            visible = (interval.begin[:, None] <= key[None, :]) & (key[None, :] < interval.end[:, None])
            p = jnp.where(visible, p, 0.0)
        dz = p * (dp - delta[:, None])
        if request.softcap is not None:
            dz = dz * (1.0 - raw * raw)
        return dq + dot(dz.astype(k.dtype), k, contract=(1, 0))

    dq = walk.run(step, jnp.zeros((rows, q_ref.shape[-1]), jnp.float32))
    store_rows(dq_ref, dq * request.scale, token, member, inside, request.head_dim)


def _dkv_kernel(*refs: Any, request: Request, tiles: PallasTile) -> None:
    order_ref, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, begin_ref, end_ref, dk_ref, dv_ref = refs
    group, tokens = request.group, tiles.tokens(request.group)
    rows = tiles.packed_rows(group)
    first_key = order_ref[jax.lax.div(pl.program_id(2), tiles.parts)] * tiles.keys
    key = first_key + jnp.arange(tiles.keys, dtype=jnp.int32)
    inside = key < request.keys
    interval = load_interval(begin_ref, end_ref, key, inside)
    walk = plan_walk(interval, inside, tokens, upward=False, window=request.window is not None)
    k = load_span(k_ref, first_key, tiles.keys, request.head_dim, inside=inside)
    v = load_span(v_ref, first_key, tiles.keys, request.value_dim, inside=inside)

    def step(index: jax.Array, carry: Any, *, masked: bool) -> Any:
        dk, dv = carry
        first = walk.last - (index + 1) * tokens
        token, member, used = pack_rows(first, tokens, group, rows, request.queries)
        # An unused row is loaded as zeros and adds nothing; where all rows are used, nothing needs a mask.
        there = used if masked or rows != tokens * group else None
        q = load_rows(q_ref, token, member, there, request.head_dim)
        dout = load_rows(dout_ref, token, member, there, request.value_dim)
        lse = load_numbers(lse_ref, first * group, rows, there)
        delta = load_numbers(delta_ref, first * group, rows, there)
        raw, factor = base2_logits(dot(k, q, contract=(1, 1)), request)
        dp = dot(v, dout, contract=(1, 1))  # runs while p is taken from the first product
        p = exp2(raw * factor - lse[None, :], request)
        if masked:
            place = jnp.where(used, token, -1)  # no key's interval holds -1
            visible = (interval.begin[:, None] <= place[None, :]) & (place[None, :] < interval.end[:, None])
            p = jnp.where(visible, p, 0.0)
        dv = dv + dot(p.astype(dout.dtype), dout, contract=(1, 0))
        dz = p * (dp - delta[None, :])
        if request.softcap is not None:
            dz = dz * (1.0 - raw * raw)
        return dk + dot(dz.astype(q.dtype), q, contract=(1, 0)), dv

    start = (
        jnp.zeros((tiles.keys, q_ref.shape[-1]), jnp.float32),
        jnp.zeros((tiles.keys, dout_ref.shape[-1]), jnp.float32),
    )
    dk, dv = walk.run(step, start, jax.lax.rem(pl.program_id(2), tiles.parts), tiles.parts)
    store_span(dk_ref, dk * request.scale, first_key, inside, request.head_dim)
    store_span(dv_ref, dv, first_key, inside, request.value_dim)
