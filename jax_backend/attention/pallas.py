"""Our own Pallas kernels, joined into one differentiable function.

Data flows segments -> intervals (what each query sees, what sees each key) -> forward, and on the way back delta -> dq,
dk and dv. Cost follows the tiles that lie inside segments. There are kernels on Hopper's own instructions
(``mosaic_*.py``) and, for everything else, kernels on Pallas's Triton lowering (``pallas_*.py``). JAX deprecates that
one: without it the former serve alone, also where they do not win. On a CPU the latter run in Pallas's interpret mode:
right, and slow.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.attention import mosaic_backward, mosaic_forward, mosaic_tiles
from jax_backend.attention.request import SECOND_ORDER, Request, saved
from jax_backend.differentiation import first_order, once
from jax_backend.lacking import lacking, missing
from jax_backend.segments import Interval, Segments, seeing_queries, visible_keys

WIDEST = 256  # channels of a head that a tile still holds in shared memory and registers
ON_TRITON = "jax_backend.attention.pallas_backward"


def supports(request: Request) -> str | None:
    if request.platform not in ("gpu", "cpu"):
        return f"its kernels are lowered for NVIDIA GPUs (and interpreted on CPUs), not for {request.platform}"
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # made at run time
        return "its kernels index with 32 bits, and jax_enable_x64 is on"
    if max(request.head_dim, request.value_dim) > WIDEST:
        return f"head width {max(request.head_dim, request.value_dim)} is above {WIDEST}"
    if missing(ON_TRITON) is None or mosaic_tiles.lowers(request):
        return None
    return lacking("pallas", ON_TRITON)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, q_offset: jax.Array, request: Request
) -> tuple[jax.Array, jax.Array]:
    """Attention [B, S, N, E] in q's dtype, and the log of each softmax's sum, float32 [B, S, N]."""
    options: dict[str, Any] = {"causal": request.causal, "window": request.window, "q_offset": q_offset}
    return _attend(request, q, k, v, visible_keys(segments, **options), seeing_queries(segments, **options))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _attend(
    request: Request, q: jax.Array, k: jax.Array, v: jax.Array, keys: Interval, queries: Interval
) -> tuple[jax.Array, jax.Array]:
    if _on_hopper(request, mosaic_tiles.wins_forward(request)):
        return mosaic_forward.forward(q, k, v, keys, request)
    from jax_backend.attention.pallas_forward import forward
    from jax_backend.attention.pallas_tiles import tiles_for

    return forward(q, k, v, keys, request, tiles_for(request).forward, interpret=request.platform == "cpu")


def _on_hopper(request: Request, wins: bool) -> bool:
    """Returns whether a kernel on Hopper's own instructions is taken."""
    return mosaic_tiles.lowers(request) and (wins or missing(ON_TRITON) is not None)


def _attend_fwd(
    request: Request, q: jax.Array, k: jax.Array, v: jax.Array, keys: Interval, queries: Interval
) -> tuple[Any, Any]:
    q, k, v = first_order(SECOND_ORDER, q, k, v)
    out, lse = saved(_attend(request, q, k, v, keys, queries))
    # Planned here, where the compiler sees that layers plan alike: remat would plan for each layer anew.
    return (out, lse), (q, k, v, keys, saved(_plan(request, queries)), out, lse)


def _plan(request: Request, queries: Interval) -> Any:
    """Prepares what the backward's kernel for keys and values reads about the queries that see each key."""
    if _on_hopper(request, mosaic_tiles.wins_backward(request)):
        return mosaic_backward.plan_walks(request, queries)
    from jax_backend.attention.pallas_tiles import heaviest_first, tiles_for

    return queries, heaviest_first(queries, tiles_for(request).dkv.keys)


def _attend_bwd(request: Request, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, keys, plan, out, lse = kept
    dout, dlse = cotangents
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    if _on_hopper(request, mosaic_tiles.wins_backward(request)):
        grads = mosaic_backward.gradients(q, k, v, dout, lse, delta, plan, request)
        return *grads, None, None
    from jax_backend.attention.pallas_backward import grad_keys, grad_queries
    from jax_backend.attention.pallas_tiles import tiles_for

    tiles, interpret = tiles_for(request), request.platform == "cpu"
    dq = grad_queries(q, k, v, dout, lse, delta, keys, request, tiles.dq, interpret=interpret)
    seen_by, order = plan
    dk, dv = grad_keys(q, k, v, dout, lse, delta, seen_by, order, request, tiles.dkv, interpret=interpret)
    return dq, dk, dv, None, None


# Under a jit of their own the layers of a model, which ask for the same, share one compiled kernel.
_attend.defvjp(jax.jit(_attend_fwd, static_argnums=0), jax.jit(once(_attend_bwd, SECOND_ORDER), static_argnums=0))
