"""An MLP by tiles of tokens: its inner columns exist for one tile at a time, forward and backward.

    x [N, D] -> tiles of tokens -> act(gate(x)) * up(x), or act(up(x)) -> down -> y [N, D]

An inner column is as long as the row, and an MLP has several times as many columns as the model is wide, so for one
long document they take most of the memory of a layer. The backward computes them again. Gradients of the weights are
added up over the tiles in float32 at least; those of x are the same operations on the same numbers as without tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torch_backend.ops.operators import operator

aten = torch.ops.aten
# name -> the activation, and (gradient, input) -> gradient of the input
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, aten.silu_backward),
    "gelu": (F.gelu, aten.gelu_backward),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "relu": (F.relu, lambda dy, x: dy * (x > 0)),
}


class Projection(NamedTuple):
    """A linear layer ``x W^T + bias + scale (x A^T) B^T``, the last two where there are any."""

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.a is None or self.b is None:
            return y
        return y + F.linear(F.linear(x, self.a), self.b) * self.scale

    def gradient(self, dy: Tensor) -> Tensor:
        """Returns the gradient of ``x`` [n, in] of ``dy`` [n, out]."""
        dx = dy @ self.weight
        if self.a is None or self.b is None:
            return dx
        return dx + (dy @ self.b) @ self.a * self.scale


def tiled_mlp(
    x: Tensor, gate: Projection | None, up: Projection, down: Projection, *, activation: str, tile: int
) -> Tensor:
    """Returns ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Args:
        x: [..., D], of the dtype of the weights.
        activation: a name of :data:`ACTIVATIONS`.
        tile: tokens that are computed at a time.
    """
    projections = [gate, up, down]
    tensors = [x for p in projections for x in ((None,) * 4 if p is None else p[:4])]
    scales = [1.0 if p is None else p.scale for p in projections]
    y: Tensor = _TiledMLP.apply(x.flatten(0, -2), scales, activation, tile, *tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: list[float], activation: str, tile: int, *tensors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.options = scales, activation, tile
        y: Tensor = _forward(x, list(tensors), scales, activation, tile)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        found = _backward(dy.contiguous(), x, tensors, *ctx.options, needs)
        dx, *others = (value if needed else None for value, needed in zip(found, needs, strict=True))
        return dx, None, None, None, *others


def _projections(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> Iterator[Projection | None]:
    for number, scale in enumerate(scales):
        weight, bias, a, b = tensors[4 * number : 4 * number + 4]
        yield None if weight is None else Projection(weight, bias, a, b, scale)


def _launch_forward(
    x: Tensor, tensors: Sequence[Tensor | None], scales: Sequence[float], activation: str, tile: int
) -> Tensor:
    gate, up, down = _projections(tensors, scales)
    assert up is not None and down is not None
    act, _ = ACTIVATIONS[activation]
    y = x.new_empty(len(x), down.weight.shape[0])
    for first in range(0, len(x), tile):
        part = x[first : first + tile]
        inner = act(up(part)) if gate is None else act(gate(part)) * up(part)
        y[first : first + tile] = down(inner)
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, tensors: Sequence[Tensor | None], scales: Sequence[float], activation: str, tile: int,
    needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    gate, up, down = _projections(tensors, scales)
    assert up is not None and down is not None
    act, act_backward = ACTIVATIONS[activation]
    sums = [
        None if t is None or not needed else torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
        for t, needed in zip(tensors, needs[1:], strict=True)
    ]
    dx = torch.empty_like(x) if needs[0] else x.new_empty(0)
    for first in range(0, len(x), tile):
        part, d_out = x[first : first + tile], dy[first : first + tile]
        raised = up(part)
        opened = raised if gate is None else gate(part)
        active = act(opened)
        inner = active if gate is None else active * raised
        _add(sums[8:], down, d_out, inner)
        d_inner = down.gradient(d_out)
        d_raised = act_backward(d_inner, opened) if gate is None else d_inner * active
        _add(sums[4:8], up, d_raised, part)
        if needs[0]:
            dx[first : first + tile] = up.gradient(d_raised)
        if gate is not None:
            d_opened = act_backward(d_inner * raised, opened)
            _add(sums[:4], gate, d_opened, part)
            if needs[0]:
                dx[first : first + tile] += gate.gradient(d_opened)
    none = x.new_empty(0)
    found = [none.clone() if s is None or t is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]
    return [dx, *found]


def _add(sums: Sequence[Tensor | None], layer: Projection, dy: Tensor, x: Tensor) -> None:
    """Adds the gradients of a layer's weight, bias and low-rank factors to their sums."""
    weight, bias, a, b = sums
    if weight is not None:
        weight += dy.T @ x
    if bias is not None:
        bias += dy.sum(0, dtype=bias.dtype)
    if layer.a is not None and layer.b is not None:
        if a is not None:
            a += (dy @ layer.b).T @ x * layer.scale
        if b is not None:
            b += dy.T @ F.linear(x, layer.a) * layer.scale


def _fake_forward(x: Tensor, tensors: Sequence[Tensor | None], *_: Any) -> Tensor:
    down = tensors[8]
    assert down is not None
    return x.new_empty(len(x), down.shape[0])


def _fake_backward(dy: Tensor, x: Tensor, tensors: Sequence[Tensor | None], *others: Any) -> list[Tensor]:
    needs = others[-1]
    shapes = [
        t.new_empty(t.shape) if t is not None and n else x.new_empty(0) for t, n in zip(tensors, needs[1:], strict=True)
    ]
    return [x.new_empty(x.shape) if needs[0] else x.new_empty(0), *shapes]


_forward = operator(
    "tiled_mlp_forward(Tensor x, Tensor?[] tensors, float[] scales, str activation, int tile) -> Tensor",
    _launch_forward,
    _fake_forward,
)
_backward = operator(
    "tiled_mlp_backward(Tensor dy, Tensor x, Tensor?[] tensors, float[] scales, str activation, int tile, "
    "bool[] needs) -> Tensor[]",
    _launch_backward,
    _fake_backward,
)
