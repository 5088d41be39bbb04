"""Linear layers whose weights' gradients are added in float32: over tokens, and over the devices that share the rows.

XLA places the sum over devices at the operation that adds over tokens, in the dtype that this operation returns. So it
returns float32 here, whatever ``dtype`` the layer multiplies in, and a gradient is rounded at most once, after the sum.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_backend.differentiation import reverse_mode
from jax_backend.strictness import aligned, widened


class Linear(nnx.Linear):
    """``nnx.Linear`` with gradients of the kernel and the bias that are summed in float32."""

    def __call__(self, inputs: jax.Array, **options: Any) -> jax.Array:  # type: ignore[override]  # flax's out_sharding
        if options or not is_plain(self):
            return super().__call__(inputs, **options)
        outputs = multiply(inputs.astype(self.dtype), self.kernel[...])
        return outputs if self.bias is None else add_bias(outputs, self.bias[...])


PLAIN = (nnx.Linear, Linear)


def is_plain(linear: Any) -> bool:
    """Returns whether it multiplies by its kernel and no more: adapters, quantised products and the like do."""
    plain = type(linear) in PLAIN and linear.dot_general is jax.lax.dot_general
    return plain and linear.precision is None and linear.dtype is not None


def project(linears: list[Any], x: jax.Array, together: bool = True) -> list[jax.Array]:
    """Applies several modules to ``x`` [..., M]: plain ones in one product, whose gradient is one too.

    Args:
        together: False where devices hold parts of each module's outputs, which one product would exchange.
    """
    if not (together and all(map(is_plain, linears))):
        return [linear(x) for linear in linears]
    kernels = [linear.kernel[...] for linear in linears]
    # The barrier is for the gradient, which XLA would put together once for each of the two products that read it.
    whole = jax.lax.optimization_barrier(multiply(x.astype(linears[0].dtype), jnp.concatenate(kernels, axis=1)))
    parts = jnp.split(whole, list(accumulate(kernel.shape[1] for kernel in kernels[:-1])), axis=-1)
    return [
        part if linear.bias is None else add_bias(part, linear.bias[...])
        for part, linear in zip(parts, linears, strict=True)
    ]


def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """``x`` [..., M] times the kernel [M, F] in the dtype of ``x``; the kernel's gradient is summed in float32."""
    only = "the layers of a Decoder have gradients in reverse mode alone: take jax.grad or jax.vjp, and not jax.jvp"
    return _multiply(*reverse_mode(only, x, kernel))


@jax.custom_vjp
def _multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x @ kernel.astype(x.dtype)


def _multiply_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rounded = kernel.astype(x.dtype)
    return x @ rounded, (x, rounded, jnp.zeros((0,), kernel.dtype))


def _multiply_backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel, like = kept
    return gradient @ kernel.T, add_products(x, gradient, axes=x.ndim - 1).astype(like.dtype)


_multiply.defvjp(_multiply_forward, _multiply_backward)


def add_products(x: jax.Array, y: jax.Array, *, axes: int) -> jax.Array:
    """Multiplies ``x`` [..., M] and ``y`` [..., F] over their first ``axes`` axes, and adds and returns in float32."""
    over = tuple(range(axes))
    wide = widened(x.dtype)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, ((over, over), ((), ())), preferred_element_type=wide)

    # On CPUs XLA raises for some shapes whose product is wider than its factors.
    return jax.lax.platform_dependent(x, y, cpu=lambda x, y: product(x.astype(wide), y.astype(wide)), default=product)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """``x`` [..., F] plus the bias [F] in its dtype; the bias's gradient is summed in float32."""
    wide = widened(x.dtype)
    return (x.astype(wide) + aligned(bias.astype(x.dtype).astype(wide), x.ndim)).astype(x.dtype)


def scale_by(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x`` [..., F] times a norm's weight [F] in the dtype of ``x``; the weight's gradient is summed in float32."""
    wide = widened(x.dtype)
    return (x.astype(wide) * aligned(weight.astype(x.dtype).astype(wide), x.ndim)).astype(x.dtype)
