"""Rotary position embedding of queries and keys, with the norm before it if asked: the autograd entry.

q [T, H, D], k, per-token cos and sin (positions restart at each segment, so the angles carry the packing) ->
:func:`apply_rope` -> rotated q and k. One Triton launch turns both, forward and backward, and copies nothing; where
Triton does not run, ``torch_backend.rope.reference`` does the same in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packing_core.errors import LayoutError
from torch_backend.operators import operator, runs_triton
from torch_backend.rope import reference

# Elements of one half-tile [tokens, heads, R/2], warps that work on it (16 bytes of each half a thread), and its heads
# at most: measured on an H200 (benchmarks/RESULTS.md).
_TILE, _WARPS, _HEADS = 1024, 4, 8
_PROGRAMS = 264  # of the norm's backward, each keeps one partial weight gradient: two per multiprocessor of an H200


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
        norm: normalise before rotating, in the same kernel.

    Returns:
        q and k rotated, shapes and dtypes as given; new tensors are contiguous.

    Raises:
        LayoutError: shapes contradict each other, or ``inplace`` is asked of something that must not be overwritten.
    """
    _check(q, k, cos, sin, inplace, norm)
    if not runs_triton(q):
        return _apply_reference(q, k, cos, sin, interleaved, inplace, norm)
    if inplace:
        return _RotateInPlace.apply(q, k, cos, sin, interleaved)
    if norm is not None:
        weights = norm.q_weight, norm.k_weight
        return _NormalizeRotate.apply(q, k, *weights, cos, sin, interleaved, norm.over_heads, norm.eps)
    return _Rotate.apply(q, k, cos, sin, interleaved)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rope(q, k, cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, True), None, None, None


class _RotateInPlace(_Rotate):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.mark_dirty(q, k)
        _rope_inplace(q, k, cos, sin, interleaved)
        return q, k


class _NormalizeRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs[:6])
        ctx.options = inputs[6:]
        return _rope_norm(*inputs)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin = ctx.saved_tensors
        dq, dq_weight = _rope_norm_backward(q, dq, q_weight, cos, sin, *ctx.options)
        dk, dk_weight = _rope_norm_backward(k, dk, k_weight, cos, sin, *ctx.options)
        return dq, dk, dq_weight, dk_weight, None, None, None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inplace: bool, norm: QKNorm | None) -> None:
    if q.ndim not in (3, 4) or k.ndim != q.ndim or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise LayoutError(
            "apply_rope takes q [T, H, D] and k [T, K, D], with or without one batch dimension: "
            + _shapes(q, k, cos, sin)
        )
    rows = q.shape[:-2]
    if cos.shape != sin.shape or cos.shape[:-1] not in (rows, (1, *rows[1:])):
        raise LayoutError(f"cos and sin must be [T, R/2], one row of angles per token: {_shapes(q, k, cos, sin)}")
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise LayoutError(
            f"cos holds {cos.shape[-1]} angles and a head of {q.shape[-1]} channels has {q.shape[-1] // 2} pairs: "
            "pass half-width angles, cos[..., : R // 2]"
        )
    if norm is not None:
        if inplace:
            raise LayoutError("norm keeps its input for the backward, so it cannot run in place: pass inplace=False")
        for name, x, weight in (("q_weight", q, norm.q_weight), ("k_weight", k, norm.k_weight)):
            width = x.shape[-1] * (x.shape[-2] if norm.over_heads else 1)
            if weight.shape != (width,):
                raise LayoutError(f"norm.{name} must be [{width}], got {list(weight.shape)}")
    if inplace and torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k)):
            if x.requires_grad and (x.is_leaf or x._is_view()):
                raise LayoutError(
                    f"{name} is a {'leaf' if x.is_leaf else 'view of another tensor'} that records a gradient, "
                    "so it cannot be overwritten: pass inplace=False"
                )


def _shapes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"


