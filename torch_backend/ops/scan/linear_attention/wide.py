"""Linear attention with a decay per head over packed rows, for heads that are not narrow, in half precision.

q, k, v, g and strengths -> the operators below -> the Triton kernels of :mod:`.wide_kernels` and
:mod:`.wide_backward_kernels`. It serves the calls of :mod:`torch_backend.ops.scan.gated_delta.delta_rule` that correct
nothing: the scan of Mamba-2 and lightning attention. Nothing is read back from the device. The backward keeps the
inputs, the sums of the gates and the state that enters each span, and computes the states of chunks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_backend.ops.operators import operator
from torch_backend.ops.scan.chunks import (
    differentiable_scan,
    gradient_parts,
    gradients_like,
    group_of,
    like,
    summed_parts,
)
from torch_backend.segments import PackedMetadata

_WIDTHS = (64, 128)  # of heads of k
_VALUES = 64  # channels of v in a program; wider heads are divided
_DTYPES = (torch.bfloat16, torch.float16)
_CHUNK, _SPAN = 64, 8  # tokens; chunks
_GATES = 16  # heads whose gates one program takes
_ENTERING = 1024  # numbers of a state in a program of ``enter``
# Heads of v that share a head of k are added up by one program, as long as so many programs remain: two for each of the
# 132 multiprocessors of an H200.
_PROGRAMS = 256


class WarpTile(NamedTuple):
    """The launch options of a kernel: its warps, and the stages of its loop's loads."""

    warps: int
    stages: int = 1


# Measured on an H200 by benchmarks/gpu_scan_tiles.py, which is at commit 82638478.
TILES = {
    "sums": WarpTile(4),
    "ends": WarpTile(4, 3),
    "enter": WarpTile(4),
    "states": WarpTile(4, 2),
    "output": WarpTile(4, 2),
    "values_backward": WarpTile(4),
    "queries_backward": WarpTile(4, 3),
    "keys_backward": WarpTile(4, 3),
    "gates_backward": WarpTile(4),
}


def serves(q: Tensor, v: Tensor) -> bool:
    """Returns whether heads and dtype are those that these kernels take."""
    return q.shape[-1] in _WIDTHS and v.shape[-1] % _VALUES == 0 and v.dtype in _DTYPES


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, skip: Tensor | None, packed: PackedMetadata,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Computes :func:`.gated_delta.delta_rule.gated_delta_rule` for calls that correct nothing."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    given = q.to(v.dtype), k.to(v.dtype), v, g, beta, skip
    return _scan(*given, packed.cu_seqlens, packed.seq_idx, float(scale))[0]


