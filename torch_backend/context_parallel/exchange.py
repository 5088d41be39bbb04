"""Differentiable exchanges between the ranks of a context-parallel group, each one all-to-all without padding.

    earlier tokens   [T, ...] -> [T, ...] and [R, ...]: the tokens of other ranks that this one needs
    heads            [T, H, ...] -> [N, H / W, ...] and back: whole straddling documents, of a part of the heads
    documents        [T, ...] -> [M, ...] and back: whole documents, each on one rank

Every rank of the group takes part in each of them, in the forward and in the backward, whether it sends or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.context_parallel.share import KeyLayout, WholeLayout


def with_earlier_tokens(
    layout: KeyLayout, group: Any, *tensors: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Callable[[], None]]:
    """Starts to fetch the earlier tokens of a layout.

    Args:
        layout: which tokens go where.
        group: the ranks.
        tensors: [T, ...] each, of one dtype.

    Returns:
        The tensors themselves, which must be used in their place, so that every rank comes to the backward of the
        exchange; the fetched tokens [R, ...] of each; and a function that waits for these. Their gradients are added to
        those of the tensors in float32.
    """
    pending: list[Any] = []
    found = _EarlierTokens.apply(layout, group, pending, *tensors)

    def wait() -> None:
        while pending:
            pending.pop().wait()

    return found[: len(tensors)], found[len(tensors) :], wait


class _EarlierTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: KeyLayout, group: Any, pending: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.group = layout, group
        ctx.widths = [x[0].numel() for x in tensors]
        sent = torch.cat([x.index_select(0, layout.send_index).flatten(1) for x in tensors], 1)
        received = sent.new_empty(sum(layout.receive), sent.shape[1])
        pending.append(dist.all_to_all_single(received, sent, layout.receive, layout.send, group=group, async_op=True))
        parts = received.split(ctx.widths, 1)
        fetched = (part.unflatten(1, x.shape[1:]) for part, x in zip(parts, tensors, strict=True))
        return *(x.view_as(x) for x in tensors), *fetched

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        layout, n = ctx.layout, len(ctx.widths)
        own, of_fetched = gradients[:n], gradients[n:]
        sent = torch.cat([x.flatten(1) for x in of_fetched], 1)
        returned = sent.new_empty(sum(layout.send), sent.shape[1])
        dist.all_to_all_single(returned, sent, layout.send, layout.receive, group=ctx.group)
        totals = []
        for x, part in zip(own, returned.split(ctx.widths, 1), strict=True):
            total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
            # rank by rank, in which no token comes twice, so that the order of the sum is fixed
            for index, each in zip(layout.send_index.split(layout.send), part.split(layout.send), strict=True):
                total.index_add_(0, index, each.to(total.dtype).view(-1, *x.shape[1:]))
            totals.append(total.to(x.dtype))
        return None, None, None, *totals


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _moved(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _moved(gradient, ctx.receive, ctx.send, ctx.group), None, None, None


def _moved(x: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
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
    if x.shape[1] < ranks:  # a head that several ranks read has a gradient from each, added in float32
        narrow, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
        sent = torch.cat([heads_of(x, 1, rank, ranks).to(narrow) for rank in range(ranks)])
    else:
        sent = torch.cat([heads_of(x, 1, rank, ranks) for rank in range(ranks)])
    found: Tensor = _AllToAll.apply(sent, [len(x)] * ranks, layout.counts, group)
    return found.index_select(0, layout.order)


def to_tokens(layout: WholeLayout, group: Any, y: Tensor, rank: int) -> Tensor:
    """The inverse of :func:`to_heads`: [N, H / W, ...] -> [n, H, ...]."""
    ranks, own = len(layout.counts), layout.counts[rank]
    by_rank = y.index_select(0, layout.back)
    found: Tensor = _AllToAll.apply(by_rank, layout.counts, [own] * ranks, group)
    return found.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Any) -> Tensor:
    """Tokens [n, ...] by receiving rank -> tokens [m, ...] by sending rank; gradients go back the same way."""
    found: Tensor = _AllToAll.apply(x, list(send), list(receive), group)
    return found
