"""The norm and the projections in front of attention by tiles of tokens: the normalised input exists for one tile.

    x [N, D] -> tiles of tokens -> norm -> queries, keys and values [N, out] each

Their backward adds up the gradients of the three inputs tile by tile, where three products and the norm's backward
would hold four hidden states of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_backend.ops.operators import operator
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


def tiled_projections(
    x: Tensor, layers: Sequence[Projection], *, tile: int, norm: Norm | None = None
) -> tuple[Tensor, ...]:
    """Returns ``layer(norm(x))`` [..., out] of each layer.

    Args:
        x: [..., D], of the dtype of the weights, or of any with a norm.
        tile: tokens that are computed at a time.
        norm: of x, in front of everything.
    """
    tensors = [None if norm is None else norm.weight, *(t for layer in layers for t in layer[:4])]
    options = [] if norm is None else [norm.eps, norm.offset]
    found = _apply(x.flatten(0, -2), options, [layer.scale for layer in layers], tile, *tensors)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in found)


def _launch_forward(
    x: Tensor, tensors: Sequence[Tensor | None], options: Sequence[float], scales: Sequence[float], tile: int
) -> list[Tensor]:
    norm, layers = norm_of(tensors[0], options), _layers(tensors, scales)
    found = [layer.weight.new_empty(len(x), len(layer.weight)) for layer in layers]
    for first in range(0, len(x), tile):
        part = x[first : first + tile]
        part = part if norm is None else norm(part, layers[0].weight.dtype)
        for y, layer in zip(found, layers, strict=True):
            y[first : first + tile] = layer(part)
    return found


def _launch_backward(
    x: Tensor, dys: Sequence[Tensor], tensors: Sequence[Tensor | None], options: Sequence[float],
    scales: Sequence[float], tile: int, needs: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    norm, layers = norm_of(tensors[0], options), _layers(tensors, scales)
    sums, needs_input = GradientSums(tensors[1:], needs[2:]), any(needs[:2])

    def of_tile(tokens: slice, part: Tensor) -> Tensor | None:
        found = None
        for number, (layer, dy) in enumerate(zip(layers, dys, strict=True)):
            sums.add(number, layer, dy[tokens], part)
            if needs_input:
                more = layer.gradient(dy[tokens])
                found = more if found is None else found.add_(more)
        return found

    found = gradients_by_tile(x, norm, layers[0].weight.dtype, tile, needs[:2], of_tile)
    return [*found, *sums.results(x)]


def _layers(tensors: Sequence[Tensor | None], scales: Sequence[float]) -> list[Projection]:
    return [layer for layer in projections(tensors[1:], scales) if layer is not None]


def _fake_forward(x: Tensor, tensors: Sequence[Tensor | None], *others: Any) -> list[Tensor]:
    return [w.new_empty(len(x), len(w)) for w in tensors[1::4] if w is not None]


_forward = operator("tiled_projections_forward", _launch_forward, _fake_forward)
_backward = operator("tiled_projections_backward", _launch_backward, empty_gradients)
_apply = by_tiles(_forward, _backward, options=3)