class _WideLaunch:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(self, q: Tensor, v: Tensor, beta: Tensor | None, skip: Tensor | None) -> None:
        self.tokens, heads, width = v.shape
        self.shared, self.width = q.shape[1:]
        self.values = min(width, _VALUES)
        self.heads = heads * width // self.values
        self.chunks = -(-self.tokens // _CHUNK)
        self.spans = -(-self.chunks // _SPAN)
        self.group = group_of(self.heads, self.shared, max(1, self.chunks * self.heads // _PROGRAMS))
        self.groups = self.heads // self.group
        gates, numbers = (self.chunks, -(-heads // _GATES)), self.width * self.values
        over_spans, over_chunks = (self.spans, self.heads), (self.chunks, self.groups)
        self.grids = {
            "sums": gates, "ends": over_spans, "enter": (self.heads, -(-numbers // _ENTERING)), "states": over_spans,
            "output": over_spans, "values_backward": over_chunks, "queries_backward": over_chunks,
            "keys_backward": over_chunks, "gates_backward": gates,
        }  # fmt: skip
        self.sizes: dict[str, Any] = {
            "H": self.heads, "SPLIT": self.heads // heads, "Q": self.shared, "K": self.width, "V": self.values,
            "C": _CHUNK, "SPAN": _SPAN, "GROUP": self.group, "GAIN": beta is not None,
            "SKIP": skip is not None, "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32x3",
        }  # fmt: skip

    def __call__(self, kernel: Any, *arguments: Any, reverse: bool = False) -> None:
        name = kernel.__name__
        block = min(_ENTERING, self.width * self.values) if name == "enter" else _GATES
        known = self.sizes | {"STAGES": TILES[name].stages, "REVERSE": reverse, "BLOCK": block}
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        kernel[self.grids[name]](*arguments, **constants, num_warps=TILES[name].warps)

    def states(self, like: Tensor, count: int) -> Tensor:
        """[count, H, K, V], unwritten."""
        return like.new_empty(count, self.heads, self.width, self.values)

    def entering(self, k: Tensor, v: Tensor, known: tuple[Tensor, ...], scale: float, reverse: bool) -> Tensor:
        """The states that enter spans [spans, H, K, V]; in reverse, of q and dO, the gradients of those that leave."""
        from torch_backend.ops.scan.linear_attention import wide_kernels as kernels

        local, entering = self.states(v, self.spans), self.states(v, self.spans)
        fading = v.new_empty(self.spans, self.heads, dtype=torch.float32)
        self(kernels.ends, k, v, *known, local, fading, scale, self.tokens, self.chunks, reverse=reverse)
        self(kernels.enter, local, fading, entering, self.spans, reverse=reverse)
        return entering

    def kept(
        self, k: Tensor, v: Tensor, known: tuple[Tensor, ...], entering: Tensor, scale: float, reverse: bool
    ) -> Tensor:
        """The same of chunks [chunks, H, K, V]."""
        from torch_backend.ops.scan.linear_attention import wide_kernels as kernels

        found = self.states(v, self.chunks)
        self(kernels.states, k, v, *known, entering, found, scale, self.tokens, self.chunks, reverse=reverse)
        return found


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, skip: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.linear_attention import wide_kernels as kernels

    launch = _WideLaunch(q, v, beta, skip)
    out, none, gates, _ = _made(q, k, v, g, beta, skip)
    known = gates[0], gates[-1], segments
    launch(kernels.sums, g, beta, segments, *known[:2], launch.tokens)
    entering = launch.entering(k, v, known, scale=1.0, reverse=False)
    launch(kernels.output, q, k, v, *known[:2], skip, segments, entering, out, scale, launch.tokens, launch.chunks)
    return out, none, gates, entering


def _made(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, skip: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; nothing; c and beta [2, H, T] in float32, or c alone; the states that enter spans. Unwritten."""
    tokens, heads, width = v.shape
    gates = v.new_empty(1 + (beta is not None), heads, tokens, dtype=torch.float32)
    values = min(width, _VALUES)
    entering = v.new_empty(-(-tokens // (_CHUNK * _SPAN)), heads * width // values, q.shape[2], values)
    return torch.empty_like(v), v.new_empty(0), gates, entering


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, skip: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, entering: Tensor, dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan.linear_attention import wide_backward_kernels as kernels

    launch, tokens = _WideLaunch(q, v, beta, skip), len(v)
    known = c, strength, _ = gates[0], gates[-1], segments
    kept = launch.kept(k, v, known, entering, scale=1.0, reverse=False)
    leaving = launch.entering(q, dout, known, scale=scale, reverse=True)
    dkept = launch.kept(q, dout, known, leaving, scale=scale, reverse=True)
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(g), like(beta, v)
    dc = v.new_empty(3, launch.heads, tokens, dtype=torch.float32)
    dstrength = dc.new_empty(launch.heads if beta is not None else 0, tokens)
    dskip = dc.new_empty(launch.chunks if skip is not None else 0, launch.heads)
    dq, dk = (gradient_parts(q, launch.groups) for _ in range(2))
    m = q.new_empty(launch.chunks, launch.groups, _CHUNK, _CHUNK)
    launch(
        kernels.values_backward, q, k, v, c, strength, skip, segments, dkept, dout, m, dv, dc[0], dstrength, dskip,
        scale, tokens,
    )  # fmt: skip
    launch(kernels.queries_backward, q, k, c, segments, kept, dout, m, dq, dc[1], scale, tokens)
    launch(kernels.keys_backward, q, v, c, strength, segments, kept, dkept, m, dk, dc[2], tokens)
    launch(kernels.gates_backward, dc, dstrength, segments, dg, dbeta, tokens)
    if skip is not None:
        dskip = dskip.view(launch.chunks, len(skip), -1).sum((0, 2))
    return summed_parts(dq, q), summed_parts(dk, q), dv, dg, dbeta, dskip.to(dv.dtype if skip is None else skip.dtype)


forward = operator("linear_attention_scan", _launch_forward, _made)
backward = operator("linear_attention_scan_backward", _launch_backward, gradients_like)
_scan = differentiable_scan(forward, backward)
