"""Quantised weights inside compiled layers: those that can make their values run there as operators, others are named.

Compiled layers run the ``Linear4bit`` of bitsandbytes by :mod:`torch_backend.ops.linear_4bit`, with its numbers. By
:mod:`torch_backend.ops.linear_stored` they run its ``Linear8bitLt``, the ``HQQLinear`` of HQQ, and a linear layer whose
frozen weight is a tensor subclass with ``dequantize()``, as torchao's are. Everything outside of compiled layers keeps
its own forward; that of ``Linear8bitLt`` on CUDA multiplies with rounded activations, and differentiates the product
with the values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Finds the linear layers in some modules whose weights are of bitsandbytes or HQQ, or make values themselves."""
    layers = (layer for module in modules for layer in module.modules())
    return [layer for layer in layers if _kind_of(layer) is not None or _makes_values(layer)]


def bytes_beside_weights(root: nn.Module, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the bytes that quantised weights take beside their parameters: of scales, and of one weight's values."""
    layers = [layer for layer in quantised_layers([root]) if _why_not(layer, sharded=True) is None]
    weights = [_weight_of(layer) for layer in layers]
    scales = 0
    for layer, weight in zip(layers, weights, strict=True):
        if _kind_of(layer) is not None:  # others are parameters in full
            beside = weight[1:5] if isinstance(weight, Weight4bit) else weight.parts[1:]
            scales += sum(x.nbytes for x in beside if x is not None)
    values = [prod(weight.shape) for weight in weights]
    values += [p.numel() for p in root.parameters() if isinstance(p, Mxfp4Weight)]
    return scales, max(values, default=0) * dtype.itemsize


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


def _kind_of(layer: nn.Module) -> str | None:
    """Returns the name of a layer's class, or of the one that it extends, if that is one of :data:`_READERS`."""
    return _kind_of_class(type(layer))  # type: ignore[arg-type] # a class is hashable


@cache
def _kind_of_class(kind: type[nn.Module]) -> str | None:
    return next((c.__name__ for c in kind.__mro__ if _READERS.get(c.__name__, ("",))[0] == c.__module__), None)


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
    kind = _kind_of(layer)
    return _stored(layer.weight) if kind is None else _READERS[kind][1](layer)


def _weight_4bit(layer: Any) -> Weight4bit:
    state, packed = _state_of(layer), None
    if getattr(layer.weight, "quant_state", None) is not None:
        packed = _plain(layer.weight)
    options = tuple(state.shape), state.blocksize, state.quant_type, state.dtype
    if not state.nested:
        return Weight4bit(packed, state.absmax, None, None, None, *options)
    return Weight4bit(packed, state.state2.absmax, state.absmax, state.state2.code, state.offset, *options)


def _weight_8bit(layer: Any) -> StoredWeight:
    scales = layer.weight.SCB if layer.state.SCB is None else layer.state.SCB
    return stored_weight([_plain(layer.weight), scales], "Linear8bitLt", tuple(layer.weight.shape), _values_of_8_bits)


def _values_of_8_bits(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """As in bitsandbytes' own backward, and in its forward off CUDA."""
    values, scales = parts
    return values.to(dtype).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


def _weight_hqq(layer: Any) -> StoredWeight:
    names = [name for name, x in layer.meta.items() if isinstance(x, Tensor)]
    options = {name: x for name, x in layer.meta.items() if name not in names}
    quantizer = sys.modules[_READERS["HQQLinear"][0]].Quantizer

    def dequantise(parts: Sequence[Tensor], _: torch.dtype) -> Tensor:
        values: Tensor = quantizer.dequantize(parts[0], options | dict(zip(names, parts[1:], strict=True)))
        return values

    for name in names:  # HQQ makes them in inference mode, and such tensors cannot be saved for a backward
        layer.meta[name] = layer.meta[name].clone() if layer.meta[name].is_inference() else layer.meta[name]
    parts = [_plain(layer.W_q), *(layer.meta[name] for name in names)]
    return stored_weight(parts, f"HQQ {names} {options}", tuple(options["shape"]), dequantise)


# Layers of libraries: where their class is defined, and what reads their weight.
_READERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Linear4bit": ("bitsandbytes.nn.modules", _weight_4bit),
    "Linear8bitLt": ("bitsandbytes.nn.modules", _weight_8bit),
    "HQQLinear": ("hqq.core.quantize", _weight_hqq),
}


def _plain(parameter: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(Tensor)


def _stored(weight: Any) -> StoredWeight:
    """Returns what a tensor subclass stores, and how it makes values: as itself, put together again."""
    names, context = weight.__tensor_flatten__()
    kind, size, stride = type(weight), weight.size(), weight.stride()

    def dequantise(parts: Sequence[Tensor], _: torch.dtype) -> Tensor:
        inner = dict(zip(names, parts, strict=True))
        values: Tensor = kind.__tensor_unflatten__(inner, context, size, stride).dequantize()
        return values

    name = f"{kind.__module__}.{kind.__qualname__} {tuple(size)} {stride} {names} {context}"
    return stored_weight([getattr(weight, part) for part in names], name, tuple(size), dequantise)


def _why_not(layer: Any, *, sharded: bool) -> str | None:
    kind, weight = _kind_of(layer), layer._parameters.get("weight")
    if kind == "Linear4bit":
        return _why_not_4bit(layer, sharded)
    if kind == "Linear8bitLt" and (isinstance(weight, DTensor) or layer.weight.dtype != torch.int8):
        return "which holds no whole 8-bit weight"
    if kind == "HQQLinear" and (not layer.ready or not {"scale", "zero"} <= layer.meta.keys() or layer.offload_meta):
        return "whose scales are quantised, or on the host"
    if getattr(weight, "act_quant_kwargs", None) is not None:
        return f"whose {type(weight).__name__} quantises what it multiplies with"
    return "whose forward was replaced" if "forward" in layer.__dict__ else None


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
