"""Rows of a tensor taken several times, with a gradient that is summed exactly and in a fixed order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def repeated(x: Tensor, index: Tensor) -> Tensor:
    """``x.index_select(0, index)``, whose gradient is summed in float32 at least and repeats to the bit.

    Args:
        x: [T, ...].
        index: int64 [N], in any order and with repetitions.
    """
    out: Tensor = _Repeated.apply(x, index)
    return out


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        # on a GPU, accumulating index_put_ sorts the indexes, where index_add_ uses atomics
        total = wide.new_zeros(ctx.length, *wide.shape[1:]).index_put_((index,), wide, accumulate=True)
        return total.to(gradient.dtype), None
