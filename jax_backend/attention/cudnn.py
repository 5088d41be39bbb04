"""cuDNN's fused attention over packed offsets, through a call that JAX keeps private.

Data flows segments -> lengths and offsets [B, M] of at most ``max_segments`` segments -> cuDNN. What it writes for
padding is undefined, so outputs and gradients of padding are set to 0 here. JAX promises nothing about the call (up to
0.10 it is silently wrong when query heads share key/value heads), so its numbers, gradients included, are compared with
``xla`` once per process and class of shapes before it is ever traced, and what it is known to get wrong is refused by
size: see ``LIMIT``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np

from jax_backend.attention import xla
from jax_backend.attention.request import Request
from jax_backend.segments import Segments, find_segments, packed_offsets
from packing_core.errors import UnsupportedError

TOLERANCE = (
    0.02  # |difference| / |reference| of a half-precision kernel that is right; a wrong one is off by 0.1 and more
)

# rows x max_segments x tokens x query heads stay below this. cuDNN sums dq in an array of that many vectors of at most
# 128 floats, and on an H200 (cuDNN 9.19) dq is wrong from element 2**32 of it on, where out, dk and dv are right. Below
# it JAX's offsets, rows x tokens x query heads x width, stay inside int32 too.
LIMIT = 2**32 // 128


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
    return _excess(request, request.rows) or _probe(
        request.dtype.name, request.heads, request.kv_heads, request.head_dim, request.causal
    )


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, q_offset: jax.Array, request: Request
) -> tuple[jax.Array, None]:
    """Attention [B, S, N, D] in q's dtype; no log-sum-exp."""
    real = segments.key_end > 0
    lengths, first = packed_offsets(segments, _laid_out(request))
    no_tokens = (jax.lax.stop_gradient(x[:, :0]) for x in (q, k, v))  # vmap may map any of them
    lengths, *_ = _bounded((lengths, *no_tokens), request, request.rows)
    q, k, v = (_zero_padding_gradient(x, real) for x in (q, k, v))
    if odd := request.queries % 2:  # the call differentiates rows of even length only
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    out = _call(q, k, v, lengths, first, request)
    return jnp.where(real[..., None, None], out[:, :-1] if odd else out, 0), None


def _call(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, first: jax.Array, request: Request
) -> jax.Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    mask_type = MaskType.PADDING_CAUSAL if request.causal else MaskType.PADDING
    scale = request.scale
    return dot_product_attention(q, k, v, None, None, lengths, lengths, first, first, scale=scale, mask_type=mask_type)


def _laid_out(request: Request) -> int:
    """Segments that the call is laid out for; 1 would select cuDNN's unpacked call, which reads lengths [B]."""
    assert request.max_segments is not None
    return max(2, request.max_segments)


def _excess(request: Request, rows: int) -> str | None:
    """Explains why so many rows exceed what the call computes correctly, or returns None."""
    size = rows * _laid_out(request) * request.queries * request.heads
    if size < LIMIT:
        return None
    return (
        f"its query gradient is wrong from {LIMIT:,} rows x max_segments x tokens x query heads on, and this is "
        f"{size:,}: lower max_segments or give fewer rows at a time"
    )


def _bounded(x: Any, request: Request, rows: int) -> Any:
    """``x`` itself. ``vmap``, whose axis the call takes as more rows, meets the bound on rows here."""

    @jax.custom_batching.custom_vmap
    def same(x: Any) -> Any:
        return x

    @same.def_vmap
    def _(size: int, batched: list[Any], x: Any) -> tuple[Any, Any]:
        reason = _excess(request, rows * size)
        if reason is not None:
            raise UnsupportedError(f"cudnn cannot serve under vmap: {reason}")
        return _bounded(x, request, rows * size), batched[0]

    return same(x)


@jax.custom_vjp
def _zero_padding_gradient(x: jax.Array, real: jax.Array) -> jax.Array:
    return x


def _keep_real(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, real


def _drop_padding(real: jax.Array, dx: jax.Array) -> tuple[jax.Array, None]:
    return jnp.where(real[..., None, None], dx, 0), None


_zero_padding_gradient.defvjp(_keep_real, _drop_padding)


@cache
def _probe(dtype: str, heads: int, kv_heads: int, head_dim: int, causal: bool) -> str | None:
    """Run small packed rows forward and backward, and say why the result cannot be trusted, or None."""
    ids = np.zeros((3, 256), np.int32)
    # Padding after, between and before segments, and a row that fills the cap.
    for row, bounds in enumerate(((0, 70, 71, 200), (16, 144, 256), (0, 1, 100, 230, 256))):
        for number, (start, stop) in enumerate(pairwise(bounds), start=1):
            ids[row, start:stop] = number
    request = Request(
        rows=3,
        queries=256,
        keys=256,
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
        max_segments=4,
        platform="gpu",
    )
    try:
        with ThreadPoolExecutor(1) as aside:  # a thread of its own is not inside the caller's trace
            worst = aside.submit(_largest_error, request, ids).result()
    except Exception as error:  # a private call fails as it likes: whatever it says is the reason
        return f"cuDNN's packed call does not run here: {type(error).__name__}: {error}"
    if not worst <= TOLERANCE:
        return (
            f"cuDNN's packed call is wrong here (relative error {worst:.2g} on {heads} query and {kv_heads} key heads)"
        )
    return None


def _largest_error(request: Request, ids: np.ndarray) -> float:
    """Relative error of cuDNN's output and gradients against ``xla`` in float32."""
    rng = np.random.default_rng(0)
    shapes = [(*ids.shape, n, request.head_dim) for n in (request.heads, request.kv_heads, request.kv_heads)]
    narrow = [jnp.asarray(rng.standard_normal(shape), request.dtype) for shape in shapes]
    dout = jnp.asarray(rng.standard_normal(shapes[0]), request.dtype)
    wide = [x.astype(jnp.float32) for x in narrow]
    found = _out_and_gradients(attend, narrow, dout, jnp.asarray(ids), request)
    wanted = _out_and_gradients(xla.attend, wide, dout, jnp.asarray(ids), request)
    return float(np.max([_distance(x, y) for x, y in zip(found, wanted, strict=True)]))  # NaN if one is


@partial(jax.jit, static_argnums=(0, 4))
def _out_and_gradients(attend: Any, operands: list[Any], dout: Any, ids: Any, request: Request) -> list[jax.Array]:
    def out_of(*qkv: jax.Array) -> jax.Array:
        return attend(*qkv, find_segments(ids), jnp.int32(0), request)[0]

    out, pullback = jax.vjp(out_of, *operands)
    return [out, *pullback(dout.astype(out.dtype))]


def _distance(x: jax.Array, reference: jax.Array) -> float:
    wanted = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(x, np.float64) - wanted) / np.linalg.norm(wanted))
