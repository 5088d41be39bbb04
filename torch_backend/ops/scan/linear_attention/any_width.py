"""Linear attention with a decay per head over packed rows, in every width and dtype, and with states in and out.

The operators of :mod:`torch_backend.ops.scan.gated_delta.delta_rule` for calls that correct nothing and that
:mod:`.wide`, which is faster, does not take, on the Triton kernels of :mod:`.any_width_kernels`. The backward keeps the
inputs and the sums of the gates, and computes the states again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.ops.operators import operator, shared_memory
from torch_backend.ops.scan.chunks import (
    CHUNK,
    LINEAR_SMALL,
    LINEAR_TILES,
    TILES,
    ChunkLaunch,
    chunk_length,
    differentiable,
    gradient_parts,
    like,
    summed_parts,
)

_WIDE, _LARGE = 256, 128 * 1024  # channels of heads, and bytes of shared memory that their tiles may need


def _row(q: Tensor, v: Tensor, beta: Tensor | None, initial: Tensor | None, boundaries: Tensor) -> ChunkLaunch:
    chunk = chunk_length(q.shape[2], v)
    tiles = TILES if chunk == CHUNK else LINEAR_TILES
    if q.shape[2] >= _WIDE and 0 < shared_memory(v.device) < _LARGE:  # 0: interpreted
        tiles = tiles | LINEAR_SMALL
    return ChunkLaunch(q, v, beta, initial, boundaries, tiles, chunk)


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.linear_attention import any_width_kernels as kernels

    row = _row(q, v, beta, initial, boundaries)
    out, gates, final = _made(v, beta, initial)
    c, strength = gates[0], gates[-1]
    row.launch(kernels.prepare, g, beta, segments, c, strength, row.tokens)
    states = row.states(v)
    row.launch(kernels.carry, k, v, c, strength, boundaries, initial, states, final, row.tokens)
    row.launch(kernels.output, q, k, v, c, strength, states, segments, out, scale, row.tokens)
    return out, gates, final


def _made(v: Tensor, beta: Tensor | None, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The output; c and beta [2, H, T] in float32, or c alone; the final states. All unwritten."""
    gates = v.new_empty(1 + (beta is not None), *v.shape[1::-1], dtype=torch.float32)
    return torch.empty_like(v), gates, like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.linear_attention import any_width_backward_kernels as backward
    from torch_backend.ops.scan.linear_attention import any_width_kernels as forward

    row = _row(q, v, beta, initial, boundaries)
    c, strength = gates[0], gates[-1]
    states, dstates, dnew = row.states(v), row.states(v), torch.empty_like(v)
    dinitial = like(initial, v)
    # Here the final states are not needed: their memory is that of the initial ones' gradients, written later.
    row.launch(forward.carry, k, v, c, strength, boundaries, initial, states, dinitial, row.tokens)
    row.launch(backward.values_backward, q, k, c, segments, dout, dnew, scale, row.tokens)
    row.launch(backward.carry_backward, q, k, c, boundaries, dout, dnew, dfinal, dstates, dinitial, scale, row.tokens)
    dq, dk = (gradient_parts(q, row.heads // row.group) for _ in range(2))
    dv, dg = dnew if beta is None else torch.empty_like(v), torch.empty_like(g)
    dbeta = like(beta, v)
    row.launch(
        backward.chunk_backward, q, k, v, c, strength, segments, states, dstates, dout, dnew, dq, dk, dv, dg, dbeta,
        scale, row.tokens,
    )  # fmt: skip
    return summed_parts(dq, q), summed_parts(dk, q), dv, dg, dbeta, dinitial


_forward = operator(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale) -> (Tensor, Tensor, Tensor)",
    _launch_forward,
    lambda q, k, v, g, beta, initial, *_: _made(v, beta, initial),
)
_backward = operator(
    "linear_attention_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor gates, Tensor dout, Tensor dfinal, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
decayed_scan = differentiable(_forward, _backward)
