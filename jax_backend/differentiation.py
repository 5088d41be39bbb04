"""Names the way out where a function with a gradient of its own meets forward mode or a second derivative.

JAX's errors there speak of ``custom_vjp`` and loops, and not of what was called. `reverse_mode` and `first_order` mark
operands on their way into such a function and its forward, and `once` wraps its backward. Values pass unchanged and
cost nothing; a tangent that JAX has to evaluate, or to transpose, raises. Tangents that nothing uses do not.

Under ``jit`` nothing is evaluated before JAX's own error comes. There `jax.jacfwd` and `jax.hessian` are found by their
``vmap`` over directions: a tangent has the new axis, and the value that it belongs to does not.
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

_nothing = Primitive("axes_of_a_value")  # an array without elements that has the axes by which ``vmap`` maps the value
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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def constant(x: jax.Array, message: str) -> jax.Array:
    """The array as it is, on its way into what has no tangents at all.

    Raises:
        UnsupportedError: with ``message``, where a tangent reaches it, used or not.
    """
    return x


@constant.defjvp
def _refuse(message: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    raise UnsupportedError(message)


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
            return out, jax.tree.map(lambda x, value: _refused(x, value, message, False), like, out)

        return call(*operands)

    return run


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _marked(x: jax.Array, message: str, transposed: bool) -> jax.Array:
    return x


@_marked.defjvp
def _marked_jvp(message: str, transposed: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], _refused(tangents[0], primals[0], message, transposed)


def _refused(tangent: jax.Array, value: jax.Array, message: str, transposed: bool) -> jax.Array:
    nothing = _nothing.bind(jax.lax.stop_gradient(value), shape=(0,))
    return _tangent.bind(tangent, nothing, message=message, transposed=transposed)


@_tangent.def_abstract_eval
def _like(tangent: Any, nothing: Any, **options: Any) -> Any:
    return tangent


@_tangent.def_impl
def _evaluate(tangent: jax.Array, nothing: jax.Array, *, message: str, transposed: bool) -> jax.Array:
    raise UnsupportedError(message)


def _transpose(cotangent: Any, tangent: Any, nothing: Any, *, message: str, transposed: bool) -> tuple[Any, None]:
    if not transposed:
        raise UnsupportedError(message)
    return cotangent, None


def _batch(operands: Any, axes: Any, *, message: str, transposed: bool) -> tuple[Any, Any]:
    if axes[1] is None:
        raise UnsupportedError(message)
    return _tangent.bind(*operands, message=message, transposed=transposed), axes[0]


@_nothing.def_abstract_eval
def _empty(value: Any, *, shape: tuple[int, ...]) -> Any:
    return jax.core.ShapedArray(shape, jnp.float32)


@_nothing.def_impl
def _make_empty(value: Any, *, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape)


def _batch_empty(operands: Any, axes: Any, *, shape: tuple[int, ...]) -> tuple[Any, int]:
    return _nothing.bind(*operands, shape=(operands[0].shape[axes[0]], *shape)), 0


ad.deflinear2(_tangent, _transpose)
batching.primitive_batchers[_tangent] = _batch
mlir.register_lowering(_tangent, mlir.lower_fun(_evaluate, multiple_results=False))
batching.primitive_batchers[_nothing] = _batch_empty
mlir.register_lowering(_nothing, mlir.lower_fun(_make_empty, multiple_results=False))
