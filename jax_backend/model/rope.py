"""Rotary position embedding with the positions that packing gives: they restart at 0 at every segment.

Su et al. 2021 (arXiv:2104.09864), section 3.4.2: channel pairs (x1, x2) of a token at position p turn by the angle
``p * inv_freq``. Data flows positions, inv_freq -> float32 angles -> cos, sin -> x; the gradient is JAX's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.strictness import aligned
from packing_core.errors import LayoutError


def apply_rope(
    x: jax.Array, positions: jax.Array, inv_freq: jax.Array, *, interleaved: bool = False, scale: float = 1.0
) -> jax.Array:
    """Turn the first R channels of each head; the others pass unchanged.

    Args:
        x: [B, S, N, D].
        positions: integer [B, S], the position of each token within its segment
            (:func:`~jax_backend.segments.segment_positions`, or a batch's ``position_ids``).
        inv_freq: [R/2] radians per position, R at most D; or [B, S, R/2], where they depend on a token's document.
        interleaved: pair neighbouring channels (2i, 2i + 1) instead of halves (i, i + R/2).
        scale: factor on the turned channels (YaRN's and LongRoPE's attention factor).

    Returns:
        [B, S, N, D] in x's dtype. Angles, cosines and the turn itself are float32, whatever the dtype of x.

    Raises:
        LayoutError: the shapes contradict each other.
    """
    if x.ndim != 4:
        raise LayoutError(f"x must have shape [B, S, N, D], got {x.shape}")
    if positions.shape != x.shape[:2]:
        raise LayoutError(f"positions must have shape [B, S] = {x.shape[:2]}, got {positions.shape}")
    if inv_freq.shape[:-1] not in ((), x.shape[:2]) or not inv_freq.ndim or 2 * inv_freq.shape[-1] > x.shape[3]:
        raise LayoutError(f"inv_freq must be [R/2] with R at most {x.shape[3]} channels, got {inv_freq.shape}")
    turned = 2 * inv_freq.shape[-1]
    angle = (positions.astype(jnp.float32)[..., None] * aligned(inv_freq.astype(jnp.float32), 3))[
        ..., None, :
    ]  # [B, S, 1, R/2]
    axis = -1 if interleaved else -2  # of the pair
    cos, sin = (jnp.expand_dims(scale * x, axis) for x in (jnp.cos(angle), jnp.sin(angle)))
    pairs = (*x.shape[:3], turned // 2, 2) if interleaved else (*x.shape[:3], 2, turned // 2)
    straight = x[..., :turned].astype(jnp.float32).reshape(pairs)
    sign = aligned(jnp.expand_dims(jnp.array([-1.0, 1.0]), -3 - axis), straight.ndim)
    # Neighbours change places by a flip, which fuses with what is around it as two halves put together do not.
    turn = straight * cos + jnp.flip(straight, axis) * (sign * sin)
    out = turn.reshape(*x.shape[:3], turned).astype(x.dtype)
    return out if turned == x.shape[3] else jnp.concatenate([out, x[..., turned:]], axis=-1)
