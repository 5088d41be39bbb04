"""Experts by Triton: launches the kernels of :mod:`.triton_kernels`, for any width, layout and top-k.

The gather is part of the loads of the first product; activations, biases and adapters are part of the products. Tiles
are chosen from the mean number of tokens per expert, which the host knows; how tokens really spread is known to the
device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_backend.ops import operators
from torch_backend.ops.experts.products import Between, LowRank, Places, Products
from torch_backend.ops.experts.request import ExpertsRequest
from torch_backend.ops.operators import TRITON, runs_triton

_ENTRIES, _PART = 128, 64  # entries of a program that sorts, and experts that it counts at once


class TileSize(NamedTuple):
    """Rows, columns and depth of a program's tile, with its warps and stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8


# By the mean number of tokens per expert, up to which they hold: a tile that is taller than most experts' tokens
# multiplies rows of nobody, and a low one reads the weights more often.
ROWS = (
    (24, TileSize(16, 128, 128, 4, 4)),
    (96, TileSize(64, 128, 64, 4, 4)),
    (2**62, TileSize(128, 256, 64, 8, 3)),
)
# Gates and values are two tiles of this size side by side.
GATED = (
    (24, TileSize(16, 64, 128, 4, 4)),
    (96, TileSize(64, 128, 64, 8, 3)),
    (2**62, TileSize(128, 128, 64, 8, 3)),
)
# The backward of the activation holds more per element.
BACKWARD = (
    (24, TileSize(16, 64, 128, 4, 4)),
    (96, TileSize(64, 64, 64, 4, 4)),
    (2**62, TileSize(128, 64, 64, 8, 4)),
)
# Sums over an expert's places; the depth is a part of them.
OUTER = ((96, TileSize(128, 128, 32, 8, 3)), (2**62, TileSize(128, 128, 64, 8, 3)))


