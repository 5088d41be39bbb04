"""Norms of hybrid layers in one pass: rows of norm 1 for q and k, and RMSNorm with a gate behind a scan.

x [..., D] -> :func:`unit_rows` or :func:`gated_rms_norm` -> [..., D], forward and backward by one Triton kernel each.
Uncompiled layers take ten passes over memory for the same; ``torch.compile`` makes one of them by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_backend.ops.operators import operator

WIDEST = 4_096  # channels that a program holds
_ELEMENTS, _TILES = 2_048, 16  # of a tile, and tiles whose shares of dw one program adds up


def unit_rows(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, with ``eps`` where fla and transformers have it.

    Args:
        x: [..., D] of two axes or more, D at most ``WIDEST``, on a GPU.

    Returns:
        The shape and dtype of x, contiguous; float32 in between.
    """
    found: Tensor = _Norm.apply(x, None, None, eps, 1, False)
    return found


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, *, eps: float, silu: bool) -> Tensor:
    """``weight x / sqrt(mean(x^2) + eps) f(gate)`` over the last axis, f silu or sigmoid.

    Args:
        x, gate: [..., D] of two axes or more, of one shape, D at most ``WIDEST``, on a GPU; weight: [D].

    Returns:
        The shape and dtype of x, contiguous; float32 in between.
    """
    found: Tensor = _Norm.apply(x, weight, gate, eps, x.shape[-1], silu)
    return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, gate: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.options = options
        found: Tensor = _forward(x, weight, gate, *options)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        dx, dweight, dgate = _backward(x, weight, gate, dy, *ctx.options)
        return dx, None if weight is None else dweight, None if gate is None else dgate, None, None, None


def _rows(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """x as [T, HEADS, D] with unit stride along D, without a copy where that can be, and its strides."""
    if x is None:
        return None, 0, 0
    heads = x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    return heads, heads.stride(0), heads.stride(1)


def _sizes(x: Tensor, weight: Tensor | None, gate: Tensor | None, count: int, silu: bool) -> dict[str, Any]:
    block = 1 << (x.shape[2] - 1).bit_length()
    return {
        "HEADS": x.shape[1], "D": x.shape[2], "COUNT": count, "WEIGHT": weight is not None,
        "GATE": gate is not None, "SILU": silu, "ROWS": max(1, _ELEMENTS // block), "BLOCK": block,
    }  # fmt: skip


def _launch_forward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, count: int, silu: bool
) -> Tensor:
    from torch_backend.ops.norm import triton as kernels

    y = x.new_empty(x.shape)
    (laid, *x_strides), (gates, *z_strides) = _rows(x), _rows(gate)
    assert laid is not None
    sizes, rows = _sizes(laid, weight, gate, count, silu), laid.shape[0] * laid.shape[1]
    grid = (-(-rows // sizes["ROWS"]),)
    kernels.forward[grid](laid, weight, gates, y, eps, rows, *x_strides, *z_strides, **sizes)
    return y


def _launch_backward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, dy: Tensor, eps: float, count: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_backend.ops.norm import triton as kernels

    (laid, *x_strides), (gates, *z_strides), (dys, *dy_strides) = _rows(x), _rows(gate), _rows(dy)
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


_forward = operator(
    "row_norm(Tensor x, Tensor? weight, Tensor? gate, float eps, int count, bool silu) -> Tensor",
    _launch_forward,
    lambda x, *_: x.new_empty(x.shape),
)
_backward = operator(
    "row_norm_backward(Tensor x, Tensor? weight, Tensor? gate, Tensor dy, float eps, int count, bool silu) "
    "-> (Tensor, Tensor, Tensor)",
    _launch_backward,
    _fake_backward,
)
