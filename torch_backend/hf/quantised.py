"""Quantised weights inside compiled layers: those that can make their values run there as operators, others are named.

Compiled layers run the ``Linear4bit`` of bitsandbytes by :mod:`torch_backend.ops.linear_4bit`, with its numbers, and a
linear layer whose frozen weight is a tensor subclass with ``dequantize()``, as torchao's are, by
:mod:`torch_backend.ops.linear_stored`. Everything outside of compiled layers keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_backend.ops.linear_4bit import Weight4bit, linear_4bit
from torch_backend.ops.linear_stored import StoredWeight, linear_stored, stored_weight
from torch_backend.ops.mxfp4 import Mxfp4Weight

_WEIGHT = "_crosspack_stored_weight"
_PLAIN: tuple[type, ...] = (Tensor, nn.Parameter, nn.Buffer, DTensor)
_NESTED_BLOCK = 256  # magnitudes of a block of double quantisation, in bitsandbytes' own product


def why_weights_stay(root: Any) -> str | None:
    """Explains why compiled layers cannot run the quantised weights of a model, None if they can or there are none."""
    layers = quantised_layers([root])
    sharded = any(isinstance(module, FSDPModule) for module in root.modules())
    reasons = ((layer, _why_not(layer, sharded=sharded)) for layer in layers)
    reason = next((f"{_named(layer)}, {why}" for layer, why in reasons if why is not None), None)
    if reason is None and getattr(root, "is_quantized", False):
        served = set(layers)
        reason = next((why for m in root.modules() if m not in served and (why := _quantised(m)) is not None), None)
        if reason is None and not layers:
            return "its weights are quantised"
    return None if reason is None else f"its weights are quantised: {reason}"


def quantised_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Finds the linear layers in some modules whose weights have 4 bits of bitsandbytes, or make values themselves."""
    layers = (layer for module in modules for layer in module.modules())
    return [layer for layer in layers if _is_linear_4bit(type(layer)) or _makes_values(layer)]  # type: ignore[arg-type] # a class is hashable


def bytes_beside_4_bits(root: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes that 4-bit weights take beside their parameters: of blocks, and of one weight's values."""
    weights = [_weight_of(layer) for layer in quantised_layers([root]) if _why_not(layer, sharded=True) is None]
    of_4_bits = (weight for weight in weights if isinstance(weight, Weight4bit))  # others are parameters in full
    blocks = sum(x.nbytes for weight in of_4_bits for x in weight[1:5] if x is not None)
    values = [prod(weight.shape) for weight in weights]
    values += [p.numel() for p in root.parameters() if isinstance(p, Mxfp4Weight)]
    return blocks, max(values, default=0) * dtype.itemsize


@contextmanager
def traceable_weights(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, linear layers found by :func:`quantised_layers` run as operators that torch.compile traces."""
    before = [(layer, type(layer)) for layer in layers]
    for layer, kind in before:
        layer.__dict__[_WEIGHT] = _weight_of(layer)  # plain tensors: a trace of others would read their class
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


def _makes_values(layer: Any) -> bool:
    """Returns whether a linear layer of torch has a frozen weight that stands for others and makes their values."""
    if type(layer) is not nn.Linear:
        return False
    weight = layer.weight
    stands = is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor)
    return stands and not weight.requires_grad and hasattr(weight, "dequantize")


def _forward(self: Any, x: Tensor) -> Tensor:
    weight = self.__dict__[_WEIGHT]
    of_4_bits = isinstance(weight, Weight4bit)
    if of_4_bits and weight.packed is None:  # FSDP2 has gathered it for this call
        weight = Weight4bit(self.weight, *weight[1:])
    dtype, of = x.dtype, self.compute_dtype if of_4_bits else None
    x = x if of is None else x.to(of)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return linear_4bit(x, weight, bias).to(dtype) if of_4_bits else linear_stored(x, weight, bias)


def _weight_of(layer: Any) -> Weight4bit | StoredWeight:
    if not _is_linear_4bit(type(layer)):  # type: ignore[arg-type] # a class is hashable
        return _stored(layer.weight)
    state, packed = _state_of(layer), None
    if getattr(layer.weight, "quant_state", None) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            packed = layer.weight.detach().as_subclass(Tensor)
    options = tuple(state.shape), state.blocksize, state.quant_type, state.dtype
    if not state.nested:
        return Weight4bit(packed, state.absmax, None, None, None, *options)
    return Weight4bit(packed, state.state2.absmax, state.absmax, state.state2.code, state.offset, *options)


def _stored(weight: Any) -> StoredWeight:
    """Returns what a tensor subclass stores, and how it makes values: as itself, put together again."""
    names, context = weight.__tensor_flatten__()
    kind, size, stride = type(weight), weight.size(), weight.stride()

    def dequantise(parts: Sequence[Tensor]) -> Tensor:
        inner = dict(zip(names, parts, strict=True))
        values: Tensor = kind.__tensor_unflatten__(inner, context, size, stride).dequantize()
        return values

    name = f"{kind.__module__}.{kind.__qualname__} {tuple(size)} {stride} {names} {context}"
    return stored_weight([getattr(weight, part) for part in names], name, tuple(size), dequantise)


def _why_not(layer: Any, *, sharded: bool) -> str | None:
    if not _is_linear_4bit(type(layer)):  # type: ignore[arg-type] # a class is hashable
        if getattr(layer.weight, "act_quant_kwargs", None) is not None:
            return f"whose {type(layer.weight).__name__} quantises what it multiplies with"
        return "whose forward was replaced" if "forward" in layer.__dict__ else None
    return _why_not_4bit(layer, sharded)


def _state_of(layer: Any) -> Any:
    """Returns how a layer's 4 bits are stored. A weight that FSDP2 has cut or gathered does not know it any more."""
    state = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if state is None else state


def _why_not_4bit(layer: Any, sharded: bool) -> str | None:
    state, weight = _state_of(layer), layer.weight
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return "which bitsandbytes from 0.50 on makes traceable"
    if state is None or (isinstance(weight, DTensor) and not (sharded and weight.device_mesh.ndim == 1)):
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
