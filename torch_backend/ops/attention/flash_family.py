"""The common ground of the flash-attention kernels: their window, their limits, and two silent traps.

Reasons are for ``Implementation.supports``; None means that nothing speaks against the request.
"""

from __future__ import annotations

import torch

from torch_backend.ops.attention.request import AttentionRequest
from torch_backend.segments import PackedMetadata

HALF = (torch.float16, torch.bfloat16)


def not_on_cuda(request: AttentionRequest) -> str | None:
    """The reason of kernels that run on a GPU in half precision only."""
    if request.device.type != "cuda":
        return f"runs on CUDA, not on {request.device.type}"
    if request.dtype not in HALF:
        return f"takes float16 and bfloat16, not {str(request.dtype).removeprefix('torch.')}"
    return None


def odd_heads(request: AttentionRequest, *, largest: int = 256, narrow_values: bool = False) -> str | None:
    """The reason of kernels that load heads in vectors of eight channels."""
    for width in (request.head_dim, request.value_dim):
        if width % 8 or width > largest:
            return f"takes heads whose width is a multiple of 8 up to {largest}, not {width}"
    if request.value_dim != request.head_dim and not narrow_values:
        return "takes values as wide as keys"
    return None


def backward_overflows(request: AttentionRequest) -> str | None:
    """The reason of flash-attention 2's packed backward, which counts elements of its float32 query gradient in int32.

    Documents are padded there by up to 128 tokens each and heads to a multiple of 32 channels; from 2^31 elements on it
    writes to wrong addresses.
    """
    elements = (request.tokens + 128 * request.segments) * request.heads * -(-request.head_dim // 32) * 32
    if request.requires_grad and elements >= 2**31:
        return f"its backward would count {elements:,} elements in 32 bits"
    return None


def window_size(request: AttentionRequest) -> tuple[int, int]:
    """The family's (left, right): further keys visible before and after a query beside its own, -1 for all."""
    left = -1 if request.window is None else request.window - 1
    return left, 0 if request.causal else left


def keys_of(packed: PackedMetadata) -> PackedMetadata:
    """The segments of the keys. The family aligns the last query of a segment with its last key."""
    assert_longest(packed)
    if packed.keys is None:
        return packed
    assert_longest(packed.keys)
    return packed.keys


def assert_longest(packed: PackedMetadata) -> None:
    """Make sure that no segment is longer than ``max_seqlen``: kernels leave the rest of such a segment unwritten.

    Lengths on the host were checked when the metadata was built. Otherwise the device checks, once per batch and
    without a read back: a violation surfaces as a device-side assertion.
    """
    if packed.lengths is None:
        packed.derived("longest", _assert_on_device)


def _assert_on_device(packed: PackedMetadata) -> None:
    longest = packed.cu_seqlens.diff().max()
    torch._assert_async(longest <= packed.max_seqlen, f"a segment is longer than max_seqlen={packed.max_seqlen:,}")
