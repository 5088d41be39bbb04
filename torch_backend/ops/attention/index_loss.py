"""The loss that trains an indexer: how far its choice is from attention over the keys that it selected.

DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, equation 4: the target of a query is its attention over these keys,
added up over the heads and divided by its sum; the loss is the Kullback-Leibler divergence of the softmax of the scores
from it. Attention gets no gradient. Some queries are taken at a time, and the backward computes them again, so memory
grows with queries times selected keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.attention.reference import attention_weights
from torch_backend.ops.attention.selected import SelectedKeys, blocks_of_queries, visible_keys
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


@torch.compiler.disable  # as selected_attention
def index_loss(factors: IndexFactors, q: Tensor, k: Tensor, keys: SelectedKeys) -> Tensor:
    """The loss of an indexer in each long document, the mean over its tokens; [documents].

    Args:
        factors: in which the loss has gradients.
        q, k: of attention, as for :func:`~torch_backend.ops.attention.selected.selected_attention`.
        keys: of tokens, not of blocks.
    """
    exact = torch.promote_types(factors.q.dtype, torch.float32)
    of_documents = keys.by_document(*(x.to(exact) for x in (factors.q, factors.k, factors.weights)))
    losses = []
    for (index_q, index_k, weights, chosen), target in zip(of_documents, _attended(q, k, keys), strict=True):
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
def _attended(q: Tensor, k: Tensor, keys: SelectedKeys) -> list[Tensor]:
    """The attention of each long document over selected keys, added up over heads; [L, top_k]."""
    if keys.refused is None:
        return keys.in_triton(q, k, k[..., :0], document_probabilities)
    return [_in_torch(own, key, chosen, keys) for own, key, chosen in keys.by_document(q, k)]


def _in_torch(q: Tensor, k: Tensor, chosen: Tensor, keys: SelectedKeys) -> Tensor:
    request, parts = keys.request, []
    for start, stop in blocks_of_queries(len(q), request.heads * len(q), q.device):
        own = chosen[start:stop]
        options: dict[str, Any] = {"sinks": keys.sinks, "first_query": start, "visible": visible_keys(own, start, 1)}
        weights = attention_weights(q[start:stop], k[:stop], request=request, **options).sum((0, 1))
        parts.append(weights.gather(1, own.clamp(min=0).long()).masked_fill(own < 0, 0))
    return torch.cat(parts)
