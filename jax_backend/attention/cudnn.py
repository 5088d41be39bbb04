"""cuDNN's fused attention over packed offsets, through a call that JAX keeps private.

Data flows segments -> lengths and offsets [B, M] of at most ``max_segments`` segments -> cuDNN. What it writes for
padding is undefined, so outputs and gradients of padding are set to 0 here. JAX promises nothing about the call (up to
0.10 it is silently wrong when query heads share key/value heads), so its numbers, gradients included, are compared with
``chunked`` once per process and shape before it is ever traced.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.attention import chunked
from jax_backend.attention.request import Request
from jax_backend.segments import Segments, find_segments, packed_offsets

TOLERANCE = (
    0.02  # |difference| / |reference| of a half-precision kernel that is right; a wrong one is off by 0.1 and more
)


def supports(request: Request) -> str | None:
    refusals = (
        (request.platform != "gpu", f"cuDNN needs an NVIDIA GPU, and this runs on {request.platform}"),
        (request.dtype == jnp.float32, "it computes in bfloat16 or float16, and q is float32"),
        (
            not request.own_keys,
            "packed offsets describe queries and keys of the same tokens, and kv_segment_ids is given",
        ),
        (request.max_segments is None, "it allocates by the number of segments: pass max_segments"),
        (request.window is not None, "the packed call has no window"),
        (request.softcap is not None, "the packed call has no softcap"),
        (request.needs_lse, "its log-sum-exp has no gradient, which sinks and return_lse need"),
        (request.head_dim != request.value_dim, "keys and values must have the same width"),
        (request.head_dim % 8 != 0 or request.head_dim > 128, "the head width must be a multiple of 8, at most 128"),
    )
    for refused, reason in refusals:
        if refused:
            return reason
    assert request.max_segments is not None
    shape = request.queries, request.max_segments, request.heads, request.kv_heads, request.head_dim
    return _probe(request.dtype.name, *shape, request.causal)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, q_offset: jax.Array, request: Request
) -> tuple[jax.Array, None]:
    """Attention [B, S, N, D] in q's dtype; no log-sum-exp."""
    assert request.max_segments is not None
    real = segments.key_end > 0
    # One segment would select cuDNN's unpacked call, which reads lengths [B].
    lengths, first = packed_offsets(segments, max(2, request.max_segments))
    q, k, v = (_zero_padding_gradient(x, real) for x in (q, k, v))
    return jnp.where(real[..., None, None], _call(q, k, v, lengths, first, request), 0), None


def _call(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, first: jax.Array, request: Request
) -> jax.Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    mask_type = MaskType.PADDING_CAUSAL if request.causal else MaskType.PADDING
    scale = request.scale
    return dot_product_attention(q, k, v, None, None, lengths, lengths, first, first, scale=scale, mask_type=mask_type)


@jax.custom_vjp
def _zero_padding_gradient(x: jax.Array, real: jax.Array) -> jax.Array:
    return x


def _keep_real(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, real


def _drop_padding(real: jax.Array, dx: jax.Array) -> tuple[jax.Array, None]:
    return jnp.where(real[..., None, None], dx, 0), None


_zero_padding_gradient.defvjp(_keep_real, _drop_padding)


@cache
def _probe(
    dtype: str, tokens: int, max_segments: int, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> str | None:
    """Run two small packed rows and a full one forward and backward, and say why the result cannot be trusted, or None.

    Small rows alone would not do: on an H200 (cuDNN 9.19) they are right where rows of many segments are wrong.
    """
    small = np.zeros((2, 256), np.int32)
    for row, bounds in enumerate(((0, 70, 71, 200), (16, 144, 256))):  # padding after, between rows, before
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            small[row, start:stop] = number
    segments = min(tokens, max_segments)
    full = (np.arange(tokens, dtype=np.int32) * segments // tokens + 1)[None]
    for ids, cap in ((small, 4), (full, max_segments)):
        reason = _distrust(ids, cap, dtype, heads, kv_heads, head_dim, causal)
        if reason is not None:
            return reason
    return None


def _distrust(
    ids: np.ndarray, max_segments: int, dtype: str, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> str | None:
    request = Request(
        queries=ids.shape[1],
        keys=ids.shape[1],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        dtype=jnp.dtype(dtype),
        causal=causal,
        scale=head_dim**-0.5,
        window=None,
        softcap=None,
        needs_lse=False,
        own_keys=True,
        max_segments=max_segments,
        platform="gpu",
    )
    try:
        with ThreadPoolExecutor(1) as aside:  # a thread of its own is not inside the caller's trace
            worst = aside.submit(_largest_error, request, ids).result()
    except Exception as error:  # a private call fails as it likes: whatever it says is the reason
        return f"cuDNN's packed call does not run here: {type(error).__name__}: {error}"
    if not worst <= TOLERANCE:
        return (
            f"cuDNN's packed call is wrong here (relative error {worst:.2g} on {heads} query and {kv_heads} key heads, "
            f"rows of {ids.shape[1]} tokens and {ids.max()} segments)"
        )
    return None


def _largest_error(request: Request, ids: np.ndarray) -> float:
    """Relative error of cuDNN's output and gradients against ``chunked`` in float32."""
    rng = np.random.default_rng(0)
    shapes = [(*ids.shape, n, request.head_dim) for n in (request.heads, request.kv_heads, request.kv_heads)]
    narrow = [jnp.asarray(rng.standard_normal(shape), request.dtype) for shape in shapes]
    dout = jnp.asarray(rng.standard_normal(shapes[0]), request.dtype)
    wide = [x.astype(jnp.float32) for x in narrow]
    found = _out_and_gradients(attend, narrow, dout, jnp.asarray(ids), request)
    wanted = _out_and_gradients(chunked.attend, wide, dout, jnp.asarray(ids), request)
    return max(_distance(x, y) for x, y in zip(found, wanted, strict=True))


@partial(jax.jit, static_argnums=(0, 4))
def _out_and_gradients(attend: Any, operands: list[Any], dout: Any, ids: Any, request: Request) -> list[jax.Array]:
    def out_of(*qkv: jax.Array) -> jax.Array:
        return attend(*qkv, find_segments(ids), jnp.int32(0), request)[0]

    out, pullback = jax.vjp(out_of, *operands)
    return [out, *pullback(dout.astype(out.dtype))]


def _distance(x: jax.Array, reference: jax.Array) -> float:
    wanted = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(x, np.float64) - wanted) / np.linalg.norm(wanted))
