"""Packed attention by xformers: its block-diagonal masks from the lengths on the host, grouped heads expanded.

Its form with grouped heads has no backward, so keys and values are repeated for each query head first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor

from torch_backend.ops.attention.flash_family import backward_overflows, not_on_cuda, odd_heads
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest, lacking
from torch_backend.segments import PackedMetadata


class Xformers(Probed):
    host_lengths = True

    def refuses(self, request: AttentionRequest) -> str | None:
        if not request.host_lengths:
            return "needs the segment lengths on the host"
        if request.compiling:
            return "its masks cannot be traced by torch.compile"
        if request.window is not None and not request.causal:
            return "windows are causal"
        lacks = lacking(request, "softcap", "sinks", "alibi")
        return lacks or not_on_cuda(request) or odd_heads(request) or backward_overflows(request)

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        q, k, v, packed, *_ = inputs
        fmha = _fmha()
        group = request.heads // request.kv_heads
        out: Tensor = fmha.memory_efficient_attention(
            q.unsqueeze(0),
            k.repeat_interleave(group, 1).unsqueeze(0),
            v.repeat_interleave(group, 1).unsqueeze(0),
            attn_bias=_mask(fmha, packed, request),
            p=request.dropout,
            scale=request.scale,
        )
        return out.squeeze(0)


XFORMERS = Xformers()


def _mask(fmha: ModuleType, packed: PackedMetadata, request: AttentionRequest) -> Any:
    def build(packed: PackedMetadata) -> Any:
        kinds = fmha.attn_bias
        kind = kinds.BlockDiagonalCausalMask if request.causal else kinds.BlockDiagonalMask
        mask = kind.from_seqlens(list(packed.lengths or ()), device=packed.device)
        return mask if request.window is None else mask.make_local_attention(request.window)

    return packed.derived(("xformers", request.causal, request.window), build)


@cache
def _fmha() -> ModuleType:
    with _no_half_of_flash_attn():
        import xformers.ops.fmha as fmha
    found: ModuleType = fmha
    return found


@contextmanager
def _no_half_of_flash_attn() -> Iterator[None]:
    """Hide a ``flash_attn`` package that has no flash-attention 2 in it.

    flash-attention 4 makes one, xformers takes any for flash-attention 2 and its import fails. None in ``sys.modules``
    is Python's own mark for a module that is not to be found.
    """
    half = find_spec("flash_attn") is not None and find_spec("flash_attn.flash_attn_interface") is None
    if not half:
        yield
        return
    hidden = sys.modules.get("flash_attn")
    sys.modules["flash_attn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["flash_attn"]
        if hidden is not None:
            sys.modules["flash_attn"] = hidden
