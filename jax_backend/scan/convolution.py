"""The causal short convolution in front of recurrent mixers, inside segments.

Data flows x, how far each token is from its segment's start -> one product a lag, summed in float32 -> activation. The
backward keeps the inputs and recomputes the rest.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jax_backend.placement import spec_of, takes_explicit_axes
from jax_backend.segments import checked_ids, is_real, segment_positions
from packing_core.errors import LayoutError, PackingError


@takes_explicit_axes(lambda given: spec_of(given["x"]))
def causal_conv(
    x: jax.Array,
    w: jax.Array,
    segment_ids: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    before: jax.Array | None = None,
) -> jax.Array:
    """Each channel's causal convolution over its own segment, zeros standing before the segment's first token.

    ``y_t = f(bias + sum_j w[W - 1 - j] x_{t-j})`` over lags ``0 <= j < W`` that stay in the segment (Mamba, Gu and Dao
    2023, arXiv:2312.00752, section 3.4). The last weight belongs to the current token, as in torch's Conv1d with left
    padding.

    Args:
        x: [B, S, E].
        w: [E, W].
        segment_ids: integer [B, S], contiguous runs of ids from 1 on, 0 for padding.
        bias: [E]; None for none.
        activation: "silu", or None.
        before: [B, W - 1, E], the tokens of the first token's segment that stood in front of the row, the last one
            next to it, 0 where there were none; None for none at all.

    Returns:
        [B, S, E] in x's dtype, exactly 0 at padding.

    Raises:
        LayoutError: the shapes contradict each other.
        PackingError: there is no such activation.
    """
    if x.ndim != 3:
        raise LayoutError(f"x must have shape [B, S, E], got {x.shape}")
    if w.ndim != 2 or w.shape[0] != x.shape[2] or not w.shape[1]:
        raise LayoutError(f"w must have shape [E, W] = ({x.shape[2]}, *), got {w.shape}")
    segment_ids = checked_ids("segment_ids", segment_ids, x.shape[:2])
    wanted = (x.shape[0], w.shape[1] - 1, x.shape[2])
    for name, y, shape in (("bias", bias, x.shape[2:]), ("before", before, wanted)):
        if y is not None and y.shape != shape:
            raise LayoutError(f"{name} must have shape {shape}, got {y.shape}")
    if activation not in (None, "silu"):
        raise PackingError(f"activation is {activation!r}: pass 'silu' or None")
    positions = segment_positions(segment_ids)
    if before is None:
        before = jnp.zeros(wanted, x.dtype)
    else:
        columns = jnp.arange(x.shape[1])[None]
        positions = positions + jnp.where(positions == columns, wanted[1], 0)  # the first segment began earlier
    return _convolve(activation, x, w, bias, before, is_real(segment_ids), positions)


@partial(jax.checkpoint, static_argnums=0)
def _convolve(
    activation: str | None,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    before: jax.Array,
    real: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    tokens, width = x.shape[1], w.shape[1]
    wide = jnp.where(real[..., None], x.astype(jnp.float32), 0.0)
    wide = jnp.concatenate([before.astype(jnp.float32), wide], axis=1)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)[None, None]
    for lag in range(width):
        first = width - 1 - lag
        earlier = jnp.where((positions >= lag)[..., None], wide[:, first : first + tokens], 0.0)
        y = y + w[:, first].astype(jnp.float32)[None, None] * earlier
    y = jax.nn.silu(y) if activation == "silu" else y
    return jnp.where(real[..., None], y, 0.0).astype(x.dtype)
