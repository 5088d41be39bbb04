"""Packed attention by the project's own Triton kernels: needs torch alone and supports every option except dropout.

q, k, v and the batch's metadata -> tile sizes for the head and the device -> work lists, made once per batch ->
``torch.ops.crosspack.attention_forward`` and ``attention_backward``, which ``torch.compile`` calls without looking in.
The backward uses no atomics, so it repeats to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import UnsupportedError
from torch_backend.ops.attention.probe import Probed
from torch_backend.ops.attention.request import AttentionInputs, AttentionRequest
from torch_backend.ops.attention.triton_work import (
    LAST_TOKENS,
    key_parts,
    key_sums,
    key_tiles,
    query_parts,
    query_tiles,
)
from torch_backend.ops.operators import operator, runs_triton, shared_memory
from torch_backend.ops.recomputing import computed_once
from torch_backend.segments import LONG, PackedMetadata

LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Shape of one kernel's programs.

    Attributes:
        rows: BLOCK_M, queries times heads of a group.
        keys: BLOCK_N.
        warps, stages: of the program and of its software pipeline.
        registers: cap per thread, 0 for none.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    registers: int = 0


class KernelTiles(NamedTuple):
    forward: Tile
    queries: Tile
    keys: Tile


class Triton(Probed):
    own = parents = compiled_parents = both_ways = more_keys = True

    def refuses(self, request: AttentionRequest) -> str | None:
        probe = torch.empty(0, dtype=request.dtype, device=request.device)
        if not runs_triton(probe):
            return "needs Triton and a GPU, and bfloat16, float16 or float32"
        if request.dropout:
            return "no dropout"
        if max(request.head_dim, request.value_dim) > 512:
            return "heads of at most 512 channels"
        if request.heads // request.kv_heads > 128:
            return "at most 128 query heads per key head"
        if request.scale <= 0:
            return "needs a positive scale"
        return None

    def __call__(self, inputs: AttentionInputs, request: AttentionRequest) -> Tensor:
        if inputs.alibi_slopes is not None and inputs.alibi_slopes.requires_grad:
            raise UnsupportedError(
                'triton attention gives ALiBi slopes no gradient: pass implementation="sdpa"', option="implementation"
            )
        return packed_attention(inputs, request, choose_tiles(request))

    def prepare(self, packed: PackedMetadata, request: AttentionRequest) -> None:
        """Make the work lists, in a shape that does not depend on the segments; of shared prefixes in their own."""
        _work_lists(packed, request, choose_tiles(request), fixed_shape=True)


TRITON = Triton()


def packed_attention(inputs: AttentionInputs, request: AttentionRequest, tiles: KernelTiles) -> Tensor:
    """Attention with given tile shapes; see :func:`torch_backend.ops.attention.attention` for the rest."""
    q, k, v, packed, sinks, alibi_slopes = inputs
    lists = _work_lists(packed, request, tiles)
    q, k, v = map(_by_tokens, (q, k, v))
    options = request.causal, request.window or 0, request.softcap or 0.0, request.scale, _by_heads(packed, request)
    parts = query_parts(packed), key_parts(packed) if request.requires_grad else None
    begins, ends = (None, None) if packed.spans is None else packed.spans
    return _Attention.apply(q, k, v, sinks, alibi_slopes, *lists, *parts, begins, ends, tiles, options)


def _by_tokens(x: Tensor) -> Tensor:
    """Returns x [T, H, D], copied unless the heads of a token lie together.

    Kernels are compiled for the strides of x, which then do not depend on the number of tokens. Compiled layers, whose
    rows mostly have one length, hand x on as it is: they would keep the copy.
    """
    heads_first = x.shape[1] > 1 and x.stride(0) < x.shape[1] * x.stride(1)
    copied = x.stride(2) != 1 or (heads_first and not torch.compiler.is_compiling())
    return x.contiguous() if copied else x


def _strides(*tensors: Tensor) -> list[int]:
    """Returns the strides along tokens and heads of each tensor; that of a single head may be anything, and is 0."""
    return [stride for x in tensors for stride in (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)]


def _by_heads(packed: PackedMetadata, request: AttentionRequest) -> bool:
    """Returns whether programs of one head of keys follow each other, in place of those of all heads of a tile.

    All heads of a long document read more keys and values than an L2 cache holds: see benchmarks/RESULTS.md.
    """
    return (packed if packed.keys is None else packed.keys).long and (request.window or LONG) >= LONG


def _work_lists(
    packed: PackedMetadata, request: AttentionRequest, tiles: KernelTiles, *, fixed_shape: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Makes the work lists of forward, gradient of q (None: the forward's), and of k and v (None: no backward), and the
    list of blocks of keys whose shares are added (None: no shared prefixes)."""
    group = request.heads // request.kv_heads
    work = query_tiles(packed, tiles.forward.rows // group, fixed_shape=fixed_shape)
    if not request.requires_grad:
        return work, None, None, None
    # one list is not passed twice: torch.compile breaks its graph at a tensor that is
    same = tiles.queries.rows == tiles.forward.rows
    work_q = None if same else query_tiles(packed, tiles.queries.rows // group, fixed_shape=fixed_shape)
    work_k = key_tiles(packed, tiles.keys.keys, request.kv_heads, fixed_shape=fixed_shape)
    return work, work_q, work_k, key_sums(packed, tiles.keys.keys, request.kv_heads)


class _Attention(torch.autograd.Function):
    """q, k, v, sinks, slopes, the work lists, the parts, where spans begin and end, tiles and options -> out."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, work, work_q, work_k, sums_k, parts_q, parts_k, begins, ends, tiles, options = arguments
        out, lse = _forward(*tensors, work, parts_q, ends, list(tiles.forward), *options)
        lists = work if work_q is None else work_q, work_k, sums_k, parts_q, parts_k, begins, ends
        ctx.save_for_backward(*tensors, out, lse, *lists)
        ctx.tiles, ctx.options = tiles, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, slopes, out, lse, *lists = ctx.saved_tensors
        tiles = list(ctx.tiles.queries), list(ctx.tiles.keys)
        dout = _by_tokens(dout)
        dq, dk, dv, stats = _backward(dout, q, k, v, slopes, out, lse, *lists, *tiles, *ctx.options)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            # the sink's weight is exp(sink) over the denominator, and its value is a zero vector
            weights = (sinks.float().view(k.shape[1], 1, -1) * LOG2E - lse).exp2()
            dsinks = -(weights * stats[..., 1]).sum(1).flatten().to(sinks.dtype)
        return dq, dk, dv, dsinks, *[None] * 11


# Measured on an H200 (benchmarks/RESULTS.md); those of small shared memory fit the 99 KB of consumer cards. Tiles for
# short and for long documents apart would gain 8% at most, and the bits of a document would depend on its batch.
def choose_tiles(request: AttentionRequest) -> KernelTiles:
    """Tile shapes for a head, a dtype and a device; they do not depend on the segments, so neither do the results."""
    width = max(16, _power_of_two(max(request.head_dim, request.value_dim)))
    group = _power_of_two(request.heads // request.kv_heads)
    memory = shared_memory(request.device) or _CONSUMER  # 0: interpreted
    if request.dtype == torch.float32:
        wide = width > 128
        tile = Tile(max(16 if wide else 32, group), 16 if wide or memory < _CONSUMER else 32, 4, 1)
        return KernelTiles(tile, tile, tile)
    tiles = _LARGE if memory >= 200 * 1024 else _SMALL if memory >= _CONSUMER else _TURING
    return KernelTiles(*(tile._replace(rows=max(tile.rows, group)) for tile in tiles[width]))


_LARGE = {
    **dict.fromkeys((16, 32, 64), KernelTiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3))),
    128: KernelTiles(Tile(128, 64, 8, 2, 128), Tile(128, 32, 8, 3, 128), Tile(32, 64, 4, 3)),
    256: KernelTiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
    # compiled for sm_90: 196, 192 and 130 KB of shared memory, 0, 0 and 20 bytes of registers spilled
    512: KernelTiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 8, 2)),
}
_CONSUMER = 99 * 1024  # bytes of shared memory that one program can have on consumer cards from compute capability 8.6
_SMALL = {
    **dict.fromkeys((16, 32, 64, 128), KernelTiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2))),
    256: KernelTiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    512: KernelTiles(Tile(32, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# Fit the 64 KB of compute capability 7.5 (a T4): compiled for it in float16, at most 48 KB. Heads of 512 do not fit.
_TURING = _SMALL | {
    128: KernelTiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: KernelTiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


# Launchers


@computed_once
def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    work: Tensor,
    parts: Tensor | None,
    ends: Tensor | None,
    tile: list[int],
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    by_heads: bool,
) -> tuple[Tensor, Tensor]:
    from torch_backend.ops.attention import triton_kernels as kernels

    out, lse = _forward_outputs(q, k, v)
    kernels.forward[work.shape[0] * k.shape[1],](
        q, k, v, sinks, slopes, out, lse, work, parts, ends, q.shape[0], scale, softcap, window,
        *_strides(q, k, v), *_shape(q, k, v),
        causal, window > 0, softcap > 0, sinks is not None, slopes is not None, parts is not None,
        work.shape[1] == LAST_TOKENS, ends is not None, by_heads, **_blocks(q, v, tile),
    )  # fmt: skip
    return out, lse


def _launch_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    out: Tensor,
    lse: Tensor,
    work_q: Tensor,
    work_k: Tensor,
    sums_k: Tensor | None,
    parts_q: Tensor | None,
    parts_k: Tensor | None,
    begins: Tensor | None,
    ends: Tensor | None,
    tile_q: list[int],
    tile_k: list[int],
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
    by_heads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from torch_backend.ops.attention import triton_kernels as kernels

    dq, dk, dv, stats = _backward_outputs(dout, q, k, v)
    strides = _strides(q, k, v, dout)
    last = work_q.shape[1] == LAST_TOKENS
    forms = parts_q is not None, last, ends is not None, by_heads
    options = causal, window > 0, softcap > 0, slopes is not None, *forms
    kernels.backward_queries[work_q.shape[0] * k.shape[1],](
        q, k, v, out, dout, lse, slopes, dq, stats, work_q, parts_q, ends, q.shape[0], scale, softcap, window,
        *strides, *_shape(q, k, v), *options, **_blocks(q, v, tile_q),
    )  # fmt: skip
    blocks, shares = _blocks(q, v, tile_k), stats  # any pointer: without sums no walk is cut
    if sums_k is not None:
        shares = stats.new_empty(sums_k.shape[0], k.shape[1], blocks["BLOCK_N"], k.shape[2] + v.shape[2])
    kernels.backward_keys[work_k.shape[0] * k.shape[1],](
        q, k, v, dout, stats, slopes, dk, dv, shares, work_k, parts_k, begins, q.shape[0], scale, softcap,
        min(window, k.shape[0]), *strides, *_shape(q, k, v), *options, **blocks,
    )  # fmt: skip
    if sums_k is not None:
        kernels.add_shares[sums_k.shape[0] * k.shape[1],](
            shares, dk, dv, sums_k, *k.shape[1:], v.shape[2],
            *(blocks[name] for name in ("BLOCK_D", "BLOCK_E", "BLOCK_N")),
        )  # fmt: skip
    return dq, dk, dv, stats


def _shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """H, H / K, D, Dv."""
    return q.shape[1], q.shape[1] // k.shape[1], q.shape[2], v.shape[2]


def _blocks(q: Tensor, v: Tensor, tile: list[int]) -> dict[str, int]:
    rows, keys, warps, stages, registers = tile
    blocks = {"BLOCK_D": max(16, _power_of_two(q.shape[2])), "BLOCK_E": max(16, _power_of_two(v.shape[2]))}
    blocks |= {"BLOCK_M": rows, "BLOCK_N": keys}
    blocks |= {"num_warps": warps, "num_stages": stages}
    return blocks | ({"maxnreg": registers} if registers else {})


def _forward_outputs(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _d = q.shape
    kv_heads = k.shape[1]
    # a tile's rows, token by token and head by head of its group, lie next to each other in lse
    lse = q.new_empty(kv_heads, tokens, heads // kv_heads, dtype=torch.float32)
    return q.new_empty(tokens, heads, v.shape[2]), lse


def _backward_outputs(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = _forward_outputs(q, k, v)[1]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), lse.new_empty(*lse.shape, 2)


_OPTIONS = "bool causal, int window, float softcap, float scale, bool by_heads"
_forward = operator("attention_forward", _launch_forward, _forward_outputs)
_backward = operator("attention_backward", _launch_backward, _backward_outputs)
