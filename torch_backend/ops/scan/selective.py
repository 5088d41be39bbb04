"""Scans whose state is a vector per channel, over packed rows: Mamba's selective scan, and the recurrence of RG-LRU.

u, g [T, E] and the batch's metadata -> :func:`diagonal_scan` -> [T, E], forward and backward by the Triton kernels of
:mod:`.selective_kernels`. :func:`selective_scan` is Mamba's form of it. Nothing is read back from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from packing_core.errors import LayoutError, UnsupportedError
from torch_backend.ops.operators import operator, runs_triton
from torch_backend.segments import PackedMetadata

# Tokens of a chunk; numbers (tokens times channels times N) of a tile; channels whose shares of dB one program adds up.
_L, _TILE, _SHARED = 32, 4_096, 128
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # of states, that tiles take


def unsupported(u: Tensor, n: int) -> str | None:
    """Why the kernels do not serve u [T, E] with states of n numbers, None if they do."""
    if not runs_triton(u):
        return f"runs on a GPU in bfloat16, float16 and float32, not on {u.device.type} in {u.dtype}"
    return None if n in WIDTHS else f"takes states of {', '.join(map(str, WIDTHS))} numbers, not {n}"


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata, *,
    D: Tensor | None = None, z: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The state-space layer of Mamba (Gu and Dao 2023, https://arxiv.org/abs/2312.00752, section 3) in every segment.

    ``h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t``, ``y_t = (C_t . h_t + D x_t) silu(z_t)``, h = 0 before each segment.

    Args:
        x: [T, E]; dt: [T, E], bias and softplus applied; A: [E, N], negative; B, C: [T, N].
        packed: the segments; they cover all T tokens.
        D: [E], z: [T, E], or None.

    Returns:
        [T, E], dtype of x. Gradients flow to all tensors.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors.
    """
    wide = dt.float()
    y = diagonal_scan(wide * x.float(), wide, A, B, C, packed)
    if D is not None:
        y = y + D.float() * x.float()
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


def diagonal_scan(u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, packed: PackedMetadata) -> Tensor:
    """``s_t = exp(g_t A) s_{t-1} + u_t B_t``, ``y_t = C_t . s_t`` for each channel, s [N] zero before each segment.

    Args:
        u, g: [T, E]; A: [E, N], with g A at most 0; B, C: [T, N].
        packed: the segments; they cover all T tokens.

    Returns:
        [T, E], dtype of u, contiguous. Gradients flow to u, g, A, B and C.

    Raises:
        LayoutError: shapes contradict each other.
        UnsupportedError: Triton does not run on these tensors, or N is another.
    """
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("u", u), ("g", g), ("A", A), ("B", B), ("C", C)))
    channels = u.ndim == 2 and g.shape == u.shape and A.ndim == 2 and A.shape[0] == u.shape[1]
    if not (channels and B.shape == C.shape == (u.shape[0], A.shape[1])):
        raise LayoutError(f"diagonal_scan takes u, g [T, E], A [E, N] and B, C [T, N], got {shapes}")
    if packed.tokens != u.shape[0]:
        raise LayoutError(f"the segments cover {packed.tokens:,} tokens and u holds {u.shape[0]:,}")
    reason = unsupported(u, A.shape[1])
    if reason is not None:
        raise UnsupportedError(f"the diagonal scan {reason}")
    y: Tensor = _DiagonalScan.apply(u, g, A, B, C, packed.cu_seqlens, packed.seq_idx)
    return y


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        inputs = [x.contiguous() for x in arguments]
        y, through, entering = _forward(*inputs)
        ctx.save_for_backward(*inputs, through, entering)
        found: Tensor = y
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(*ctx.saved_tensors, dy.contiguous()), None, None


def _sizes(u: Tensor, A: Tensor) -> tuple[int, int, dict[str, int]]:
    """Chunks, tiles of channels, and the constants of the kernels."""
    (channels, n), block = A.shape, max(1, _TILE // (_L * A.shape[1]))
    block = min(block, 1 << (channels - 1).bit_length())
    return -(-u.shape[0] // _L), -(-channels // block), {"E": channels, "N": n, "L": _L, "BLOCK": block}


def _launch_forward(
    u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, boundaries: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_backend.ops.scan import selective_kernels as kernels

    chunks, blocks, sizes = _sizes(u, A)
    y, through, entering = _made(u, A)
    local, tokens = torch.empty_like(through), u.shape[0]
    kernels.ends[chunks, blocks](u, g, A, B, segments, local, through, tokens, **sizes)
    kernels.carry[len(boundaries) - 1, blocks](local, through, boundaries, entering, **sizes)
    kernels.output[chunks, blocks](u, g, A, B, C, segments, entering, y, tokens, **sizes)
    return y, through, entering


def _made(u: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, and [chunks, E, N] in float32 the decay over each chunk and the state that enters it. All unwritten."""
    states = u.new_empty(-(-u.shape[0] // _L), *A.shape, dtype=torch.float32)
    return torch.empty_like(u), states, torch.empty_like(states)


def _launch_backward(
    u: Tensor, g: Tensor, A: Tensor, B: Tensor, C: Tensor, boundaries: Tensor, segments: Tensor,
    through: Tensor, entering: Tensor, dy: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan import selective_kernels as kernels

    chunks, blocks, sizes = _sizes(u, A)
    tokens, local, leaving = u.shape[0], torch.empty_like(through), torch.empty_like(through)
    kernels.ends_backward[chunks, blocks](g, A, C, dy, segments, local, tokens, **sizes)
    kernels.carry_backward[len(boundaries) - 1, blocks](local, through, boundaries, leaving, **sizes)
    du, dg, dA = torch.empty_like(u), torch.empty_like(g), local
    together = max(1, min(blocks, _SHARED // sizes["BLOCK"]))
    parts = -(-blocks // together)
    dB, dC = (u.new_empty(parts, *B.shape, dtype=torch.float32) for _ in range(2))
    kernels.chunk_backward[chunks, parts](
        u, g, A, B, C, dy, segments, entering, leaving, du, dg, dA, dB, dC, tokens, **sizes, BLOCKS=together
    )
    return du, dg, dA.sum(0).to(A.dtype), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype)


_forward = operator(
    "diagonal_scan(Tensor u, Tensor g, Tensor A, Tensor B, Tensor C, Tensor boundaries, Tensor segments) "
    "-> (Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda u, g, A, *_: _made(u, A),
)
_backward = operator(
    "diagonal_scan_backward(Tensor u, Tensor g, Tensor A, Tensor B, Tensor C, Tensor boundaries, Tensor segments, "
    "Tensor through, Tensor entering, Tensor dy) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda u, g, A, B, C, *_: tuple(torch.empty_like(x) for x in (u, g, A, B, C)),
)
