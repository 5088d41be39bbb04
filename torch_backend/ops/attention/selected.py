"""Attention of queries to the keys of their document that an indexer scores highest (DeepSeek's sparse attention).

    a row and a budget       -> LongDocuments.of, the documents that are longer; None where there are none
    index queries and keys   -> select, the places of the best keys of each query
    q, k, v and these places -> selected_attention, [T, H, Dv]

A document within the budget sees all of its earlier tokens, so packed dense attention serves it without scores. Longer
ones run one after the other, a block of queries at a time, and the backward computes a block again: memory grows with
the length of a document and not with its square. Blocks depend on the length of their document alone, and so do bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.attention.dispatch import choose, run
from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.request import AttentionRequest, request_of
from torch_backend.ops.attention.sdpa import fused, has_no_kernel
from torch_backend.segments import PackedMetadata, host_lengths, to_device

_SCORES, _SCORES_ON_CPU = 2**26, 2**22  # computed at a time: 256 MiB in float32, and what the caches of a CPU hold


@dataclass(frozen=True)
class LongDocuments:
    """The documents of a row that are longer than the budget of an indexer.

    Attributes:
        budget: the tokens that a query may select.
        lengths: of these documents, in the order of the row.
        places: int64 [N], their tokens among the T of the row.
        others: int64 [T - N], all other tokens; rest: their segments, None if there are none.
        order: int64 [T], where each token of the row stands among ``others`` and ``places``, one after the other.
    """

    budget: int
    lengths: tuple[int, ...]
    places: Tensor
    others: Tensor
    rest: PackedMetadata | None
    order: Tensor

    @classmethod
    def of(
        cls, packed: PackedMetadata, budget: int, documents: Sequence[Sequence[int]] | None = None
    ) -> LongDocuments | None:
        """The documents above a budget, found on the host; None if there are none.

        Args:
            packed: their lengths are read from the device where nothing else tells that all are short.
            documents: the segments of each document; what is in none is padding, and dense. None: all are documents.

        >>> long = LongDocuments.of(PackedMetadata.from_lengths([2, 4, 1]), budget=3)
        >>> long.places.tolist(), long.others.tolist(), long.rest.lengths, long.order.tolist()
        ([2, 3, 4, 5], [0, 1, 6], (2, 1), [0, 1, 3, 4, 5, 6, 2])
        """
        if packed.max_seqlen <= budget:
            return None
        lengths = host_lengths(packed)
        real = range(len(lengths)) if documents is None else {number for each in documents for number in each}
        above = np.array([number in real and length > budget for number, length in enumerate(lengths)])
        if not above.any():
            return None
        of_token = np.repeat(above, lengths)
        (places,), (others,) = of_token.nonzero(), (~of_token).nonzero()
        order = np.argsort(np.concatenate([others, places]))
        rest = [length for length, long in zip(lengths, above, strict=True) if not long]
        return cls(
            budget,
            lengths=tuple(length for length, long in zip(lengths, above, strict=True) if long),
            places=to_device(torch.from_numpy(places), packed.device),
            others=to_device(torch.from_numpy(others), packed.device),
            rest=PackedMetadata.from_lengths(rest, device=packed.device) if rest else None,
            order=to_device(torch.from_numpy(order), packed.device),
        )

    def to(self, device: torch.device | str) -> LongDocuments:
        """The same documents on another device."""
        rest = None if self.rest is None else self.rest.to(device)
        places, others, order = (to_device(each, device) for each in (self.places, self.others, self.order))
        return LongDocuments(self.budget, self.lengths, places, others, rest, order)

    def __str__(self) -> str:
        number = f"{len(self.lengths)} documents" if len(self.lengths) > 1 else "1 document"
        return f"{number} above {self.budget:,} tokens by selected keys in plain torch, outside of compiled layers"


@torch.no_grad()
def select(q: Tensor, k: Tensor, weights: Tensor, long: LongDocuments, *, top_k: int) -> Tensor:
    """The keys of its own document that each query of a long document sees.

    The score of key j for query i is ``sum_h weights[i, h] * relu(q[i, h] . k[j])`` (DeepSeek-V3.2, equation 1), up to
    a scale of all products. Of equal scores ``torch.topk`` chooses, as it does for the document alone.

    Args:
        q, k, weights: [T, H, D], [T, D], [T, H] of the whole row.
        long: of the row.
        top_k: keys of a query, at least ``long.budget``.

    Returns:
        int32 [N, top_k], places counted from the beginning of the document, in no order; -1 where a query has fewer.
    """
    q, k, weights = (x.index_select(0, long.places) for x in (q, k, weights))
    found = q.new_full((len(q), top_k), -1, dtype=torch.int32)
    for end, length in zip(accumulate(long.lengths), long.lengths, strict=True):
        first = end - length
        keys = k[first:end].transpose(0, 1)
        kept = min(top_k, length)
        for start, stop in _blocks(length, q.shape[1] * length, q.device):
            block = slice(first + start, first + stop)
            scores = torch.matmul(weights[block, None], torch.matmul(q[block], keys).relu()).squeeze(1)
            query = torch.arange(start, stop, device=q.device)[:, None]
            later = torch.arange(length, device=q.device) > query
            best = scores.masked_fill(later, float("-inf")).topk(kept).indices
            found[block, :kept] = best.masked_fill(best > query, -1).int()
    return found


@torch.compiler.disable  # each batch has other documents
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor,
    long: LongDocuments,
    request: AttentionRequest,
    *,
    sinks: Tensor | None = None,
    implementation: str | Sequence[str] = "auto",
) -> Tensor:
    """Packed causal attention in which the queries of long documents see selected keys alone.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, Dv] of the whole row.
        selected: int32 [N, top_k], as :func:`select` returns it.
        long: of the row.
        request: softcap, dropout and scale are read.
        sinks: [H].
        implementation: of the other documents.

    Returns:
        [T, H, Dv], dtype of q.
    """
    exact, dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    queries = q.index_select(0, long.places).split(long.lengths)
    # the gradients of a key and of a sink are sums over blocks, and are summed in float32
    keys, values = (x.index_select(0, long.places).to(exact).split(long.lengths) for x in (k, v))
    of_sinks = None if sinks is None else sinks.to(exact)

    def block(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, sinks: Tensor | None, start: int) -> Tensor:
        stop, k, v = start + len(q), k.to(dtype), v.to(dtype)
        # -1 marks a column of its own, which is dropped
        column = selected.long() % (stop + 1)
        visible = torch.zeros(len(q), stop + 1, dtype=torch.bool, device=q.device).scatter_(1, column, True)[:, :stop]
        if has_no_kernel(request):
            return scores_attention(q, k, v, request=request, sinks=sinks, first_query=start, visible=visible)
        return fused(q[None], k[None], v[None], request, visible)[0]

    parts = []
    for own, key, value, chosen in zip(queries, keys, values, selected.split(long.lengths), strict=True):
        length = len(own)
        for start, stop in _blocks(length, (request.heads if has_no_kernel(request) else 1) * length, q.device):
            parts.append(
                checkpoint(
                    block, own[start:stop], key[:stop], value[:stop], chosen[start:stop], of_sinks, start,
                    use_reentrant=False, preserve_rng_state=request.dropout > 0,
                )
            )  # fmt: skip
    if long.rest is not None:
        rest, (q, k, v) = long.rest, (x.index_select(0, long.others) for x in (q, k, v))
        softcap, dropout = request.softcap, request.dropout
        dense = request_of(q, k, v, rest, softcap=softcap, sinks=sinks, dropout=dropout, scale=request.scale)
        name, dense = choose(dense, rest, implementation)
        parts.insert(0, run(name, dense, q, k, v, rest, sinks=sinks))
    return torch.cat(parts).index_select(0, long.order)


def _blocks(length: int, scores_of_a_query: int, device: torch.device) -> list[tuple[int, int]]:
    """The first query of each block of a document and the one after it, for a bounded number of scores at a time."""
    at_once = _SCORES_ON_CPU if device.type == "cpu" else _SCORES
    queries = max(1, at_once // scores_of_a_query)
    return [(start, min(start + queries, length)) for start in range(0, length, queries)]
