"""Rotary position embedding in plain torch, with autograd: what runs where Triton does not.

The rotation of a pair (a, b) by the angle of its token and channel is (a cos - b sin, b cos + a sin), Su et al. 2021,
"RoFormer", eq. 34. Arithmetic is float32 for half-width inputs, rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R channels of each head; the others pass through.

    Args:
        x: [..., T, H, D].
        cos, sin: [..., T, R/2].
        interleaved: pairs are channels (2i, 2i+1) rather than (i, i + R/2).

    Returns:
        [..., T, H, D], dtype of x.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(exact), x[..., 2 * half :]
    cos, sin = cos.to(exact).unsqueeze(-2), sin.to(exact).unsqueeze(-2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out.to(x.dtype), rest), dim=-1)


def normalize(x: Tensor, weight: Tensor, eps: float, *, over_heads: bool = False) -> Tensor:
    """Root-mean-square norm of each head [D], or with ``over_heads`` of all heads together [H, D].

    ``x / sqrt(mean(x^2) + eps) * weight``: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.

    Args:
        x: [..., T, H, D].
        weight: [D], or [H * D] with ``over_heads``.
        eps: added to the mean square.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mean_square = exact.square().mean((-2, -1) if over_heads else -1, keepdim=True)
    scaled = exact * (mean_square + eps).rsqrt()
    return (scaled * weight.to(exact.dtype).view(x.shape[-2:] if over_heads else x.shape[-1:])).to(x.dtype)
