"""Operations of the conformance adapters: numpy float32 in, the named dtype inside, numpy float32 out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_backend.conformance.reductions import arithmetic
from packing_core.protocol import ADAMW_EPSILON, Array, Gradients

# the optimizers that the suite names
RULES: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "adamw": partial(optax.adamw, eps=ADAMW_EPSILON, weight_decay=0.0),
}


def out_and_gradients(
    function: Callable[..., jax.Array],
    operands: dict[str, Array],
    dout: Array | None,
    *data: Array,
    dtype: str,
    **options: Any,
) -> tuple[Array, Gradients]:
    """The output of ``function(operands, *data, **options)`` and, with ``dout``, the operands' gradients."""
    # Rounded by numpy: JAX would compile a program for every shape.
    in_dtype = {name: np.asarray(x, jnp.dtype(dtype)) for name, x in operands.items()}
    cotangent = None if dout is None else np.asarray(dout, jnp.dtype(dtype))
    with arithmetic(dtype):
        found = _compiled(function, tuple(sorted(options.items())), in_dtype, cotangent, *data)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), found)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(function: Callable[..., jax.Array], options: Any, operands: Any, dout: Any, *data: Any) -> Any:
    """Compiles once for all calls of the same shapes and options; segments may differ."""
    call = partial(function, **dict(options))
    if dout is None:
        return call(operands, *data), {}
    out, pullback = jax.vjp(lambda operands: call(operands, *data), operands)
    return out, pullback(dout)[0]
