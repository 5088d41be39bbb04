"""Stand-ins for flash-attention 2, 3, 4 and torch's varlen attention, for machines on which none of them runs.

Each has the library's own signature and conventions (key limits to the left and right, -1 or None for no limit, 0 for
no softcap, the log-sum-exp of shape [H, T]) and computes plain attention from them, segment by segment.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from packing_core import reference
from torch_backend.ops.attention import varlen as varlen_implementation


def install(monkeypatch) -> None:
    """Put the stand-ins where the implementations import the real ones from."""
    flash2 = module("flash_attn.flash_attn_interface", flash_attn_varlen_func=flash2_func)
    flash4 = module("flash_attn.cute.interface", _flash_attn_fwd=flash4_forward, _flash_attn_bwd=flash4_backward)
    flash3 = module("flash_attn_interface", flash_attn_varlen_func=flash3_func)
    parents = module("flash_attn"), module("flash_attn.cute")
    for each in (*parents, flash2, flash3, flash4):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(varlen_implementation, "varlen_attn", varlen_attn)


def module(name: str, **contents: object) -> ModuleType:
    made = ModuleType(name)
    made.__path__ = []
    made.__dict__.update(contents)
    return made


def by_segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [T, H, Dv] and log-sum-exp [H, T]; query i sees keys i - left to i + right."""
    outputs, sums = [], []
    bounds = cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        queries, keys, values = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        if slopes is not None:
            scores = scores - slopes[:, None, None] * ahead.abs()
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if left is not None and left >= 0:
            visible &= ahead <= left
        if right is not None and right >= 0:
            visible &= ahead >= -right
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, stop - start, 1)], -1)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()[..., : stop - start]
        outputs.append((weights @ values).transpose(0, 1))
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums, 1)


def flash2_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    left, right = window_size
    return by_segment(
        q,
        k,
        v,
        cu_seqlens_q,
        scale=softmax_scale,
        left=left,
        right=0 if causal else right,
        softcap=softcap,
        slopes=alibi_slopes,
    )[0]


def flash3_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    left, right = window_size
    right = 0 if causal else right
    return by_segment(q, k, v, cu_seqlens_q, scale=softmax_scale, left=left, right=right, softcap=softcap)[0]


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = window_size
    return by_segment(query, key, value, cu_seq_q, scale=scale, left=left, right=right)[0]


def flash4_forward(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    softcap,
    window_size_left,
    window_size_right,
    learnable_sink,
    return_lse,
):
    assert return_lse
    out, lse = by_segment(
        q,
        k,
        v,
        cu_seqlens_q,
        scale=softmax_scale,
        left=window_size_left,
        right=0 if causal else window_size_right,
        softcap=softcap,
        sinks=learnable_sink,
    )
    return out.contiguous(), lse.contiguous(), None, None, None


def flash4_backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale,
    causal,
    softcap,
    *,
    window_size_left,
    window_size_right,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    deterministic,
    dq,
    dk,
    dv,
    learnable_sink,
):
    assert max_seqlen_q == max_seqlen_k and cu_seqlens_q is cu_seqlens_k
    assert window_size_right == (0 if causal else window_size_left)  # the only windows that the oracle has
    sinks = {} if learnable_sink is None else {"sinks": learnable_sink.numpy()}
    found = reference.attention_vjp(
        q.numpy(),
        k.numpy(),
        v.numpy(),
        cu_seqlens_q.numpy(),
        dout.numpy(),
        causal=causal,
        window=None if window_size_left is None else window_size_left + 1,
        softcap=softcap or None,
        scale=softmax_scale,
        **sinks,
    )
    for buffer, name in ((dq, "q"), (dk, "k"), (dv, "v")):
        buffer.copy_(torch.from_numpy(found[name]))
    return dq, dk, dv, *(torch.from_numpy(found[name]).float() for name in sinks)
