"""Packed attention by the flash-attention packages: 4 (``flash_attn.cute``), 3 (``flash_attn_interface``) and 2.

The second and third are called through their public functions. The fourth's cannot be traced by ``torch.compile``, so
its two passes become operators of ours under one autograd function:

    q, k, v, boundaries -> _flash4 -> crosspack::flash4_forward, crosspack::flash4_backward -> flash_attn.cute

The libraries are imported where they are called, because that a name imports decides nothing: flash-attention 4 alone
makes a ``flash_attn`` package without flash-attention 2 in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.attention.flash_family import (
    backward_overflows,
    keys_of,
    not_on_cuda,
    odd_heads,
    window_size,
)
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest, lacking
from torch_backend.ops.operators import differentiable, operator
from torch_backend.ops.recomputing import computed_once


class Flash2(Probed):
    more_keys = True

    def refuses(self, request: AttentionRequest) -> str | None:
        lacks = lacking(request, "sinks")
        return lacks or not_on_cuda(request) or odd_heads(request) or backward_overflows(request)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        from flash_attn.flash_attn_interface import flash_attn_varlen_func

        slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.float()
        return _by_library(flash_attn_varlen_func, inputs, request, dropout_p=request.dropout, alibi_slopes=slopes)


class Flash3(Probed):
    more_keys = True

    def refuses(self, request: AttentionRequest) -> str | None:
        if request.compiling:
            return "not every build of it can be traced by torch.compile"
        lacks = lacking(request, "sinks", "alibi", "dropout")
        return lacks or not_on_cuda(request) or odd_heads(request, narrow_values=True)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        from flash_attn_interface import flash_attn_varlen_func

        return _by_library(flash_attn_varlen_func, inputs, request)


def _by_library(
    function: Callable[..., Tensor], inputs: AttentionInputs, request: AttentionRequest, **others: Any
) -> Tensor:
    """Calls the public function of flash-attention 2 or 3, which take these arguments alike."""
    q, k, v, packed, *_ = inputs
    keys = keys_of(packed)
    return function(
        q,
        k,
        v,
        packed.cu_seqlens,
        keys.cu_seqlens,
        packed.max_seqlen,
        keys.max_seqlen,
        softmax_scale=request.scale,
        causal=request.causal,
        window_size=window_size(request),
        softcap=request.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **others,
    )


class Flash4(Probed):
    more_keys = True

    def refuses(self, request: AttentionRequest) -> str | None:
        if request.requires_grad and request.head_dim % 32:
            # Version 4.0.0b36 rounds widths up to 32 where it reads its gradients and to 16 where Hopper writes them.
            return f"its backward takes heads whose width is a multiple of 32, not {request.head_dim}"
        widths = request.head_dim, request.value_dim
        if request.value_dim != request.head_dim and (widths != (192, 128) or request.heads != request.kv_heads):
            return "takes values narrower than keys at widths 192 and 128 only, and without grouped heads"
        return lacking(request, "alibi", "dropout") or not_on_cuda(request) or odd_heads(request, narrow_values=True)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, sinks, _ = inputs
        keys = keys_of(packed)
        longest = packed.max_seqlen, keys.max_seqlen
        options = *longest, request.causal, *window_size(request), request.softcap or 0.0, request.scale
        # no tensor twice: torch.compile cannot trace a function that takes one tensor as two arguments (2.13)
        cu_keys = None if keys is packed else keys.cu_seqlens
        found: Tensor = _flash4(q, k, v, sinks, packed.cu_seqlens, cu_keys, *options)
        return found


FLASH2, FLASH3, FLASH4 = Flash2(), Flash3(), Flash4()

# longest segment of queries and of keys, causal, keys visible to the left and to the right (-1 for all), softcap (0 for
# none), scale
_OPTIONS = "SymInt max_seqlen, SymInt max_keys, bool causal, SymInt left, SymInt right, float softcap, float scale"


def _shared_arguments(cu_seqlens: Tensor, cu_keys: Tensor | None, *options: Any) -> dict[str, Any]:
    max_seqlen, max_keys, causal, left, right, softcap, scale = options
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens if cu_keys is None else cu_keys,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_k": max_keys,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 else right,
        "softcap": softcap,
    }


@computed_once
def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor, cu_keys: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    arguments = _shared_arguments(cu_seqlens, cu_keys, *options)
    out, lse, *_ = _flash_attn_fwd(q, k, v, learnable_sink=sinks, return_lse=True, **arguments)
    return out, lse


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _d = q.shape
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(heads, tokens, dtype=torch.float32)


def _launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor,
    cu_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv, dsinks = _fake_backward(q, k, v, sinks)
    _, _, _, *rest = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        dq=dq,
        dk=dk,
        dv=dv,
        learnable_sink=sinks,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_shared_arguments(cu_seqlens, cu_keys, *options),
    )
    return dq, dk, dv, rest[0] if rest else dsinks


def _fake_backward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_forward = operator(
    "flash4_forward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens, Tensor? cu_keys, "
    f"{_OPTIONS}) -> (Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = operator(
    "flash4_backward(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens, Tensor? cu_keys, Tensor out, "
    f"Tensor lse, Tensor dout, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    _fake_backward,
)
_flash4 = differentiable(_forward, _backward, tensors=6, keeps_outputs=True)
