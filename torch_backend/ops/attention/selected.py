"""Attention of queries to the keys of their document that an indexer scores highest (DeepSeek's sparse attention).

    a row and a budget       -> LongDocuments.of, the documents that are longer; None where there are none
    index queries and keys   -> select or select_blocks, the places of the best keys, or blocks of keys, of each query
    q, k, v and these places -> selected_attention, [T, H, Dv]

A document within the budget sees all of its earlier tokens, so packed dense attention serves it without scores. Longer
ones run one after the other, in Triton (:mod:`.selected_triton`) or in plain torch. Keys and values of latent attention
are projections of one vector for all heads: Triton projects queries and outputs instead, so heads share their keys.
Plain torch takes a block of queries at a time, and the backward computes a block again. Memory grows with the length of
a document and not with its square. Blocks depend on the length of their document alone, and so do bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_backend.ops.attention.dispatch import choose, run
from torch_backend.ops.attention.reference import scores_attention
from torch_backend.ops.attention.request import AttentionRequest, request_of
from torch_backend.ops.attention.sdpa import fused, has_no_kernel
from torch_backend.ops.attention.selected_triton import Channels, document_attention, refuses
from torch_backend.ops.attention.selection_scores import best_scores, index_scores, scores_refused
from torch_backend.segments import PackedMetadata, host_lengths, to_device

# Device types whose topk chooses among equal scores by how many scores there are, so that it gets as many as it does of
# the document alone. A GPU takes the first of equal ones.
_BY_NUMBER = ("cpu",)
_SCORES, _SCORES_ON_CPU = 2**26, 2**22  # computed at a time: 256 MiB in float32, and what the caches of a CPU hold
_HEADS = 8  # that share their keys, half of the smallest tile


@dataclass(frozen=True)
class LongDocuments:
    """The documents of a row that are longer than the budget of an indexer.

    Attributes:
        budget: the longest document that selects all of its keys.
        block: keys that are selected together; blocks are counted from the beginning of a document.
        lengths: of these documents, in the order of the row.
        places: int64 [N], their tokens among the T of the row.
        others: int64 [T - N], all other tokens; rest: their segments, None if there are none.
        order: int64 [T], where each token of the row stands among ``others`` and ``places``, one after the other.
    """

    budget: int
    block: int
    lengths: tuple[int, ...]
    places: Tensor
    others: Tensor
    rest: PackedMetadata | None
    order: Tensor

    @classmethod
    def of(
        cls, packed: PackedMetadata, budget: int, documents: Sequence[Sequence[int]] | None = None, *, block: int = 1
    ) -> LongDocuments | None:
        """The documents above a budget, found on the host; None if there are none.

        Args:
            packed: their lengths are read from the device where nothing else tells that all are short.
            block: keys that are selected together.
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
            block,
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
        return LongDocuments(self.budget, self.block, self.lengths, places, others, rest, order)


@dataclass(frozen=True)
class Latent:
    """The operands of latent attention's keys and values (DeepSeek-V2, https://arxiv.org/abs/2405.04434).

    Attributes:
        compressed: [T, R], of which the keys of all heads, up to their end, and the values are projections.
        rotated: [T, r], the end of the keys of all heads.
        weight: [H * (D - r + Dv), R], the projection.
    """

    compressed: Tensor
    rotated: Tensor
    weight: Tensor


@torch.no_grad()
def select(q: Tensor, k: Tensor, weights: Tensor, long: LongDocuments, *, top_k: int) -> Tensor:
    """The keys of its own document that each query of a long document sees.

    The score of key j for query i is ``sum_h weights[i, h] * relu(q[i, h] . k[j])`` (DeepSeek-V3.2, equation 1), up to
    a scale of all products. Of equal scores ``torch.topk`` chooses, as it does for the document alone.

    Args:
        q, k, weights: [T, H, D], [T, D], [T, H] of the whole row. Half precision computes scores in Triton; they are
            summed in float32, or in the dtype of the weights.
        long: of the row.
        top_k: keys of a query, at least ``long.budget``.

    Returns:
        int32 [N, top_k], places counted from the beginning of the document, in no order; -1 where a query has fewer.
    """
    q, k, weights = (x.index_select(0, long.places) for x in (q, k, weights))
    places = q.new_full((len(q), top_k), -1, dtype=torch.int32)
    in_triton = scores_refused(q) is None
    q, k = (q, k) if in_triton else (x.to(weights.dtype) for x in (q, k))
    for tile, keys, start, query in _tiles(k.split(long.lengths), long, 1 if in_triton else q.shape[1]):
        if in_triton:
            scores = index_scores(q[tile], keys, weights[tile], start)
        else:
            scores = torch.matmul(weights[tile, None], torch.matmul(q[tile], keys.transpose(0, 1)).relu()).squeeze(1)
            scores = scores.masked_fill(torch.arange(len(keys), device=q.device) > query[:, None], float("-inf"))
        in_order = q.device.type in _BY_NUMBER  # elsewhere it changes no choice
        best = scores.topk(min(top_k, len(keys)), sorted=in_order).indices
        places[tile, : best.shape[1]] = best.masked_fill(best > query[:, None], -1).int()
    return places


