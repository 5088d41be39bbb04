"""Blockwise attention in plain XLA operations: any device, any option, memory linear in tokens, blocks outside segments
skipped.

Data flows as in the kernels: blocks of queries are mapped over, and each walks the key blocks that its rows can see; on
the way back dq walks the same blocks, and dk and dv walk the query blocks that can see a key block. The walks' bounds
are values, not shapes, so a new segmentation never recompiles. Formulas: Dao 2023 (arXiv:2307.08691), algorithms 1 and
2. Rows of the batch walk together, so a block costs as much as the row that needs most of it.

A block may hold tokens of several segments, and a hidden token has weight 0. So that 0 times NaN does not carry what is
not finite from one segment to another, products take 0 for it, and a weight of NaN where it is visible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_backend.attention.request import SECOND_ORDER, Request, saved
from jax_backend.attention.xla import einsum
from jax_backend.differentiation import first_order, once
from jax_backend.segments import Interval, Segments, seeing_queries, visible_keys
from jax_backend.strictness import finite

BLOCK = 128  # tokens of a block of queries and of a block of keys; measured on a CPU


def supports(request: Request) -> str | None:
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    q_offset: jax.Array,
    request: Request,
    seen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S, N, E] in q's dtype, and the log of each softmax's sum, float32 [B, S, N].

    ``seen``, bool [B, S, T], says which keys of its segment a query sees; None for all.
    """
    options: dict[str, Any] = {"causal": request.causal, "window": request.window, "q_offset": q_offset}
    keys, queries = visible_keys(segments, **options), seeing_queries(segments, **options)
    rows, tokens, heads, _ = q.shape
    grouped = q.reshape(rows, tokens, request.kv_heads, request.group, -1)
    padded_q, *padded_keys = (_pad(x) for x in (grouped, *keys))
    padded_k, padded_v, *padded_queries = (_pad(x) for x in (k, v, *queries))
    if seen is not None:
        seen = _pad(_pad(seen).swapaxes(1, 2)).swapaxes(1, 2)
    out, lse = _attend(request, padded_q, padded_k, padded_v, Interval(*padded_keys), Interval(*padded_queries), seen)
    return out[:, :tokens].reshape(rows, tokens, heads, -1), lse[:, :tokens].reshape(rows, tokens, heads)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    request: Request,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: Interval,
    queries: Interval,
    seen: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """q [B, S, K, G, D], k [B, T, K, D], v [B, T, K, E], seen [B, S, T], S and T multiples of BLOCK; out [B, S, K, G,
    E], lse [B, S, K, G]."""

    def one(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_block, interval = _take(q, block), Interval(_take(keys.begin, block), _take(keys.end, block))
        shape = (*q_block.shape[:-1], v.shape[-1])

        def step(other: jax.Array, carry: Any) -> Any:
            acc, largest, total = carry
            raw, _ = _raw_logits(q_block, _take(k, other), request)
            visible = _visible(interval, seen, block, other)
            logits = jnp.where(visible, raw, -jnp.inf)
            new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
            pivot = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)  # a row may have seen nothing yet
            weight = jnp.exp(logits - pivot[..., None])
            shrink = jnp.exp(largest - pivot)
            v_block = _take(v, other)
            broken = jnp.moveaxis(_broken(v_block), 1, 2)[:, None, :, None]  # [B, 1, K, 1, BLOCK]
            weighed = jnp.where(visible & broken, jnp.nan, weight).astype(v.dtype)
            acc = acc * shrink[..., None] + einsum("bskgt,btke->bskge", weighed, finite(v_block))
            return acc, new_largest, total * shrink + jnp.sum(weight, axis=-1)

        start = jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf), jnp.zeros(shape[:-1], jnp.float32)
        acc, largest, total = _walk(interval, step, start)
        divisor = jnp.where(total == 0, 1.0, total)
        lse = jnp.where(total == 0, -jnp.inf, jnp.log(divisor) + largest)
        return (acc / divisor[..., None]).astype(q.dtype), lse

    return _over_blocks(one, q.shape[1])


def _attend_fwd(request: Request, *operands: Any) -> tuple[Any, Any]:
    operands = *first_order(SECOND_ORDER, *operands[:3]), *operands[3:]
    results = saved(_attend(request, *operands))
    return results, (*operands, *results)


