"""Keeps numbers that are not finite inside their document, around any implementation of attention.

A hidden value has weight 0, and 0 times NaN is NaN. So q, k and v enter the attention with 0 for what is not finite,
and the outputs of the queries that see it become NaN; on the way back the gradient of the output enters likewise, and
the gradients of what it reaches become NaN. What is visible to whom is in two intervals for each token, so this costs
one pass over each of these arrays. The gradient is a rule for transposing an identity: a ``custom_vjp`` would take
forward mode and second derivatives from ``xla``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_backend.attention.request import Request
from jax_backend.segments import Segments, any_inside, seeing_queries, visible_keys
from jax_backend.strictness import finite

Attend = Callable[..., tuple[jax.Array, jax.Array | None]]

_identity = Primitive("contained")  # (results, operands, residuals) -> results; its transpose is `_pull_back`
_identity.multiple_results = True


def contained(attend: Attend) -> Attend:
    """The attention of an implementation that keeps numbers which are not finite in what can see them."""

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments,
        q_offset: jax.Array,
        request: Request,
        seen: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        options: dict[str, Any] = {"causal": request.causal, "window": request.window, "q_offset": q_offset}
        visible: tuple[jax.Array, ...] = (*visible_keys(segments, **options), *seeing_queries(segments, **options))
        visible = visible if seen is None else (seen,)
        broken_keys = _broken(k, v)
        broken = _real(visible) & (_broken(q) | _at_queries(visible, broken_keys))
        more = {} if seen is None else {"seen": seen}
        out, lse = attend(finite(q), finite(k), finite(v), segments, q_offset, request=request, **more)
        results = [out] if lse is None else [out, lse]
        found = _identity.bind(*results, q, k, v, broken, *visible, results=len(results), batched=0)
        found = [jnp.where(_like(broken, x), jnp.nan, x) for x in found]
        return found[0], None if lse is None else found[1]

    return run


def _pull_back(gradients: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
    """The gradients of the results, and NaN for q, k and v that one which is not finite reaches, 0 for the others."""
    q, k, v, broken, *visible = operands
    broken = broken | (_broken(*gradients) & _real(tuple(visible)))
    keys = _at_keys(tuple(visible), broken)
    poison = [
        jnp.where(_like(where, x), jnp.nan, jnp.zeros(x.shape, x.dtype))
        for where, x in ((broken, q), (keys, k), (keys, v))
    ]
    return [*(jnp.where(_like(broken, x), 0, finite(x)) for x in gradients), *poison]


def _broken(*arrays: jax.Array) -> jax.Array:
    """Marks the tokens of [B, S, ...] with a number that is not finite, bool [B, S]."""
    flags = [~jnp.isfinite(x).all(axis=tuple(range(2, x.ndim))) for x in arrays]
    return flags[0] if len(flags) == 1 else flags[0] | flags[1]


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    return flags.reshape(*flags.shape, *[1] * (x.ndim - 2))


# ``visible`` is (begin, end) of the keys of each query and of the queries of each key, or one bool [B, S, T].


def _real(visible: tuple[jax.Array, ...]) -> jax.Array:
    """Marks the queries that see anything."""
    return visible[0].any(axis=2) if len(visible) == 1 else visible[0] < visible[1]


def _at_queries(visible: tuple[jax.Array, ...], keys: jax.Array) -> jax.Array:
    return (visible[0] & keys[:, None]).any(axis=2) if len(visible) == 1 else any_inside(keys, *visible[:2])


def _at_keys(visible: tuple[jax.Array, ...], queries: jax.Array) -> jax.Array:
    return (visible[0] & queries[..., None]).any(axis=1) if len(visible) == 1 else any_inside(queries, *visible[2:])


def _same(*operands: Any, results: int, batched: int) -> list[Any]:
    return list(operands[:results])


def _jvp(primals: Any, tangents: Any, *, results: int, batched: int) -> tuple[Any, Any]:
    linear = [ad.instantiate_zeros(tangent) for tangent in tangents[: results + 3]]
    call = partial(_identity.bind, results=results, batched=batched)
    return call(*primals), call(*linear, *primals[results + 3 :])


def _transpose(cotangents: Any, *operands: Any, results: int, batched: int) -> list[Any]:
    gradients = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    # of q, k and v themselves shapes and dtypes alone are read
    like = [jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x for x in operands[results:]]
    pull_back: Any = _pull_back
    for _ in range(batched):
        pull_back = jax.vmap(pull_back)
    found = [*pull_back(gradients, like), *[None] * (len(operands) - results - 3)]
    return [x if ad.is_undefined_primal(operand) else None for x, operand in zip(found, operands, strict=True)]


def _batch(operands: Any, axes: Any, *, results: int, batched: int) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    moved = [batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)]
    return _identity.bind(*moved, results=results, batched=batched + 1), [0] * results


_identity.def_impl(_same)
_identity.def_abstract_eval(_same)
ad.primitive_jvps[_identity] = _jvp
ad.primitive_transposes[_identity] = _transpose
batching.primitive_batchers[_identity] = _batch
mlir.register_lowering(_identity, mlir.lower_fun(_same, multiple_results=True))
