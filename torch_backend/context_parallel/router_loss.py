"""The balancing losses of routers, of all tokens or per document, over ranks that each hold a part of the tokens.

Router logits of a rank's tokens -> how many tokens chose each expert and the sum of its probabilities -> added over the
ranks -> the loss, on every rank. :func:`balancing_loss`: Fedus et al. 2021, "Switch Transformers", https://arxiv.org/abs/2101.03961,
equations 4 to 6, over the tokens of all layers together, as transformers' ``load_balancing_loss_func`` computes it.
:func:`document_balance`: DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 17 to 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def balancing_loss(
    router_logits: Sequence[Tensor],
    experts: int,
    chosen: int,
    mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The loss of the tokens of all ranks of ``group``, or of one process without it, as float32.

    Args:
        router_logits: [T, E] of each layer.
        experts: E.
        chosen: experts of each token.
        mask: [1, T], 0 at padding, which is not counted; None for no padding.
        group: every rank of it calls this, also if it has no token that counts. Gradients are added over it.
    """
    device = router_logits[0].device
    real = torch.ones(len(router_logits[0]), device=device) if mask is None else mask.reshape(-1).to(device)
    real = real.double()
    sums = torch.zeros(2, experts, dtype=torch.float64, device=device)
    for logits in router_logits:
        probabilities = logits.to(device).softmax(-1)
        choices = probabilities.topk(chosen, -1).indices
        hits = torch.zeros_like(probabilities, dtype=torch.float64).scatter_(1, choices, 1.0)
        sums = sums + torch.stack([real @ hits, real @ probabilities.double()])
    tokens = real.sum() * len(router_logits)
    if group is not None:
        added = _SumOverRanks.apply(torch.cat([sums.flatten(), tokens[None]]), group)
        sums, tokens = added[:-1].view(2, experts), added[-1].detach()
    hits, probabilities = sums / tokens.clamp(min=1)
    return (experts * (hits * probabilities).sum()).float()


def document_balance(
    scores: Sequence[Tensor],
    documents: Tensor,
    count: int,
    chosen: int,
    mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The balance of the experts in each document and layer, averaged over documents and added up over layers, float32.

    Args:
        scores: [T, E] above 0 of each layer, the affinities of the tokens.
        documents: [T], the number of each token's document.
        count: one more than the largest number in ``documents``; those without tokens that count are left out.
        chosen, mask, group: as for :func:`balancing_loss`.
    """
    device, experts = scores[0].device, scores[0].shape[-1]
    documents = documents.to(device)
    real = torch.ones(len(documents), device=device) if mask is None else mask.reshape(-1).to(device)
    real = real.double()[:, None]
    columns = [real]  # beside the tokens of each document, its hits and its probabilities in every layer
    for s in (s.to(device) for s in scores):
        hits = torch.zeros_like(s).scatter_(1, s.topk(chosen, -1).indices, 1.0)
        columns += [real * hits, real * (s / s.sum(-1, keepdim=True))]
    sums = torch.zeros(count, sum(x.shape[1] for x in columns), dtype=torch.float64, device=device)
    sums = sums.index_add(0, documents, torch.cat(columns, 1))
    if group is not None:
        sums = _SumOverRanks.apply(sums, group)
    tokens = sums[:, :1].detach()
    hits, probabilities = (sums[:, 1:] / tokens.clamp(min=1)).view(count, len(scores), 2, experts).unbind(2)
    return (experts / chosen * (hits * probabilities).sum() / (tokens > 0).sum().clamp(min=1)).float()


class _SumOverRanks(torch.autograd.Function):
    """Adds a tensor over ranks, and the gradients of its sum, which every rank takes part of its loss from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