class TritonExperts(Products):
    def supports(self, request: ExpertsRequest) -> str | None:
        if not TRITON:
            return "Triton is not installed"
        if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"{str(request.dtype).removeprefix('torch.')} has no kernels"
        if not runs_triton(torch.empty(0, dtype=request.dtype, device=request.device)):
            return "its kernels run on GPUs"
        if request.tokens * request.top_k >= 2**31:
            return "places are numbered in 32 bits"
        return None

    def route(self, indices: Tensor, experts: int) -> Places:
        from torch_backend.ops.experts import triton_kernels as kernels

        entries = indices.numel()
        blocks = -(-entries // _ENTRIES)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": indices.device}
        counts = torch.empty(experts, blocks, **integers)
        kernels.count[blocks,](indices, counts, entries, blocks, experts, _ENTRIES, _PART, num_warps=4)
        ends = counts.flatten().cumsum(0, dtype=torch.int32)
        order, offsets = torch.zeros(entries, **integers), torch.empty(experts + 1, **integers)
        places = torch.empty(indices.shape, **integers)
        kernels.place[blocks,](
            indices, ends, order, places, offsets, entries, blocks, experts, _ENTRIES, _PART, num_warps=4
        )
        return Places(order, places, offsets, indices)

    def rows(
        self,
        a: Tensor,
        w: Tensor,
        routing: Places,
        *,
        gather: bool = False,
        bias: Tensor | None = None,
        adapter: LowRank | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        y = a.new_empty(routing.order.shape[0], w.shape[1])
        self.add_rows(a, w, routing, y, gather=gather, bias=bias, adapter=adapter, scale=scale, add=False)
        return y

    def add_rows(
        self,
        a: Tensor | None,
        w: Tensor | None,
        routing: Places,
        y: Tensor,
        *,
        gather: bool = False,
        bias: Tensor | None = None,
        adapter: LowRank | None = None,
        scale: float = 1.0,
        add: bool = True,
    ) -> None:
        """:meth:`rows` into y, or added to it; without a, the bias and the adapter alone."""
        from torch_backend.ops.experts import triton_kernels as kernels

        sizes = _sizes(routing)
        tile = _tile(ROWS, routing, y)
        block_n = min(tile.n, max(16, _power(y.shape[1])))
        depth = 0 if a is None else a.shape[1]
        tiles = _tiles(routing, tile.m)
        kernels.rows[tiles * -(-y.shape[1] // block_n),](
            a, w, bias, *_pair(adapter), routing.order, routing.offsets, y, tiles, scale, *_strides(w),
            *_strides(None if adapter is None else adapter.b),
            N=y.shape[1], K=depth, R=_rank(adapter), TOP_K=routing.top_k, **sizes, GATHER=gather,
            BIAS=bias is not None, ADD=add, PRECISION=_precision(y), BLOCK_M=tile.m, BLOCK_N=block_n,
            BLOCK_K=_depth(tile.k, depth), BLOCK_R=_depth(tile.k, _rank(adapter)), GROUP=tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def up(
        self,
        x: Tensor,
        w: Tensor,
        routing: Places,
        *,
        bias: Tensor | None,
        adapter: LowRank | None,
        between: Between,
    ) -> tuple[Tensor, Tensor]:
        from torch_backend.ops.experts import triton_kernels as kernels

        places, outer = routing.order.shape[0], w.shape[1]
        inner = outer // 2 if between.activation.gated else outer
        z, h = x.new_empty(places, outer), x.new_empty(places, inner)
        tile = _tile(GATED if between.activation.gated else ROWS, routing, x)
        block_n = min(tile.n, max(16, _power(inner)))
        tiles = _tiles(routing, tile.m)
        kernels.up[tiles * -(-inner // block_n),](
            x, w, bias, *_pair(adapter), routing.order, routing.offsets, z, h, tiles, *_numbers(between),
            *_strides(w), *_strides(None if adapter is None else adapter.b),
            INNER=inner, K=x.shape[1], R=_rank(adapter), TOP_K=routing.top_k, **_sizes(routing),
            BIAS=bias is not None, SAVE=True, PRECISION=_precision(x), **_kind(between),
            BLOCK_M=tile.m, BLOCK_N=block_n, BLOCK_K=_depth(tile.k, x.shape[1]),
            BLOCK_R=_depth(tile.k, _rank(adapter)), GROUP=tile.group, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return z, h

    def down_backward(
        self,
        dy: Tensor,
        w: Tensor,
        z: Tensor,
        weights: Tensor,
        routing: Places,
        *,
        bias: Tensor | None,
        adapter: LowRank | None,
        between: Between,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weighted = z.new_empty(z.shape[0], w.shape[1])
        return self.activation_backward(dy, w, z, weighted, weights, routing, bias, adapter, between, multiply=True)

    def activation_backward(
        self,
        dy: Tensor,
        w: Tensor,
        z: Tensor,
        weighted: Tensor,
        weights: Tensor,
        routing: Places,
        bias: Tensor | None,
        adapter: LowRank | None,
        between: Between,
        *,
        multiply: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`down_backward`; without ``multiply``, the product ``dy w^T`` is already in ``weighted``."""
        from torch_backend.ops.experts import triton_kernels as kernels

        inner, places, depth = w.shape[1], z.shape[0], dy.shape[1] if multiply else 0
        tile = _tile(BACKWARD, routing, z)
        block_n = min(tile.n, max(16, _power(inner)))
        tiles, wide = _tiles(routing, tile.m), -(-inner // block_n)
        dz = torch.empty_like(z)
        shares = z.new_empty(places, wide, dtype=torch.float32)
        kernels.down_backward[tiles * wide,](
            dy, w, *_pair(adapter), z, weights, routing.order, routing.offsets, dz, weighted, shares, tiles,
            *_numbers(between), *_strides(w), *_strides(None if adapter is None else adapter.b),
            INNER=inner, K=depth, R=_rank(adapter), TOP_K=routing.top_k, **_sizes(routing),
            PRECISION=_precision(z), **_kind(between), BLOCK_M=tile.m, BLOCK_N=block_n,
            BLOCK_K=_depth(tile.k, depth), BLOCK_R=_depth(tile.k, _rank(adapter)), GROUP=tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        routed = routing.places >= 0
        by_entry = shares.sum(1)[routing.places.clamp(min=0)]
        gradient = torch.where(routed, by_entry, 0.0)
        if bias is not None:
            entries = gradient.numel()
            kernels.bias_shares[-(-entries // 16),](
                dy, bias, routing.places, routing.indices, gradient, entries, dy.shape[1], routing.top_k,
                bias.shape[0], 16, 128, num_warps=4,
            )  # fmt: skip
        return dz, weighted, gradient

    def outer(
        self,
        a: Tensor,
        b: Tensor,
        routing: Places,
        like: Tensor,
        *,
        gather_a: bool = False,
        gather_b: bool = False,
    ) -> Tensor:
        from torch_backend.ops.experts import triton_kernels as kernels

        out = torch.empty_like(like)
        experts, m, n = like.shape
        tile = _tile(OUTER, routing, a)
        block_m, block_n = (min(block, max(16, _power(size))) for block, size in ((tile.m, m), (tile.n, n)))
        kernels.outer[-(-m // block_m) * -(-n // block_n), experts](
            a, b, routing.order, routing.offsets, out, *out.stride(), m, n, routing.top_k, gather_a, gather_b,
            _precision(a), block_m, block_n, tile.k, tile.group, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    def sums(self, a: Tensor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        from torch_backend.ops.experts import triton_kernels as kernels

        experts, n = like.shape
        out = a.new_empty(experts, n, dtype=torch.float32)
        kernels.sums[-(-n // 64), experts](
            a, weights, routing.order, routing.offsets, out, n, routing.top_k, weights is not None,
            weights is not None, 64, 64, num_warps=4,
        )  # fmt: skip
        return out.to(like.dtype)

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        from torch_backend.ops.experts import triton_kernels as kernels

        tokens, width = routing.places.shape[0], y.shape[1]
        out = y.new_empty(tokens, width)
        block = min(1_024, max(16, _power(width)))
        kernels.combine[tokens, -(-width // block)](
            y, routing.places, weights, out, tokens, width, routing.top_k, weights is not None, 1, block, num_warps=4
        )
        return out


def gathered(x: Tensor, routing: Places) -> Tensor:
    """[S, D]: each place's token of x [T, D]."""
    from torch_backend.ops.experts import triton_kernels as kernels

    places, width = routing.order.shape[0], x.shape[1]
    out = x.new_empty(places, width)
    block = min(1_024, max(16, _power(width)))
    kernels.gather[-(-places // 4), -(-width // block)](
        x, routing.order, routing.offsets, out, width, routing.top_k, routing.offsets.shape[0] - 1, 4, block,
        num_warps=4,
    )  # fmt: skip
    return out


def activate(z: Tensor, bias: Tensor | None, routing: Places, between: Between) -> Tensor:
    """The activation [S, I] of a first product z [S, O], which gets its bias in place."""
    from torch_backend.ops.experts import triton_kernels as kernels

    inner = z.shape[1] // 2 if between.activation.gated else z.shape[1]
    h = z.new_empty(z.shape[0], inner)
    block = min(128, max(16, _power(inner)))
    tiles = _tiles(routing, 32)
    kernels.activate[tiles, -(-inner // block)](
        z, bias, h, routing.offsets, tiles, *_numbers(between), INNER=inner, **_sizes(routing),
        BIAS=bias is not None, **_kind(between), BLOCK_M=32, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return h


def _tile(table: tuple[tuple[int, TileSize], ...], routing: Places, x: Tensor) -> TileSize:
    if operators.INTERPRETED:  # small, so that tests of a few tokens have several
        return TileSize(16, 16, 16, 4, 1, 2)
    if x.element_size() > 2:  # float32 by exact products, which take twice the memory
        return TileSize(64, 64, 32, 4, 2)
    mean = routing.order.shape[0] / (routing.offsets.shape[0] - 1)
    return next(tile for up_to, tile in table if mean <= up_to)


def _tiles(routing: Places, block: int) -> int:
    """An upper bound of the tiles of ``block`` places: each expert's last one may be partly filled."""
    places, experts = routing.order.shape[0], routing.offsets.shape[0] - 1
    return min(places, places // block + experts)


def _sizes(routing: Places) -> dict[str, int]:
    experts = routing.offsets.shape[0] - 1
    return {"EXPERTS": experts, "PADDED": _power(experts)}


def _kind(between: Between) -> dict[str, Any]:
    kind = between.activation
    limited = kind.limit is not None
    return {"NAME": kind.name, "GATED": kind.gated, "LIMIT": limited, "INTERLEAVED": between.interleaved}


def _numbers(between: Between) -> tuple[float, float, float]:
    kind = between.activation
    return kind.alpha, kind.limit or 0.0, kind.offset


def _pair(adapter: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if adapter is None else (adapter.t, adapter.b)


def _rank(adapter: LowRank | None) -> int:
    return 0 if adapter is None else adapter.t.shape[1]


def _strides(w: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if w is None else w.stride()


def _depth(block: int, size: int) -> int:
    return min(block, max(16, _power(size)))


def _power(size: int) -> int:
    """The next power of two, 1 at least."""
    return 1 << max(0, size - 1).bit_length()


def _precision(x: Tensor) -> str:
    """Float32 products are exact unless the process allows TF32, as torch's own are."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


TRITON_EXPERTS = TritonExperts()
