"""Linear attention with a decay per head, not scaled, in two halves: lightning attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_backend.ops.scan.chunks import chunk_length
from torch_backend.ops.scan.gated_delta.delta_rule import check
from torch_backend.ops.scan.halves import HalvedScan, Tensors
from torch_backend.ops.scan.linear_attention import any_width, wide
from torch_backend.segments import PackedMetadata

_SCALE = 1.0


class DecayedHalves(HalvedScan):
    """q, k, v and g are the inputs, in one dtype but for g; states are [S, H, V, K]."""

    gates = 3

    def chunk(self, given: Tensors) -> int:
        q, _, v, _ = given
        return chunk_length(q.shape[2], v)

    def fade(self, states: Tensor, gates: Tensor, given: Tensors) -> Tensor:
        return states * gates.exp()[..., None, None]

    def forward(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensor, Tensors]:
        q, k, v, g = given
        check(q, k, v, g, None, packed)
        out, _, *kept = _operators(q, v).forward(*given, None, None, packed.cu_seqlens, packed.seq_idx, _SCALE)
        return out, kept

    def backward(self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor) -> Tensors:
        q, _, v, _ = given
        segments = packed.cu_seqlens, packed.seq_idx
        found = _operators(q, v).backward(*given, None, None, *segments, *kept, dy, v.new_empty(0), _SCALE)
        return found[: len(given)]

    def begin(self, given: Tensors, packed: PackedMetadata) -> tuple[Tensors, Tensor]:
        q, k, v, g = given
        check(q, k, v, g, None, packed)
        row = _row(given, packed, _zeros(given, packed))
        gates = row.prepare(v, g, None)
        _, last = row.carry(k, v, gates)
        return (gates,), last

    def finish(self, given: Tensors, packed: PackedMetadata, work: Tensors, initial: Tensor) -> tuple[Tensor, Tensors]:
        (q, k, v, _), (gates,) = given, work
        row = _row(given, packed, initial)
        states, _ = row.carry(k, v, gates)
        return row.output(q, k, v, gates, states), (gates, initial)

    def begin_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor
    ) -> tuple[Tensors, Tensor]:
        (q, k, v, _), (gates, initial) = given, kept
        row = _row(given, packed, initial)
        states, _ = row.carry(k, v, gates)
        dnew = row.values_backward(q, k, gates, dy)
        _, dinitial = row.carry_backward(q, k, gates, dy, dnew.clone(), _zeros(given, packed))
        return (states, dnew), dinitial

    def finish_backward(
        self, given: Tensors, packed: PackedMetadata, kept: Tensors, dy: Tensor, work: Tensors, dfinal: Tensor
    ) -> Tensors:
        (q, k, v, g), (gates, initial), (states, dnew) = given, kept, work
        row = _row(given, packed, initial)
        dstates, _ = row.carry_backward(q, k, gates, dy, dnew, dfinal)
        dq, dk, dv, dg, _ = row.chunk_backward(q, k, v, g, None, gates, states, dstates, dy, dnew)
        return dq, dk, dv, dg


def _operators(q: Tensor, v: Tensor) -> Any:
    """The module whose operators run segments from zero."""
    return wide if wide.serves(q, v) else any_width


def _row(given: Tensors, packed: PackedMetadata, initial: Tensor) -> any_width.LinearRow:
    q, _, v, _ = given
    return any_width.LinearRow(q, v, None, initial, packed.cu_seqlens, packed.seq_idx, _SCALE)


def _zeros(given: Tensors, packed: PackedMetadata) -> Tensor:
    """States [S, H, V, K]."""
    q, _, v, _ = given
    return v.new_zeros(len(packed.cu_seqlens) - 1, v.shape[1], v.shape[2], q.shape[2], dtype=torch.float32)


HALVES = DecayedHalves()
