"""Linear layers over 4-bit weights of bitsandbytes (NF4, FP4), as operators that torch.compile does not look into.

    x [..., K], weight of N * K values in 4 bits -> y [..., N]

Forward and backward each make the weight's values anew inside one operator, so no layer keeps them: traced operation by
operation, both would share one copy, which the forward would keep. Results are those of ``bitsandbytes.matmul_4bit``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.ops.operators import operator


class Weight4bit(NamedTuple):
    """A frozen weight [N, K] as bitsandbytes stores it.

    Attributes:
        packed: two values a byte, of any dtype; None until FSDP2 has gathered them.
        absmax: float32, the largest magnitude of each block; of each block of ``scales`` where these are quantised.
        scales, code, offset: of double quantisation, which stores the magnitude of a block as
            ``code[scales] * absmax + offset``; else None.
        shape: [N, K].
        blocksize: values of a block.
        kind: "nf4" or "fp4".
        dtype: that the weight had, in which the backward makes its values.
    """

    packed: Tensor | None
    absmax: Tensor
    scales: Tensor | None
    code: Tensor | None
    offset: Tensor | None
    shape: tuple[int, ...]
    blocksize: int
    kind: str
    dtype: torch.dtype


def linear_4bit(x: Tensor, weight: Weight4bit, bias: Tensor | None = None) -> Tensor:
    """Returns ``x @ weight.T + bias``: [..., N] of the dtype of x [..., K], and of bias [N]."""
    y: Tensor = _Linear4bit.apply(x, bias, *weight)
    return y


class _Linear4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, bias, *weight = arguments
        ctx.save_for_backward(*(x for x in weight[:5] if x is not None))
        ctx.options = weight[5:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        y: Tensor = _FORWARD(x, *weight[:5], bias, *weight[5:8])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed, absmax, *double = ctx.saved_tensors
        weight = packed, absmax, *(double or [None] * 3), *ctx.options
        dx = _BACKWARD(dy, *weight) if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, db, *[None] * 9


def _forward(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    scales: Tensor | None,
    code: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    shape: list[int],
    blocksize: int,
    kind: str,
) -> Tensor:
    y: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        x, packed.view(-1, 1), shape, absmax, blocksize, kind, bias, scales, code, offset
    )
    return y


def _backward(
    dy: Tensor,
    packed: Tensor,
    absmax: Tensor,
    scales: Tensor | None,
    code: Tensor | None,
    offset: Tensor | None,
    shape: list[int],
    blocksize: int,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    of = torch.ops.bitsandbytes
    if scales is not None:
        absmax = of.dequantize_blockwise.default(scales, absmax, code, 256, torch.float32).add_(offset)
    dtype = dy.dtype if dtype == torch.float32 else dtype  # one pass, which rounds as the cast would
    weight = of.dequantize_4bit.default(packed.view(-1, 1), absmax, blocksize, kind, shape, dtype)
    return torch.matmul(dy, weight.to(dy.dtype))


_WEIGHT = "Tensor packed, Tensor absmax, Tensor? scales, Tensor? code, Tensor? offset"
_FORWARD = operator(
    f"linear_4bit(Tensor x, {_WEIGHT}, Tensor? bias, int[] shape, int blocksize, str kind) -> Tensor",
    _forward,
    lambda x, *others: x.new_empty(*x.shape[:-1], others[6][0]),
)
_BACKWARD = operator(
    f"linear_4bit_backward(Tensor dy, {_WEIGHT}, int[] shape, int blocksize, str kind, ScalarType dtype) -> Tensor",
    _backward,
    lambda dy, *others: dy.new_empty(*dy.shape[:-1], others[5][1]),
)
