"""The gated delta rule and the scan of Mamba-2 over packed rows, one state per segment.

Data flows operands in the model's dtype -> checked and grouped by heads -> :mod:`.chunked_scan`, in float32 -> the
model's dtype.
Segment ids are data: one trace serves all segmentations. It is plain XLA and runs on CPU, GPU and TPU, under ``jit``
with sharded rows or heads too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_backend.differentiation import reverse_mode
from jax_backend.placement import refuse_varying, spec_of, takes_explicit_axes
from jax_backend.scan import chunked_scan
from jax_backend.scan.chunked_scan import Carry, Inputs, Rule
from jax_backend.segments import broken_segments, checked_ids, find_segments, is_real, run_numbers
from packing_core.errors import LayoutError, UnsupportedError


def _spread_as(values: jax.Array, return_state: bool) -> Any:
    """Returns how outputs [B, S, N, E], and states [B, N, ...], are spread: as v or x are."""
    spec = spec_of(values)
    return (spec, PartitionSpec(spec[0], spec[2])) if return_state else spec


@takes_explicit_axes(lambda given: _spread_as(given["v"], given.get("return_state", False)))
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float | None = None,
    normalise: bool = False,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
) -> Any:
    """Linear attention that corrects its memory, with a state of its own for every segment.

    Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464, equation 10): for each head, with a state ``S[D, E]`` that is 0
    before a segment's first token, ``S' = exp(g_t) S``, ``S = S' + k_t beta_t (v_t - S'^T k_t)^T`` and
    ``o_t = scale S^T q_t``. The backward keeps the inputs and recomputes the rest.

    Args:
        q, k: [B, S, H, D].
        v: [B, S, N, E], N a multiple of H; head n of v reads head ``n // (N / H)`` of q and k.
        g: [B, S, N], the log of the decay, at most 0 (-inf forgets everything).
        beta: [B, S, N], the strength of the correction.
        segment_ids: integer [B, S], contiguous runs of ids from 1 on, 0 for padding.
        scale: of the output; ``D ** -0.5`` by default.
        normalise: divide every head of q and k by ``sqrt(sum(x^2) + 1e-6)`` first, as Qwen3-Next does.
        initial_state: [B, N, D, E] that the first token of each row goes on from, as the token before it left it; 0 by
            default. It belongs to the segment of the first token and never reaches another.
        return_state: also return the state after the last token of each row, [B, N, D, E] float32, 0 where that is
            padding: the ``initial_state`` of the row that goes on.

    Returns:
        [B, S, N, E] in v's dtype, exactly 0 at padding; with ``return_state`` that and the states.

    Raises:
        LayoutError: the shapes contradict each other.
        UnsupportedError: g has a decay for each channel (Kimi Delta Attention).
    """
    if q.ndim != 4 or k.shape != q.shape or v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise LayoutError(f"q and k must have shape [B, S, H, D] and v [B, S, N, E] with H dividing N, got {shapes}")
    if g.shape == (*v.shape[:3], q.shape[3]) and g.ndim == 4:
        raise UnsupportedError(
            f"g has shape {g.shape}, a decay for each channel, and gated_delta_rule takes one for each head: "
            "torch_backend computes Kimi Delta Attention"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:3]:
            raise LayoutError(f"{name} must have shape [B, S, N] = {v.shape[:3]}, got {x.shape}")
    state_shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != state_shape:
        raise LayoutError(f"initial_state must have shape [B, N, D, E] = {state_shape}, got {initial_state.shape}")
    segment_ids = checked_ids("segment_ids", segment_ids, q.shape[:2])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rule = Rule(corrects=True, scale=scale, normalises=normalise)
    out, state = _scan(rule, q, k, v, g, beta, segment_ids, initial_state)
    out = out.astype(v.dtype)
    return (out, state) if return_state else out


@takes_explicit_axes(lambda given: _spread_as(given["x"], given.get("return_state", False)))
def ssd(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    segment_ids: jax.Array,
    *,
    D: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_state: bool = False,
) -> Any:
    """The state-space layer of Mamba-2, with a state of its own for every segment.

    Structured state-space duality (Dao and Gu 2024, arXiv:2405.21060, section 5): for each head, with a state
    ``h[P, N]`` that is 0 before a segment's first token, ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`` and
    ``y_t = h_t C_t + D x_t``. The backward keeps the inputs and recomputes the rest.

    Args:
        x: [B, S, H, P].
        dt: [B, S, H] step sizes, bias and softplus already applied.
        A: [H], negative.
        B: [B, S, G, N], G groups, each of which serves H / G neighbouring heads.
        C: like B.
        segment_ids: integer [B, S], contiguous runs of ids from 1 on, 0 for padding.
        D: [H] weight of the skip connection; None for none.
        initial_state: [B, H, P, N] that the first token of each row goes on from; 0 by default.
        return_state: also return the state after the last token of each row, [B, H, P, N] float32, 0 where that is
            padding.

    Returns:
        [B, S, H, P] in x's dtype, exactly 0 at padding; with ``return_state`` that and the states.

    Raises:
        LayoutError: the shapes contradict each other.
    """
    if x.ndim != 4 or B.ndim != 4 or B.shape != C.shape or B.shape[:2] != x.shape[:2] or x.shape[2] % B.shape[2]:
        shapes = ", ".join(f"{name} {w.shape}" for name, w in (("x", x), ("B", B), ("C", C)))
        raise LayoutError(f"x must have shape [B, S, H, P], B and C [B, S, G, N] with G dividing H, got {shapes}")
    heads = x.shape[2:3]
    for name, w, want in (("dt", dt, x.shape[:3]), ("A", A, heads), ("D", D, heads)):
        if w is not None and w.shape != want:
            raise LayoutError(f"{name} must have shape {want}, got {w.shape}")
    state_shape = (*x.shape[:1], *x.shape[2:], B.shape[3])
    if initial_state is not None and initial_state.shape != state_shape:
        raise LayoutError(f"initial_state must have shape [B, H, P, N] = {state_shape}, got {initial_state.shape}")
    segment_ids = checked_ids("segment_ids", segment_ids, x.shape[:2])
    step = dt.astype(jnp.float32)
    start = None if initial_state is None else initial_state.mT
    real = is_real(segment_ids)[..., None]  # A's gradient is a sum over tokens, so that padding is left out here too
    decay = jnp.where(real, step, 0.0) * A.astype(jnp.float32)[None, None]
    y, state = _scan(Rule(corrects=False, scale=1.0), C, B, x, decay, step, segment_ids, start)
    if D is not None:
        y = y + D.astype(jnp.float32)[None, None, :, None] * jnp.where(real[..., None], x.astype(jnp.float32), 0.0)
    y = y.astype(x.dtype)
    return (y, state.mT) if return_state else y


def _scan(
    rule: Rule,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    strength: jax.Array,
    segment_ids: jax.Array,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, S, N, E] and last states [B, N, D, E], float32; all shapes fit each other."""
    name = "gated_delta_rule" if rule.corrects else "ssd"
    refuse_varying(name, q, k, v)
    k, v, g, strength, initial_state = reverse_mode(
        f"{name} has a gradient in reverse mode alone: take jax.grad or jax.vjp, and not jax.jvp, jax.jacfwd or "
        "jax.hessian",
        *(k, v, g, strength, initial_state),
    )
    (rows, _, heads, width), group = q.shape, v.shape[2] // q.shape[2]
    segments = find_segments(segment_ids)
    shape = (rows, v.shape[2], width, v.shape[3])
    start = jnp.zeros(shape, jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    # A log decay of -inf forgets everything, which is no broken number.
    first = None if initial_state is None else start  # XLA would fold the zeros for seconds, in each layer
    broken = broken_segments(segments, q, k, v, jnp.maximum(g, 0), strength, first=first)
    # Inside a chunk products are of all its tokens, and 0 times NaN is NaN: a broken segment is padding to the scan.
    runs = jnp.where(broken, 0, run_numbers(segments))
    start = jnp.where(jnp.isfinite(start), start, 0.0)

    def grouped(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], heads, group, *x.shape[3:])

    # Without a state to go on from, the first token goes on from run -1, of which no token is.
    before = jnp.full_like(runs[:, 0], -1) if initial_state is None else runs[:, 0]
    carry, out = chunked_scan.scan(
        rule,
        Inputs(runs, q, k, grouped(v), grouped(g), grouped(strength)),
        Carry(start.reshape(rows, heads, group, width, -1), before),
    )
    out = jnp.where(broken[..., None, None], jnp.nan, out.reshape(v.shape))
    return out, jnp.where(broken[:, -1, None, None, None], jnp.nan, carry.state.reshape(shape))
