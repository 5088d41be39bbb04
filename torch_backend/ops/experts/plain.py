"""Experts by plain torch, on any device and in any dtype: one product per expert.

The number of tokens of each expert is read by the host, once per product, which the CPU does for nothing and a GPU by
waiting: there it is the last resort.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.reference import ExpertActivation
from torch_backend.ops.experts.products import Between, LowRank, Places, Products
from torch_backend.ops.experts.request import ExpertsRequest


class Plain(Products):
    def supports(self, request: ExpertsRequest) -> str | None:
        return None

    def route(self, indices: Tensor, experts: int) -> Places:
        chosen = indices.flatten()
        routed = (chosen >= 0) & (chosen < experts)
        chosen = torch.where(routed, chosen, experts)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
        counts = counts.scatter_add_(0, chosen.long(), torch.ones_like(chosen, dtype=torch.int64))[:experts]
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        places = torch.where(routed, places, -1).view(indices.shape)
        return Places(order.int(), places.int(), F.pad(counts.cumsum(0), (1, 0)).int(), indices)

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
        y = a.new_zeros(routing.order.shape[0], w.shape[1])
        for e, (start, end) in _spans(routing):
            x = a[routing.order[start:end].long() // routing.top_k] if gather else a[start:end]
            y[start:end] = torch.mm(x, w[e].t()) * scale
            if adapter is not None:
                y[start:end] += torch.mm(adapter.t[start:end], adapter.b[e].t())
            if bias is not None:
                y[start:end] += bias[e]
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
        z = self.rows(x, w, routing, gather=True, bias=bias, adapter=adapter)
        h, _ = activated(z, between)
        return z, h

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
        dh = self.rows(dy, w, routing, gather=True, adapter=adapter)
        h, by_z = activated(z, between)
        share = (dh * h).sum(1, dtype=torch.promote_types(torch.float32, dh.dtype))
        if bias is not None:
            share += self.rows(dy, bias[:, None], routing, gather=True)[:, 0]
        weight = weights.flatten()[routing.order.long()].to(dh.dtype)[:, None]
        dz = torch.empty_like(z)
        for half, part in zip(_halves(dz, between), by_z, strict=True):
            half.copy_(dh * weight * part)
        routed = routing.places >= 0
        shares = torch.where(routed, share[routing.places.long().clamp(min=0)], 0)
        return dz, weight * h, shares

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
        out = torch.zeros_like(like)
        for e, (start, end) in _spans(routing):
            tokens = routing.order[start:end].long() // routing.top_k
            x = a[tokens] if gather_a else a[start:end]
            out[e] = torch.mm(x.t(), b[tokens] if gather_b else b[start:end])
        return out

    def sums(self, a: Tensor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(like)
        for e, (start, end) in _spans(routing):
            entries = routing.order[start:end].long()
            if weights is None:
                out[e] = a[start:end].sum(0)
            else:
                out[e] = (a[entries // routing.top_k] * weights.flatten()[entries, None].to(a.dtype)).sum(0)
        return out

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        terms = torch.where((routing.places >= 0)[..., None], y[routing.places.long().clamp(min=0)], 0)
        if weights is not None:
            terms = terms * weights[..., None].to(torch.promote_types(weights.dtype, y.dtype))
        return terms.sum(1).to(y.dtype)


def activated(z: Tensor, between: Between) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The activation of the first product [S, O], and its derivatives by the gate, or z, and by the value."""
    gate, *values = _halves(z, between)
    kind, limit = between.activation, between.activation.limit
    if not values:
        f, slope = _function(gate, kind)
        return f, (slope,)
    (value,) = values
    free = free_value = None
    if limit is not None:
        free, free_value = gate <= limit, value.abs() <= limit
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    f, slope = _function(gate, kind)
    by_gate, by_value = (value + kind.offset) * slope, f
    if free is not None and free_value is not None:
        by_gate, by_value = by_gate * free, by_value * free_value
    return f * (value + kind.offset), (by_gate, by_value)


def _function(x: Tensor, kind: ExpertActivation) -> tuple[Tensor, Tensor]:
    """An activation function and its derivative."""
    if kind.name == "silu":
        s = torch.sigmoid(kind.alpha * x)
        return x * s, s * (1 + kind.alpha * x * (1 - s))
    if kind.name == "gelu_tanh":
        scale = (2 / torch.pi) ** 0.5
        t = torch.tanh(scale * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)
    positive = x.relu()
    return positive * positive, 2 * positive


def _halves(z: Tensor, between: Between) -> tuple[Tensor, ...]:
    if not between.activation.gated:
        return (z,)
    step, second = between.columns(z.shape[1] // 2)
    return z[:, : step * (z.shape[1] // 2) : step], z[:, second::step]


def _spans(routing: Places) -> list[tuple[int, tuple[int, int]]]:
    """The experts that somebody chose, each with where its places begin and end."""
    return [(e, span) for e, span in enumerate(pairwise(routing.offsets.tolist())) if span[0] < span[1]]


PLAIN = Plain()
