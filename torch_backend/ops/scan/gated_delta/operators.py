"""The operators of the gated delta rule that :mod:`.delta_rule` calls, on the Triton kernels of :mod:`.kernels`.

The backward keeps the inputs, the sums of the gates, the inverses of each chunk and the corrected values, and computes
the states again.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from torch_backend.ops import operators
from torch_backend.ops.operators import operator
from torch_backend.ops.scan import chunks
from torch_backend.ops.scan.chunks import (
    CHUNK,
    ChunkLaunch,
    ChunkTile,
    differentiable_scan,
    gradient_parts,
    gradients_like,
    like,
    summed_parts,
)

# In float16 and bfloat16; float32 takes half of the channels, without stages, for its elements are twice as large.
# Measured on an H200 by benchmarks/gpu_scan_tiles.py, which is at commit 82638478.
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


class _Row(ChunkLaunch):
    """One call: its sizes, and how each kernel is launched."""

    def __init__(self, q: Tensor, v: Tensor, initial: Tensor | None, boundaries: Tensor) -> None:
        chunk = chunk_length(q, v)
        super().__init__(q, v, None, initial, boundaries, TILES, chunk)
        few = chunk == CHUNK or self.segments * self.heads < _FEW_WALKS
        self.tiles = TILES | FEW if few else TILES
        self.groups = self.heads // self.group
        self.parts = -(-self.width // _BLOCK_K)
        self.sizes |= {"BLOCK_K": min(self.width, _BLOCK_K), "PARTS": self.parts}
        self.sizes["INVERSE"] = _of_inverses(self.dtype) or self.sizes["PRECISION"]

    def grid(self, name: str, block: int) -> tuple[int, int, int]:
        return (
            self.segments if name in _WALKS else self.chunks,
            self.groups if name in _GROUPED else self.heads,
            self.value_width // block if name in (*_WALKS, "output") else self.parts if name in _SPLIT else 1,
        )


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.gated_delta import kernels

    row = _Row(q, v, initial, boundaries)
    out, final, gates, inverses, new = _made(q, v, initial)
    c, strength = gates
    row.launch(kernels.prepare, k, v, g, beta, segments, c, strength, inverses, new, row.tokens)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, inverses, boundaries, initial, new, states, final, row.tokens)
    row.launch(kernels.output, q, k, c, segments, new, states, out, scale, row.tokens)
    return out, final, gates, inverses, new


def _made(q: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output; the final states; c and beta [2, H, T] in float32; T [T, H, C]; N [T, H, V]. All unwritten."""
    gates = v.new_empty(2, *v.shape[1::-1], dtype=torch.float32)
    inverses = v.new_empty(*v.shape[:2], chunk_length(q, v))
    new = torch.empty_like(v) if initial is None else torch.zeros_like(v)  # chunks of padding read theirs
    return torch.empty_like(v), like(initial, v), gates, inverses, new


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, inverses: Tensor, new: Tensor,
    dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.gated_delta import backward_kernels as backward
    from torch_backend.ops.scan.gated_delta import kernels as forward

    row = _Row(q, v, initial, boundaries)
    c, strength = gates
    states, dstates = row.states(v), row.states(v)
    dinitial = like(initial, v)
    row.launch(forward.restore, k, c, boundaries, initial, new, states, row.tokens)
    dq, dk = (gradient_parts(q, row.groups) for _ in range(2))
    dscores, da = (q.new_empty(row.tokens, row.groups, inverses.shape[2]) for _ in range(2))
    dc, dstrength = (c.new_empty(1 + row.parts, *c.shape) for _ in range(2))
    dright, dv, dg, dbeta = torch.empty_like(v), torch.empty_like(v), torch.empty_like(g), torch.empty_like(beta)
    row.launch(backward.scores_backward, q, k, c, inverses, segments, new, dout, dright, dscores, dc, scale, row.tokens)
    row.launch(backward.query_backward, q, k, c, segments, states, dout, dscores, dq, dc, scale, row.tokens)
    row.launch(
        backward.carry_backward, q, k, c, strength, inverses, boundaries, dout, dright, dfinal, dstates, dinitial,
        scale, row.tokens,
    )  # fmt: skip
    row.launch(backward.solve_backward, k, v, c, strength, segments, new, dright, da, dv, dc, dstrength, row.tokens)
    row.launch(
        backward.key_backward, q, k, c, strength, segments, new, states, dstates, dright, dscores, da,
        dk, dc, dstrength, row.tokens,
    )  # fmt: skip
    row.launch(backward.gates_backward, segments, dc, dstrength, dg, dbeta, row.tokens)
    return summed_parts(dq, q), summed_parts(dk, q), dv, dg, dbeta, dinitial


_forward = operator("gated_delta_rule", _launch_forward, lambda q, k, v, g, beta, initial, *_: _made(q, v, initial))
_backward = operator("gated_delta_rule_backward", _launch_backward, gradients_like)
delta_scan = differentiable_scan(_forward, _backward)
