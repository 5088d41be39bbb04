"""mamba_ssm's kernels of Mamba-2's scan as operators: compilers do not look inside, CUDA graphs record them.

x, dt, A, B, C, D and the batch's metadata -> :func:`ssd` -> [T, H, P]. The kernels find the segments in ``seq_idx`` and
read nothing back. They are tuned at their first call, which has to be outside of a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.ops.operators import operator
from torch_backend.segments import PackedMetadata

_CHUNK = 256  # tokens, with which benchmarks/RESULTS.md has it


def ssd(packed: PackedMetadata, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """``S = exp(dt A) S + dt B x^T``, ``y = C S + D x``, S zero before each segment: Dao and Gu 2024, section 5.

    Args:
        packed: the segments; they cover all T tokens.
        x: [T, H, P]; dt: [T, H], after bias and softplus; A, D: [H]; B, C: [T, G, N].

    Returns:
        [T, H, P], dtype of x.
    """
    found: Tensor = _Ssd.apply(x, dt.float(), A.float(), B.to(x.dtype), C.to(x.dtype), D, packed.seq_idx)
    return found


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor | None) -> Tensor:
        given = [None if x is None else x.contiguous() for x in arguments]
        out: Tensor = _forward(*given)
        ctx.save_for_backward(*given, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *given, _, _ = ctx.saved_tensors
        found = _backward(*ctx.saved_tensors, dout.contiguous())
        return *(None if x is None else dx for x, dx in zip(given, found, strict=True)), None


def _launch_forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, segments: Tensor
) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd

    rows = x[None], dt[None], A, B[None], C[None]
    out = _mamba_chunk_scan_combined_fwd(*rows, _CHUNK, D=D, seq_idx=segments[None])[0]
    return out[0].to(x.dtype)


def _launch_backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, segments: Tensor,
    out: Tensor, dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_bwd

    rows = dout[None], x[None], dt[None], A, B[None], C[None], out[None]
    dx, ddt, dA, dB, dC, dD, *_ = _mamba_chunk_scan_combined_bwd(*rows, _CHUNK, D=D, seq_idx=segments[None])
    dD = x.new_empty(0) if D is None else dD.to(D.dtype)
    return dx[0].to(x.dtype), ddt[0].to(dt.dtype), dA.to(A.dtype), dB[0].to(B.dtype), dC[0].to(C.dtype), dD


_forward = operator("mamba_ssm_ssd", _launch_forward, lambda x, *_: torch.empty_like(x))
_backward = operator(
    "mamba_ssm_ssd_backward",
    _launch_backward,
    lambda x, dt, A, B, C, D, *_: (
        *(torch.empty_like(y) for y in (x, dt, A, B, C)),
        x.new_empty(0) if D is None else torch.empty_like(D),
    ),
)
