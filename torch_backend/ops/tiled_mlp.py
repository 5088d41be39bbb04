"""An MLP by tiles of tokens: its inner columns exist for one tile at a time, forward and backward.

    x [N, D] -> tiles of tokens -> norm -> act(gate(x)) * up(x), or act(up(x)) -> down -> y [N, D]

An inner column is as long as the row, and an MLP has several times as many columns as the model is wide, so for one
long document they take most of the memory of a layer. The backward computes them again. With the norm that stands in
front of it, the MLP keeps no normalised input either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_backend.ops.operators import operator
from torch_backend.ops.recomputing import is_recomputing
from torch_backend.ops.tiles import (
    GradientSums,
    Norm,
    Projection,
    by_tiles,
    empty_gradients,
    gradients_by_tile,
    norm_of,
    projections,
)

aten = torch.ops.aten
# name -> the activation, and (gradient, input) -> gradient of the input
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, aten.silu_backward),
    "gelu": (F.gelu, aten.gelu_backward),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "relu": (F.relu, lambda dy, x: dy * (x > 0)),
}


def tiled_mlp(
    x: Tensor,
    gate: Projection | None,
    up: Projection,
    down: Projection,
    *,
    activation: str,
    tile: int,
    norm: Norm | None = None,
    last: bool = False,
) -> Tensor:
    """Returns ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Args:
        x: [..., D], of the dtype of the weights, or of any with a norm.
        activation: a name of :data:`ACTIVATIONS`.
        tile: tokens that are computed at a time.
        norm: of x, in front of everything.
        last: the result is only added to what the layer returns, so no backward reads it: it is not computed, and its
            memory not written, where the forward runs again (:mod:`.recomputing`).
    """
    layers = [gate, up, down]
    tensors = [
        None if norm is None else norm.weight,
        *(x for p in layers for x in ((None,) * 4 if p is None else p[:4])),
    ]
    scales = [1.0 if p is None else p.scale for p in layers]
    options = [] if norm is None else [norm.eps, norm.offset]
    y: Tensor = _apply(x.flatten(0, -2), options, scales, activation, tile, last, *tensors)
    return y.view(*x.shape[:-1], y.shape[-1])


def _launch_forward(
    x: Tensor, tensors: Sequence[Tensor | None], options: Sequence[float], scales: Sequence[float], activation: str,
    tile: int, last: bool,
) -> Tensor:  # fmt: skip
    norm, (gate, up, down) = norm_of(tensors[0], options), projections(tensors[1:], scales)
    assert up is not None and down is not None
    act, _ = ACTIVATIONS[activation]
    y = down.weight.new_empty(len(x), down.weight.shape[0])
    if last and is_recomputing():
        return y
    for first in range(0, len(x), tile):
        part = x[first : first + tile]
        part = part if norm is None else norm(part, up.weight.dtype)
        inner = act(up(part)) if gate is None else act(gate(part)) * up(part)
        y[first : first + tile] = down(inner)
    return y


def _launch_backward(
    x: Tensor, dys: Sequence[Tensor], tensors: Sequence[Tensor | None], options: Sequence[float],
    scales: Sequence[float], activation: str, tile: int, last: bool, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    dy = dys[0].contiguous()
    norm, (gate, up, down) = norm_of(tensors[0], options), projections(tensors[1:], scales)
    assert up is not None and down is not None
    act, act_backward = ACTIVATIONS[activation]
    sums, needs_input = GradientSums(tensors[1:], needs[2:]), any(needs[:2])

    def of_tile(tokens: slice, part: Tensor) -> Tensor | None:
        # each of these is [tile, F], so what was read last is given up, or written over
        d_out, raised = dy[tokens], up(part)
        opened = raised if gate is None else gate(part)
        active = act(opened)
        sums.add(2, down, d_out, active if gate is None else active * raised)
        d_inner = down.gradient(d_out)
        d_raised = act_backward(d_inner, opened) if gate is None else active.mul_(d_inner)
        sums.add(1, up, d_raised, part)
        found = up.gradient(d_raised) if needs_input else None
        if gate is not None:
            del active, d_raised
            d_inner *= raised
            del raised
            d_opened = act_backward(d_inner, opened)
            sums.add(0, gate, d_opened, part)
            if found is not None:
                found += gate.gradient(d_opened)
        return found

    found = gradients_by_tile(x, norm, up.weight.dtype, tile, needs[:2], of_tile)
    return [*found, *sums.results(x)]


def _fake_forward(x: Tensor, tensors: Sequence[Tensor | None], *_: Any) -> Tensor:
    down = tensors[9]
    assert down is not None
    return down.new_empty(len(x), down.shape[0])


_forward = operator("tiled_mlp_forward", _launch_forward, _fake_forward)
_backward = operator("tiled_mlp_backward", _launch_backward, empty_gradients)
_apply = by_tiles(_forward, _backward, options=5)
