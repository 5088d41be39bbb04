"""Experts by ``torch.nn.functional.grouped_mm``, a grouped product of CUTLASS with the offsets on the device.

It takes operands that lie in order, so tokens are gathered before it and nothing is part of it: the activation, the
biases and the second half of an adapter are Triton kernels after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_backend.ops.experts.products import Between, LowRank, Places
from torch_backend.ops.experts.request import ExpertsRequest
from torch_backend.ops.experts.triton import TritonExperts, activate, gathered

_PRODUCT = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class GroupedMM(TritonExperts):
    def supports(self, request: ExpertsRequest) -> str | None:
        if _PRODUCT is None:
            return "this torch has no grouped_mm"
        if request.device.type != "cuda":
            return "its kernels run on GPUs"
        if request.dtype != torch.bfloat16:
            return "it takes bfloat16"
        if torch.cuda.get_device_capability(request.device) < (8, 0):
            return "it needs compute capability 8.0"
        if not request.aligned:
            return "rows of an operand are no multiple of 16 bytes"
        return super().supports(request)

    def rows(
        self,
        a: Tensor,
        w: Tensor,
        routing: Places,
        *,
        gather: bool = False,
        bias: Tensor | None = None,
        adapter: LowRank | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if scale != 1 or min(w.shape[1:]) < 64:  # the first half of an adapter
            return super().rows(a, w, routing, gather=gather, bias=bias, adapter=adapter, scale=scale)
        y = _product(gathered(a, routing) if gather else a, w.mT, routing)
        if bias is not None or adapter is not None:
            self.add_rows(None, None, routing, y, bias=bias, adapter=adapter)
        return y

    def up(
        self,
        x: Tensor,
        w: Tensor,
        routing: Places,
        *,
        bias: Tensor | None,
        adapter: LowRank | None,
        between: Between,
    ) -> tuple[Tensor, Tensor]:
        z = self.rows(x, w, routing, gather=True, adapter=adapter)
        return z, activate(z, bias, routing, between)

    def down_backward(
        self,
        dy: Tensor,
        w: Tensor,
        z: Tensor,
        weights: Tensor,
        routing: Places,
        *,
        bias: Tensor | None,
        adapter: LowRank | None,
        between: Between,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dh = _product(gathered(dy, routing), w.mT, routing)
        return self.activation_backward(dy, w, z, dh, weights, routing, bias, adapter, between, multiply=False)

    def outer(
        self,
        a: Tensor,
        b: Tensor,
        routing: Places,
        like: Tensor,
        *,
        gather_a: bool = False,
        gather_b: bool = False,
    ) -> Tensor:
        if min(like.shape[1:]) < 64:
            return super().outer(a, b, routing, like, gather_a=gather_a, gather_b=gather_b)
        x = gathered(a, routing) if gather_a else a
        y = gathered(b, routing) if gather_b else b
        assert _PRODUCT is not None
        if like.stride(1) == 1:  # in the order in which ``like`` lies
            return _PRODUCT(y.t(), x, offs=routing.offsets[1:]).mT
        return _PRODUCT(x.t(), y, offs=routing.offsets[1:])


def _product(a: Tensor, w: Tensor, routing: Places) -> Tensor:
    assert _PRODUCT is not None
    y: Tensor = _PRODUCT(a, w, offs=routing.offsets[1:])
    return y


GROUPED_MM = GroupedMM()
