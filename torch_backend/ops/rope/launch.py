"""Launches the rotary kernels: layouts of tensors -> a plan, made once for each -> launches -> operators.

Everything here sees [T, ., .] or [B, T, ., .] tensors that ``apply_rope`` has checked, or with ``heads_first`` states
[., T, .] or [B, ., T, .]. What follows from their layouts
alone (grid, tiles, strides, the compiled kernel) is settled at the first call and kept, so that an eager call costs
little more than its two allocations and one launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.operators import operator

# Warps that work on a tile [tokens, heads, R/2] and its heads at most, measured on an H200; the norm's backward keeps
# sums per tile. A warp takes as many pairs as leave each thread
# one wide load of either channel.
_WARPS, _HEADS, _PAIRS_OF_A_WARP = 2, 4, 256
_BACKWARD_WARPS, _BACKWARD_HEADS = 4, 8
_PROGRAMS = 264  # of the norm's backward, each keeps one partial weight gradient: two per multiprocessor of an H200
_PLANS = 1024  # that are kept; each new number of tokens makes one

# shape, strides, dtype and device of one tensor
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class Launch:
    """A kernel, its grid and every argument of it that is not a tensor.

    To find the compiled kernel of a call Triton looks at the type, value and alignment of all arguments; for forty of
    them that takes longer than the rotation of 2,000 tokens. What it finds depends on what a Launch keeps, on layouts
    and on whether tensors begin at multiples of 16 bytes, so a Launch that sees one layout asks once.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], warps: int, *scalars: float) -> None:
        self._kernel, self._grid, self._warps, self._scalars = kernel, grid, warps, scalars
        self._compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        addresses = [x.data_ptr() for x in tensors]
        aligned = reduce(or_, addresses) % 16 == 0
        if aligned and self._compiled is not None:
            self._compiled[self._grid](*addresses, *self._scalars)
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, num_warps=self._warps)
        if aligned:
            self._compiled = compiled  # None where kernels are interpreted


