"""The causal short convolution inside segments in plain torch, with autograd: what runs where Triton does not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool) -> Tensor:
    """Each channel's convolution over the last W tokens of its segment.

    Args:
        x: [T, C].
        weight: [C, W]; the last weight belongs to the current token.
        bias: [C] or None.
        positions: [T] tokens since the segment's start.
        silu: whether the activation follows.

    Returns:
        [T, C], dtype of x; float32 in between, where x is narrower.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    padded = F.pad(x.to(exact), (0, 0, width - 1, 0))
    total = torch.zeros_like(x, dtype=exact) if bias is None else bias.to(exact).expand(x.shape)
    for lag in range(width):
        taken = padded[width - 1 - lag : width - 1 - lag + x.shape[0]]
        total = total + torch.where((positions >= lag)[:, None], taken, 0) * weight[:, width - 1 - lag].to(exact)
    return (F.silu(total) if silu else total).to(x.dtype)
