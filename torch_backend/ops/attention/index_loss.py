"""The loss that trains an indexer: how far its choice is from attention over the keys that it selected.

DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 4: the target of a query is its attention over these keys,
added up over the heads and divided by its sum; the loss is the Kullback-Leibler divergence of the softmax of the scores
from it. Attention gets no gradient. Some queries are taken at a time, and the backward computes them again, so memory
grows with queries times selected keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.attention.reference import attention_weights
from torch_backend.ops.attention.request import AttentionRequest
from torch_backend.ops.attention.selected import (
    Latent,
    LongDocuments,
    blocks_of_queries,
    latent_operands,
    visible_keys,
    why_not_triton,
)
from torch_backend.ops.attention.selected_triton import document_probabilities


@dataclass(frozen=True)
class IndexFactors:
    """The operands of the scores of an indexer, with the graph of its weights.

    Attributes:
        q, k, weights: [T, H, D], [T, D], [T, H] of the whole row; the score is ``sum_h weights[h] relu(q[h] . k)``.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


def index_loss(
    factors: IndexFactors,
    q: Tensor,
    k: Tensor,
    selected: Tensor,
    long: LongDocuments,
    request: AttentionRequest,
    *,
    sinks: Tensor | None = None,
    latent: Latent | None = None,
    implementation: str | Sequence[str] = "auto",
) -> Tensor:
    """The loss of an indexer in each long document, the mean over its tokens; [documents].

    Args:
        factors: in which the loss has gradients.
        q, k, selected, long, request, sinks, latent, implementation: as for
            :func:`~torch_backend.ops.attention.selected.selected_attention`; tokens are selected, not blocks.
    """
    exact = torch.promote_types(factors.q.dtype, torch.float32)
    of_index = (x.index_select(0, long.places).to(exact) for x in (factors.q, factors.k, factors.weights))
    of_documents = zip(*(x.split(long.lengths) for x in of_index), selected.split(long.lengths), strict=True)
    losses = []
    attended = _attended(q, k, selected, long, request, sinks, latent, implementation)
    for (index_q, index_k, weights, chosen), target in zip(of_documents, attended, strict=True):
        target = (target / target.sum(-1, keepdim=True)).to(exact)
        numbers = chosen.shape[1] * (index_q.shape[1] + index_q.shape[2])
        parts = [
            checkpoint(
                _divergence, index_q[start:stop], index_k, weights[start:stop], chosen[start:stop], target[start:stop],
                use_reentrant=False, preserve_rng_state=False,
            )
            for start, stop in blocks_of_queries(len(chosen), numbers, q.device)
        ]  # fmt: skip
        losses.append(torch.stack(parts).sum() / len(chosen))
    return torch.stack(losses)


def _divergence(q: Tensor, k: Tensor, weights: Tensor, chosen: Tensor, target: Tensor) -> Tensor:
    """The divergence of some queries q [L, H, D] in all, over keys that they chose of k [S, D], [L, top_k]."""
    keys = F.embedding(chosen.clamp(min=0), k)  # whose gradient is added up in one order
    scores = torch.matmul(weights[:, None], torch.matmul(q, keys.transpose(1, 2)).relu()).squeeze(1)
    unseen = chosen < 0
    log_choice = scores.masked_fill(unseen, float("-inf")).log_softmax(-1).masked_fill(unseen, 0)
    return (torch.xlogy(target, target) - target * log_choice).sum()


@torch.no_grad()
def _attended(
    q: Tensor,
    k: Tensor,
    selected: Tensor,
    long: LongDocuments,
    request: AttentionRequest,
    sinks: Tensor | None,
    latent: Latent | None,
    implementation: str | Sequence[str],
) -> list[Tensor]:
    """The attention of each long document over selected keys, added up over heads; [L, top_k]."""
    queries, chosen = q.index_select(0, long.places).split(long.lengths), selected.split(long.lengths)
    keys, weight = k.index_select(0, long.places), None
    if why_not_triton(request, latent, implementation) is not None:
        pairs = zip(queries, keys.split(long.lengths), chosen, strict=True)
        return [_in_torch(*each, request, sinks) for each in pairs]
    width = k.shape[2]
    if latent is not None:
        keys, weight, width = *latent_operands(latent, long, request, q.dtype), latent.compressed.shape[1]
    options: dict[str, Any] = {
        "value_dim": width,
        "values_at": 0,
        "scale": request.scale,
        "sinks": sinks,
        "weight": weight,
    }
    return [
        document_probabilities(*each, **options) for each in zip(queries, keys.split(long.lengths), chosen, strict=True)
    ]


def _in_torch(q: Tensor, k: Tensor, chosen: Tensor, request: AttentionRequest, sinks: Tensor | None) -> Tensor:
    parts = []
    for start, stop in blocks_of_queries(len(q), request.heads * len(q), q.device):
        own = chosen[start:stop]
        options: dict[str, Any] = {"sinks": sinks, "first_query": start, "visible": visible_keys(own, start, 1)}
        weights = attention_weights(q[start:stop], k[:stop], request=request, **options).sum((0, 1))
        parts.append(weights.gather(1, own.clamp(min=0).long()).masked_fill(own < 0, 0))
    return torch.cat(parts)
