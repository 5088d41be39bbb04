"""The operators of the gated delta rule that :mod:`.delta_rule` calls, on the Triton kernels of :mod:`.kernels`.

The backward keeps the inputs, the sums of the gates, the inverses of each chunk and the corrected values, and computes
the states again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_backend.ops import operators
from torch_backend.ops.operators import operator
from torch_backend.ops.scan import chunks
from torch_backend.ops.scan.chunks import (
    CHUNK,
    MOST_SHARING,
    ChunkTile,
    differentiable,
    gradient_parts,
    group_of,
    like,
    summed_parts,
)

# In float16 and bfloat16; float32 takes half of the channels, without stages, for its elements are twice as large.
# Measured on an H200 by benchmarks/gpu_scan_tiles.py, which is at commit e33bdc18.
TILES = {
    "prepare": ChunkTile(64, 2),
    "carry": ChunkTile(64, 4, 2),
    "restore": ChunkTile(64, 4, 3),
    "output": ChunkTile(128, 4),
    "scores_backward": ChunkTile(64, 4, 2),
    "query_backward": ChunkTile(128, 4, 2),
    "carry_backward": ChunkTile(64, 4),
    "solve_backward": ChunkTile(128, 4),
    "key_backward": ChunkTile(128, 4),
    "gates_backward": ChunkTile(0, 1),
}
# Where documents and heads are so few that what walks documents leaves most of the GPU idle; and of short chunks.
FEW = {"carry": ChunkTile(32, 4, 2), "restore": ChunkTile(32, 2, 3), "carry_backward": ChunkTile(32, 4, 2)}
_FEW_WALKS = 128  # documents times heads
_WALKS = ("carry", "restore", "carry_backward")
_SPLIT = ("query_backward", "key_backward")
_GROUPED = (*_SPLIT, "scores_backward", "solve_backward")
_BLOCK_K = 64  # channels of q and k in a program; products of half as many read wrong memory by wgmma (Triton 3.6)
_WIDEST = 128  # channels of q, k and v of heads in long chunks


def chunk_length(q: Tensor, v: Tensor) -> int:
    """Tokens of a chunk."""
    return chunks.chunk_length(q.shape[2], v) if max(q.shape[2], v.shape[2]) <= _WIDEST else CHUNK


@cache
def _of_inverses(dtype: torch.dtype) -> str | None:
    """The precision of the inverses' products where it may be less: three of bfloat16, half the work, as exact as T."""
    import triton

    known = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
    return "bf16x3" if dtype == torch.bfloat16 and known and not operators.INTERPRETED else None


class _Launch:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(self, q: Tensor, v: Tensor, initial: Tensor | None, boundaries: Tensor) -> None:
        self.dtype = v.dtype
        self.tokens, self.heads, self.value_width = v.shape
        self.shared, self.width = q.shape[1:]
        self.segments = len(boundaries) - 1
        chunk = chunk_length(q, v)
        self.chunks = -(-self.tokens // chunk)
        few = chunk == CHUNK or self.segments * self.heads < _FEW_WALKS
        self.tiles = TILES | FEW if few else TILES
        self.group = group_of(self.heads, self.shared, MOST_SHARING)
        self.groups = self.heads // self.group
        self.parts = -(-self.width // _BLOCK_K)
        precision = "ieee" if self.dtype == torch.float32 else "tf32x3"
        self.sizes: dict[str, Any] = {
            "H": self.heads, "Q": self.shared, "K": self.width, "V": self.value_width, "C": chunk,
            "STATES": initial is not None, "GROUP": self.group, "BLOCK_K": min(self.width, _BLOCK_K),
            "PARTS": self.parts, "PRECISION": precision,
            "INVERSE": _of_inverses(self.dtype) or precision,
        }  # fmt: skip

    def __call__(self, kernel: Any, *arguments: Any) -> None:
        name = kernel.__name__
        block, warps, stages = self.tiles[name]
        wide = self.dtype == torch.float32
        block = min(block, _WIDEST * _WIDEST // self.width)
        block = min(max(16, block // (1 + wide)), self.value_width)
        grid = (
            self.segments if name in _WALKS else self.chunks,
            self.groups if name in _GROUPED else self.heads,
            self.value_width // block if name in (*_WALKS, "output") else self.parts if name in _SPLIT else 1,
        )
        known = self.sizes | {"BLOCK_V": block}
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=1 if wide else stages)

    def states(self, like: Tensor) -> Tensor:
        """[chunks, H, V, K], unwritten where no document reaches from one chunk into the next."""
        make = like.new_zeros if self.sizes["STATES"] else like.new_empty  # then chunks of padding read theirs
        return make(self.chunks, self.heads, self.value_width, self.width)


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan.gated_delta import kernels

    launch = _Launch(q, v, initial, boundaries)
    out, gates, inverses, new, final = _made(q, v, initial)
    c, strength = gates
    launch(kernels.prepare, k, v, g, beta, segments, c, strength, inverses, new, launch.tokens)
    states = launch.states(v)
    launch(kernels.carry, k, v, c, strength, inverses, boundaries, initial, new, states, final, launch.tokens)
    launch(kernels.output, q, k, c, segments, new, states, out, scale, launch.tokens)
    return out, gates, inverses, new, final


def _made(q: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, ...]:
    """The output; c and beta [2, H, T] in float32; T [T, H, C]; N [T, H, V]; the final states. All unwritten."""
    gates = v.new_empty(2, *v.shape[1::-1], dtype=torch.float32)
    inverses = v.new_empty(*v.shape[:2], chunk_length(q, v))
    new = torch.empty_like(v) if initial is None else torch.zeros_like(v)  # chunks of padding read theirs
    return torch.empty_like(v), gates, inverses, new, like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, inverses: Tensor, new: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from torch_backend.ops.scan.gated_delta import backward_kernels as backward
    from torch_backend.ops.scan.gated_delta import kernels as forward

    launch = _Launch(q, v, initial, boundaries)
    c, strength = gates
    states, dstates = launch.states(v), launch.states(v)
    dinitial = like(initial, v)
    launch(forward.restore, k, c, boundaries, initial, new, states, launch.tokens)
    dq, dk = (gradient_parts(q, launch.groups) for _ in range(2))
    dscores, da = (q.new_empty(launch.tokens, launch.groups, inverses.shape[2]) for _ in range(2))
    dc, dstrength = (c.new_empty(1 + launch.parts, *c.shape) for _ in range(2))
    dright, dv, dg, dbeta = torch.empty_like(v), torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    launch(backward.scores_backward, q, k, c, inverses, segments, new, dout, dright, dscores, dc, scale, launch.tokens)
    launch(backward.query_backward, q, k, c, segments, states, dout, dscores, dq, dc, scale, launch.tokens)
    launch(
        backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dright, dfinal, dstates, dinitial,
        scale, launch.tokens,
    )  # fmt: skip
    launch(backward.solve_backward, k, v, c, strength, segments, new, dright, da, dv, dc, dstrength, launch.tokens)
    launch(
        backward.key_backward, q, k, c, strength, segments, new, states, dstates, dright, dscores, da,
        dk, dc, dstrength, launch.tokens,
    )  # fmt: skip
    launch(backward.gates_backward, segments, dc, dstrength, dg, dbeta, launch.tokens)
    return summed_parts(dq, q), summed_parts(dk, q), dv, dg, dbeta, dinitial


_forward = operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, initial, *_: _made(q, v, initial),
)
_backward = operator(
    "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor gates, Tensor inverses, Tensor new, Tensor dout, Tensor dfinal, "
    "float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
delta_scan = differentiable(_forward, _backward)