def _attend_bwd(request: Request, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, keys, queries, seen, out, lse = kept
    dout, dlse = cotangents
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse

    def p_and_dz(query_block: jax.Array, key_block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights and the gradients of the scaled products, both [B, BLOCK, K, G, BLOCK]."""
        interval = Interval(_take(keys.begin, query_block), _take(keys.end, query_block))
        raw, slope = _raw_logits(_take(q, query_block), _take(k, key_block), request)
        visible = _visible(interval, seen, query_block, key_block)
        logits = jnp.where(visible, raw, -jnp.inf)
        lse_block = _take(lse, query_block)[..., None]
        p = jnp.exp(logits - jnp.where(lse_block == -jnp.inf, 0.0, lse_block))
        dout_block = _take(dout, query_block)
        dp = einsum("bskge,btke->bskgt", dout_block, _take(v, key_block))
        dz = p * (dp - _take(delta, query_block)[..., None]) * slope
        p = jnp.where(_broken(dout_block)[..., None], jnp.nan, p)
        return jnp.where(visible, p, 0.0), jnp.where(visible, dz, 0.0)

    def dq_block(block: jax.Array) -> jax.Array:
        def step(other: jax.Array, dq: jax.Array) -> jax.Array:
            _, dz = p_and_dz(block, other)
            return dq + einsum("bskgt,btkd->bskgd", dz.astype(k.dtype), finite(_take(k, other)))

        interval = Interval(_take(keys.begin, block), _take(keys.end, block))
        dq = _walk(interval, step, jnp.zeros(_take(q, block).shape, jnp.float32))
        return (dq * request.scale).astype(q.dtype)

    def dkv_block(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(other: jax.Array, carry: Any) -> Any:
            dk, dv = carry
            p, dz = p_and_dz(other, block)
            dv = dv + einsum("bskgt,bskge->btke", p.astype(dout.dtype), finite(_take(dout, other)))
            return dk + einsum("bskgt,bskgd->btkd", dz.astype(q.dtype), finite(_take(q, other))), dv

        interval = Interval(_take(queries.begin, block), _take(queries.end, block))
        start = jnp.zeros(_take(k, block).shape, jnp.float32), jnp.zeros(_take(v, block).shape, jnp.float32)
        dk, dv = _walk(interval, step, start)
        return (dk * request.scale).astype(k.dtype), dv.astype(v.dtype)

    dk, dv = _over_blocks(dkv_block, k.shape[1])
    return _over_blocks(dq_block, q.shape[1]), dk, dv, None, None, None


_attend.defvjp(_attend_fwd, once(_attend_bwd, SECOND_ORDER))


def _raw_logits(q: jax.Array, k: jax.Array, request: Request) -> tuple[jax.Array, jax.Array | float]:
    """Logits [B, S, K, G, T] before the mask, and their derivative by the scaled product."""
    logits = einsum("bskgd,btkd->bskgt", q, k) * request.scale
    if request.softcap is None:
        return logits, 1.0
    tanh = jnp.tanh(logits / request.softcap)
    return tanh * request.softcap, 1.0 - tanh * tanh


def _visible(interval: Interval, seen: jax.Array | None, query_block: jax.Array, key_block: jax.Array) -> jax.Array:
    """Marks the keys of a block that each query of a block sees, bool [B, BLOCK, 1, 1, BLOCK]."""
    key = (key_block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32))[None, None]
    visible = (interval.begin[..., None] <= key) & (key < interval.end[..., None])
    if seen is not None:
        visible &= _take(_take(seen, query_block).swapaxes(1, 2), key_block).swapaxes(1, 2)
    return visible[:, :, None, None, :]


def _broken(x: jax.Array) -> jax.Array:
    """Marks vectors [..., D] with a number that is not finite, bool [...]."""
    return ~jnp.isfinite(x).all(axis=-1)


def _walk(interval: Interval, step: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """Fold ``step(block, carry)`` over the blocks that meet any of the intervals [B, BLOCK]."""
    begin, end = interval
    some = begin < end
    first = jnp.min(jnp.where(some, begin, jnp.iinfo(jnp.int32).max)) // BLOCK
    last = (jnp.max(jnp.where(some, end, 0)) + BLOCK - 1) // BLOCK
    return lax.fori_loop(jnp.minimum(first, last), last, step, carry)


def _over_blocks(one: Callable[[jax.Array], Any], tokens: int) -> Any:
    """Results of ``one(block)`` for all blocks of a token axis, joined along axis 1."""

    def join(x: jax.Array) -> jax.Array:
        blocks, rows, *rest = x.shape
        return x.swapaxes(0, 1).reshape(rows, blocks * rest[0], *rest[1:])

    return jax.tree.map(join, lax.map(one, jnp.arange(tokens // BLOCK, dtype=jnp.int32)))


def _take(x: jax.Array, block: jax.Array) -> jax.Array:
    """One block of the token axis, axis 1."""
    return lax.dynamic_slice_in_dim(x, block * BLOCK, BLOCK, axis=1)


def _pad(x: jax.Array) -> jax.Array:
    """Zeros after the last token, up to a whole number of blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2))