def _apply_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool, norm: QKNorm | None
) -> tuple[Tensor, Tensor]:
    inputs = q, k
    if norm is not None:
        q = reference.normalize(q, norm.q_weight, norm.eps, over_heads=norm.over_heads)
        k = reference.normalize(k, norm.k_weight, norm.eps, over_heads=norm.over_heads)
    q, k = (reference.rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return (inputs[0].copy_(q), inputs[1].copy_(k)) if inplace else (q, k)


# Launchers. Everything below sees [T, ., .] or [B, T, ., .] tensors that were checked above.


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _batches(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors without a batch dimension: merged into the tokens if all strides allow that, else row by row."""
    if tensors[0].ndim == 3:
        return [tensors]
    size = tensors[0].shape[0]
    if size == 1:
        return [tuple(x[0] for x in tensors)]
    tensors = tuple(x.expand(size, *x.shape[1:]) for x in tensors)
    if all(x.stride(0) == x.shape[1] * x.stride(1) for x in tensors):
        return [tuple(x.flatten(0, 1) for x in tensors)]
    return list(zip(*(x.unbind(0) for x in tensors), strict=True))


def _launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    conjugate: bool = False,
    weights: tuple[Tensor, Tensor] | None = None,
    over_heads: bool = False,
    eps: float = 0.0,
) -> None:
    from torch_backend.rope import triton as kernels

    half = cos.shape[-1]
    pairs = _power_of_two(half)
    head_dim = q.shape[-1]
    copies = weights is not None or q_out.data_ptr() != q.data_ptr()
    rest = _power_of_two(head_dim - 2 * half) if head_dim > 2 * half and copies else 0
    most_heads = _power_of_two(max(q.shape[-2], k.shape[-2]))
    block_h = most_heads if over_heads else min(most_heads, _HEADS)
    block_t = max(1, _TILE // (block_h * pairs))
    q_weight, k_weight = weights or (q, k)  # not read without weights
    for row in _batches(q, k, q_out, k_out, cos, sin):
        tokens, h_q, _ = row[0].shape
        h_k = row[1].shape[1]
        tiles = -(-h_q // block_h) + -(-h_k // block_h)
        kernels.rotate[-(-tokens // block_t) * tiles,](
            *row[:4], q_weight, k_weight, *row[4:], tokens, *(stride for x in row for stride in x.stride()), eps,
            h_q, h_k, head_dim, half, pairs, rest, interleaved, conjugate, weights is not None, over_heads,
            block_t, block_h, num_warps=_WARPS,
        )  # fmt: skip


def _rope_launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch(q, k, q_out, k_out, cos, sin, interleaved, conjugate)
    return q_out, k_out


def _rope_inplace_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    _launch(q, k, q, k, cos, sin, interleaved)


def _rope_norm_launch(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    over_heads: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch(q, k, q_out, k_out, cos, sin, interleaved, False, (q_weight, k_weight), over_heads, eps)
    return q_out, k_out


def _rope_norm_backward_launch(
    x: Tensor, dout: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, over_heads: bool, eps: float
) -> tuple[Tensor, Tensor]:
    from torch_backend.rope import triton as kernels

    *_, heads, head_dim = x.shape
    half = cos.shape[-1]
    pairs = _power_of_two(half)
    rest = _power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0
    block_h = _power_of_two(heads) if over_heads else min(_power_of_two(heads), _HEADS)
    block_t = max(1, _TILE // (block_h * pairs))
    dx = x.new_empty(x.shape)
    batches = _batches(x, dout, dx, cos, sin)
    programs = max(1, min(_PROGRAMS, -(-batches[0][0].shape[0] // block_t)))
    partial = x.new_empty((len(batches), programs, heads, head_dim), dtype=torch.float32)
    for (x_row, dout_row, dx_row, cos_row, sin_row), dweight in zip(batches, partial, strict=True):
        kernels.normalize_backward[programs, -(-heads // block_h)](
            x_row, dout_row, dx_row, weight, dweight, cos_row, sin_row, x_row.shape[0],
            *x_row.stride(), *dout_row.stride(), *dx_row.stride(), *cos_row.stride(), *sin_row.stride(), eps,
            heads, head_dim, half, pairs, rest, interleaved, over_heads, block_t, block_h, num_warps=_WARPS,
        )  # fmt: skip
    dweight = partial.sum((0, 1)).flatten() if over_heads else partial.sum((0, 1, 2))
    return dx, dweight.to(weight.dtype)


_rope = operator(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool conjugate) -> (Tensor, Tensor)",
    _rope_launch,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
_rope_inplace = operator(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()",
    _rope_inplace_launch,
    lambda *_: None,
)
_rope_norm = operator(
    "rope_norm(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, bool interleaved, "
    "bool over_heads, float eps) -> (Tensor, Tensor)",
    _rope_norm_launch,
    lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
)
_rope_norm_backward = operator(
    "rope_norm_backward(Tensor x, Tensor dout, Tensor weight, Tensor cos, Tensor sin, bool interleaved, "
    "bool over_heads, float eps) -> (Tensor, Tensor)",
    _rope_norm_backward_launch,
    lambda x, dout, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
