"""Linear layers over frozen weights in fewer bits of any kind, as operators that torch.compile does not look into.

    x [..., K], what a weight [N, K] is made of -> y [..., N]

A kind of weight is one function, from what is stored to the values. Forward and backward each make the values anew
inside one operator, so no layer keeps them. The function is found by a name, because operators take no Python objects;
it gets the dtype of x, and may return another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.ops.operators import operator

Dequantise = Callable[[Sequence[Tensor], torch.dtype], Tensor]
_KINDS: dict[str, Dequantise] = {}


class StoredWeight(NamedTuple):
    """A frozen weight [N, K].

    Attributes:
        parts: what is stored. kind: the name of the function that makes the values of them.
        shape: [N, K].
    """

    parts: tuple[Tensor, ...]
    kind: str
    shape: tuple[int, int]


def stored_weight(parts: Sequence[Tensor], kind: str, shape: tuple[int, int], dequantise: Dequantise) -> StoredWeight:
    """Returns a weight whose values ``dequantise`` makes; ``kind`` names that function, alike in any process."""
    _KINDS.setdefault(kind, dequantise)
    return StoredWeight(tuple(parts), kind, shape)


def linear_stored(x: Tensor, weight: StoredWeight, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias``: [..., N] of the dtype of x [..., K], and of bias [N]."""
    y: Tensor = _LinearStored.apply(x, bias, weight.kind, weight.shape, *weight.parts)
    return y


class _LinearStored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, bias, kind, shape, *parts = arguments
        ctx.save_for_backward(*parts)
        ctx.kind, ctx.shape = kind, shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        y: Tensor = _FORWARD(x, parts, bias, kind, shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _BACKWARD(dy, ctx.saved_tensors, ctx.kind, ctx.shape) if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, db, None, None, *[None] * len(ctx.saved_tensors)


def _forward(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, shape: Sequence[int]) -> Tensor:
    return torch.nn.functional.linear(x, _KINDS[kind](parts, x.dtype).to(x.dtype), bias)


def _backward(dy: Tensor, parts: Sequence[Tensor], kind: str, shape: Sequence[int]) -> Tensor:
    return torch.matmul(dy, _KINDS[kind](parts, dy.dtype).to(dy.dtype))


_FORWARD = operator(
    "linear_stored(Tensor x, Tensor[] parts, Tensor? bias, str kind, int[] shape) -> Tensor",
    _forward,
    lambda x, parts, bias, kind, shape: x.new_empty(*x.shape[:-1], shape[0]),
)
_BACKWARD = operator(
    "linear_stored_backward(Tensor dy, Tensor[] parts, str kind, int[] shape) -> Tensor",
    _backward,
    lambda dy, parts, kind, shape: dy.new_empty(*dy.shape[:-1], shape[1]),
)
