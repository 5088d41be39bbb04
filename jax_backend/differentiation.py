"""Names the way out where a function with a gradient of its own meets forward mode or a second derivative.

JAX's errors there speak of ``custom_vjp`` and loops, and not of what was called. `reverse_mode` and `first_order` mark
operands on their way into such a function and its forward, and `once` wraps its backward. Values pass unchanged and
cost nothing; a tangent that JAX has to evaluate, or to transpose, raises. Tangents that nothing uses do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from packing_core.errors import UnsupportedError

_tangent = Primitive("refused_tangent")  # raises where it is evaluated and, if it says so, where it is transposed


def reverse_mode(message: str, *arrays: jax.Array | None) -> tuple[Any, ...]:
    """The arrays as they are, whose derivatives exist in reverse mode alone.

    Raises:
        UnsupportedError: with ``message``, where forward mode evaluates their tangents.
    """
    return tuple(None if x is None else _marked(x, message, True) for x in arrays)


def first_order(message: str, *arrays: jax.Array) -> tuple[Any, ...]:
    """The arrays as they are, of which a custom forward is made that is not differentiated itself.

    Raises:
        UnsupportedError: with ``message``, where it is.
    """
    return tuple(_marked(x, message, False) for x in arrays)


def once(backward: Callable[..., Any], message: str) -> Callable[..., Any]:
    """A custom backward ``(options, residuals, cotangents)`` that is not differentiated itself.

    Raises:
        UnsupportedError: with ``message``, where it is.
    """

    @wraps(backward)
    def run(options: Any, *operands: Any) -> Any:
        call = jax.custom_jvp(lambda *operands: backward(options, *operands))

        @call.defjvp
        def refuse(primals: Any, tangents: Any) -> tuple[Any, Any]:
            floating = [t for t in jax.tree.leaves(tangents) if jnp.issubdtype(t.dtype, jnp.floating)]
            reached = sum((jnp.sum(t, dtype=jnp.float32) for t in floating), jnp.zeros(()))
            out = call(*primals)
            like = jax.tree.map(lambda x: jnp.broadcast_to(reached, x.shape).astype(x.dtype), out)
            return out, jax.tree.map(lambda x: _tangent.bind(x, message=message, transposed=False), like)

        return call(*operands)

    return run


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _marked(x: jax.Array, message: str, transposed: bool) -> jax.Array:
    return x


@_marked.defjvp
def _marked_jvp(message: str, transposed: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], _tangent.bind(tangents[0], message=message, transposed=transposed)


@_tangent.def_abstract_eval
def _like(tangent: Any, **options: Any) -> Any:
    return tangent


@_tangent.def_impl
def _evaluate(tangent: jax.Array, *, message: str, transposed: bool) -> jax.Array:
    raise UnsupportedError(message)


def _transpose(cotangent: Any, tangent: Any, *, message: str, transposed: bool) -> tuple[Any]:
    if not transposed:
        raise UnsupportedError(message)
    return (cotangent,)


ad.deflinear2(_tangent, _transpose)
batching.defvectorized(_tangent)
mlir.register_lowering(_tangent, mlir.lower_fun(_evaluate, multiple_results=False))
