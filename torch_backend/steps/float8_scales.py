"""Scales of torchao's float8 recipes in compiled layers: made once for a row or a weight, with the same bits.

torchao makes a scale ``2**floor(log2(448 / amax))`` in float64, by a division and two transcendental functions.
Inductor puts that into every kernel that reads the scale. One that has not found the largest value itself computes it
for each element: those after the products of gradients, whose results are multiplied with the scales of rows. The
length of the formula also makes Inductor write what stands before it, in float32. Here each scale is a tensor of its
own, which the kernel that finds the largest value writes.

The largest value of a weight, by which the backward scales it, is that of the largest values of its rows, which the
forward has found: the weight is not read for it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten
_ROUNDED = (_ATEN.exp2.default, _ATEN.floor.default, _ATEN.log2.default)  # down to a power of two


class ScalesOnce(CustomGraphPass):
    """A pass over the joint graph of a layer's forward and backward."""

    def __call__(self, graph: fx.Graph) -> None:
        rows: dict[Any, fx.Node] = {}  # the largest values of a tensor along one of its axes
        for node in [*graph.nodes]:
            if node.target is _ATEN.amax.default and _is_magnitude(node.args[0]):
                rows.setdefault(node.args[0].args[0], node)
            elif node.target is _ATEN.max.default and _is_magnitude(node.args[0]):
                if (largest := rows.get(node.args[0].args[0])) is not None:
                    node.args = (largest,)
            elif _is_scale(node):
                _keep(graph, node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


SCALES_ONCE = ScalesOnce()


def _is_magnitude(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _ATEN.abs.default


def _is_scale(node: Any) -> bool:
    for target in _ROUNDED:
        if not isinstance(node, fx.Node) or node.target is not target:
            return False
        node = node.args[0]
    return True


def _keep(graph: fx.Graph, scale: fx.Node) -> None:
    """Makes a scale of fixed shape a tensor: Inductor computes what ``as_strided`` reads in one place."""
    value = scale.meta["val"]
    if not all(isinstance(size, int) for size in value.shape):
        return
    with graph.inserting_after(scale):
        kept = graph.call_function(_ATEN.as_strided.default, (scale, [*value.shape], [*value.stride()]))
    kept.meta = {**scale.meta}
    scale.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)
