"""Parts of layers by tiles of tokens: linear layers, the norm in front of them, and the sums of their gradients.

    x [N, D] -> a tile [n, D] -> norm -> what a layer computes of it, and the gradients of one tile after the other

Gradients of weights are added up over the tiles in float32 at least. Those of x are the same operations on the same
numbers as without tiles. Used by :mod:`.tiled_mlp` and :mod:`.tiled_projections`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torch_backend.ops.norm import WIDEST, rms_norm, rms_norm_gradients
from torch_backend.ops.operators import runs_triton


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

    def to(self, dtype: torch.dtype) -> Projection:
        """Returns the layer in another dtype."""
        bias, a, b = (t if t is None else t.to(dtype) for t in self[1:4])
        return Projection(self.weight.to(dtype), bias, a, b, self.scale)

    def gradient(self, dy: Tensor) -> Tensor:
        """Returns the gradient of ``x`` [n, in] of ``dy`` [n, out]."""
        dx = dy @ self.weight
        if self.a is None or self.b is None:
            return dx
        return dx + (dy @ self.b) @ self.a * self.scale


class Norm(NamedTuple):
    """``x / sqrt(mean(x^2) + eps) (offset + weight)`` over the last axis, computed in float32 at least.

    One kernel computes it where Triton runs and one reads such a row, and another its gradients.

    Attributes:
        weight: [D]. offset: 1 where the weight counts from one, as in Gemma's models.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the norm of ``x`` [n, D] in ``dtype``."""
        if _has_kernel(x) and x.dtype == dtype:
            return rms_norm(x, self._factor(x), eps=self.eps)
        unit, _ = self._unit(x)
        return (unit * self._factor(unit)).to(dtype)

    def gradients(self, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of ``x`` [n, D], in its dtype, and of the weight, not yet rounded."""
        if _has_kernel(x):
            return rms_norm_gradients(x, self._factor(x), dy, eps=self.eps)
        unit, root = self._unit(x)
        dy = dy.to(unit.dtype)
        of_weight = (dy * unit).sum(0)
        inner = dy * self._factor(unit)
        return ((inner - unit * (inner * unit).mean(-1, keepdim=True)) * root).to(x.dtype), of_weight

    def _unit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to(_wide(x))
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * root, root

    def _factor(self, x: Tensor) -> Tensor:
        """Returns what rows of norm 1 are multiplied by, not rounded."""
        return self.weight.to(_wide(x)) + self.offset


def _has_kernel(x: Tensor) -> bool:
    return runs_triton(x) and x.shape[-1] <= WIDEST


def projections(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> Iterator[Projection | None]:
    """Yields linear layers of what operators take: four tensors of each, none for a layer that is missing."""
    for number, scale in enumerate(scales):
        weight, bias, a, b = tensors[4 * number : 4 * number + 4]
        yield None if weight is None else Projection(weight, bias, a, b, scale)


def norm_of(weight: Tensor | None, options: Sequence[float]) -> Norm | None:
    """Returns the norm of what operators take, None where there is none."""
    return None if weight is None else Norm(weight, *options)


class GradientSums:
    """The gradients of linear layers, added up over tiles.

    Args:
        tensors: as :func:`projections` takes them. needs: for which of them there is a gradient.
    """

    def __init__(self, tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> None:
        self.tensors = tensors
        self.sums = [
            None if t is None or not needed else torch.zeros_like(t, dtype=_wide(t))
            for t, needed in zip(tensors, needs, strict=True)
        ]

    def add(self, number: int, layer: Projection, dy: Tensor, x: Tensor) -> None:
        """Adds a tile of the layer of a number: its input ``x`` [n, in] and the gradient ``dy`` [n, out]."""
        weight, bias, a, b = self.sums[4 * number : 4 * number + 4]
        if weight is not None:
            weight += dy.T @ x
        if bias is not None:
            bias += dy.sum(0, dtype=bias.dtype)
        if layer.a is not None and layer.b is not None:
            if a is not None:
                a += (dy @ layer.b).T @ x * layer.scale
            if b is not None:
                b += dy.T @ F.linear(x, layer.a) * layer.scale

    def results(self, x: Tensor) -> list[Tensor]:
        """Returns them in the dtypes of the tensors; empty where there is none."""
        return [
            x.new_empty(0) if s is None or t is None else s.to(t.dtype)
            for s, t in zip(self.sums, self.tensors, strict=True)
        ]


def gradients_by_tile(
    x: Tensor, norm: Norm | None, dtype: torch.dtype, tile: int, needs: Sequence[bool],
    of_tile: Callable[[slice, Tensor], Tensor | None],
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of ``x`` and of its norm's weight; empty where there is none.

    Args:
        dtype: of what ``of_tile`` takes.
        needs: whether there is a gradient of x, and of the norm's weight.
        of_tile: (tokens, their normalised input) -> the gradient of that input, None if nobody needs it.
    """
    dx = torch.empty_like(x) if needs[0] else x.new_empty(0)
    of_weight = None if norm is None or not needs[1] else torch.zeros_like(norm.weight, dtype=_wide(norm.weight))
    for first in range(0, len(x), tile):
        tokens = slice(first, first + tile)
        gradient = of_tile(tokens, x[tokens] if norm is None else norm(x[tokens], dtype))
        if gradient is not None and norm is not None:
            gradient, more = norm.gradients(gradient, x[tokens])
            if of_weight is not None:
                of_weight += more
        if gradient is not None and needs[0]:
            dx[tokens] = gradient
    return [dx, x.new_empty(0) if of_weight is None or norm is None else of_weight.to(norm.weight.dtype)]


def by_tiles(ahead: Callable[..., Any], behind: Callable[..., Any], options: int) -> Callable[..., Any]:
    """Joins two operators on tiles of tokens into a function of x, so many options and tensors, with gradients.

    Args:
        ahead: (x, tensors, *options) -> outputs.
        behind: (x, gradients of the outputs, tensors, *options, needs) -> gradients of x and of the tensors, as
            :func:`empty_gradients` says.
    """

    class ByTiles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            x, ctx.options, tensors = arguments[0], arguments[1 : 1 + options], list(arguments[1 + options :])
            ctx.save_for_backward(x, *tensors)
            results = ahead(x, tensors, *ctx.options)
            return tuple(results) if isinstance(results, list) else results

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
            x, *tensors = ctx.saved_tensors
            needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1 + options :]]
            results = behind(x, list(dys), tensors, *ctx.options, needs)
            dx, *of_tensors = (value if needed else None for value, needed in zip(results, needs, strict=True))
            return dx, *[None] * options, *of_tensors

    return ByTiles.apply


def empty_gradients(x: Tensor, dys: Any, tensors: Sequence[Tensor | None], *others: Any) -> list[Tensor]:
    """Allocates the gradients of x and the tensors where they are needed, as the last argument says, else nothing."""
    pairs = zip((x, *tensors), others[-1], strict=True)
    return [t.new_empty(t.shape) if t is not None and needed else x.new_empty(0) for t, needed in pairs]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
