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
    differentiable_scan,
    gradient_parts,
    gradients_like,
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


class LinearRow:
    """One call, kernel by kernel, on states of chunks [chunks, H, V, K] and of segments [S, H, V, K].

    ``gates`` are c and beta [2, H, T] in float32, or c alone.
    """

    def __init__(
        self, q: Tensor, v: Tensor, beta: Tensor | None, initial: Tensor | None, boundaries: Tensor, segments: Tensor,
        scale: float,
    ) -> None:  # fmt: skip
        from torch_backend.ops.scan.linear_attention import any_width_backward_kernels, any_width_kernels

        self._ahead, self._behind = any_width_kernels, any_width_backward_kernels
        self._row = _row(q, v, beta, initial, boundaries)
        self._initial, self._boundaries, self._segments, self._scale = initial, boundaries, segments, scale

    def prepare(self, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """The gates."""
        gates = _gates(v, beta)
        self._row.launch(self._ahead.prepare, g, beta, self._segments, gates[0], gates[-1], self._row.tokens)
        return gates

    def carry(self, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The states that enter chunks, and the last ones of segments."""
        states, final = self._row.states(v), like(self._initial, v)
        self._row.launch(
            self._ahead.carry, k, v, gates[0], gates[-1], self._boundaries, self._initial, states, final,
            self._row.tokens,
        )  # fmt: skip
        return states, final

    def output(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, states: Tensor) -> Tensor:
        """O [T, H, V]."""
        out = torch.empty_like(v)
        self._row.launch(
            self._ahead.output, q, k, v, gates[0], gates[-1], states, self._segments, out, self._scale, self._row.tokens
        )
        return out

    def values_backward(self, q: Tensor, k: Tensor, gates: Tensor, dout: Tensor) -> Tensor:
        """The part of the gradients of N that comes from each chunk's own O."""
        dnew = torch.empty_like(dout)
        self._row.launch(
            self._behind.values_backward, q, k, gates[0], self._segments, dout, dnew, self._scale, self._row.tokens
        )
        return dnew

    def carry_backward(
        self, q: Tensor, k: Tensor, gates: Tensor, dout: Tensor, dnew: Tensor, dfinal: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the states that leave chunks, and of those before segments; completes ``dnew``."""
        dstates, dinitial = self._row.states(dout), like(self._initial, dout)
        self._row.launch(
            self._behind.carry_backward, q, k, gates[0], self._boundaries, dout, dnew, dfinal, dstates, dinitial,
            self._scale, self._row.tokens,
        )  # fmt: skip
        return dstates, dinitial

    def chunk_backward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, gates: Tensor, states: Tensor,
        dstates: Tensor, dout: Tensor, dnew: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of q, k, v, g and beta."""
        dq, dk = (gradient_parts(q, self._row.heads // self._row.group) for _ in range(2))
        dv, dg = dnew if beta is None else torch.empty_like(v), torch.empty_like(g)
        dbeta = like(beta, v)
        self._row.launch(
            self._behind.chunk_backward, q, k, v, gates[0], gates[-1], self._segments, states, dstates, dout, dnew, dq,
            dk, dv, dg, dbeta, self._scale, self._row.tokens,
        )  # fmt: skip
        return summed_parts(dq, q), summed_parts(dk, q), dv, dg, dbeta


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    row = LinearRow(q, v, beta, initial, boundaries, segments, scale)
    gates = row.prepare(v, g, beta)
    states, final = row.carry(k, v, gates)
    return row.output(q, k, v, gates, states), final, gates


def _gates(v: Tensor, beta: Tensor | None) -> Tensor:
    """c and beta [2, H, T] in float32, or c alone, unwritten."""
    return v.new_empty(1 + (beta is not None), *v.shape[1::-1], dtype=torch.float32)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    row = LinearRow(q, v, beta, initial, boundaries, segments, scale)
    states, _ = row.carry(k, v, gates)
    dnew = row.values_backward(q, k, gates, dout)
    dstates, dinitial = row.carry_backward(q, k, gates, dout, dnew, dfinal)
    return *row.chunk_backward(q, k, v, g, beta, gates, states, dstates, dout, dnew), dinitial


forward = operator(
    "linear_attention",
    _launch_forward,
    lambda q, k, v, g, beta, initial, *_: (torch.empty_like(v), like(initial, v), _gates(v, beta)),
)
backward = operator("linear_attention_backward", _launch_backward, gradients_like)
decayed_scan = differentiable_scan(forward, backward)
