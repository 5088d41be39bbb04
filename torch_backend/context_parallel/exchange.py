"""Differentiable exchanges between the ranks of a context-parallel group, without padding.

    earlier tokens   [T, ...] -> [T, ...] and [R, C]: the tokens of other ranks that this one needs
    heads            [T, H, ...] -> [N, H / W, ...] and back: whole straddling documents, of a part of the heads
    documents        [T, ...] -> [M, ...] and back: whole documents, each on one rank
    states           [n, ...] -> [m, ...]: those in which the pieces of other ranks ended
    whole batch      [T, ...] -> [N, ...]: the tokens of all ranks, on every rank, for losses that read whole documents

Every rank of the group takes part in each of them, in the forward and in the backward, whether it sends or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.context_parallel.share import KeyLayout, RankShare, TokenRun, WholeLayout


def with_earlier_tokens(
    layout: KeyLayout, group: Any, *tensors: Tensor
) -> tuple[tuple[Tensor, ...], Tensor, Callable[[], None]]:
    """Starts to fetch the earlier tokens of a layout.

    Args:
        layout: which tokens go where.
        group: the ranks.
        tensors: [T, ...] each, of one dtype.

    Returns:
        The tensors themselves, which must be used in their place, so that every rank comes to the backward of the
        exchange; the fetched tokens [R, C], those of all tensors side by side; and a function that waits for these.
        What :func:`lengthened` makes of them has gradients that are added to those of the tensors in float32.
    """
    pending: list[Any] = []
    *own, fetched = _EarlierTokens.apply(layout, group, pending, *tensors)

    def wait() -> None:
        while pending:
            pending.pop().wait()

    return tuple(own), fetched, wait


def lengthened(layout: KeyLayout, fetched: Tensor, *tensors: Tensor, whole: bool = False) -> tuple[Tensor, ...]:
    """Pieces that continue documents, with the earlier tokens that they need, in one copy.

    Args:
        layout: see :func:`with_earlier_tokens`, as for the others.
        fetched: the fetched tokens, which have arrived.
        tensors: [T, ...] each.
        whole: put the pieces that begin documents in front, as in ``layout.extended``.

    Returns:
        [N, ...] for each tensor. Gradients of a token that several pieces need are added in float32.
    """
    found: tuple[Tensor, ...] = _Lengthened.apply(layout, whole, fetched, *tensors)
    return found


class _EarlierTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        layout, group, pending, *tensors = arguments
        ctx.layout, ctx.group = layout, group
        sent = tensors[0].new_empty(sum(layout.send), sum(_widths(tensors)))
        for x, columns in zip(tensors, _columns(sent, tensors), strict=True):
            copy_runs(layout.sent, x, columns)
        received = sent.new_empty(sum(layout.receive), sent.shape[1])
        pending.append(dist.all_to_all_single(received, sent, layout.receive, layout.send, group=group, async_op=True))
        return *(x.view_as(x) for x in tensors), received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        layout, (*own, sent) = ctx.layout, gradients
        returned = sent.new_empty(sum(layout.send), sent.shape[1])
        dist.all_to_all_single(returned, sent, layout.send, layout.receive, group=ctx.group)
        totals = []
        for x, columns in zip(own, _columns(returned, own), strict=True):
            total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            _add_back(layout.sent, columns, total)
            totals.append(total.to(x.dtype))
        return None, None, None, *totals


class _Lengthened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        layout, whole, fetched, *tensors = arguments
        ctx.runs = own, of_fetched = layout.runs(whole=whole)
        ctx.tokens = len(tensors[0]), len(fetched)
        length = sum(run.tokens for run in (*own, *of_fetched))
        found = tuple(x.new_empty(length, *x.shape[1:]) for x in tensors)
        for x, columns, longer in zip(tensors, _columns(fetched, tensors), found, strict=True):
            copy_runs(own, x, longer)
            copy_runs(of_fetched, columns, longer)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (own, of_fetched), (tokens, received) = ctx.runs, ctx.tokens
        totals = []
        for x in gradients:
            total = x.new_zeros(tokens, *x.shape[1:], dtype=_dtype_of_sums(own, x))
            _add_back(own, x, total)
            totals.append(total.to(x.dtype))
        dtype = _dtype_of_sums(of_fetched, gradients[0])
        sums = gradients[0].new_zeros(received, sum(_widths(gradients)), dtype=dtype)
        for x, columns in zip(gradients, _columns(sums, gradients), strict=True):
            _add_back(of_fetched, x, columns)
        return None, None, sums.to(gradients[0].dtype), *totals


def _columns(side_by_side: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of [R, C] as the [R, ...] of each tensor."""
    parts = side_by_side.split(_widths(tensors), 1)
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]


