"""Dense attention in plain XLA operations: the simplest implementation, any device, any option, S x T memory.

Data flows q, k -> logits [B, K, G, S, T] in float32 -> interval mask -> softmax -> out, lse. Gradients are JAX's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.attention.request import Request
from jax_backend.segments import Segments, keys_inside


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

    ``seen``, bool [B, S, T], says which keys a query sees in place of the segments.
    """
    rows, queries, heads, width = q.shape
    grouped = q.reshape(rows, queries, request.kv_heads, request.group, width)
    logits = einsum("bskgd,btkd->bkgst", grouped, k) * request.scale
    if request.softcap is not None:
        logits = request.softcap * jnp.tanh(logits / request.softcap)
    if seen is None:
        seen = keys_inside(segments, request.keys, causal=request.causal, window=request.window, q_offset=q_offset)
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)

    # A query that sees nothing has largest -inf and total 0: both are replaced before they reach an exp, a log or a
    # division.
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weight = jnp.exp(logits - largest)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    divisor = jnp.where(total == 0, 1.0, total)
    out = einsum("bkgst,btke->bskge", (weight / divisor).astype(q.dtype), v).astype(q.dtype)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(divisor) + largest)
    lse = lse[..., 0].transpose(0, 3, 1, 2)
    return out.reshape(rows, queries, heads, v.shape[-1]), lse.reshape(rows, queries, heads)


def einsum(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Contraction that multiplies in the operands' own dtype, without tf32, and accumulates in float32."""
    return jnp.einsum(formula, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
