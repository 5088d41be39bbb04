"""The forward kernel: one program per (key/value head, tile of queries, row), online softmax over the keys it can see.

The recurrence is Dao 2023 (arXiv:2307.08691), algorithm 1, in base 2: the running maximum m and sum l of each row
rescale the accumulated output whenever the maximum grows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_backend.attention.pallas_tiles import (
    LOG2E,
    PallasTile,
    base2_logits,
    dot,
    exp2,
    load_interval,
    load_rows,
    load_span,
    pack_rows,
    padded,
    plan_walk,
    store_rows,
)
from jax_backend.attention.request import Request
from jax_backend.segments import Interval


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, keys: Interval, request: Request, tiles: PallasTile, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S, N, E] in q's dtype and lse, float32 [B, S, N].

    Args:
        q, k, v: [B, S, N, D], [B, T, K, D], [B, T, K, E].
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    rows, queries, heads, width = q.shape
    group, tokens = request.group, tiles.tokens(request.group)
    d, e = padded(width), padded(v.shape[-1])
    per_query = pl.BlockSpec((None, queries), lambda h, i, b: (b, 0))
    return pl.pallas_call(
        partial(_kernel, request=request, tiles=tiles),
        grid=(request.kv_heads, pl.cdiv(queries, tokens), rows),
        in_specs=[
            pl.BlockSpec((None, queries, group, d), lambda h, i, b: (b, 0, h, 0)),
            pl.BlockSpec((None, request.keys, None, d), lambda h, i, b: (b, 0, h, 0)),
            pl.BlockSpec((None, request.keys, None, e), lambda h, i, b: (b, 0, h, 0)),
            per_query,
            per_query,
        ],
        out_specs=[
            pl.BlockSpec((None, queries, group, e), lambda h, i, b: (b, 0, h, 0)),
            pl.BlockSpec((None, queries, group), lambda h, i, b: (b, 0, h)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, queries, heads, v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((rows, queries, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="segment_attention_forward",
    )(q, k, v, *keys)


def _kernel(*refs: Any, request: Request, tiles: PallasTile) -> None:
    q_ref, k_ref, v_ref, begin_ref, end_ref, o_ref, lse_ref = refs
    group, tokens = request.group, tiles.tokens(request.group)
    rows = tiles.packed_rows(group)
    # From the row's end: of one long segment, the tiles that see most start first.
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    token, member, inside = pack_rows(tile * tokens, tokens, group, rows, request.queries)
    interval = load_interval(begin_ref, end_ref, token, inside)
    walk = plan_walk(interval, inside, tiles.keys, upward=True, window=request.window is not None)
    q = load_rows(q_ref, token, member, inside, request.head_dim)

    def step(index: jax.Array, carry: Any, *, masked: bool) -> Any:
        acc, m, total = carry
        first = walk.first + index * tiles.keys
        key = first + jnp.arange(tiles.keys, dtype=jnp.int32)
        there = key < request.keys if masked else None
        k = load_span(k_ref, first, tiles.keys, request.head_dim, inside=there)
        raw, factor = base2_logits(dot(q, k, contract=(1, 1)), request)
        if masked:
            visible = (interval.begin[:, None] <= key[None, :]) & (key[None, :] < interval.end[:, None])
            raw = jnp.where(visible, raw, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(raw, axis=1) * factor)
        pivot = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new  # a row may have seen nothing yet
        p = exp2(raw * factor - pivot[:, None], request)
        alpha = exp2(m - pivot, request)
        v = load_span(v_ref, first, tiles.keys, request.value_dim, inside=there)
        acc = acc * alpha[:, None] + dot(p.astype(v.dtype), v, contract=(1, 0))
        return acc, m_new, total * alpha + jnp.sum(p, axis=1)

    start = (
        jnp.zeros((rows, v_ref.shape[-1]), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    acc, m, total = walk.run(step, start)
    saw = total > 0
    divisor = jnp.where(saw, total, 1.0)
    store_rows(o_ref, acc / divisor[:, None], token, member, inside, request.value_dim)
    lse = jnp.where(saw, m / LOG2E + jnp.log(divisor), -jnp.inf)
    plgpu.store(lse_ref.at[token, member], lse, mask=inside)
