"""Keys that an indexer selects inside segments (DeepSeek's sparse attention), as a mask for ``segment_attention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.attention.xla import einsum
from jax_backend.segments import find_segments, keys_inside
from packing_core.errors import PackingError


def select_keys(q: jax.Array, k: jax.Array, weights: jax.Array, segment_ids: jax.Array, *, top_k: int) -> jax.Array:
    """Returns which keys each query sees: the ``top_k`` of the largest scores in its segment, none of them after it.

    The score of key j for query i is ``sum_h weights[i, h] relu(q[i, h] . k[j])``, in float32; of equal ones the
    earlier key comes first. It has no gradient. Memory follows the square of a row, times the heads.

    Args:
        q, k, weights: [B, S, H, D], [B, S, D], [B, S, H].
        segment_ids: integer [B, S], as ``segment_attention`` takes them.
        top_k: keys that a query sees at most.

    Returns:
        bool [B, S, S], for ``segment_attention(..., selected=...)``.

    Raises:
        PackingError: ``top_k`` is below 1.
    """
    if top_k < 1:
        raise PackingError(f"top_k is {top_k}: a query sees at least one key")
    q, k, weights = (jax.lax.stop_gradient(jnp.asarray(x)) for x in (q, k, weights))
    products = jax.nn.relu(einsum("bshd,btd->bsht", q, k))
    scores = jnp.einsum("bsh,bsht->bst", weights.astype(jnp.float32), products, precision=jax.lax.Precision.HIGHEST)
    seen = keys_inside(find_segments(segment_ids), k.shape[1], causal=True, window=None, q_offset=jnp.int32(0))
    _, best = jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), min(top_k, k.shape[1]))
    rows, queries = jnp.arange(len(k))[:, None, None], jnp.arange(k.shape[1])[None, :, None]
    return jnp.zeros_like(seen).at[rows, queries, best].set(True) & seen
