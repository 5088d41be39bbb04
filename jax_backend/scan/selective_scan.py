"""The selective scan of Mamba with its state reset at segment starts, as an associative scan.

Data flows dt, A -> decay, set to 0 at segment starts and padding -> associative scan of (decay, input) pairs -> states
-> y. A decay of 0 is what a reset is: nothing that stood before reaches the state. Gradients are JAX's own. Memory is
[B, S, E, N] float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.segments import checked_ids, is_real, segment_starts
from packing_core.errors import LayoutError


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    segment_ids: jax.Array,
    *,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
) -> jax.Array:
    """The state-space layer of Mamba (Gu and Dao 2023, arXiv:2312.00752, section 3), one state per segment.

    For each channel, with a state ``h[N]`` that is 0 before a segment's first token:
    ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`` and ``y_t = (C_t . h_t + D x_t) silu(z_t)``.

    Args:
        x: [B, S, E], E channels.
        dt: [B, S, E] step sizes, bias and softplus already applied.
        A: [E, N], negative.
        B: [B, S, N], or [B, S, G, N] where each of G groups serves E / G neighbouring channels.
        C: like B.
        segment_ids: integer [B, S], contiguous runs of ids from 1 on, 0 for padding.
        D: [E] weight of the skip connection; None for none.
        z: [B, S, E] gate; None for none.

    Returns:
        [B, S, E] in x's dtype, exactly 0 at padding; states are float32.

    Raises:
        LayoutError: the shapes contradict each other, or the ids break a rule of :func:`find_segments`.
    """
    _check(x, dt, A, B, C, D, z)
    segment_ids = checked_ids("segment_ids", segment_ids, x.shape[:2])
    real = is_real(segment_ids)

    def at_tokens(w: jax.Array) -> jax.Array:
        """float32, 0 at padding, so that nothing which stands there reaches a gradient."""
        return jnp.where(real.reshape(*real.shape, *[1] * (w.ndim - 2)), w.astype(jnp.float32), 0.0)

    x_, dt_, B_, C_ = (at_tokens(w) for w in (x, dt, B, C))
    drive = (dt_ * x_)[..., None] * _per_channel(B_, x)  # [B, S, E, N]
    decay = jnp.exp(dt_[..., None] * A.astype(jnp.float32)[None, None])
    decay = jnp.where((real & ~segment_starts(segment_ids))[..., None, None], decay, 0.0)
    _, states = jax.lax.associative_scan(_compose, (decay, drive), axis=1)
    y = jnp.sum(states * _per_channel(C_, x), axis=-1)
    if D is not None:
        y = y + D.astype(jnp.float32)[None, None] * x_
    if z is not None:
        y = y * jax.nn.silu(at_tokens(z))
    return y.astype(x.dtype)


def _compose(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two steps ``h -> a h + b`` as one: first the earlier, then the later. After an ``a`` of 0 nothing is left of what
    was before, be it NaN."""
    (a1, b1), (a2, b2) = earlier, later
    goes_on = a2 != 0
    return jnp.where(goes_on, a1 * a2, 0.0), jnp.where(goes_on, a2 * b1, 0.0) + b2


def _per_channel(grouped: jax.Array, x: jax.Array) -> jax.Array:
    """[B, S, N] or [B, S, G, N] to [B, S, E or 1, N]."""
    return grouped[:, :, None] if grouped.ndim == 3 else jnp.repeat(grouped, x.shape[2] // grouped.shape[2], axis=2)


def _check(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None,
    z: jax.Array | None,
) -> None:
    if x.ndim != 3:
        raise LayoutError(f"x must have shape [B, S, E], got {x.shape}")
    rows, tokens, channels = x.shape
    if A.ndim != 2 or A.shape[0] != channels:
        raise LayoutError(f"A must have shape [E, N] = ({channels}, *), got {A.shape}")
    states = A.shape[1]
    for name, w, want in (("dt", dt, x.shape), ("z", z, x.shape), ("D", D, (channels,))):
        if w is not None and w.shape != want:
            raise LayoutError(f"{name} must have shape {want}, got {w.shape}")
    for name, w in (("B", B), ("C", C)):
        plain = w.shape == (rows, tokens, states)
        grouped = w.ndim == 4 and w.shape == (rows, tokens, w.shape[2], states) and w.shape[2] > 0
        if not plain and not (grouped and channels % w.shape[2] == 0):
            raise LayoutError(
                f"{name} must have shape [B, S, N] = ({rows}, {tokens}, {states}), or [B, S, G, N] with G dividing "
                f"{channels} channels, got {w.shape}"
            )
