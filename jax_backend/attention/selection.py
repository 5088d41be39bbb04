"""Keys that an indexer selects inside segments (DeepSeek's sparse attention), as a mask for ``segment_attention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.attention.chunked import BLOCK
from jax_backend.attention.xla import einsum
from jax_backend.segments import find_segments, keys_inside
from packing_core.errors import PackingError


def select_keys(q: jax.Array, k: jax.Array, weights: jax.Array, segment_ids: jax.Array, *, top_k: int) -> jax.Array:
    """Returns which keys each query sees: the ``top_k`` of the largest scores in its segment, none of them after it.

    The score of key j for query i is ``sum_h weights[i, h] relu(q[i, h] . k[j])``, in float32; of equal ones the
    earlier key comes first. It has no gradient. Scores are computed for a block of queries at a time.

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
    seen = keys_inside(find_segments(segment_ids), k.shape[1], causal=True, window=None, q_offset=jnp.int32(0))
    rows, most = jnp.arange(len(k))[:, None], min(top_k, k.shape[1])

    def of_query(operands: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        one, weight, inside = operands  # [B, H, D], [B, H], [B, S]
        products = jax.nn.relu(einsum("bhd,btd->bht", one, k))
        scores = jnp.einsum("bh,bht->bt", weight.astype(jnp.float32), products, precision=jax.lax.Precision.HIGHEST)
        _, best = jax.lax.top_k(jnp.where(inside, scores, -jnp.inf), most)
        return jnp.zeros_like(inside).at[rows, best].set(True) & inside

    by_query = (jnp.moveaxis(x, 1, 0) for x in (q, weights, seen))
    return jnp.moveaxis(jax.lax.map(of_query, tuple(by_query), batch_size=BLOCK), 0, 1)
