"""Packed attention on torch's ``flex_attention``: every option as a function of scores, every segmentation as a mask.

The block mask is built once per batch and kind of layer, from the first and last segment number of each block of
tokens, so it costs the square of the number of blocks and never that of tokens:

    seq_idx [T] -> segment range of each block -> blocks to skip, to mask, to take whole -> BlockMask
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from torch_backend.ops.attention.flash_family import not_on_cuda
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.segments import PackedMetadata

_BLOCK = 128  # tokens; the size that flex_attention's kernels work in by default
_EAGER = cast(Callable[..., Any], flex_attention)  # its own signature is hidden by a decorator


class Flex(Probed):
    both_ways = True

    def supports(self, request: AttentionRequest) -> str | None:
        # Inside torch.compile the surrounding graph compiles the kernel: a trial would be another compilation in it.
        return self.refuses(request) if request.compiling else super().supports(request)

    def refuses(self, request: AttentionRequest) -> str | None:
        if request.dropout:
            return "no dropout"
        if request.device.type == "cpu":
            return "no backward on the CPU" if request.requires_grad else None
        if not all(16 <= width <= 256 for width in (request.head_dim, request.value_dim)):
            return "takes heads of 16 to 256 channels"  # at 512 a tile needs more shared memory than a GPU has
        return not_on_cuda(request)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, sinks, alibi_slopes = inputs
        on_gpu = q.device.type == "cuda"
        run = _compiled(_without_sizes(request)) if on_gpu and not request.compiling else _EAGER
        out, extra = run(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
            score_mod=_score_mod(request.softcap, alibi_slopes),
            block_mask=block_mask(packed, causal=request.causal, window=request.window),
            scale=request.scale,
            enable_gqa=request.heads != request.kv_heads,
            return_aux=AuxRequest(lse=sinks is not None),
            # Below 128 tokens torch would take its decoding kernel, which has no tile for every group of heads.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if on_gpu else None,
        )
        if sinks is not None:
            # The sink's weight joins the denominator: exp(lse) / (exp(lse) + exp(sink)) of the output is left.
            out = out * torch.sigmoid(extra.lse - sinks[:, None].float()).unsqueeze(-1).to(out.dtype)
        return out.squeeze(0).transpose(0, 1)


FLEX = Flex()


def block_mask(packed: PackedMetadata, *, causal: bool, window: int | None) -> BlockMask:
    """The document mask of a batch, built on first use and shared by every layer of the same kind.

    Args:
        packed: the segments; they cover all tokens.
        causal: key j is visible to query i only if j <= i.
        window: visible keys per query, its own included; None for all of the segment.
    """
    key = "flex", causal, window, packed.spans is not None
    return packed.derived(key, partial(_build, causal=causal, window=window))


def _without_sizes(request: AttentionRequest) -> AttentionRequest:
    """The key of a compiled kernel: everything but the numbers of tokens and segments."""
    return replace(request, tokens=0, segments=0, max_seqlen=0, host_lengths=False)


@cache
def _compiled(configuration: AttentionRequest) -> Callable[..., Any]:
    """``flex_attention`` compiled for one configuration.

    torch counts recompilations by code object and gives up after eight, so every configuration has a code object of its
    own. With ``fullgraph`` it raises then, where it would otherwise run the T x T form without a word.
    """
    code = _run.__code__.replace(co_name=f"flex_attention_{_compiled.cache_info().currsize}")
    return torch.compile(FunctionType(code, _run.__globals__), fullgraph=True)


def _run(*arguments: Any, **options: Any) -> Any:
    return flex_attention(*arguments, **options)


def _score_mod(softcap: float | None, alibi_slopes: Tensor | None) -> Callable[..., Tensor] | None:
    if softcap is None and alibi_slopes is None:
        return None

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[head] * (query - key).abs()
        return score

    return score_mod


def _build(packed: PackedMetadata, causal: bool, window: int | None) -> BlockMask:
    seq_idx = packed.seq_idx
    end = None if packed.spans is None else packed.spans.end

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = seq_idx[query] == seq_idx[key]
        if end is not None:
            visible = visible & (key < end[query])
        elif causal:
            visible = visible & (key <= query)
        if window is not None:
            distance = query - key
            visible = visible & ((distance if causal else distance.abs()) < window)
        return visible

    some, all_ = _visible_blocks(seq_idx, causal, window, end)
    partly, wholly = some & ~all_, all_
    return BlockMask.from_kv_blocks(
        *_listed(partly),
        *_listed(wholly),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(packed.tokens, packed.tokens),
    )


def _visible_blocks(
    seq_idx: Tensor, causal: bool, window: int | None, end: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns for each block of queries and of keys, [N, N], whether any pair is visible, and whether every pair is.

    Segments are contiguous, so a block holds a range of them, and what it takes to decide is each block's ends; so it
    is with ``end``, the ends of spans, which never fall.
    """
    tokens = seq_idx.shape[0]
    blocks = -(-tokens // _BLOCK)
    first_token = torch.arange(blocks, device=seq_idx.device) * _BLOCK
    last_token = (first_token + _BLOCK - 1).clamp(max=tokens - 1)
    first, last = seq_idx[first_token], seq_idx[last_token]
    some = (first[:, None] <= last) & (last[:, None] >= first)
    all_ = (first[:, None] == last) & (last[:, None] == first)
    # query minus key over all pairs of two blocks lies between these
    nearest, furthest = first_token[:, None] - last_token, last_token[:, None] - first_token
    if end is not None:
        some, all_ = some & (first_token < end[last_token][:, None]), all_ & (last_token < end[first_token][:, None])
    elif causal:
        some, all_ = some & (furthest >= 0), all_ & (nearest >= 0)
    if window is not None:
        some, all_ = some & (nearest < window), all_ & (furthest < window)
        if not causal:
            some, all_ = some & (furthest > -window), all_ & (nearest > -window)
    # The last block may be cut off by the end, and a whole block is taken without a mask.
    whole = last_token - first_token == _BLOCK - 1
    return some, all_ & whole & whole[:, None]


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the blocks of keys of each block of queries, [1, 1, N], and orders them, [1, 1, N, N]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(stable=True, dim=-1, descending=True).to(torch.int32)
    return counts[None, None], order[None, None]
