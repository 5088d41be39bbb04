"""Packed attention in a few plain operations, one segment at a time: what the others are read against.

It serves every option on every device, at the cost of a Python loop over documents and of their full score matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing_core.storage.forest import lineage
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.segments import PackedMetadata, host_lengths


def scores_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    request: AttentionRequest,
    **options: Any,
) -> Tensor:
    """Attention by score matrices, softmax in float32 at least: of whole documents, or of some of their queries.

    Args:
        q, k, v: [..., L, H, D], [..., S, K, D], [..., S, K, Dv]; the keys are all that the queries see.
        request: causal, window, softcap, dropout and scale are read.
        options: as of :func:`attention_weights`.

    Returns:
        [..., L, H, Dv], dtype of q.
    """
    weights = attention_weights(q, k, request=request, **options)
    if request.dropout:
        weights = torch.nn.functional.dropout(weights, request.dropout)
    return torch.einsum("...kgls,...ske->...lkge", weights.to(v.dtype), v).flatten(-3, -2)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    request: AttentionRequest,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    first_query: int = 0,
    ahead: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """The softmax [..., K, H // K, L, S] of :func:`scores_attention`, before dropout.

    Args:
        q, k, request: as there.
        sinks, alibi_slopes: [H].
        first_query: where the first query stands among the S keys.
        ahead: integers [..., L], the keys that a query sees from its own on, causal attention alone; None for its own.
        visible: bool, broadcast to [..., K, H // K, L, S], the keys that a query may see at all; None for every one.
    """
    heads = request.kv_heads, request.heads // request.kv_heads  # of keys, and of queries for each
    q = q.unflatten(-2, heads)
    working = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("...lkgd,...skd->...kgls", q, k).to(working) * request.scale
    if request.softcap is not None:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    queries = first_query + torch.arange(scores.shape[-2], device=q.device)
    distance = queries[:, None] - torch.arange(scores.shape[-1], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(working).view(*heads, 1, 1) * distance.abs()
    if ahead is not None:
        hidden = -distance >= ahead[..., None, None, :, None]
    else:
        hidden = (distance < 0) if request.causal else torch.zeros_like(distance, dtype=torch.bool)
    if request.window is not None:
        hidden = hidden | ((distance if request.causal else distance.abs()) >= request.window)
    if visible is not None:
        hidden = hidden | ~visible
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(working).view(*heads, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)


def segments_of(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedMetadata
) -> Iterator[tuple[tuple[Tensor, Tensor, Tensor], int]]:
    """The queries, keys and values of each segment, and where its first query stands among its keys."""
    lengths = host_lengths(packed)
    queries = q.split(lengths)
    if packed.parents is None:
        seen = lengths if packed.keys is None else host_lengths(packed.keys)
        keys, values = k.split(seen), v.split(seen)
    else:
        paths = [lineage(packed.parents, segment) for segment in range(len(lengths))]
        keys, values = (
            [torch.cat([parts[ancestor] for ancestor in path]) for path in paths]
            for parts in (k.split(lengths), v.split(lengths))
        )
    return ((part, len(part[1]) - len(part[0])) for part in zip(queries, keys, values, strict=True))


def keys_ahead(packed: PackedMetadata) -> Tensor | None:
    """int64 [T]: the keys that each query sees from its own on; None without spans, where that is its own alone."""
    if packed.spans is None:
        return None
    return packed.spans.end - torch.arange(packed.tokens, device=packed.device)


class ReferenceAttention:
    host_lengths = both_ways = True
    more_keys = True
    parents = True

    def supports(self, request: AttentionRequest) -> str | None:
        return None if request.host_lengths else "needs the segment lengths on the host"

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, sinks, alibi_slopes = inputs
        scored = partial(scores_attention, request=request, sinks=sinks, alibi_slopes=alibi_slopes)
        ahead, lengths = keys_ahead(packed), host_lengths(packed)
        several = [None] * len(lengths) if ahead is None else ahead.split(lengths)
        parts = zip(segments_of(q, k, v, packed), several, strict=True)
        return torch.cat([scored(*each, first_query=first, ahead=own) for (each, first), own in parts])


REFERENCE = ReferenceAttention()
