"""Linear attention with a decay per head over packed rows, for heads that are not narrow, in half precision.

q, k, v, g and strengths -> the operators below -> the Triton kernels of :mod:`.linear_kernels` and
:mod:`.linear_backward_kernels`. It serves calls of :mod:`.delta_rule` that correct nothing: the scan of Mamba-2 and
lightning attention. Nothing is read back from the device. The backward keeps the inputs, the sums of the gates and the
state that enters each span, and computes the states of chunks again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_backend.ops.operators import operator
from torch_backend.ops.scan.chunks import differentiable, like

_WIDTHS = (64, 128)  # of heads of k; those of v are divided into parts of _VALUES channels
_VALUES = 64
_CHUNK, _SPAN = 64, 8  # tokens; chunks
_GATES = 16  # heads whose gates one program takes
_ENTERING = 1024  # numbers of a state in a program of ``enter``
_GROUP = 16  # heads of v that share a head of k and whose gradients of it one program adds up, at most


class Tile(NamedTuple):
    """How a kernel runs: its warps, and the stages of its loop's loads."""

    warps: int
    stages: int = 1


# Measured on an H200 by benchmarks/gpu_scan_tiles.py.
TILES = {
    "sums": Tile(4),
    "ends": Tile(4, 2),
    "enter": Tile(4),
    "states": Tile(4, 2),
    "output": Tile(4, 2),
    "chunk_backward": Tile(8, 2),
    "gates_backward": Tile(4),
}


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether heads and dtype are those that these kernels take."""
    return q.shape[-1] in _WIDTHS and v.shape[-1] % _VALUES == 0 and v.dtype in (torch.bfloat16, torch.float16)


class _Launch:
    """One call: its sizes, and how each kernel is launched."""

    def __init__(self, q: Tensor, v: Tensor, beta: Tensor | None) -> None:
        self.tokens, heads, width = v.shape
        self.shared, self.width = q.shape[1:]
        values = min(width, _VALUES)
        self.split = width // values
        self.heads = heads * self.split
        self.chunks = -(-self.tokens // _CHUNK)
        self.spans = -(-self.chunks // _SPAN)
        each = self.heads // self.shared
        self.group = max(n for n in range(1, min(each, _GROUP) + 1) if each % n == 0)
        gates = -(-heads // _GATES)
        self.grids = {
            "sums": (self.chunks, gates),
            "enter": (self.heads, max(1, self.width * values // _ENTERING)),
            "chunk_backward": (self.chunks, self.heads // self.group),
            "gates_backward": (self.chunks, gates),
        }
        self.sizes: dict[str, Any] = {
            "H": self.heads, "SPLIT": self.split, "Q": self.shared, "K": self.width, "V": values, "C": _CHUNK,
            "SPAN": _SPAN, "GROUP": self.group, "GAIN": beta is not None,
            "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32x3",
        }  # fmt: skip

    def states(self, like: Tensor, count: int) -> Tensor:
        """[count, H, K, V], unwritten."""
        return like.new_empty(count, self.heads, self.width, self.sizes["V"])

    def __call__(self, kernel: Any, *arguments: Any, reverse: bool = False) -> None:
        name = kernel.__name__
        tile = TILES[name]
        block = min(_ENTERING, self.width * self.sizes["V"]) if name == "enter" else _GATES
        known = self.sizes | {"STAGES": tile.stages, "REVERSE": reverse, "BLOCK": block}
        constants = {key: value for key, value in known.items() if key in kernel.arg_names}
        kernel[self.grids.get(name, (self.spans, self.heads))](*arguments, **constants, num_warps=tile.warps)

    def entering(self, k: Tensor, v: Tensor, *gates: Any, scale: float, reverse: bool) -> Tensor:
        """The states that enter spans [spans, H, K, V]; in reverse, their gradients behind spans, of q and dO."""
        from torch_backend.ops.scan import linear_kernels as kernels

        local, entering = self.states(v, self.spans), self.states(v, self.spans)
        fading = v.new_empty(self.spans, self.heads, dtype=torch.float32)
        sizes = self.tokens, self.chunks
        self(kernels.ends, k, v, *gates, local, fading, scale, *sizes, reverse=reverse)
        self(kernels.enter, local, fading, entering, self.spans, reverse=reverse)
        return entering

    def kept(self, k: Tensor, v: Tensor, *gates: Any, entering: Tensor, scale: float, reverse: bool) -> Tensor:
        """The states that enter chunks [chunks, H, K, V], or the gradients of those that leave them."""
        from torch_backend.ops.scan import linear_kernels as kernels

        found = self.states(v, self.chunks)
        self(kernels.states, k, v, *gates, entering, found, scale, self.tokens, self.chunks, reverse=reverse)
        return found


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import linear_kernels as kernels

    launch = _Launch(q, v, beta)
    gates = v.new_empty(1 + (beta is not None), *v.shape[1::-1], dtype=torch.float32)
    launch(kernels.sums, g, beta, segments, gates[0], gates[-1], launch.tokens)
    known = gates[0], gates[-1], segments
    entering = launch.entering(k, v, *known, scale=1.0, reverse=False)
    out = torch.empty_like(v)
    launch(kernels.output, q, k, v, *known, entering, out, scale, launch.tokens, launch.chunks)
    return out, gates, entering, like(initial, v)


def _made(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; c and beta [2, H, T] in float32, or c alone; the states that enter spans; nothing. Unwritten."""
    launch = _Launch(q, v, beta)
    gates = v.new_empty(1 + (beta is not None), *v.shape[1::-1], dtype=torch.float32)
    return torch.empty_like(v), gates, launch.states(v, launch.spans), like(initial, v)


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    boundaries: Tensor, segments: Tensor, gates: Tensor, entering: Tensor, dout: Tensor, dfinal: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from torch_backend.ops.scan import linear_backward_kernels as kernels

    launch = _Launch(q, v, beta)
    known = gates[0], gates[-1], segments
    kept = launch.kept(k, v, *known, entering=entering, scale=1.0, reverse=False)
    leaving = launch.entering(q, dout, *known, scale=scale, reverse=True)
    dkept = launch.kept(q, dout, *known, entering=leaving, scale=scale, reverse=True)
    # Where several programs share a head of k, each leaves its sum in float32.
    groups = launch.heads // launch.group
    dtype = q.dtype if groups == launch.shared else torch.float32
    dq, dk = (q.new_empty(launch.tokens, groups, launch.width, dtype=dtype) for _ in range(2))
    dgates = v.new_empty(len(gates), launch.heads, launch.tokens, dtype=torch.float32)
    dv, dg, dbeta = torch.empty_like(v), torch.empty_like(g), like(beta, v)
    launch(
        kernels.chunk_backward, q, k, v, *known, kept, dkept, dout, dq, dk, dv, dgates[0], dgates[-1], scale,
        launch.tokens,
    )  # fmt: skip
    launch(kernels.gates_backward, dgates[0], dgates[-1], segments, dg, dbeta, launch.tokens)
    if groups != launch.shared:
        dq, dk = (x.unflatten(1, (launch.shared, -1)).sum(2).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, like(initial, v)


_forward = operator(
    "linear_attention_scan(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, Tensor boundaries, "
    "Tensor segments, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _made,
)
_backward = operator(
    "linear_attention_scan_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor? initial, "
    "Tensor boundaries, Tensor segments, Tensor gates, Tensor entering, Tensor dout, Tensor dfinal, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda q, k, v, g, beta, initial, *_: tuple(like(x, v) for x in (q, k, v, g, beta, initial)),
)
linear_scan = differentiable(_forward, _backward)
