"""Segments that continue others: which keys each query sees, as a dense mask for plain XLA operations.

segment_ids and parents [B, S] -> the last token of each token's parent -> the ancestors of all tokens, twice as many
generations in every round -> bool [B, S, S]. All shapes are static.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.segments import Segments, checked_ids
from packing_core.errors import LayoutError


def seen_keys(
    segments: Segments, segment_ids: jax.Array, parents: jax.Array, *, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The keys that each query sees in causal attention, its ancestors' among them.

    Args:
        segments: of ``segment_ids``, integer [B, S].
        parents: integer [B, S], at each token the id of the segment that its segment continues; 0 for none.
        window: keys visible to a query, its own included, counted along its path; None for no limit.

    Returns:
        bool [B, S, S], and bool [B]: whether every parent stands before its children.

    Raises:
        LayoutError: (concrete values) shapes differ, or a parent does not stand before its children.
    """
    ids, above_ids = jnp.asarray(segment_ids), checked_ids("parents", parents)
    if above_ids.shape != ids.shape:
        raise LayoutError(f"parents must have shape [B, S] = {ids.shape} as segment_ids, got {above_ids.shape}")
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)
    begin, real = segments.key_begin, segments.key_end > segments.key_begin
    matches = (ids[:, None, :] == above_ids[:, :, None]) & (above_ids[:, :, None] > 0)
    last = jnp.max(jnp.where(matches, place, -1), axis=-1)
    stands = (last >= 0) & (last < begin)
    valid = jnp.all((above_ids <= 0) | stands | ~real, axis=1)
    if not isinstance(valid, jax.core.Tracer) and not bool(valid.all()):
        row = int(jnp.argmin(valid))
        raise LayoutError(
            f"parents of row {row} name a segment that does not stand before the one that continues it in its row"
        )
    own = (begin[..., None] <= place) & (place <= place[:, None]) & real[..., None]
    state = own, jnp.where(stands & real, last, -1), place - begin

    def reaches(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[1] >= 0)

    def twice(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        seen, above, depth = state
        has, at = above >= 0, jnp.maximum(above, 0)
        seen = seen | (has[..., None] & jnp.take_along_axis(seen, at[..., None], axis=1))
        depth = depth + jnp.where(has, jnp.take_along_axis(depth, at, axis=1) + 1, 0)
        return seen, jnp.where(has, jnp.take_along_axis(above, at, axis=1), -1), depth

    seen, _, depth = jax.lax.while_loop(reaches, twice, state)
    if window is not None:
        seen = seen & (depth[:, :, None] - depth[:, None, :] < window)
    return seen, valid