@lru_cache(_PLANS)
def _rotation(
    layouts: tuple[Layout, ...],
    weights: tuple[Layout, ...],
    heads_first: bool,
    interleaved: bool,
    conjugate: bool,
    copies: bool,
    over_heads: bool,
    eps: float,
) -> tuple[Launch, bool]:
    """Plans the launch of ``rotate`` on q, k, their outputs, cos and sin, and whether it goes row by row."""
    from torch_backend.ops.rope import rope_kernels as kernels

    layouts = _tokens_first(layouts, 4, heads_first)
    tokens, split = _tokens(layouts)
    *_, h_q, head_dim = layouts[0][0]
    h_k, half = layouts[1][0][-2], layouts[4][0][-1]
    pairs, rest = _power_of_two(half), _power_of_two(head_dim - 2 * half) if copies else 0
    block_t, block_h, warps = _tile(pairs, max(h_q, h_k), over_heads, _WARPS, _HEADS)
    tiles = -(-h_q // block_h) + -(-h_k // block_h)
    launch = Launch(
        kernels.rotate, (-(-tokens // block_t) * tiles, 1, 1), warps, tokens, *_strides(layouts, 4), eps,
        h_q, h_k, head_dim, half, pairs, rest, interleaved, conjugate, bool(weights), over_heads,
        _wide(layouts, 4, tokens), block_t, block_h,
    )  # fmt: skip
    return launch, split


@lru_cache(_PLANS)
def _norm_backward(
    layouts: tuple[Layout, ...],
    weight: Layout,
    heads_first: bool,
    interleaved: bool,
    over_heads: bool,
    eps: float,
) -> tuple[Launch, bool, int]:
    """Plans the launch of ``normalize_backward`` on x, dout, dx, cos, sin: row by row or not, and programs per row."""
    from torch_backend.ops.rope import rope_kernels as kernels

    layouts = _tokens_first(layouts, 3, heads_first)
    tokens, split = _tokens(layouts)
    *_, heads, head_dim = layouts[0][0]
    half = layouts[3][0][-1]
    pairs, rest = _power_of_two(half), _power_of_two(head_dim - 2 * half)
    block_t, block_h, warps = _tile(pairs, heads, over_heads, _BACKWARD_WARPS, _BACKWARD_HEADS)
    programs = max(1, min(_PROGRAMS, -(-tokens // block_t)))
    launch = Launch(
        kernels.normalize_backward, (programs, -(-heads // block_h), 1), warps, tokens, *_strides(layouts, 3), eps,
        heads, head_dim, half, pairs, rest, interleaved, over_heads, _wide(layouts, 3, tokens), block_t, block_h,
    )  # fmt: skip
    return launch, split, programs


def _layout(x: Tensor) -> Layout:
    return x.shape, x.stride(), x.dtype, x.device


def _tokens_first(layouts: tuple[Layout, ...], states: int, heads_first: bool) -> tuple[Layout, ...]:
    """The layouts with T before H in the states, which come before the angles."""
    if not heads_first:
        return layouts

    def swapped(n: Any) -> Any:
        return (*n[:-3], n[-2], n[-3], n[-1])

    turned = [(swapped(shape), swapped(stride), *rest) for shape, stride, *rest in layouts[:states]]
    return (*turned, *layouts[states:])


def _tokens(layouts: tuple[Layout, ...]) -> tuple[int, bool]:
    """The tokens of one launch, and whether each row of a batch needs its own: not if rows are evenly spaced in all."""
    *batches, tokens, _, _ = layouts[0][0]
    batch = batches[0] if batches else 1
    if batch == 1:
        return tokens, False
    if all(shape[0] == batch and stride[0] == tokens * stride[1] for shape, stride, *_ in layouts):
        return batch * tokens, False
    return tokens, True


def _tile(pairs: int, heads: int, over_heads: bool, warps: int, most_heads: int) -> tuple[int, int, int]:
    """BLOCK_T, BLOCK_H and the warps of a tile: more of them where a norm needs all heads of a token in one."""
    block_h = _power_of_two(heads) if over_heads else min(_power_of_two(heads), most_heads)
    block_t = max(1, warps * _PAIRS_OF_A_WARP // (block_h * pairs))
    return block_t, block_h, max(warps, min(16, block_t * block_h * pairs // _PAIRS_OF_A_WARP))


def _power_of_two(n: int) -> int:
    """The smallest that is not below n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def _wide(layouts: tuple[Layout, ...], states: int, tokens: int) -> bool:
    """Returns whether something lies 2^31 elements or more behind the first one."""
    sizes = [(tokens, *shape[-2 if i < states else -1 :]) for i, (shape, *_) in enumerate(layouts)]
    strides = [stride[-len(size) :] for size, (_, stride, *_) in zip(sizes, layouts, strict=True)]
    return any(
        sum((n - 1) * step for n, step in zip(size, steps, strict=True)) >= 2**31
        for size, steps in zip(sizes, strides, strict=True)
    )


def _strides(layouts: tuple[Layout, ...], states: int) -> list[int]:
    """Describes the states [.., T, H, D], which come first, and the angles [.., T, R/2]."""
    return [n for i, (_, stride, *_) in enumerate(layouts) for n in stride[-3 if i < states else -2 :]]


def _rows(tensors: tuple[Tensor, ...], split: bool) -> Iterable[tuple[Tensor, ...]]:
    if not split:
        return [tensors]
    batch = tensors[0].shape[0]
    return zip(*(x.expand(batch, *x.shape[1:]).unbind(0) for x in tensors), strict=True)


def _empty(x: Tensor, heads_first: bool) -> Tensor:
    """A new tensor like x, in memory [.., T, H, D] for every memory order of x."""
    if not heads_first:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    *_, h, t, d = x.shape
    return x.new_empty_strided(x.shape, (h * t * d, d, h * d, 1)[-x.ndim :])


def _rotate(
    tensors: tuple[Tensor, ...],
    heads_first: bool,
    interleaved: bool,
    *,
    conjugate: bool = False,
    copies: bool = True,
    weights: tuple[Tensor, ...] = (),
    over_heads: bool = False,
    eps: float = 0.0,
) -> None:
    q, k, q_out, k_out, *angles = tensors
    if q.dtype != k.dtype:  # one launch has one dtype: each beside no heads of its own
        for x, out, weight in ((q, q_out, weights[:1]), (k, k_out, weights[1:])):
            none, none_out = (each.narrow(-3 if heads_first else -2, 0, 0) for each in (x, out))
            _rotate(
                (x, none, out, none_out, *angles), heads_first, interleaved,
                conjugate=conjugate, copies=copies, weights=weight * 2, over_heads=over_heads, eps=eps,
            )  # fmt: skip
        return
    layouts, weight_layouts = tuple(map(_layout, tensors)), tuple(map(_layout, weights))
    launch, split = _rotation(
        layouts, weight_layouts, heads_first, interleaved, conjugate, copies, over_heads, eps
    )  # fmt: skip
    for row in _rows(tensors, split):
        launch(*row, *(weights or row[:2]))  # not read without a norm


def _launch_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool, conjugate: bool
) -> tuple[Tensor, Tensor]:
    out = _empty(q, heads_first), _empty(k, heads_first)
    _rotate((q, k, *out, cos, sin), heads_first, interleaved, conjugate=conjugate)
    return out


def _launch_rope_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool, interleaved: bool) -> None:
    _rotate((q, k, q, k, cos, sin), heads_first, interleaved, copies=False)


def _launch_rope_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_first: bool,
    interleaved: bool,
    over_heads: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    out = _empty(q, heads_first), _empty(k, heads_first)
    weights = q_weight.contiguous(), k_weight.contiguous()
    _rotate((q, k, *out, cos, sin), heads_first, interleaved, weights=weights, over_heads=over_heads, eps=eps)
    return out


def _launch_rope_norm_backward(
    x: Tensor,
    dout: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads_first: bool,
    interleaved: bool,
    over_heads: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    dx = _empty(x, heads_first)
    weight = weight.contiguous()
    tensors = x, dout, dx, cos, sin
    layouts = tuple(map(_layout, tensors))
    launch, split, programs = _norm_backward(layouts, _layout(weight), heads_first, interleaved, over_heads, eps)
    rows = list(_rows(tensors, split))
    heads = x.shape[-3 if heads_first else -2]
    partial = x.new_empty((len(rows), programs, heads, x.shape[-1]), dtype=torch.float32)
    for row, dweight in zip(rows, partial, strict=True):
        launch(*row, weight, dweight)
    dweight = partial.sum((0, 1)).flatten() if over_heads else partial.sum((0, 1, 2))
    return dx, dweight.to(weight.dtype)


rope = operator(
    "rope", _launch_rope, lambda q, k, cos, sin, heads_first, *_: (_empty(q, heads_first), _empty(k, heads_first))
)
rope_inplace = operator(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool heads_first, bool interleaved) -> ()",
    _launch_rope_inplace,
    lambda *_: None,
)
rope_norm = operator(
    "rope_norm",
    _launch_rope_norm,
    lambda q, k, q_weight, k_weight, cos, sin, heads_first, *_: (_empty(q, heads_first), _empty(k, heads_first)),
)
rope_norm_backward = operator(
    "rope_norm_backward",
    _launch_rope_norm_backward,
    lambda x, dout, weight, cos, sin, heads_first, *_: (_empty(x, heads_first), weight.new_empty(weight.shape)),
)
