"""Values of the tokens of all ranks, on every rank: for losses that read documents as a whole.

Values of the whole batch -> :func:`own_tokens` -> those of a rank's tokens -> :func:`whole_tokens` -> those of the
whole batch again. Every rank computes the same loss of them, and gradients that are averaged over ranks are those of
one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.context_parallel.share import RankShare


def own_tokens(x: Tensor, share: RankShare) -> Tensor:
    """Values [N, ...] of the whole batch as those [T, ...] of the rank's tokens."""
    return x.index_select(0, share.index.to(x.device))


def whole_tokens(x: Tensor, share: RankShare) -> Tensor:
    """Values [T, ...] of the rank's tokens as those [N, ...] of the whole batch, on every rank.

    Gradients that are averaged over ranks are those of one process, if every rank takes the same loss of the result.
    """
    found: Tensor = _Whole.apply(x if x.is_floating_point() else x.long(), share)
    return found.to(x.dtype)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: RankShare) -> Tensor:
        ctx.share = share
        whole = x.new_zeros(int(share.plan.lengths.sum()), *x.shape[1:])
        whole.index_copy_(0, share.index.to(x.device), x)
        dist.all_reduce(whole, group=share.group)  # of zeros but for the rank that has the token
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        share: RankShare = ctx.share
        return own_tokens(gradient, share) * share.ranks, None
