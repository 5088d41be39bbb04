"""Splash attention, JAX's own TPU kernel, with segment ids. On a CPU it runs in Pallas's interpret mode, and what is
exported there for a TPU holds the kernel.

Data flows segments -> one number per segment -> the kernel, row by row under vmap, on tokens padded to whole blocks.
Padding tokens attend to each other in the kernel; their outputs are set to 0 here, and so are the gradients that come
back to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.attention.request import SECOND_ORDER, Request
from jax_backend.differentiation import constant
from jax_backend.segments import Segments, run_numbers

LANES = 128  # a block is a multiple of this, and vector memory keeps an axis of channels as one
BLOCKS = (512, 256, 128)
SCOPED_VMEM = 16 * 2**20  # bytes of vector memory that XLA lets a kernel hold on v5e and v5p; v6e allows twice as much


def supports(request: Request) -> str | None:
    refusals = (
        (request.platform not in ("tpu", "cpu"), f"it is a TPU kernel, and this runs on {request.platform}"),
        (not request.own_keys, "its causal mask is static, so keys cannot be other tokens than the queries"),
        (request.needs_lse, "its log-sum-exp has no gradient, which sinks and return_lse need"),
        (request.dtype == jnp.float16, "TPUs have no float16"),
        (
            request.group > 1 and jax.config.jax_enable_x64,  # type: ignore[attr-defined]  # made at run time
            "it finds the key/value head of a group with 32 bits, and jax_enable_x64 is on",
        ),
        (
            vector_memory(LANES, request) > SCOPED_VMEM,
            f"its blocks of heads {request.head_dim} wide do not fit into {SCOPED_VMEM // 2**20} MiB of vector memory",
        ),
    )
    return next((reason for refused, reason in refusals if refused), None)


def vector_memory(block: int, request: Request) -> int:
    """Returns a bound on the bytes that each of the three kernels holds in vector memory, ``block`` tokens a block.

    The kernel of dk and dv holds most: two buffers each of q, k, v, dout, dk, dv, float32 sums of the last two, and
    ids, positions and statistics in rows of lanes (five of them in the forward); and four squares of float32: scores,
    weights and the gradients of both.
    """
    width, value_width = (-(-size // LANES) * LANES for size in (request.head_dim, request.value_dim))
    per_token = (3 * request.dtype.itemsize + 4) * (width + value_width) + 5 * 4 * LANES
    return 2 * block * per_token + 4 * 4 * block**2


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, q_offset: jax.Array, request: Request
) -> tuple[jax.Array, None]:
    """Attention [B, S, N, E] in q's dtype; no log-sum-exp."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    tokens = request.queries
    padding = -tokens % LANES
    numbers = jnp.pad(run_numbers(segments), ((0, 0), (0, padding)))

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, numbers: jax.Array, *, interpret: bool) -> jax.Array:
        kernel = _kernel(tokens + padding, request, interpret)

        def row(q: jax.Array, k: jax.Array, v: jax.Array, numbers: jax.Array) -> jax.Array:
            by_head = (jnp.pad(x, ((0, padding), (0, 0), (0, 0))).swapaxes(0, 1) for x in (q * request.scale, k, v))
            return kernel(*by_head, segment_ids=SegmentIds(q=numbers, kv=numbers)).swapaxes(0, 1)[:tokens]

        return jax.vmap(row)(q, k, v, numbers)

    compiled, interpreted = (partial(rows, interpret=interpret) for interpret in (False, True))

    def run(numbers: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if request.platform == "cpu":  # the platform that a trace is exported for is known when it is lowered
            return jax.lax.platform_dependent(q, k, v, numbers, tpu=compiled, default=interpreted)
        return compiled(q, k, v, numbers)

    out = _differentiable_once(run, numbers, q, k, v)
    return jnp.where((numbers != 0)[:, :tokens, None, None], out, 0).astype(q.dtype), None


def _differentiable_once(run: Callable[..., jax.Array], numbers: jax.Array, *operands: jax.Array) -> jax.Array:
    """``run(numbers, *operands)``, which names the way out of second derivatives; the library's kernels raise without
    a word."""

    def forward(numbers: jax.Array, *operands: jax.Array) -> Any:
        return jax.vjp(partial(run, numbers), *(constant(x, SECOND_ORDER) for x in operands))

    call = jax.custom_vjp(run)
    call.defvjp(forward, lambda pullback, gradient: (None, *pullback(gradient)))
    return call(numbers, *operands)


def _kernel(tokens: int, request: Request, interpret: bool) -> Any:
    """The kernel for one shape; it holds the block map of the mask, which the library makes once on the host.

    Its arrays belong to the trace in which they are made, so the kernel is not kept: it takes milliseconds.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, window = (tokens, tokens), request.window
    if window is not None:
        mask: Any = splash.LocalMask(shape, window_size=(window - 1, 0 if request.causal else window - 1), offset=0)
    else:
        mask = splash.CausalMask(shape) if request.causal else splash.FullMask(shape)
    fitting = (size for size in BLOCKS if vector_memory(size, request) <= SCOPED_VMEM)
    block = next(size for size in fitting if tokens % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * request.heads),
        block_sizes=sizes,
        attn_logits_soft_cap=request.softcap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
