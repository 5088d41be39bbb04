"""A layer of routed experts: each token's K chosen experts, weighted and summed, without a read by the host.

x [T, D], the router's choices and the experts' weights -> :func:`experts` -> [T, D]. The steps between are those of
:mod:`.products`; ``_forward`` and ``_backward`` put them together in the same way for every implementation, as two
operators that ``torch.compile`` does not look into. The forward keeps the first product alone: the backward gathers
nothing that was stored and makes the activation again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.reference import ExpertActivation
from torch_backend.ops.experts.dispatch import IMPLEMENTATIONS, describe, load, rejections, select
from torch_backend.ops.experts.products import Between, LowRank, Places
from torch_backend.ops.experts.request import Adapter, ExpertsRequest, request_of
from torch_backend.ops.operators import operator

__all__ = [
    "IMPLEMENTATIONS",
    "Adapter",
    "ExpertActivation",
    "ExpertsRequest",
    "describe",
    "experts",
    "rejections",
    "request_of",
    "select",
]


def experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: ExpertActivation = ExpertActivation(),  # noqa: B008  frozen
    interleaved: bool = False,
    up_adapter: Adapter | None = None,
    down_adapter: Adapter | None = None,
    implementation: str | Sequence[str] = "auto",
) -> Tensor:
    """The weighted sum of the experts that each token chose.

    ``y_t = sum_c weights[t, c] (down[e] f(up[e] x_t + up_bias[e]) + down_bias[e])`` with ``e = indices[t, c]``.
    ``packing_core.reference.experts`` defines it. Results are deterministic.

    Args:
        x: [T, D].
        indices: int64 or int32 [T, K]. An index outside of the experts routes to none, which is how padding is marked:
            it contributes exactly zero, forward and backward. On the CPU, only -1 and E are accepted for that.
        weights: [T, K], the router's, of any floating dtype.
        up: [E, O, D], O being 2I with a gate and I without; any strides: pass stored [E, D, O] as its transpose.
        down: [E, D, I]; likewise.
        up_bias: [E, O]. down_bias: [E, D].
        activation: between the products; from ``ExpertActivation``.
        interleaved: rows of ``up`` alternate between gate and value; otherwise all gates come first.
        up_adapter, down_adapter: low-rank additions to ``up`` and ``down``, which are not added up.
        implementation: one of ``IMPLEMENTATIONS``, several to try in order, or "auto".

    Returns:
        [T, D], dtype of x.

    Raises:
        LayoutError: shapes, dtypes or devices contradict each other, or an index on the CPU is out of range.
        UnsupportedError: no wanted implementation supports the call.
    """
    request = request_of(
        x, indices, weights, up, down,
        up_bias=up_bias, down_bias=down_bias, activation=activation, interleaved=interleaved,
        up_adapter=up_adapter, down_adapter=down_adapter,
    )  # fmt: skip
    name = select(request, implementation)
    if not request.tokens:
        return x.clone()
    up_a, up_b, up_scale = (None, None, 1.0) if up_adapter is None else up_adapter
    down_a, down_b, down_scale = (None, None, 1.0) if down_adapter is None else down_adapter
    options = (name, up_scale, down_scale, *_packed(activation), interleaved)
    tensors = (x.contiguous(), weights, up, down, up_bias, down_bias, up_a, up_b, down_a, down_b)
    found: Tensor = _Experts.apply(indices, options, *tensors)
    return found


def _packed(kind: ExpertActivation) -> tuple[str, bool, float, float, float]:
    """The activation in the types of a schema; a limit of 0 is none."""
    return kind.name, kind.gated, kind.alpha, kind.limit or 0.0, kind.offset


def _between(name: str, gated: bool, alpha: float, limit: float, offset: float, interleaved: bool) -> Between:
    return Between(ExpertActivation(name, gated, alpha, limit or None, offset), interleaved)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, options: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
        y, *saved = _forward(*tensors, indices, *options)
        ctx.save_for_backward(*tensors, indices, *saved)
        ctx.options = options
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = [bool(n) for n in ctx.needs_input_grad[2:]]
        found = _backward(dy.contiguous(), *ctx.saved_tensors, *ctx.options, needs)
        return None, None, *(x if needed else None for x, needed in zip(found, needs, strict=True))


def _low_rank(t: Tensor | None, b: Tensor | None) -> LowRank | None:
    return None if t is None or b is None else LowRank(t, b)


def _launch_forward(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    up_a: Tensor | None, up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    indices: Tensor, implementation: str, up_scale: float, down_scale: float, *kind: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    steps, between = load(implementation), _between(*kind)
    routing = steps.route(indices.contiguous(), up.shape[0])
    t = None if up_a is None else steps.rows(x, up_a, routing, gather=True, scale=up_scale)
    z, h = steps.up(x, up, routing, bias=up_bias, adapter=_low_rank(t, up_b), between=between)
    u = None if down_a is None else steps.rows(h, down_a, routing, scale=down_scale)
    y = steps.rows(h, down, routing, bias=down_bias, adapter=_low_rank(u, down_b))
    none = x.new_empty(0)
    return (
        steps.combine(y, routing, weights.contiguous()),
        z,
        none if t is None else t,
        none.clone() if u is None else u,
        routing.order,
        routing.places,
        routing.offsets,
    )


def _launch_backward(
    dy: Tensor, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    up_a: Tensor | None, up_b: Tensor | None, down_a: Tensor | None, down_b: Tensor | None,
    indices: Tensor, z: Tensor, t: Tensor, u: Tensor, order: Tensor, places: Tensor, offsets: Tensor,
    implementation: str, up_scale: float, down_scale: float, *others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    steps, between, needs = load(implementation), _between(*others[:-1]), others[-1]
    routing = Places(order, places, offsets, indices.contiguous())
    weights = weights.contiguous()
    found: dict[str, Tensor] = {}
    du = None if down_b is None else steps.rows(dy, down_b.mT, routing, gather=True, scale=down_scale)
    dz, weighted, found["weights"] = steps.down_backward(
        dy, down.mT, z, weights, routing,
        bias=down_bias if needs[1] else None, adapter=_low_rank(du, None if down_a is None else down_a.mT),
        between=between,
    )  # fmt: skip
    found["weights"] = found["weights"].to(weights.dtype)
    if needs[3]:
        found["down"] = steps.outer(dy, weighted, routing, down, gather_a=True)
    if needs[5] and down_bias is not None:
        found["down_bias"] = steps.sums(dy, routing, down_bias, weights=weights)
    if du is not None and down_a is not None and down_b is not None:
        if needs[8]:
            found["down_a"] = steps.outer(du, weighted, routing, down_a)
        if needs[9]:
            weight = weights.flatten()[order.long()].to(u.dtype)
            found["down_b"] = steps.outer(dy, u * weight[:, None], routing, down_b, gather_a=True)
    del weighted
    dt = None if up_b is None else steps.rows(dz, up_b.mT, routing, scale=up_scale)
    if needs[2]:
        found["up"] = steps.outer(dz, x, routing, up, gather_b=True)
    if needs[4] and up_bias is not None:
        found["up_bias"] = steps.sums(dz, routing, up_bias)
    if dt is not None and up_a is not None and up_b is not None:
        if needs[6]:
            found["up_a"] = steps.outer(dt, x, routing, up_a, gather_b=True)
        if needs[7]:
            found["up_b"] = steps.outer(dz, t, routing, up_b)
    if needs[0]:
        terms = steps.rows(dz, up.mT, routing, adapter=_low_rank(dt, None if up_a is None else up_a.mT))
        found["x"] = steps.combine(terms, routing, None)
    return tuple(found[name] if name in found else x.new_empty(0) for name in _DIFFERENTIABLE)


_DIFFERENTIABLE = (
    "x", "weights", "up", "down", "up_bias", "down_bias", "up_a", "up_b", "down_a", "down_b",
)  # fmt: skip


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    x, _, up, _, _, _, up_a, _, down_a, _, indices, *_ = given
    places, none = indices.numel(), x.new_empty(0)

    def rank(a: Tensor | None) -> Tensor:
        return none.clone() if a is None else x.new_empty(places, a.shape[1])

    def integers(*shape: int) -> Tensor:
        return indices.new_empty(shape, dtype=torch.int32)

    order, offsets = integers(places), integers(up.shape[0] + 1)
    return (
        torch.empty_like(x), x.new_empty(places, up.shape[1]), rank(up_a), rank(down_a),
        order, integers(*indices.shape), offsets,
    )  # fmt: skip


def _fake_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    tensors, needs = given[:10], given[-1]
    return tuple(
        torch.empty_like(tensor) if tensor is not None and (needed or number == 1) else dy.new_empty(0)
        for number, (tensor, needed) in enumerate(zip(tensors, needs, strict=True))
    )


_OPERANDS = (
    "Tensor x, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, Tensor? up_a, Tensor? up_b, "
    "Tensor? down_a, Tensor? down_b, Tensor indices"
)
_OPTIONS = (
    "str implementation, float up_scale, float down_scale, str activation, bool gated, float alpha, float limit, "
    "float offset, bool interleaved"
)
_forward = operator(
    f"experts({_OPERANDS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch_forward,
    _fake_forward,
)
_backward = operator(
    f"experts_backward(Tensor dy, {_OPERANDS}, Tensor z, Tensor t, Tensor u, Tensor order, Tensor places, "
    f"Tensor offsets, {_OPTIONS}, bool[] needs) -> ({', '.join(['Tensor'] * 10)})",
    _launch_backward,
    _fake_backward,
)
