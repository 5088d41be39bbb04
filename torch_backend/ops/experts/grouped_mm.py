"""Experts by ``torch.nn.functional.grouped_mm``, a grouped product of CUTLASS with the offsets on the device.

It takes operands that lie in order, so tokens are gathered before it and nothing is part of it. It serves the products
of which it is the faster part in spite of that; the others are those of :mod:`.triton`, where biases, adapters and
activations are part of the products (``benchmarks/RESULTS.md``, "Routed experts").
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.ops.experts.products import Between, ByToken, ExpertProduct, Factor, Places
from torch_backend.ops.experts.request import ExpertsRequest
from torch_backend.ops.experts.triton import TritonExperts, activate, gathered

_PRODUCT = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_NARROW = 64  # a product with fewer rows or columns than this, such as the first half of an adapter, is Triton's
# From this mean number of tokens per expert on, the first product gains more than its gather and activation cost.
WIDE_UP = 1_024


class GroupedMM(TritonExperts):
    def supports(self, request: ExpertsRequest) -> str | None:
        if _PRODUCT is None:
            return "this torch has no grouped_mm"
        if request.device.type == "cuda":
            if request.dtype != torch.bfloat16:
                return "it takes bfloat16"
            if torch.cuda.get_device_capability(request.device) < (8, 0):
                return "it needs compute capability 8.0"
        if not request.aligned:
            return "rows of an operand are no multiple of 16 bytes"
        if min(request.width, request.inner) < _NARROW:
            return f"products are narrower than {_NARROW}"
        return super().supports(request)

    def rows(self, a: Factor, by: ExpertProduct, routing: Places) -> Tensor:
        if by.bias is not None or by.adapter is not None or by.scale != 1 or min(by.w.shape[1:]) < _NARROW:
            return super().rows(a, by, routing)
        return _product(_in_order(a, routing), by.w.mT, routing)

    def up(self, x: ByToken, by: ExpertProduct, routing: Places, between: Between) -> tuple[Tensor, Tensor]:
        if by.adapter is not None or routing.mean < WIDE_UP:
            return super().up(x, by, routing, between)
        z = _product(_in_order(x, routing), by.w.mT, routing)
        return z, activate(z, by.bias, routing, between)

    def down_backward(
        self, dy: ByToken, by: ExpertProduct, z: Tensor, weights: Tensor, routing: Places, between: Between
    ) -> tuple[Tensor, Tensor, Tensor]:
        dh = _product(_in_order(dy, routing), by.w.mT, routing)
        return self.activation_backward(dy, by, z, dh, weights, routing, between, multiply=False)

    def outer(self, a: Factor, b: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        if weights is not None or min(like.shape[1:]) < _NARROW:
            return super().outer(a, b, routing, like, weights=weights)
        x, y = _in_order(a, routing), _in_order(b, routing)
        assert _PRODUCT is not None
        if like.stride(1) == 1:  # in the order in which ``like`` lies
            return _PRODUCT(y.t(), x, offs=routing.offsets[1:]).mT
        return _PRODUCT(x.t(), y, offs=routing.offsets[1:])


def _in_order(x: Factor, routing: Places) -> Tensor:
    return x.in_order(gathered, routing) if isinstance(x, ByToken) else x


def _product(a: Tensor, w: Tensor, routing: Places) -> Tensor:
    assert _PRODUCT is not None
    y: Tensor = _PRODUCT(a, w, offs=routing.offsets[1:])
    return y


GROUPED_MM = GroupedMM()
