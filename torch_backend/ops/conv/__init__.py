"""The causal short convolution of state-space and linear-attention layers, restarted at every document.

x [T, C] and the batch's metadata -> :func:`short_convolution` -> [T, C], forward by one Triton kernel and backward by
two, so that hybrid models train packed without ``causal_conv1d``, whose build is what stops people; plain torch where
Triton does not run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.ops.conv import reference
from torch_backend.ops.forests import tails
from torch_backend.ops.operators import differentiable, operator, runs_triton
from torch_backend.segments import PackedMetadata

# A tile's tokens and channels (256 bytes of bfloat16 a row), its warps, and how many tiles a program of the backward
# sums its weight gradient over.
_TOKENS, _CHANNELS, _WARPS, _TILES = 16, 128, 4, 8


def short_convolution(
    x: Tensor, weight: Tensor, packed: PackedMetadata, *, bias: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Convolve each channel with its W weights over the tokens of the same segment, zeros before the first.

    ``y[t] = f(bias + sum over w of weight[W - 1 - w] x[t - w])`` over the lags w that stay in the segment: Gu and Dao
    2023, "Mamba", section 3.4. A segment that continues another sees the last W - 1 tokens of that.

    Args:
        x: [T, C], any strides, bfloat16, float16, float32 or float64.
        weight: [C, W], or [C, 1, W] as ``torch.nn.Conv1d`` keeps it; the last weight belongs to the current token.
        packed: the segments; they cover all T tokens.
        bias: [C].
        silu: apply silu to the result.

    Returns:
        [T, C], dtype of x, contiguous.

    Raises:
        LayoutError: shapes contradict each other.
    """
    if weight.ndim == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    given = f"x {list(x.shape)}, weight {list(weight.shape)}, bias {None if bias is None else list(bias.shape)}"
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise LayoutError(f"short_convolution takes x [T, C] and weight [C, W] or [C, 1, W], got {given}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise LayoutError(f"short_convolution takes bias [C], got {given}")
    packed.check_covers("x", x.shape[0])
    if packed.parents is not None:
        unfolded = tails(packed, weight.shape[1])
        return unfolded.run(lambda row: short_convolution(row, weight, unfolded.packed, bias=bias, silu=silu), x)
    return convolve(x, weight, bias, packed.position_ids, silu)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """Runs :func:`short_convolution` on x [T, C], given each token's place in its segment, [T], and checks nothing."""
    if not runs_triton(x):
        return reference.short_convolution(x, weight, bias, positions, silu)
    found: Tensor = _apply(x, weight, bias, positions, silu)
    return found


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    from torch_backend.ops.conv import conv_kernels as kernels

    tokens, channels = x.shape
    y = x.new_empty(x.shape)
    kernels.forward[-(-tokens // _TOKENS), -(-channels // _CHANNELS)](
        x, weight, bias, positions, y, tokens, *x.stride(), *weight.stride(),
        channels, weight.shape[1], bias is not None, silu, _TOKENS, _CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    return y


def _launch_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_backend.ops.conv import conv_kernels as kernels

    (tokens, channels), width = x.shape, weight.shape[1]
    programs = -(-tokens // (_TOKENS * _TILES))
    dx = x.new_empty(x.shape)
    dweight = x.new_empty(programs, channels, width, dtype=torch.float32)
    dbias = x.new_empty(programs, channels if bias is not None else 0, dtype=torch.float32)
    # The gradient before the activation, which the one kernel writes and the other reads at W tokens.
    dz = x.new_empty(x.shape, dtype=torch.float32) if silu else dy
    tiles = -(-channels // _CHANNELS)
    kernels.weights_backward[programs, tiles](
        x, weight, bias, positions, dy, dz, dweight, dbias, tokens, *x.stride(), *weight.stride(), *dy.stride(),
        channels, width, bias is not None, silu, 1 << (width - 1).bit_length(), _TOKENS, _CHANNELS, _TILES,
        num_warps=_WARPS,
    )  # fmt: skip
    kernels.input_backward[-(-tokens // _TOKENS), tiles](
        weight,
        positions,
        dz,
        dx,
        tokens,
        *weight.stride(),
        *dz.stride(),
        channels,
        width,
        _TOKENS,
        _CHANNELS,
        num_warps=_WARPS,
    )
    bias_dtype = weight.dtype if bias is None else bias.dtype
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(bias_dtype)


def _fake_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, dy: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


_forward = operator("short_convolution", _launch_forward, lambda x, *_: x.new_empty(x.shape))
_backward = operator("short_convolution_backward", _launch_backward, _fake_backward)
_apply = differentiable(_forward, _backward, tensors=4)
