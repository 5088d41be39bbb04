"""A layer of routed experts: each token's K chosen experts, weighted and summed, without a read by the host.

x [T, D], the router's choices and the experts' weights -> :func:`experts` -> [T, D]. The steps between are those of
:mod:`.products`; ``_forward`` and ``_backward`` put them together in the same way for every implementation, as two
operators that ``torch.compile`` does not look into. The forward keeps the first product alone: the backward gathers
nothing that was stored and makes the activation again. With a ``tile`` nothing is kept: of one long document, products
exist for a tile of tokens at a time, forward and backward. Of weights in MXFP4 an operator makes the values when a
product needs them, one weight at a time, in memory that all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from packing_core.errors import LayoutError
from packing_core.reference import ExpertActivation
from torch_backend.ops.experts.dispatch import IMPLEMENTATIONS, describe, load, rejections, select
from torch_backend.ops.experts.products import Between, ByToken, ExpertProduct, LowRank, Places
from torch_backend.ops.experts.request import Adapter, ExpertsRequest, request_of
from torch_backend.ops.mxfp4 import shared_values
from torch_backend.ops.operators import arguments_of, operator

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
    up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    again: Callable[[], tuple[Tensor, Tensor]] | None = None,
    tile: int | None = None,
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
        up_scales, down_scales: uint8 [E, O, D / 32] and [E, D, I / 32] of weights in MXFP4, which are frozen; ``up`` is
            uint8 [E, O, D / 2] then, and ``down`` [E, D, I / 2] (:mod:`torch_backend.ops.mxfp4`).
        again: makes ``up`` and ``down``, both frozen, once more for the backward, so that neither is kept until then.
            For weights that are stored in fewer bits.
        tile: tokens that are computed at a time, where products of all would take too much memory. The backward makes
            the first product again, and adds up the gradients of weights over the tiles in float32 at least.
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
        up_adapter=up_adapter, down_adapter=down_adapter, up_scales=up_scales, down_scales=down_scales,
    )  # fmt: skip
    name = select(request, implementation)
    if again is not None and (up.requires_grad or down.requires_grad):
        raise LayoutError(
            "weights that are made again for the backward have no gradient: leave again out, or freeze them"
        )
    if not request.tokens:
        return x.clone()
    up_a, up_b, up_scale = (None, None, 1.0) if up_adapter is None else up_adapter
    down_a, down_b, down_scale = (None, None, 1.0) if down_adapter is None else down_adapter
    limit = activation.limit or 0.0
    options = _Options(
        name, up_scale, down_scale, activation.name, activation.gated, activation.alpha, limit, activation.offset,
        interleaved,
    )  # fmt: skip
    up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (up_bias, down_bias))
    found: Tensor = _Experts.apply(
        options, again, tile, x.contiguous(), weights, up, down, up_bias, down_bias, up_a, up_b, down_a, down_b,
        up_scales, down_scales, indices,
    )  # fmt: skip
    return found


class _Operands(NamedTuple):
    """The tensors of a call, as the operators take them one by one; all but the last three have gradients."""

    x: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    up_scales: Tensor | None
    down_scales: Tensor | None
    indices: Tensor

    def values(self, name: str) -> Tensor:
        """Returns the weights ``"up"`` or ``"down"``; of 4 bits, values that are valid until others are made."""
        weight: Tensor = getattr(self, name)
        scales: Tensor | None = getattr(self, f"{name}_scales")
        return weight if scales is None else shared_values(weight, scales, self.x.dtype)


class _Options(NamedTuple):
    """The rest of a call, in the types of a schema; a limit of 0 is none."""

    implementation: str
    up_scale: float
    down_scale: float
    activation: str
    gated: bool
    alpha: float
    limit: float
    offset: float
    interleaved: bool

    @property
    def between(self) -> Between:
        kind = ExpertActivation(self.activation, self.gated, self.alpha, self.limit or None, self.offset)
        return Between(kind, self.interleaved)


class _Saved(NamedTuple):
    """Tensors that the forward keeps for the backward: the first product, halves of adapters, the places."""

    z: Tensor
    t: Tensor
    u: Tensor
    order: Tensor
    places: Tensor
    offsets: Tensor


_LOCK = RLock()
_GRADIENTS = _Operands._fields[:-3]
_BY_TOKEN = ("x", "weights")  # of these, those with a line for each token


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        options, again, tile, *operands = arguments
        y, *saved = _forward(*operands, *options) if tile is None else (_tiled_forward(*operands, *options, tile),)
        made = () if again is None else ("up", "down")
        kept = (None if name in made else x for name, x in zip(_Operands._fields, operands, strict=True))
        ctx.save_for_backward(*kept, *saved)
        ctx.options, ctx.again, ctx.tile = options, again, tile
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = [bool(n) for n in ctx.needs_input_grad[3:-3]]
        tensors = list(ctx.saved_tensors)
        if ctx.again is not None:
            tensors[2:4] = ctx.again()
        dy = dy.contiguous()
        if ctx.tile is None:
            found = _backward(dy, *tensors, *ctx.options, needs)
        else:
            found = _tiled_backward(dy, *tensors, *ctx.options, needs, ctx.tile)
        gradients = (x if needed else None for x, needed in zip(found, needs, strict=True))
        return None, None, None, *gradients, *[None] * 3


def _low_rank(t: Tensor | None, b: Tensor | None) -> LowRank | None:
    return None if t is None or b is None else LowRank(t, b)


def _until_activation(call: _Operands, options: _Options) -> tuple[Tensor, _Saved]:
    """Returns what the second product reads, and what the backward does."""
    steps = load(options.implementation)
    x, up_a, down_a = ByToken(call.x), call.up_a, call.down_a
    routing = steps.route(call.indices.contiguous(), call.up.shape[0])
    t = None if up_a is None else steps.rows(x, ExpertProduct(up_a, scale=options.up_scale), routing)
    by = ExpertProduct(call.values("up"), call.up_bias, _low_rank(t, call.up_b))
    z, h = steps.up(x, by, routing, options.between)
    u = None if down_a is None else steps.rows(h, ExpertProduct(down_a, scale=options.down_scale), routing)
    t, u = (z.new_empty(0) if half is None else half for half in (t, u))
    return h, _Saved(z, t, u, routing.order, routing.places, routing.offsets)


def _one_at_a_time(launch: Callable[..., Any]) -> Callable[..., Any]:
    """``launch``, during which no other thread makes values in the memory that they share."""

    @wraps(launch)
    def run(*given: Any) -> Any:
        with _LOCK:
            return launch(*given)

    return run


@_one_at_a_time
def _launch_forward(*given: Any) -> tuple[Tensor, ...]:
    call, options = _Operands(*given[: len(_Operands._fields)]), _Options(*given[len(_Operands._fields) :])
    steps = load(options.implementation)
    h, saved = _until_activation(call, options)
    routing = Places(saved.order, saved.places, saved.offsets, call.indices.contiguous())
    u = None if call.down_a is None else saved.u
    y = steps.rows(h, ExpertProduct(call.values("down"), call.down_bias, _low_rank(u, call.down_b)), routing)
    return steps.combine(y, routing, call.weights.contiguous()), *saved


@_one_at_a_time
def _launch_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    first, second = len(_Operands._fields), len(_Operands._fields) + len(_Saved._fields)
    call, saved, options = _Operands(*given[:first]), _Saved(*given[first:second]), _Options(*given[second:-1])
    steps, found = load(options.implementation), dict[str, Tensor]()
    needs = {name for name, need in zip(_GRADIENTS, given[-1], strict=True) if need}
    weights, (up_a, up_b, down_a, down_b) = call.weights.contiguous(), call[6:10]
    routing = Places(saved.order, saved.places, saved.offsets, call.indices.contiguous())
    x, out = ByToken(call.x), ByToken(dy)
    du = None if down_b is None else steps.rows(out, ExpertProduct(down_b.mT, scale=options.down_scale), routing)
    bias = call.down_bias if "weights" in needs else None
    by = ExpertProduct(call.values("down").mT, bias, _low_rank(du, None if down_a is None else down_a.mT))
    dz, weighted, dweights = steps.down_backward(out, by, saved.z, weights, routing, options.between)
    found["weights"] = dweights.to(weights.dtype)
    if "down" in needs:
        found["down"] = steps.outer(out, weighted, routing, call.down)
    if "down_bias" in needs and call.down_bias is not None:
        found["down_bias"] = steps.sums(out, routing, call.down_bias, weights=weights)
    if du is not None and down_a is not None and down_b is not None:
        if "down_a" in needs:
            found["down_a"] = steps.outer(du, weighted, routing, down_a)
        if "down_b" in needs:
            found["down_b"] = steps.outer(out, saved.u, routing, down_b, weights=weights)
    del weighted, out, by
    dt = None if up_b is None else steps.rows(dz, ExpertProduct(up_b.mT, scale=options.up_scale), routing)
    if "up" in needs:
        found["up"] = steps.outer(dz, x, routing, call.up)
    if "up_bias" in needs and call.up_bias is not None:
        found["up_bias"] = steps.sums(dz, routing, call.up_bias)
    if dt is not None and up_a is not None and up_b is not None:
        if "up_a" in needs:
            found["up_a"] = steps.outer(dt, x, routing, up_a)
        if "up_b" in needs:
            found["up_b"] = steps.outer(dz, saved.t, routing, up_b)
    if "x" in needs:
        by = ExpertProduct(call.values("up").mT, adapter=_low_rank(dt, None if up_a is None else up_a.mT))
        found["x"] = steps.combine(steps.rows(dz, by, routing), routing, None)
    return tuple(found[name] if name in found else dy.new_empty(0) for name in _GRADIENTS)


def _tiles(tile: int, call: _Operands) -> Iterator[tuple[slice, _Operands]]:
    for first in range(0, len(call.x), tile):
        part = slice(first, first + tile)
        yield part, call._replace(x=call.x[part], weights=call.weights[part], indices=call.indices[part])


def _launch_tiled_forward(*given: Any) -> Tensor:
    *options, tile = given[len(_Operands._fields) :]
    call = _Operands(*given[: len(_Operands._fields)])
    y = torch.empty_like(call.x)
    for part, operands in _tiles(tile, call):
        y[part] = _launch_forward(*operands, *options)[0]
    return y


@_one_at_a_time
def _launch_tiled_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *options, needs, tile = given[len(_Operands._fields) :]
    call = _Operands(*given[: len(_Operands._fields)])
    found = {
        name: torch.empty_like(x) if name in _BY_TOKEN else torch.zeros_like(x, dtype=_sum_dtype(x))
        for name, x, needed in zip(_GRADIENTS, call, needs, strict=False)
        if needed and x is not None
    }
    for part, operands in _tiles(tile, call):
        _, saved = _until_activation(operands, _Options(*options))
        gradients = _launch_backward(dy[part], *operands, *saved, *options, needs)
        for name, gradient in zip(_GRADIENTS, gradients, strict=True):
            if name in _BY_TOKEN and name in found:
                found[name][part] = gradient
            elif name in found:
                found[name] += gradient
    none = dy.new_empty(0)
    return tuple(
        found[name].to(x.dtype) if name in found and x is not None else none.clone()
        for name, x in zip(_GRADIENTS, call, strict=False)
    )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _fake_forward(*given: Any) -> tuple[Tensor, ...]:
    call = _Operands(*given[: len(_Operands._fields)])
    x, places = call.x, call.indices.numel()

    def rank(a: Tensor | None) -> Tensor:
        return x.new_empty(0) if a is None else x.new_empty(places, a.shape[1])

    def integers(*shape: int) -> Tensor:
        return call.indices.new_empty(shape, dtype=torch.int32)

    numbers = integers(places), integers(*call.indices.shape), integers(call.up.shape[0] + 1)
    z = x.new_empty(places, call.up.shape[1])
    return torch.empty_like(x), *_Saved(z, rank(call.up_a), rank(call.down_a), *numbers)


def _fake_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    tensors, needs = given[: len(_GRADIENTS)], given[-1]
    return tuple(
        torch.empty_like(tensor) if tensor is not None and (needed or name == "weights") else dy.new_empty(0)
        for name, tensor, needed in zip(_GRADIENTS, tensors, needs, strict=True)
    )


def _fake_tiled_forward(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_tiled_backward(dy: Tensor, *given: Any) -> tuple[Tensor, ...]:
    tensors, needs = given[: len(_GRADIENTS)], given[-2]
    return tuple(
        torch.empty_like(tensor) if tensor is not None and needed else dy.new_empty(0)
        for tensor, needed in zip(tensors, needs, strict=True)
    )


_OPERANDS, _OPTIONS, _SAVED = map(arguments_of, (_Operands, _Options, _Saved))
_forward = operator(
    f"experts({_OPERANDS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * (1 + len(_Saved._fields)))})",
    _launch_forward,
    _fake_forward,
)
_backward = operator(
    f"experts_backward(Tensor dy, {_OPERANDS}, {_SAVED}, {_OPTIONS}, bool[] needs)"
    f" -> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _launch_backward,
    _fake_backward,
)
_tiled_forward = operator(
    f"tiled_experts({_OPERANDS}, {_OPTIONS}, int tile) -> Tensor",
    _launch_tiled_forward,
    _fake_tiled_forward,
)
_tiled_backward = operator(
    f"tiled_experts_backward(Tensor dy, {_OPERANDS}, {_OPTIONS}, bool[] needs, int tile)"
    f" -> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _launch_tiled_backward,
    _fake_tiled_backward,
)