@torch.no_grad()
def select_blocks(q: Tensor, k: Tensor, long: LongDocuments, *, top_k: int, local: int) -> Tensor:
    """The blocks of keys of its own document that each query of a long document sees (MiniMax-M3).

    The score of a block is the largest ``q[i, g] . k[j]`` of its keys that are not after query i.

    Args:
        q, k: [T, G, D], [T, D] of the whole row; each of G groups of heads selects for itself.
        long: of the row.
        top_k: blocks of a query.
        local: the block of a query and those right before it, so many in all, come first.

    Returns:
        int32 [N, G, top_k], blocks counted from the beginning of the document; -1 where a query has fewer.
    """
    q, k = (x.index_select(0, long.places) for x in (q, k))
    places = q.new_full((*q.shape[:2], top_k), -1, dtype=torch.int32)
    in_triton = scores_refused(q, long.block, best=True) is None
    q, k = (q, k) if in_triton else (_exact(x) for x in (q, k))
    at_once = max(1, q.shape[1] // long.block) if in_triton else q.shape[1]
    for tile, keys, start, query in _tiles(k.split(long.lengths), long, at_once):
        if in_triton:
            best = best_scores(q[tile], keys, start, long.block)
        else:
            later = torch.arange(len(keys), device=q.device) > query[:, None, None]
            scores = torch.matmul(q[tile], keys.transpose(0, 1)).masked_fill(later, float("-inf"))
            scores = F.pad(scores, (0, -len(keys) % long.block), value=float("-inf"))
            best = scores.unflatten(-1, (-1, long.block)).amax(-1)
        own = (query[:, None] // long.block - torch.arange(local, device=q.device)).clamp(min=0)
        best.scatter_(2, own[:, None].expand(-1, q.shape[1], -1), float("inf"))
        chosen = best.topk(min(top_k, best.shape[2]))
        places[tile, :, : best.shape[2]] = chosen.indices.masked_fill(chosen.values == float("-inf"), -1).int()
    return places


@torch.no_grad()
def select_pooled(q: Tensor, pooled: Sequence[Tensor], long: LongDocuments, *, top_k: int) -> Tensor:
    """The blocks of keys that each query of a long document sees, chosen among those that end before it (Qwen 4).

    The score of a block is ``sum_h relu(q[i, h] . k)`` with its pooled key k. A query also sees the block after the
    last one that it chooses from, up to itself.

    Args:
        q: [T, H, D] of the whole row.
        pooled: [L // block, D] of each long document.
        long: of the row.
        top_k: blocks of a query, beside its own.

    Returns:
        int32 [N, 1, top_k + 1], blocks counted from the beginning of the document; -1 where a query has fewer.
    """
    q = q.index_select(0, long.places)
    places = q.new_full((len(q), 1, top_k + 1), -1, dtype=torch.int32)
    in_triton = scores_refused(q, long.block) is None
    q = q if in_triton else _exact(q)
    for tile, keys, start, query in _tiles(pooled, long, 1 if in_triton else q.shape[1]):
        if in_triton:
            scores = index_scores(q[tile], keys, q.new_ones(len(query), q.shape[1]), start, long.block)
        else:
            scores = torch.matmul(q[tile], keys.to(q.dtype).transpose(0, 1)).relu().sum(1)
        complete = (query + 1) // long.block
        best = _best_before(scores, complete, top_k)
        places[tile, 0, : best.shape[1]] = best.int()
        places[tile, 0, top_k] = complete.int()
    return places


def _best_before(scores: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """The places of the best of the first ``ends`` [L] scores [L, S] in each row, -1 where there are fewer."""
    if scores.device.type in _BY_NUMBER:
        best = scores.new_full((len(scores), top_k), -1, dtype=torch.long)
        for end in range(max(int(ends.min()), 1), int(ends.max()) + 1):
            (rows,) = (ends == end).nonzero(as_tuple=True)
            best[rows, : min(top_k, end)] = scores[rows, :end].topk(min(top_k, end)).indices
        return best
    later = torch.arange(scores.shape[1], device=scores.device) >= ends[:, None]
    best = scores.masked_fill(later, float("-inf")).topk(min(top_k, scores.shape[1])).indices
    return best.masked_fill(best >= ends[:, None], -1)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tiles(
    documents: Iterable[Tensor], long: LongDocuments, scores: int
) -> Iterator[tuple[slice, Tensor, int, Tensor]]:
    """Some queries of a long document, its keys [S, D] as far as the choice needs them, the first query, and all.

    Queries are counted from the beginning of the document; ``scores`` of each query and key are held at a time.
    """
    device = long.places.device
    for end, length, keys in zip(accumulate(long.lengths), long.lengths, documents, strict=True):
        for start, stop in blocks_of_queries(length, scores * length, device):
            needed = keys if device.type in _BY_NUMBER else keys[:stop]
            tile = slice(end - length + start, end - length + stop)
            yield tile, needed, start, torch.arange(start, stop, device=device)


@dataclass(frozen=True)
class SelectedKeys:
    """Holds what the queries of long documents see, and how attention runs over it.

    Attributes:
        places: int32 [N, top_k] or [N, G, top_k], as :func:`select` or :func:`select_blocks` returns it.
        long: of the row.
        request: of attention to all keys; softcap, dropout and scale are read.
        sinks: [H].
        latent: what keys and values were made of, if it is known.
        implementation: of the other documents; "auto" and "triton" run selected keys in Triton where they can.
    """

    places: Tensor
    long: LongDocuments
    request: AttentionRequest
    sinks: Tensor | None = None
    latent: Latent | None = None
    implementation: str | Sequence[str] = "auto"

    @property
    def refused(self) -> str | None:
        """Explains why they run in plain torch, None if they run in Triton."""
        return why_not_triton(self.request, self.latent, self.implementation)

    def by_document(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yields the parts [L, ...] of rows [T, ...] and of ``places`` that belong to each long document."""
        lengths = self.long.lengths
        parts = (x.index_select(0, self.long.places).split(lengths) for x in rows)
        yield from zip(*parts, self.places.split(lengths), strict=True)

    def in_triton(self, q: Tensor, k: Tensor, v: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
        """Returns what ``run``, a function of :mod:`.selected_triton`, makes of each long document.

        Keys and values of latent attention [T, 1, R + r] are its vectors, the first R channels of which are the values.
        """
        scale, block, weight = self.request.scale, self.long.block, None
        if (latent := self.latent) is None:
            kv, channels = torch.cat([k, v], -1), Channels(v.shape[2], k.shape[2], scale, block)
        else:
            kv = torch.cat([latent.compressed.to(q.dtype), latent.rotated.to(q.dtype)], -1).unsqueeze(1)
            channels = Channels(latent.compressed.shape[1], 0, scale, block)
            weight = latent.weight.to(q.dtype).unflatten(0, (self.request.heads, -1))  # [H, n + Dv, R]
        return [run(*each, channels, sinks=self.sinks, weight=weight) for each in self.by_document(q, kv)]


def why_not_triton(
    request: AttentionRequest, latent: Latent | None = None, implementation: str | Sequence[str] = "auto"
) -> str | None:
    """Explains why selected keys run in plain torch, None if they run in Triton."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not {"auto", "triton"} & set(names):
        return "another implementation was named"
    if request.softcap or request.dropout:
        return "no softcap and no dropout"
    group = request.heads // request.kv_heads
    if latent is None and group < _HEADS and "triton" not in names:
        return f"fewer than {_HEADS} heads share their keys"
    rotated = 0 if latent is None else latent.rotated.shape[1]
    return refuses(request, None if latent is None else latent.compressed.shape[1], rotated)


@torch.compiler.disable  # as selected_attention
def words_of(keys: SelectedKeys) -> str:
    """Says which documents see selected keys, and by what, for ``explain``."""
    long, refused = keys.long, keys.refused
    number = f"{len(long.lengths)} documents" if len(long.lengths) > 1 else "1 document"
    by = "Triton" if refused is None else f"plain torch ({refused})"
    return f"{number} above {long.budget:,} tokens by selected keys in {by}, outside of compiled layers"


@torch.compiler.disable  # each batch has other documents
def selected_attention(q: Tensor, k: Tensor, v: Tensor, keys: SelectedKeys) -> Tensor:
    """Packed causal attention in which the queries of long documents see selected keys alone.

    Args:
        q, k, v: [T, H, D], [T, K, D], [T, K, Dv] of the whole row.

    Returns:
        [T, H, Dv], dtype of q.
    """
    long, request, sinks = keys.long, keys.request, keys.sinks
    parts = _in_torch(q, k, v, keys) if keys.refused is not None else keys.in_triton(q, k, v, document_attention)
    if long.rest is not None:
        rest, (q, k, v) = long.rest, (x.index_select(0, long.others) for x in (q, k, v))
        softcap, dropout = request.softcap, request.dropout
        dense = request_of(q, k, v, rest, softcap=softcap, sinks=sinks, dropout=dropout, scale=request.scale)
        name, dense = choose(dense, rest, keys.implementation)
        parts.insert(0, run(name, dense, q, k, v, rest, sinks=sinks))
    return torch.cat(parts).index_select(0, long.order)


def _in_torch(q: Tensor, k: Tensor, v: Tensor, keys: SelectedKeys) -> list[Tensor]:
    dtype, request, size = k.dtype, keys.request, keys.long.block
    exact = torch.promote_types(dtype, torch.float32)
    # the gradients of a key and of a sink are sums over blocks, and are summed in float32
    of_sinks = None if keys.sinks is None else keys.sinks.to(exact)
    scored, grouped = has_no_kernel(request), keys.places.ndim == 3 and keys.places.shape[1] > 1

    def block(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, sinks: Tensor | None, start: int) -> Tensor:
        k, v = k.to(dtype), v.to(dtype)
        visible = visible_keys(selected, start, size)
        if grouped:
            visible = visible.repeat_interleave(q.shape[1] // len(visible), 0)
        if scored:
            if grouped:
                visible = visible.unflatten(0, (k.shape[1], -1))
            return scores_attention(q, k, v, request=request, sinks=sinks, first_query=start, visible=visible)
        return fused(q[None], k[None], v[None], request, visible)[0]

    parts = []
    for own, key, value, selected in keys.by_document(q, k.to(exact), v.to(exact)):
        length = len(own)
        for start, stop in blocks_of_queries(length, length * (request.heads if scored or grouped else 1), own.device):
            parts.append(
                checkpoint(
                    block, own[start:stop], key[:stop], value[:stop], selected[start:stop], of_sinks, start,
                    use_reentrant=False, preserve_rng_state=request.dropout > 0,
                )
            )  # fmt: skip
    return parts


def visible_keys(selected: Tensor, start: int, size: int) -> Tensor:
    """bool [L, S] or [G, L, S]: the keys that L queries from ``start`` on see, the last of which is key S - 1."""
    queries = selected.shape[0]
    stop = start + queries
    blocks = -(-stop // size)
    column = selected.long() % (blocks + 1)  # -1 has a column of its own, which is dropped
    seen = torch.zeros(*selected.shape[:-1], blocks + 1, dtype=torch.bool, device=selected.device)
    seen = seen.scatter_(-1, column, True)[..., :blocks]
    if seen.ndim == 3:
        seen = seen.repeat_interleave(size, -1)[..., :stop]
        seen = seen.movedim(0, -2) & torch.ones(queries, stop, dtype=torch.bool, device=seen.device).tril(start)
    return seen


def blocks_of_queries(length: int, scores_of_a_query: int, device: torch.device) -> list[tuple[int, int]]:
    """The first query of each block of a document and the one after it, for a bounded number of scores at a time."""
    at_once = _SCORES_ON_CPU if device.type == "cpu" else _SCORES
    queries = max(1, at_once // scores_of_a_query)
    return [(start, min(start + queries, length)) for start in range(0, length, queries)]
