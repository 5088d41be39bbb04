"""Experts by Triton: launches the kernels beside this file, for any width, layout and top-k.

The gather is part of the loads of the first product; activations, biases and adapters are part of the products. Tiles
are chosen from the mean number of tokens per expert, which the host knows; how tokens really spread is known to the
device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_backend.ops import operators
from torch_backend.ops.experts.products import Between, ByToken, ExpertProduct, Factor, Places, Products
from torch_backend.ops.experts.request import ExpertsRequest
from torch_backend.ops.operators import TRITON, runs_triton

_ENTRIES, _PART = 128, 64  # entries of a program that sorts, and experts that it counts at once


class TileSize(NamedTuple):
    """Rows, columns and depth of a program's tile, with its warps and stages.

    ``parts``: what follows the product passes over the columns in one part or in two, which takes half the registers.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    parts: int = 1
    group: int = 8


# By the mean number of tokens per expert, up to which they hold. Measured on an H100 at 64, 512 and 1,024
# (benchmarks/RESULTS.md). Few tokens leave a product bound by reading its weights, which a low tile reads more often; a
# high one multiplies rows of nobody.
ROWS = (
    (24, TileSize(16, 128, 128, 4, 4)),
    (96, TileSize(64, 256, 64, 8, 3)),
    (2**62, TileSize(128, 256, 64, 8, 4)),
)
# First halves of adapters and what else has few columns: bound by reading their rows.
NARROW = (
    (24, TileSize(16, 64, 128, 4, 4)),
    (96, TileSize(64, 64, 64, 8, 3)),
    (2**62, TileSize(128, 64, 64, 8, 4)),
)
# Gates and values are two tiles of this size side by side.
GATED = (
    (24, TileSize(16, 64, 128, 4, 4)),
    (2**62, TileSize(128, 128, 64, 8, 4)),
)
# The backward of the activation holds more per element.
BACKWARD = (
    (24, TileSize(16, 64, 128, 4, 4)),
    (2**62, TileSize(64, 64, 64, 4, 4)),
)
# The activation alone, its product being made before.
ACTIVATION = ((2**62, TileSize(64, 64, 64, 4, 1)),)
# Sums over an expert's places; the depth is a part of them.
OUTER = ((2**62, TileSize(128, 128, 64, 4, 4)),)
NARROW_OUTER = ((2**62, TileSize(128, 128, 64, 4, 4)),)
_FEW_COLUMNS = 64  # up to which a product is narrow


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
        from torch_backend.ops.experts import place_kernels as kernels

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

    def rows(self, a: Factor, by: ExpertProduct, routing: Places) -> Tensor:
        from torch_backend.ops.experts import product_kernels as kernels

        (x, gather), (n, depth) = _read(a), by.w.shape[1:]
        y = x.new_empty(routing.order.shape[0], n)
        tile = _tile(NARROW if n <= _FEW_COLUMNS else ROWS, routing, y, rank=by.rank)
        block_n = min(tile.n, max(16, _power(n)))
        tiles = _tiles(routing, tile.m)
        kernels.rows[tiles * -(-n // block_n),](
            x, by.w, by.bias, *_pair(by), routing.order, routing.offsets, y, tiles, by.scale, *_strides(by),
            N=n, K=depth, R=by.rank, TOP_K=routing.top_k, **_sizes(routing), GATHER=gather, BIAS=by.bias is not None,
            BLOCK_N=block_n, **_launch(tile, y, depth, by.rank),
        )  # fmt: skip
        return y

    def up(self, x: ByToken, by: ExpertProduct, routing: Places, between: Between) -> tuple[Tensor, Tensor]:
        from torch_backend.ops.experts import product_kernels as kernels

        tokens, places, (outer, depth) = x.x, routing.order.shape[0], by.w.shape[1:]
        gated = between.activation.gated
        inner = outer // 2 if gated else outer
        z, h = tokens.new_empty(places, outer), tokens.new_empty(places, inner)
        tile = _tile(GATED if gated else ROWS, routing, z, columns=2 if gated else 1, rank=by.rank)
        block_n = min(tile.n, max(16, _power(inner)))
        tiles = _tiles(routing, tile.m)
        kernels.up[tiles * -(-inner // block_n),](
            tokens, by.w, by.bias, *_pair(by), routing.order, routing.offsets, z, h, tiles, *_numbers(between),
            *_strides(by), INNER=inner, K=depth, R=by.rank, TOP_K=routing.top_k, **_sizes(routing),
            BIAS=by.bias is not None, **_kind(between), BLOCK_N=block_n, **_launch(tile, z, depth, by.rank),
        )  # fmt: skip
        return z, h

    def down_backward(
        self, dy: ByToken, by: ExpertProduct, z: Tensor, weights: Tensor, routing: Places, between: Between
    ) -> tuple[Tensor, Tensor, Tensor]:
        weighted = z.new_empty(z.shape[0], by.w.shape[1])
        return self.activation_backward(dy, by, z, weighted, weights, routing, between, multiply=True)

    def activation_backward(
        self,
        dy: ByToken,
        by: ExpertProduct,
        z: Tensor,
        weighted: Tensor,
        weights: Tensor,
        routing: Places,
        between: Between,
        *,
        multiply: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`down_backward`; without ``multiply``, the product ``dy w^T`` is already in ``weighted``."""
        from torch_backend.ops.experts import place_kernels, product_kernels

        inner, places, width = by.w.shape[1], z.shape[0], dy.x.shape[1]
        tile = _tile(BACKWARD if multiply else ACTIVATION, routing, z, rank=by.rank)
        block_n = min(tile.n, max(16, _power(inner)))
        tiles, wide = _tiles(routing, tile.m), -(-inner // block_n)
        dz = torch.empty_like(z)
        shares = z.new_empty(places, wide, dtype=torch.float32)
        product_kernels.down_backward[tiles * wide,](
            dy.x, by.w, *_pair(by), z, weights, routing.order, routing.offsets, dz, weighted, shares, tiles,
            *_numbers(between), *_strides(by), INNER=inner, K=width if multiply else 0, R=by.rank,
            TOP_K=routing.top_k, **_sizes(routing), **_kind(between), PARTS=tile.parts, BLOCK_N=block_n,
            **_launch(tile, z, width, by.rank),
        )  # fmt: skip
        gradient = shares.new_empty(routing.places.shape)
        entries = gradient.numel()
        place_kernels.add_shares[-(-entries // 16),](
            shares, dy.x, by.bias, routing.places, routing.indices, gradient, entries, wide, width, routing.top_k,
            by.bias is not None, 16, _power(wide), 128, num_warps=4,
        )  # fmt: skip
        return dz, weighted, gradient

    def outer(self, a: Factor, b: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        from torch_backend.ops.experts import product_kernels as kernels

        (x, gather_x), (y, gather_y) = _read(a), _read(b)
        out = torch.empty_like(like)
        experts, m, n = like.shape
        tile = _tile(NARROW_OUTER if min(m, n) <= _FEW_COLUMNS else OUTER, routing, x)
        block_m, block_n = (min(block, max(16, _power(size))) for block, size in ((tile.m, m), (tile.n, n)))
        kernels.outer[-(-m // block_m) * -(-n // block_n), experts](
            x, y, weights, routing.order, routing.offsets, out, *out.stride(), m, n, routing.top_k, gather_x, gather_y,
            weights is not None, _precision(x), block_m, block_n, tile.k, tile.group, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip
        return out

    def sums(self, a: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        from torch_backend.ops.experts import place_kernels as kernels

        (x, gather), (experts, n) = _read(a), like.shape
        out = x.new_empty(experts, n, dtype=torch.float32)
        kernels.sums[-(-n // 64), experts](
            x, weights, routing.order, routing.offsets, out, n, routing.top_k, gather, weights is not None, 64, 64,
            num_warps=4,
        )  # fmt: skip
        return out.to(like.dtype)

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        from torch_backend.ops.experts import place_kernels as kernels

        tokens, width = routing.places.shape[0], y.shape[1]
        out = y.new_empty(tokens, width)
        block = min(1_024, max(16, _power(width)))
        kernels.combine[tokens, -(-width // block)](
            y, routing.places, weights, out, tokens, width, routing.top_k, weights is not None, 1, block, num_warps=4
        )
        return out


def _read(a: Factor) -> tuple[Tensor, bool]:
    """A factor, and whether a kernel gathers its lines as it reads them."""
    return (a.x, True) if isinstance(a, ByToken) else (a, False)


def gathered(x: Tensor, routing: Places) -> Tensor:
    """[S, D]: each place's token of x [T, D]."""
    from torch_backend.ops.experts import place_kernels as kernels

    places, width = routing.order.shape[0], x.shape[1]
    out = x.new_empty(places, width)
    block = min(1_024, max(16, _power(width)))
    kernels.gather[-(-places // 4), -(-width // block)](
        x, routing.order, routing.offsets, out, width, routing.top_k, routing.experts, 4, block, num_warps=4
    )
    return out


def activate(z: Tensor, bias: Tensor | None, routing: Places, between: Between) -> Tensor:
    """The activation [S, I] of a first product z [S, O], which gets its bias in place."""
    from torch_backend.ops.experts import activation_kernels as kernels

    inner = z.shape[1] // 2 if between.activation.gated else z.shape[1]
    h = z.new_empty(z.shape[0], inner)
    block = min(128, max(16, _power(inner)))
    kernels.activate[_tiles(routing, 32), -(-inner // block)](
        z, bias, h, routing.offsets, *_numbers(between), INNER=inner, **_sizes(routing),
        BIAS=bias is not None, **_kind(between), BLOCK_M=32, BLOCK_N=block, num_warps=4,
    )  # fmt: skip
    return h


def _tile(
    table: tuple[tuple[int, TileSize], ...], routing: Places, x: Tensor, *, columns: int = 1, rank: int = 0
) -> TileSize:
    """The tile of a product of x, with as many stages of its operands as shared memory holds.

    Args:
        columns: tiles of weights side by side.
        rank: of an adapter, whose operands, if not read in stages, may be held beside the last ones of the weights.
    """
    tile = next(tile for up_to, tile in table if routing.mean <= up_to)
    if operators.INTERPRETED:  # small, so that tests of a few tokens have several
        return TileSize(16, 16, 16, 4, 1, tile.parts, 2)
    if x.element_size() > 2:  # float32 by exact products, which take twice the memory
        return TileSize(64, 64, 32, 4, 2, tile.parts)
    lines = (tile.m + columns * tile.n) * x.element_size()
    stages = (operators.shared_memory(x.device) // lines - _depth(tile.k, rank) * (rank > 0)) // tile.k
    return tile._replace(stages=max(1, min(tile.stages, stages)))


def _launch(tile: TileSize, x: Tensor, depth: int, rank: int) -> dict[str, Any]:
    """The options that every product of weights has: precision, tile, warps and stages."""
    return {
        "PRECISION": _precision(x),
        "BLOCK_M": tile.m,
        "BLOCK_K": _depth(tile.k, depth),
        "BLOCK_R": _depth(tile.k, rank),
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _tiles(routing: Places, block: int) -> int:
    """An upper bound of the tiles of ``block`` places: each expert's last one may be partly filled."""
    places = routing.order.shape[0]
    return min(places, places // block + routing.experts)


def _sizes(routing: Places) -> dict[str, int]:
    return {"EXPERTS": routing.experts, "PADDED": _power(routing.experts)}


def _kind(between: Between) -> dict[str, Any]:
    kind = between.activation
    limited = kind.limit is not None
    return {"NAME": kind.name, "GATED": kind.gated, "LIMIT": limited, "INTERLEAVED": between.interleaved}


def _numbers(between: Between) -> tuple[float, float, float]:
    kind = between.activation
    return kind.alpha, kind.limit or 0.0, kind.offset


def _pair(by: ExpertProduct) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if by.adapter is None else (by.adapter.t, by.adapter.b)


def _strides(by: ExpertProduct) -> tuple[int, ...]:
    """Returns the strides of the weights and of the adapter's second half."""
    return *by.w.stride(), *((0, 0, 0) if by.adapter is None else by.adapter.b.stride())


def _depth(block: int, size: int) -> int:
    return min(block, max(16, _power(size)))


def _power(size: int) -> int:
    """The next power of two, 1 at least."""
    return 1 << max(0, size - 1).bit_length()


def _precision(x: Tensor) -> str:
    """Float32 products are exact unless the process allows TF32, as torch's own are."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


TRITON_EXPERTS = TritonExperts()
