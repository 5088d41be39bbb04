"""Norms in one pass: rows of norm 1 for q and k, RMSNorm with a gate behind a scan, and RMSNorm of a tile.

x [..., D] -> :func:`unit_rows` or :func:`gated_rms_norm` -> [..., D], forward and backward by one Triton kernel each.
Uncompiled layers take ten passes over memory for the same; ``torch.compile`` makes one of them by itself.
:func:`rms_norm` and :func:`rms_norm_gradients` are for operators, which have no autograd inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.operators import differentiable, operator

WIDEST = 4_096  # channels that a program holds
_ELEMENTS, _TILES = 2_048, 16  # of a tile, and tiles whose shares of dw one program adds up


def unit_rows(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, with ``eps`` where fla and transformers have it.

    Args:
        x: [..., D] of two axes or more, D at most ``WIDEST``, on a GPU.

    Returns:
        The shape and dtype of x, contiguous; float32 in between.
    """
    found: Tensor = _apply(x, None, None, eps, 1, False)
    return found


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, silu: bool) -> Tensor:
    """``weight x / sqrt(mean(x^2) + eps) f(gate)`` over the last axis, f silu or sigmoid.

    Args:
        x, gate: [..., D] of two axes or more, of one shape, D at most ``WIDEST``, on a GPU; weight: [D].

    Returns:
        The shape and dtype of x, contiguous; float32 in between.
    """
    found: Tensor = _apply(x, weight, gate, eps, x.shape[-1], silu)
    return found


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Returns ``weight x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of x, without a gradient.

    Args:
        x: [..., D] of two axes or more, D at most ``WIDEST``, on a GPU; weight: [D], of any dtype.
    """
    found: Tensor = _forward(x, weight, None, eps, x.shape[-1], False)
    return found


def rms_norm_gradients(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the weight of :func:`rms_norm`, in their dtypes, from that of its result."""
    dx, dweight, _ = _backward(x, weight, None, dy, eps, x.shape[-1], False)
    return dx, dweight


def _rows(*given: Tensor | None) -> list[tuple[Tensor | None, int, int]]:
    """Each tensor as [T, HEADS, D] with unit stride along D, without a copy where that can be, and its strides.

    HEADS is 1 where the rows of each tensor lie at equal distances: a kernel is compiled for each number of heads, and
    there an axis of tokens may stand.
    """
    laid = [x if x is None else x.unsqueeze(1) if x.ndim == 2 else x.flatten(0, -3) for x in given]
    laid = [x if x is None or x.stride(2) == 1 else x.contiguous() for x in laid]
    if all(x is None or len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1) for x in laid):
        laid = [x if x is None else x.flatten(0, 1).unsqueeze(1) for x in laid]
    return [(x, 0, 0) if x is None else (x, x.stride(0), x.stride(1)) for x in laid]


def _sizes(x: Tensor, weight: Tensor | None, gate: Tensor | None, count: int, silu: bool) -> dict[str, Any]:
    block = 1 << (x.shape[2] - 1).bit_length()
    return {
        "HEADS": x.shape[1], "D": x.shape[2], "COUNT": count, "WEIGHT": weight is not None,
        "GATE": gate is not None, "SILU": silu, "ROWS": max(1, _ELEMENTS // block), "BLOCK": block,
    }  # fmt: skip


def _launch_forward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, count: int, silu: bool
) -> Tensor:
    from torch_backend.ops.norm import norm_kernels as kernels

    y = x.new_empty(x.shape)
    (laid, *x_strides), (gates, *z_strides) = _rows(x, gate)
    assert laid is not None
    sizes, rows = _sizes(laid, weight, gate, count, silu), laid.shape[0] * laid.shape[1]
    grid = (-(-rows // sizes["ROWS"]),)
    kernels.forward[grid](laid, weight, gates, y, eps, rows, *x_strides, *z_strides, **sizes)
    return y


def _launch_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, eps: float, count: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_backend.ops.norm import norm_kernels as kernels

    (laid, *x_strides), (gates, *z_strides), (dys, *dy_strides) = _rows(x, gate, dy)
    assert laid is not None
    sizes, rows = _sizes(laid, weight, gate, count, silu), laid.shape[0] * laid.shape[1]
    programs = -(-rows // (sizes["ROWS"] * _TILES))
    dx, dgate = x.new_empty(x.shape), x.new_empty(0 if gate is None else gate.shape)
    dweight = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    kernels.backward[programs,](
        laid, weight, gates, dys, dx, dweight, dgate, eps, rows, *x_strides, *z_strides, *dy_strides,
        **sizes, TILES=_TILES,
    )  # fmt: skip
    return dx, dx.new_empty(0) if weight is None else dweight.sum(0).to(weight.dtype), dgate


def _fake_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    def like(y: Tensor | None) -> Tensor:
        return x.new_empty(0) if y is None else y.new_empty(y.shape)

    return like(x), like(weight), like(gate)


_forward = operator("row_norm", _launch_forward, lambda x, *_: x.new_empty(x.shape))
_backward = operator("row_norm_backward", _launch_backward, _fake_backward)
_apply = differentiable(_forward, _backward, tensors=3)
