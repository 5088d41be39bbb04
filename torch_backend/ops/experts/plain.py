"""Experts by plain torch, on any device and in any dtype: one product per expert.

The number of tokens of each expert is read by the host, once per product, which the CPU does for nothing and a GPU by
waiting: there it is the last resort.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from packing_core.reference import ExpertActivation
from torch_backend.ops.experts.products import Between, Linear, Places, Products
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

    def rows(self, a: Tensor, by: Linear, routing: Places, *, gather: bool = False) -> Tensor:
        x = _gathered(a, routing) if gather else a
        y = x.new_empty(x.shape[0], by.w.shape[1])
        for e, start, end in _spans(routing):
            torch.mm(x[start:end], by.w[e].t(), out=y[start:end])
            if by.scale != 1:
                y[start:end] *= by.scale
            if by.adapter is not None:
                y[start:end].addmm_(by.adapter.t[start:end], by.adapter.b[e].t())
            if by.bias is not None:
                y[start:end] += by.bias[e]
        return y

    def up(self, x: Tensor, by: Linear, routing: Places, between: Between) -> tuple[Tensor, Tensor]:
        z = self.rows(x, by, routing, gather=True)
        return z, activated(z, between)

    def down_backward(
        self, dy: Tensor, by: Linear, z: Tensor, weights: Tensor, routing: Places, between: Between
    ) -> tuple[Tensor, Tensor, Tensor]:
        dh = self.rows(dy, replace(by, bias=None), routing, gather=True)
        h, by_z = activated_with_slopes(z, between)
        share = (dh * h).sum(1, dtype=torch.promote_types(torch.float32, dh.dtype))
        if by.bias is not None:
            share += self.rows(dy, Linear(by.bias[:, None]), routing, gather=True)[:, 0]
        weight = weights.flatten()[routing.order].to(dh.dtype)[:, None]
        dh *= weight
        dz = torch.empty_like(z)
        for half, slope in zip(_halves(dz, between), by_z, strict=True):
            torch.mul(dh, slope, out=half)
        routed = routing.places >= 0
        shares = torch.where(routed, share[routing.places.clamp(min=0)], 0)
        return dz, h.mul_(weight), shares

    def outer(
        self, a: Tensor, b: Tensor, routing: Places, like: Tensor, *, gather_a: bool = False, gather_b: bool = False
    ) -> Tensor:
        x = _gathered(a, routing) if gather_a else a
        y = _gathered(b, routing) if gather_b else b
        out, spans = torch.empty_like(like), _spans(routing)
        chosen = {e for e, _, _ in spans}
        for e in range(like.shape[0]):
            if e not in chosen:
                out[e] = 0
        for e, start, end in spans:
            torch.mm(x[start:end].t(), y[start:end], out=out[e])
        return out

    def sums(self, a: Tensor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        out = torch.zeros_like(like)
        if weights is not None:
            a = _gathered(a, routing) * weights.flatten()[routing.order, None].to(a.dtype)
        for e, start, end in _spans(routing):
            out[e] = a[start:end].sum(0)
        return out

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        terms = torch.where((routing.places >= 0)[..., None], y[routing.places.clamp(min=0)], 0)
        if weights is not None:
            terms = terms * weights[..., None].to(torch.promote_types(weights.dtype, y.dtype))
        return terms.sum(1).to(y.dtype)


def activated(z: Tensor, between: Between) -> Tensor:
    """The activation of the first product [S, O]."""
    gate, *values = _limited(z, between)
    f = _function(gate, between.activation)
    return f * (values[0] + between.activation.offset) if values else f


def activated_with_slopes(z: Tensor, between: Between) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The activation of the first product [S, O], and its derivatives by the gate, or z, and by the value."""
    kind, limit = between.activation, between.activation.limit
    gate, *values = _limited(z, between)
    f, slope = _function(gate, kind), _slope(gate, kind)
    if not values:
        return f, (slope,)
    value = values[0] + kind.offset
    by_gate, by_value = value * slope, f
    if limit is not None:
        own_gate, own_value = _halves(z, between)
        by_gate, by_value = by_gate * (own_gate <= limit), by_value * (own_value.abs() <= limit)
    return f * value, (by_gate, by_value)


def _function(x: Tensor, kind: ExpertActivation) -> Tensor:
    if kind.name == "silu":
        return x * torch.sigmoid(kind.alpha * x)
    if kind.name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return x.relu().square()


def _slope(x: Tensor, kind: ExpertActivation) -> Tensor:
    """The derivative of :func:`_function`."""
    if kind.name == "silu":
        s = torch.sigmoid(kind.alpha * x)
        return s * (1 + kind.alpha * x * (1 - s))
    if kind.name == "gelu_tanh":
        scale = (2 / torch.pi) ** 0.5
        t = torch.tanh(scale * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)
    return 2 * x.relu()


def _limited(z: Tensor, between: Between) -> tuple[Tensor, ...]:
    """Gates and values within their limits; without gates z itself."""
    halves, limit = _halves(z, between), between.activation.limit
    if limit is None or len(halves) == 1:
        return halves
    return halves[0].clamp(max=limit), halves[1].clamp(-limit, limit)


def _halves(z: Tensor, between: Between) -> tuple[Tensor, ...]:
    if not between.activation.gated:
        return (z,)
    step, second = between.columns(z.shape[1] // 2)
    return z[:, : step * (z.shape[1] // 2) : step], z[:, second::step]


def _gathered(x: Tensor, routing: Places) -> Tensor:
    """[S, D]: each place's token of x [T, D]."""
    return x[routing.order // routing.top_k]


def _spans(routing: Places) -> list[tuple[int, int, int]]:
    """The experts that somebody chose, each with where its places begin and end."""
    return [(e, start, end) for e, (start, end) in enumerate(pairwise(routing.offsets.tolist())) if start < end]


PLAIN = Plain()
