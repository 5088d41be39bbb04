"""Packed attention on ``torch.nn.attention.varlen``: the flash-attention 2 kernels that torch itself carries."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torch_backend.ops.attention.flash_family import (
    backward_overflows,
    keys_of,
    not_on_cuda,
    odd_heads,
    window_size,
)
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest, lacking

# torch 2.11 takes grouped heads as they come; from 2.12 on they must be announced.
_ANNOUNCE_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters


class Varlen(Probed):
    more_keys = True

    def refuses(self, request: AttentionRequest) -> str | None:
        # of sinks: its log-sum-exp has no gradient
        lacks = lacking(request, "softcap", "sinks", "alibi", "dropout")
        return lacks or not_on_cuda(request) or odd_heads(request) or backward_overflows(request)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, *_ = inputs
        keys = keys_of(packed)
        grouped: dict[str, Any] = {"enable_gqa": request.heads != request.kv_heads} if _ANNOUNCE_GROUPS else {}
        out = varlen_attn(
            q,
            k,
            v,
            packed.cu_seqlens,
            keys.cu_seqlens,
            packed.max_seqlen,
            keys.max_seqlen,
            scale=request.scale,
            window_size=window_size(request),
            **grouped,
        )
        assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
        return out


VARLEN = Varlen()
