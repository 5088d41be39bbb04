"""FlashAttention's two functions: on a GPU torch's own FlashAttention-2, else plain torch, for stacks that require it.

:func:`register` makes transformers take them wherever it would call flash-attn: its own code still decides what the
boundaries are, which is what the board tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAME = "flash_attention_stand_in"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Returns the attention of every sequence on its own, [T, H, D]: q [T, H, D], k and v [T, KV, D]."""
    if q.is_cuda:
        sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        left, right = (None if side < 0 else side for side in window_size)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        options = {"scale": softmax_scale, "window_size_left": left, "window_size_right": right}
        flash: Any = torch.ops.aten._flash_attention_forward
        attended: Tensor = flash(q, k, v, *sizes, dropout_p, causal, False, **options)[0]
        return attended
    starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    output = torch.zeros_like(q)
    for first, last, key_first, key_last in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        segment = slice(first, last), slice(key_first, key_last)
        output[segment[0]] = _attention(
            q[segment[0]], k[segment[1]], v[segment[1]], softmax_scale, causal, window_size, softcap
        )
    return output


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Returns the attention of every row, [B, S, H, D]."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    key_starts = torch.arange(len(k) + 1, dtype=torch.int32, device=q.device) * k.shape[1]
    q_flat, k_flat, v_flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    sizes, options = (starts, key_starts, q.shape[1], k.shape[1]), (dropout_p, softmax_scale, causal)
    return flash_attn_varlen_func(q_flat, k_flat, v_flat, *sizes, *options, window_size, softcap).view(q.shape)


def register() -> None:
    """Makes ``NAME`` an attention implementation of transformers, with flash-attn's masks and our two functions."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    modules: Any = flash
    modules._flash_fn, modules._flash_varlen_fn = flash_attn_func, flash_attn_varlen_func
    modules._pad_fn, modules._unpad_fn = flash._pad_input, flash._unpad_input
    process: Callable[..., Any] = flash._lazy_define_process_function(flash_attn_varlen_func)
    modules._process_flash_kwargs_fn = process
    modules._process_with_kvcache_kwargs_fn = partial(dict)
    modules._loaded_implementation = NAME


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """One sequence: q [L, H, D], k and v [M, KV, D]; the last query sees the last key."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = torch.einsum("lhd,mhd->hlm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        seen &= distance <= window[0]
    if window[1] >= 0:
        seen &= -distance <= window[1]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hlm,mhd->lhd", weights, v)
