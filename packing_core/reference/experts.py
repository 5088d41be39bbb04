"""A layer of routed experts, its tokens and choices one by one: the oracle for grouped kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError, UnsupportedError
from packing_core.reference.arithmetic import Array, WorkingDtype, operand, operands, plain, plain_gradients, sigmoid

_GELU_SCALE = (2.0 / np.pi) ** 0.5
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class ExpertActivation:
    """The function between the two products of an expert.

    With a gate, the first product makes a gate g and a value u, and the function is ``f(g) (u + offset)``; without,
    it is ``f`` of the first product. ``silu`` is ``g sigmoid(alpha g)``. With a limit, g is at most ``limit`` and u
    lies in ``[-limit, limit]`` (gpt-oss: alpha 1.702, limit 7, offset 1; https://arxiv.org/abs/2508.10925).

    Attributes:
        name: ``silu``, ``gelu_tanh`` or ``relu2`` (the square of relu).
        gated: whether the first product makes a gate too.
        alpha: of ``silu``.
        limit: None for none. offset: added to the value.
    """

    name: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise UnsupportedError(f"no expert activation {self.name!r}: there are {', '.join(ACTIVATIONS)}")
        if not self.gated and (self.limit is not None or self.offset):
            raise UnsupportedError("limit and offset belong to experts with a gate: leave them out, or pass gated=True")
        if self.limit is not None and self.limit <= 0:
            raise UnsupportedError(f"limit must be positive, got {self.limit}: pass None for none")


class Choice(NamedTuple):
    """The tokens that chose one expert, each with the number of its choice."""

    expert: int
    tokens: npt.NDArray[np.int64]
    choices: npt.NDArray[np.int64]


def experts(
    x: npt.ArrayLike,
    indices: npt.ArrayLike,
    weights: npt.ArrayLike,
    up: npt.ArrayLike,
    down: npt.ArrayLike,
    *,
    up_bias: npt.ArrayLike | None = None,
    down_bias: npt.ArrayLike | None = None,
    activation: ExpertActivation = ExpertActivation(),
    dtype: WorkingDtype = "float64",
) -> npt.NDArray[np.float64]:
    """The weighted sum of the experts that each token chose (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538).

    ``y_t = sum_c weights[t, c] (down[e] f(up[e] x_t + up_bias[e]) + down_bias[e])`` with ``e = indices[t, c]``. A
    choice outside of the experts, by which padding is marked, contributes exactly zero.

    Args:
        x: ``[T, D]``.
        indices: integers ``[T, K]``; -1, or the number of experts, for no expert.
        weights: ``[T, K]``.
        up: ``[E, O, D]``, O being I, or 2I with a gate: the rows of the gate first.
        down: ``[E, D, I]``.
        up_bias: ``[E, O]``. down_bias: ``[E, D]``.
        activation: between the products.
        dtype: working dtype that every operation is rounded to.

    Returns:
        ``[T, D]`` float64.

    Raises:
        LayoutError: shapes contradict each other.
    """
    layer = _Layer(x, indices, weights, up, down, up_bias, down_bias, activation, dtype)
    terms = np.zeros_like(layer.x, shape=(*layer.indices.shape, layer.x.shape[1]))
    for chosen in layer.chosen():
        terms[chosen.tokens, chosen.choices] = layer.forward(chosen).y * layer.weight(chosen)
    return plain(terms.sum(1))


def experts_vjp(
    x: npt.ArrayLike,
    indices: npt.ArrayLike,
    weights: npt.ArrayLike,
    up: npt.ArrayLike,
    down: npt.ArrayLike,
    dy: npt.ArrayLike,
    *,
    up_bias: npt.ArrayLike | None = None,
    down_bias: npt.ArrayLike | None = None,
    activation: ExpertActivation = ExpertActivation(),
    dtype: WorkingDtype = "float64",
) -> dict[str, npt.NDArray[np.float64]]:
    """Gradients of ``sum(experts * dy)``.

    Args:
        dy: ``[T, D]``, the gradient of the output.
        x, indices, weights, up, down, up_bias, down_bias, activation, dtype: as for `experts`.

    Returns:
        ``{"x", "weights", "up", "down"}``, and the biases that were given, each in its input's shape.
    """
    layer = _Layer(x, indices, weights, up, down, up_bias, down_bias, activation, dtype)
    (dy_,) = operands(dtype, dy)
    if dy_.shape != layer.x.shape:
        raise LayoutError(f"dy must be of the shape of x {list(layer.x.shape)}, got {list(dy_.shape)}")
    weights_of = {name: getattr(layer, name) for name in ("weights", "up", "down", "up_bias", "down_bias")}
    gradients = {name: np.zeros_like(array) for name, array in weights_of.items() if array is not None}
    terms = np.zeros_like(layer.x, shape=(*layer.indices.shape, layer.x.shape[1]))
    for chosen in layer.chosen():
        e, forward = chosen.expert, layer.forward(chosen)
        gradients["weights"][chosen.tokens, chosen.choices] = (dy_[chosen.tokens] * forward.y).sum(1)
        weighted = dy_[chosen.tokens] * layer.weight(chosen)
        gradients["down"][e] = weighted.T @ forward.h
        dz = _activation_vjp(forward.z, weighted @ layer.down[e], activation)
        gradients["up"][e] = dz.T @ layer.x[chosen.tokens]
        terms[chosen.tokens, chosen.choices] = dz @ layer.up[e]
        if "up_bias" in gradients:
            gradients["up_bias"][e] = dz.sum(0)
        if "down_bias" in gradients:
            gradients["down_bias"][e] = weighted.sum(0)
    return plain_gradients(x=terms.sum(1), **gradients)


class _Forward(NamedTuple):
    z: Array
    h: Array
    y: Array


class _Layer:
    """The operands of a layer, checked and in the working dtype."""

    def __init__(
        self,
        x: npt.ArrayLike,
        indices: npt.ArrayLike,
        weights: npt.ArrayLike,
        up: npt.ArrayLike,
        down: npt.ArrayLike,
        up_bias: npt.ArrayLike | None,
        down_bias: npt.ArrayLike | None,
        activation: ExpertActivation,
        dtype: WorkingDtype,
    ) -> None:
        self.x, self.weights, self.up, self.down = operands(dtype, x, weights, up, down)
        self.up_bias, self.down_bias = operand(dtype, up_bias), operand(dtype, down_bias)
        self.indices, self.activation = np.asarray(indices), activation
        if self.x.ndim != 2 or self.up.ndim != 3 or self.down.ndim != 3 or self.indices.ndim != 2:
            given = ", ".join(str(list(each.shape)) for each in (self.x, self.indices, self.up, self.down))
            raise LayoutError(f"experts takes x [T, D], indices [T, K], up [E, O, D] and down [E, D, I], got {given}")
        (tokens, width), (count, _, inner) = self.x.shape, self.down.shape
        outer = 2 * inner if activation.gated else inner
        shapes = {
            "indices": (self.indices, (tokens, self.indices.shape[1])),
            "weights": (self.weights, self.indices.shape),
            "up": (self.up, (count, outer, width)),
            "down": (self.down, (count, width, inner)),
            "up_bias": (self.up_bias, (count, outer)),
            "down_bias": (self.down_bias, (count, width)),
        }
        for name, (array, shape) in shapes.items():
            if array is not None and array.shape != shape:
                raise LayoutError(f"{name} must be {list(shape)}, got {list(array.shape)}")

    def chosen(self) -> Iterator[Choice]:
        for expert in range(self.up.shape[0]):
            yield Choice(expert, *np.nonzero(self.indices == expert))

    def weight(self, chosen: Choice) -> Array:
        return self.weights[chosen.tokens, chosen.choices][:, None]

    def forward(self, chosen: Choice) -> _Forward:
        z = self.x[chosen.tokens] @ self.up[chosen.expert].T
        if self.up_bias is not None:
            z = z + self.up_bias[chosen.expert]
        h = _activated(z, self.activation)
        y = h @ self.down[chosen.expert].T
        if self.down_bias is not None:
            y = y + self.down_bias[chosen.expert]
        return _Forward(z, h, y)


def _activated(z: Array, activation: ExpertActivation) -> Array:
    gate, value, _, _ = _halves(z, activation)
    f, _ = _function(gate, activation)
    return f if value is None else f * (value + activation.offset)


def _activation_vjp(z: Array, dh: Array, activation: ExpertActivation) -> Array:
    gate, value, free_gate, free_value = _halves(z, activation)
    f, slope = _function(gate, activation)
    if value is None:
        return dh * slope
    return np.concatenate([dh * (value + activation.offset) * slope * free_gate, dh * f * free_value], axis=1)


def _halves(z: Array, activation: ExpertActivation) -> tuple[Array, Array | None, Array, Array]:
    """The gate and the value after the limit, and 1 where the limit left each as it was, 0 where it cut."""
    if not activation.gated:
        return z, None, np.ones(()), np.ones(())
    gate, value = z[:, : z.shape[1] // 2], z[:, z.shape[1] // 2 :]
    if activation.limit is None:
        return gate, value, np.ones(()), np.ones(())
    limit = activation.limit
    free = gate <= limit, np.abs(value) <= limit
    return np.minimum(gate, limit), np.clip(value, -limit, limit), *free


def _function(x: Array, activation: ExpertActivation) -> tuple[Array, Array]:
    """The activation function and its derivative."""
    if activation.name == "silu":
        s = sigmoid(activation.alpha * x)
        return x * s, s * (1.0 + activation.alpha * x * (1.0 - s))
    if activation.name == "gelu_tanh":
        t = np.tanh(_GELU_SCALE * (x + 0.044715 * x * x * x))
        inner = _GELU_SCALE * (1.0 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    positive = np.maximum(x, 0.0)
    return positive * positive, 2.0 * positive
