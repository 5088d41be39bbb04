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
from torch_backend.ops.experts.products import Between, ByToken, ExpertProduct, Factor, Places, Products
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

    def rows(self, a: Factor, by: ExpertProduct, routing: Places) -> Tensor:
        x = _in_order(a, routing)
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

    def up(self, x: ByToken, by: ExpertProduct, routing: Places, between: Between) -> tuple[Tensor, Tensor]:
        z = self.rows(x, by, routing)
        return z, activated(z, between)

    def down_backward(
        self, dy: ByToken, by: ExpertProduct, z: Tensor, weights: Tensor, routing: Places, between: Between
    ) -> tuple[Tensor, Tensor, Tensor]:
        dh, h = self.rows(dy, replace(by, bias=None), routing), activated(z, between)
        share = (dh * h).sum(1, dtype=torch.promote_types(torch.float32, dh.dtype))
        if by.bias is not None:
            share += self.rows(dy, ExpertProduct(by.bias[:, None]), routing)[:, 0]
        weight = _weights(weights, routing, dh)
        dz = _activation_backward(dh.mul_(weight), z, between)
        return dz, h.mul_(weight), _at_entries(share, routing)

    def outer(self, a: Factor, b: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        x, y = _in_order(a, routing), _in_order(b, routing)
        if weights is not None:
            y = y * _weights(weights, routing, y)
        out, spans = torch.empty_like(like), _spans(routing)
        chosen = {e for e, _, _ in spans}
        for e in range(like.shape[0]):
            if e not in chosen:
                out[e] = 0
        for e, start, end in spans:
            torch.mm(x[start:end].t(), y[start:end], out=out[e])
        return out

    def sums(self, a: Factor, routing: Places, like: Tensor, *, weights: Tensor | None = None) -> Tensor:
        out, x = torch.zeros_like(like), _in_order(a, routing)
        if weights is not None:
            x = x * _weights(weights, routing, x)
        for e, start, end in _spans(routing):
            out[e] = x[start:end].sum(0)
        return out

    def combine(self, y: Tensor, routing: Places, weights: Tensor | None) -> Tensor:
        terms = _at_entries(y, routing)
        if weights is not None:
            terms = terms * weights[..., None].to(torch.promote_types(weights.dtype, y.dtype))
        return terms.sum(1).to(y.dtype)


def activated(z: Tensor, between: Between) -> Tensor:
    """The activation of the first product [S, O]."""
    gate, *values = _limited(z, between)
    f = _function(gate, between.activation)
    return f.mul_(values[0] + between.activation.offset) if values else f


def _activation_backward(dh: Tensor, z: Tensor, between: Between) -> Tensor:
    """The gradient of the first product, from that of its activation."""
    kind, limit = between.activation, between.activation.limit
    gate, *values = _limited(z, between)
    if not values:
        return _function_backward(dh, gate, kind)
    dz = torch.empty_like(z)
    by_gate, by_value = _halves(dz, between)
    by_gate.copy_(_function_backward(dh * (values[0] + kind.offset), gate, kind))
    torch.mul(dh, _function(gate, kind), out=by_value)
    if limit is not None:
        own_gate, own_value = _halves(z, between)
        by_gate.masked_fill_(own_gate > limit, 0)
        by_value.masked_fill_(own_value.abs() > limit, 0)
    return dz


def _function(x: Tensor, kind: ExpertActivation) -> Tensor:
    if kind.name == "silu":
        return F.silu(x) if kind.alpha == 1 else F.silu(kind.alpha * x).div_(kind.alpha)
    if kind.name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return x.relu().square_()


def _function_backward(df: Tensor, x: Tensor, kind: ExpertActivation) -> Tensor:
    """The product of ``df`` with the derivative of :func:`_function`."""
    if kind.name == "silu":
        return torch.ops.aten.silu_backward(df, kind.alpha * x if kind.alpha != 1 else x)
    if kind.name == "gelu_tanh":
        return torch.ops.aten.gelu_backward(df, x, approximate="tanh")
    return df * x.relu() * 2


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


def _in_order(x: Factor, routing: Places) -> Tensor:
    """[S, D]: the line of a factor at each place."""
    return x.in_order(lambda x, routing: x[routing.order // routing.top_k], routing) if isinstance(x, ByToken) else x


def _weights(weights: Tensor, routing: Places, like: Tensor) -> Tensor:
    """[S, 1]: the weight of each place, in the dtype of ``like``."""
    return weights.flatten()[routing.order, None].to(like.dtype)


def _at_entries(x: Tensor, routing: Places) -> Tensor:
    """[T, K, ...]: what x [S, ...] holds at the place of each choice, and 0 for a choice of no expert."""
    missing = routing.places < 0
    found = x[routing.places.clamp(min=0)]
    if not missing.any():
        return found
    return found.masked_fill_(missing.view(*missing.shape, *[1] * (x.ndim - 1)), 0)


def _spans(routing: Places) -> list[tuple[int, int, int]]:
    """The experts that somebody chose, each with where its places begin and end."""
    return [(e, start, end) for e, (start, end) in enumerate(pairwise(routing.offsets.tolist())) if start < end]


PLAIN = Plain()