def _widths(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of a token in each tensor."""
    return [math.prod(x.shape[1:]) for x in tensors]


def copy_runs(runs: Sequence[TokenRun], source: Tensor, target: Tensor) -> None:
    """Copies runs of tokens from [T, ...] into [N, ...]."""
    for run in runs:
        target.narrow(0, run.target, run.tokens).copy_(source.narrow(0, run.source, run.tokens))


def _add_back(runs: Sequence[TokenRun], gradient: Tensor, total: Tensor) -> None:
    """Adds the gradients of what :func:`copy_runs` wrote to those of its source, run by run, in a fixed order."""
    for run in runs:
        total.narrow(0, run.source, run.tokens).add_(gradient.narrow(0, run.target, run.tokens))


def _dtype_of_sums(runs: Sequence[TokenRun], gradient: Tensor) -> torch.dtype:
    """float32 where a token is in several runs, otherwise that of the gradient, to which a zero is added."""
    ends = np.maximum.accumulate([run.source + run.tokens for run in sorted(runs)])
    several = any(run.source < end for run, end in zip(sorted(runs)[1:], ends, strict=False))
    return torch.promote_types(gradient.dtype, torch.float32) if several else gradient.dtype


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchanged(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return exchanged(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def exchanged(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Rows [n, ...] by receiving rank -> rows [m, ...] by sending rank, without gradients.

    A rank that neither sends nor receives may pass rows of any width.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def divides(heads: int, ranks: int) -> bool:
    """Returns whether :func:`to_heads` can give every rank its part of so many heads."""
    return heads % ranks == 0 or ranks % heads == 0


def heads_of(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The part of the heads along ``dim`` that a rank computes; one head serves several ranks where there are fewer."""
    heads = x.shape[dim]
    if heads % ranks == 0:
        return x.narrow(dim, rank * (heads // ranks), heads // ranks)
    return x.narrow(dim, rank * heads // ranks, 1)


def to_heads(layout: WholeLayout, group: Any, x: Tensor, ranks: int) -> Tensor:
    """The rank's tokens of straddling documents, all heads -> all their tokens, the rank's part of the heads.

    Args:
        x: [n, H, ...].

    Returns:
        [N, H / W, ...] in the order of the documents.
    """
    narrow = x.dtype
    if x.shape[1] < ranks:  # a head that several ranks read has a gradient from each, added in float32
        x = x.to(torch.promote_types(narrow, torch.float32))
    sent = torch.cat([heads_of(x, 1, rank, ranks).to(narrow) for rank in range(ranks)])
    return all_to_all(sent, [len(x)] * ranks, layout.receive, group).index_select(0, layout.order)


def to_tokens(layout: WholeLayout, group: Any, y: Tensor, rank: int) -> Tensor:
    """The inverse of :func:`to_heads`: [N, H / W, ...] -> [n, H, ...]."""
    ranks, own = len(layout.receive), layout.receive[rank]
    by_rank = y.index_select(0, layout.back)
    by_head = all_to_all(by_rank, layout.receive, [own] * ranks, group)
    return by_head.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
    """Tokens [n, ...] by receiving rank -> tokens [m, ...] by sending rank; gradients go back the same way."""
    received: Tensor = _AllToAll.apply(x, send, receive, group)
    return received


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
