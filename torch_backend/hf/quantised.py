"""Quantised weights inside compiled layers: those of 4 bits run there as operators, others are named.

Compiled layers run the ``Linear4bit`` of bitsandbytes by :mod:`torch_backend.ops.linear_4bit`, with its numbers.
Everything outside of compiled layers keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_backend.ops.linear_4bit import Weight4bit, linear_4bit
from torch_backend.ops.mxfp4 import Mxfp4Weight

_WEIGHT = "_crosspack_weight_4bit"
_PLAIN: tuple[type, ...] = (Tensor, nn.Parameter, nn.Buffer, DTensor)
_NESTED_BLOCK = 256  # magnitudes of a block of double quantisation, in bitsandbytes' own product


def why_weights_stay(root: Any) -> str | None:
    """Explains why compiled layers cannot run the quantised weights of a model, None if they can or there are none."""
    layers = linear_4bit_layers([root])
    reason = next((f"{_named(layer)}, {why}" for layer in layers if (why := _why_not_4bit(layer)) is not None), None)
    if reason is None and getattr(root, "is_quantized", False):
        of_4_bits = set(layers)
        reason = next((why for m in root.modules() if m not in of_4_bits and (why := _quantised(m)) is not None), None)
        if reason is None and not layers:
            return "its weights are quantised"
    return None if reason is None else f"its weights are quantised: {reason}"


def linear_4bit_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Finds the linear layers of bitsandbytes in some modules whose weights have 4 bits."""
    return [layer for module in modules for layer in module.modules() if _is_linear_4bit(type(layer))]  # type: ignore[arg-type] # a class is hashable


def bytes_beside_4_bits(root: nn.Module, dtype: torch.dtype) -> int:
    """Returns the bytes that 4-bit weights take beside their parameters: of blocks, and one weight's values."""
    weights = [_weight_of(layer) for layer in linear_4bit_layers([root]) if _why_not_4bit(layer) is None]
    blocks = sum(x.nbytes for weight in weights for x in weight[1:5] if x is not None)
    values = [prod(weight.shape) for weight in weights]
    values += [p.numel() for p in root.parameters() if isinstance(p, Mxfp4Weight)]
    return blocks + max(values, default=0) * dtype.itemsize


@contextmanager
def traceable_4bit(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, linear layers found by :func:`linear_4bit_layers` run as operators that torch.compile traces."""
    before = [(layer, type(layer)) for layer in layers]
    for layer, kind in before:
        layer.__dict__[_WEIGHT] = _weight_of(layer)  # plain tensors: a trace of Params4bit would read its class
        layer.__class__ = _traceable(kind)  # type: ignore[arg-type] # a class is hashable
    try:
        yield
    finally:
        for layer, kind in before:
            layer.__class__ = kind
            del layer.__dict__[_WEIGHT]


@cache
def _is_linear_4bit(kind: type[nn.Module]) -> bool:
    return any(c.__name__ == "Linear4bit" and c.__module__ == "bitsandbytes.nn.modules" for c in kind.__mro__)


@cache
def _traceable(kind: type[nn.Module]) -> type[nn.Module]:
    """One class for all layers of a kind, so that equal layers share their compiled graphs."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": _forward})


def _forward(self: Any, x: Tensor) -> Tensor:
    dtype, of = x.dtype, self.compute_dtype
    x = x if of is None else x.to(of)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return linear_4bit(x, self.__dict__[_WEIGHT], bias).to(dtype)


def _weight_of(layer: Any) -> Weight4bit:
    state = layer.weight.quant_state
    with torch._C.DisableTorchFunctionSubclass():
        packed = layer.weight.detach().as_subclass(Tensor)
    options = tuple(state.shape), state.blocksize, state.quant_type, state.dtype
    if not state.nested:
        return Weight4bit(packed, state.absmax, None, None, None, *options)
    return Weight4bit(packed, state.state2.absmax, state.absmax, state.state2.code, state.offset, *options)


def _why_not_4bit(layer: Any) -> str | None:
    state = getattr(layer.weight, "quant_state", None)
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return "which bitsandbytes from 0.50 on makes traceable"
    if state is None or isinstance(layer.weight, DTensor):
        return "which holds no whole 4-bit weight"
    if "forward" in layer.__dict__:
        return "whose forward was replaced"
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return "whose weight lies the other way round"
    if state.nested and state.state2.blocksize != _NESTED_BLOCK:
        return f"whose magnitudes have blocks of {state.state2.blocksize} and not {_NESTED_BLOCK}"
    return None


def _quantised(module: nn.Module) -> str | None:
    """Names a module with a tensor that stands for others; None if it has none."""
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is None:
            continue
        if type(x) not in _PLAIN:
            return f"{_named(module)} with {type(x).__name__}"
        small = x.dtype.is_floating_point and x.dtype.itemsize == 1
        if small or (not x.dtype.is_floating_point and x.dtype not in (torch.int64, torch.bool)):
            return _named(module)
    return None


def _named(module: nn.Module) -> str:
    return f"{type(module).__name__} of {type(module).__module__.partition('.')[0]}"
