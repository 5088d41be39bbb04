"""Rotary position embedding of queries and keys, optionally with the norm before it: the autograd entry.

q [T, H, D], k, per-token cos and sin (positions restart at each segment, so the angles carry the packing) ->
:func:`apply_rope` -> rotated q and k. One Triton launch turns both, forward and backward, and copies nothing; where
Triton does not run, ``torch_backend.ops.rope.reference`` does the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.ops.operators import runs_triton
from torch_backend.ops.rope import launch, reference


@dataclass(frozen=True)
class QKNorm:
    """The root-mean-square norm that some models put between projection and rotation.

    Attributes:
        q_weight, k_weight: [D] per head (Qwen3; Gemma-3 with ``1 + weight``); [H * D] and [K * D] with ``over_heads``.
        eps: added to the mean square.
        over_heads: one norm over all heads of a token (OLMo-2).
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float = 1e-6
    over_heads: bool = False


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    heads_first: bool = False,
    norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of every head of q and k by their token's angles.

    Args:
        q: [T, H, D] or [B, T, H, D], any strides, bfloat16, float16, float32 or float64.
        k: [T, K, D] or [B, T, K, D].
        cos, sin: [T, R/2], or [B, T, R/2] or [1, T, R/2] beside a batch dimension: half width, one angle per pair; any
            floating dtype. R = D rotates whole heads, a smaller one part of them. They get no gradient.
        interleaved: pairs are channels (2i, 2i+1), as in GPT-J, rather than (i, i + R/2), as in GPT-NeoX and Llama.
        inplace: overwrite q and k and return them; they must own their memory where a gradient is recorded.
        heads_first: q is [H, T, D] or [B, H, T, D] and k likewise, as transformers holds them.
        norm: normalise before rotating, in the same kernel.

    Returns:
        q and k rotated, shapes and dtypes as given; new tensors are contiguous, or transposed views
        of contiguous ones with ``heads_first``.

    Raises:
        LayoutError: shapes contradict each other, or ``inplace`` is set for something that must not be overwritten.
    """
    weights = () if norm is None else (norm.q_weight, norm.k_weight)
    over_heads = norm is not None and norm.over_heads
    shapes = q.shape, k.shape, cos.shape, sin.shape, tuple([x.shape for x in weights]), over_heads, heads_first
    # a compiler traces the checks; an eager call makes them once per shape
    (_check_shapes if torch.compiler.is_compiling() else _checked_shapes)(*shapes)
    recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or norm is not None)
    if inplace:
        _check_overwritten(q, k, norm, recorded)
    if not runs_triton(q):
        return _apply_reference(q, k, cos, sin, heads_first, interleaved, inplace, norm)
    if norm is not None:
        inputs = q, k, *weights, cos, sin, heads_first, interleaved, over_heads, norm.eps
        return _NormalizeRotate.apply(*inputs) if recorded else launch.rope_norm(*inputs)
    if inplace:
        if recorded:
            return _RotateInPlace.apply(q, k, cos, sin, heads_first, interleaved)
        launch.rope_inplace(q, k, cos, sin, heads_first, interleaved)
        return q, k
    if recorded:
        return _Rotate.apply(q, k, cos, sin, heads_first, interleaved)
    return launch.rope(q, k, cos, sin, heads_first, interleaved, False)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.options = heads_first, interleaved
        return launch.rope(q, k, cos, sin, *ctx.options, False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *launch.rope(dq, dk, *ctx.saved_tensors, *ctx.options, True), None, None, None, None


class _RotateInPlace(_Rotate):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.options = heads_first, interleaved
        ctx.mark_dirty(q, k)
        launch.rope_inplace(q, k, cos, sin, *ctx.options)
        return q, k


class _NormalizeRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs[:6])
        ctx.options = inputs[6:]
        return launch.rope_norm(*inputs)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        dq, dq_weight = launch.rope_norm_backward(q, dq, q_weight, cos, sin, *ctx.options)
        dk, dk_weight = launch.rope_norm_backward(k, dk, k_weight, cos, sin, *ctx.options)
        return dq, dk, dq_weight, dk_weight, None, None, None, None, None, None


def _check_shapes(
    q: Sequence[int],
    k: Sequence[int],
    cos: Sequence[int],
    sin: Sequence[int],
    weights: tuple[Sequence[int], ...],
    over_heads: bool,
    heads_first: bool,
) -> None:
    given = f"q {list(q)}, k {list(k)}, cos {list(cos)}, sin {list(sin)}"
    if heads_first and len(q) in (3, 4) and len(k) in (3, 4):
        q, k = ((*x[:-3], x[-2], x[-3], x[-1]) for x in (q, k))
    if len(q) not in (3, 4) or len(k) != len(q) or q[:-2] != k[:-2] or q[-1] != k[-1]:
        raise LayoutError(
            "apply_rope takes q [T, H, D] and k [T, K, D], or [H, T, D] and [K, T, D] with heads_first=True, "
            f"with or without one batch dimension: {given}"
        )
    rows = q[:-2]
    if cos != sin or cos[:-1] not in (rows, (1, *rows[1:])):
        raise LayoutError(f"cos and sin must be [T, R/2], one row of angles per token: {given}")
    if 2 * cos[-1] > q[-1]:
        raise LayoutError(
            f"cos holds {cos[-1]} angles and a head of {q[-1]} channels has {q[-1] // 2} pairs: "
            "pass half-width angles, cos[..., : R // 2]"
        )
    for name, shape, weight in zip(("q_weight", "k_weight"), (q, k), weights):
        width = shape[-1] * (shape[-2] if over_heads else 1)
        if tuple(weight) != (width,):
            raise LayoutError(f"norm.{name} must be [{width}], got {list(weight)}")


_checked_shapes = lru_cache(1024)(_check_shapes)


def _check_overwritten(q: Tensor, k: Tensor, norm: QKNorm | None, recorded: bool) -> None:
    if norm is not None:
        raise LayoutError("norm keeps its input for the backward, so it cannot run in place: pass inplace=False")
    for name, x in (("q", q), ("k", k)):
        if recorded and x.requires_grad and (x.is_leaf or x._is_view()):
            raise LayoutError(
                f"{name} is a {'leaf' if x.is_leaf else 'view of another tensor'} that records a gradient, "
                "so it cannot be overwritten: pass inplace=False"
            )


def _apply_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_first: bool,
    interleaved: bool,
    inplace: bool,
    norm: QKNorm | None,
) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        out = x.transpose(-3, -2) if heads_first else x
        if norm is not None and weight is not None:
            out = reference.normalize(out, weight, norm.eps, over_heads=norm.over_heads)
        out = reference.rotate(out, cos, sin, interleaved=interleaved)
        out = out.transpose(-3, -2) if heads_first else out
        return x.copy_(out) if inplace else out

    q_weight, k_weight = (None, None) if norm is None else (norm.q_weight, norm.k_weight)
    return turned(q, q_weight), turned(k, k_weight)
