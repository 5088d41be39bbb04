"""mamba_ssm's kernels of Mamba-2's scan as operators: compilers do not look inside, CUDA graphs record them.

x, dt, A, B, C, D and the batch's metadata -> :func:`ssd` -> [T, H, P]. The kernels find the segments in ``seq_idx`` and
read nothing back. They are tuned at their first call, which has to be outside of a graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.ops.operators import differentiable, operator
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
    found: Tensor = _ssd(x, dt.float(), A.float(), B.to(x.dtype), C.to(x.dtype), D, packed.seq_idx)
    return found


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
_ssd = differentiable(_forward, _backward, tensors=7, contiguous=True, keeps_outputs=True)
