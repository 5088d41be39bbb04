"""The request of one attention call, checked once, before any implementation sees it.

``Request`` is static (shapes, dtype, options, platform): an implementation reads it in ``supports`` to say what it
cannot do and in ``attend`` to build its computation. Arrays travel beside it. Shape letters: B rows, S queries, T keys,
N query heads, K key/value heads with G = N // K, D width of queries and keys, E width of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from packing_core.errors import LayoutError, PackingError

FORWARD_MODE = (
    "segment_attention has a gradient in reverse mode alone (jax.grad, jax.vjp): for forward mode (jax.jvp, "
    "jax.jacfwd, jax.hessian) pass implementation='xla'"
)
SECOND_ORDER = (
    "the gradient of segment_attention is not differentiated again: for second derivatives pass implementation='xla'"
)
LOG2E = math.log2(math.e)  # kernels take powers of two
FLOATING = ("bfloat16", "float16", "float32")
SAVED = "segment_attention"  # the name under which policies of jax.checkpoint find what a backward reads of its forward


def saved(results: Any) -> Any:
    """Names what a forward made (a pytree) ``SAVED``: a policy can keep it rather than have it made again."""
    return jax.tree.map(lambda x: checkpoint_name(x, SAVED), results)


@dataclass(frozen=True)
class Request:
    """The static part of one call; ``scale`` is resolved, ``own_keys`` says that queries and keys are the same
    tokens."""

    rows: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    needs_lse: bool
    own_keys: bool
    max_segments: int | None
    platform: str

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Compare the shapes and dtypes of q [B, S, N, D], k [B, T, K, D] and v [B, T, K, E].

    Raises:
        LayoutError: they do not fit together.
    """
    for name, x, legend in (("q", q, "[B, S, N, D]"), ("k", k, "[B, T, K, D]"), ("v", v, "[B, T, K, E]")):
        if getattr(x, "ndim", None) != 4:
            raise LayoutError(f"{name} must have shape {legend}, got {getattr(x, 'shape', type(x).__name__)}")
        if x.dtype != q.dtype or x.dtype.name not in FLOATING:
            raise LayoutError(
                f"q, k and v must share one dtype of {', '.join(FLOATING)}, "
                f"got {q.dtype}, {k.dtype}, {v.dtype}: cast them"
            )
    if k.shape[:3] != v.shape[:3]:
        raise LayoutError(f"k {k.shape} and v {v.shape} must agree in rows, tokens and heads")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise LayoutError(f"q {q.shape} and k {k.shape} must agree in rows (axis 0) and width (axis 3)")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise LayoutError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: the first must be a multiple of the second"
        )
    if 0 in q.shape or 0 in v.shape:
        raise LayoutError(f"q {q.shape} and v {v.shape} must not be empty")


def checked_sinks(sinks: Any, heads: int) -> jax.Array | None:
    """Returns the sinks, one number for each of ``heads``, as an array; None for none.

    Raises:
        LayoutError: they are something else.
    """
    if sinks is None:
        return None
    wanted = f"sinks must have one logit per query head, shape ({heads},), got"
    try:
        array = jnp.asarray(sinks)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"{wanted} {sinks!r}") from error
    if array.shape != (heads,):
        raise LayoutError(f"{wanted} {array.shape}")
    return array


def check_options(
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    max_segments: int | None,
) -> None:
    """Check the ranges of one call's options.

    Raises:
        PackingError: an option is out of its range.
    """
    for name, value in (("window", window), ("max_segments", max_segments), ("softcap", softcap), ("scale", scale)):
        if isinstance(value, jax.core.Tracer):
            raise PackingError(
                f"{name} is traced, and it is a constant of the kernel: pass a Python number, as a static argument of "
                "jit; a scale that is learnt multiplies q instead"
            )
    for name, value in (("window", window), ("max_segments", max_segments)):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise PackingError(f"{name} must be an int or None, got {value!r}")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None and not hasattr(value, "__float__"):
            raise PackingError(f"{name} must be a number or None, got {value!r}")
        if value is not None and np.ndim(value):
            raise PackingError(
                f"{name} must be one number, got an array of shape {np.shape(value)}: multiply q instead"
            )
    if not isinstance(causal, bool | np.bool_):
        raise PackingError(f"causal must be True or False, got {causal!r}")
    if window is not None and window < 1:
        raise PackingError(f"window is {window}: it counts visible keys, the query's own included, so it is at least 1")
    if max_segments is not None and max_segments < 1:
        raise PackingError(f"max_segments is {max_segments}: it must be at least 1; pass None for no cap")
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None and not (0 < value < math.inf):
            raise PackingError(f"{name} is {value}: it must be positive and finite; pass None for none")
