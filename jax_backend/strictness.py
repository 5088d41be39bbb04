"""Shapes and dtypes as ``jax_numpy_rank_promotion="raise"`` and ``jax_numpy_dtype_promotion="strict"`` ask for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def aligned(x: jax.Array, ndim: int) -> jax.Array:
    """Returns ``x`` with leading axes of 1, ``ndim`` in all."""
    return x.reshape(*[1] * (ndim - x.ndim), *x.shape)


def widened(dtype: Any) -> Any:
    """Returns the dtype that sums of numbers of ``dtype`` are made in: float32, or float64 if it is that."""
    return jnp.dtype(dtype) if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def finite(x: jax.Array) -> jax.Array:
    """Returns ``x`` with 0 for what is not finite."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))
