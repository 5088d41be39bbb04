"""Packed calls run routed experts on our kernels; unpacked calls run the implementation that was in force.

Three modules are overridden: the experts; the decoder layer around them, which says whose tokens run; and PEFT's
wrapper of a parameter of experts (``target_parameters``), which would add its low-rank product to the weights of all
experts before each call. Such adapters reach the kernels as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_backend.hf.anatomy.additions import has_foreign_hooks
from torch_backend.hf.anatomy.expert_layouts import ExpertsLayout, holds_4_bits, is_spread, layout_of, makes_weights
from torch_backend.hf.anatomy.layers import find_experts, passes_on
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.edits.mixers import segments_passed_on
from torch_backend.hf.entry import THREAD, run_with
from torch_backend.hf.experts import LAYOUT, run_experts
from torch_backend.hf.forward import forward_among
from torch_backend.hf.override import Attribute, LayerOverride, has_own_forward, is_reached, original_class
from torch_backend.ops.experts import Adapter
from torch_backend.ops.operators import runs_triton

_WRAPPER = "ParamWrapper"  # of PEFT, by name: it may not be installed
_DECORATOR = "transformers.integrations.moe"  # whose use_experts_implementation makes forwards of experts


def reasons_against(decoder: nn.Module) -> dict[str, str]:
    """The modules of experts that keep the implementation they name, each with the reason."""
    layouts = _layouts(decoder, find_experts(decoder))
    return {name: layout for name, layout in layouts.items() if isinstance(layout, str)}


def experts_edits(decoder: nn.Module, experts: Mapping[str, nn.Module]) -> Iterator[LayerOverride | Attribute]:
    """The edits of a decoder whose ``experts``, by name, run on our kernels in packed calls.

    Among them are PEFT's adapters of their parameters, which kernels take as they are.
    """
    layouts = {id(experts[name]): x for name, x in _layouts(decoder, experts).items() if not isinstance(x, str)}
    for module in decoder.modules():
        inside = _innermost(module) if type(module).__name__ == _WRAPPER else module
        if id(inside) in layouts:
            yield from kernel_edits(module, layouts[id(inside)])
        elif isinstance(module, DecoderLayer) and any(id(inner) in layouts for inner in module.modules()):
            yield LayerOverride(module, _passing_layer_forward if passes_on(module) else _layer_forward)


def kernel_edits(module: nn.Module, layout: ExpertsLayout) -> Iterator[LayerOverride | Attribute]:
    """The edits of a module of experts, or of PEFT's adapter of their parameter, which kernels take as it is."""
    if type(module).__name__ == _WRAPPER:
        yield LayerOverride(module, _adapter_forward)
        return
    yield Attribute(module, LAYOUT, layout)
    yield LayerOverride(module, _experts_forward)


def why_experts_read(model: nn.Module) -> str | None:
    """Explains why experts of a model may read from the device during a packed call, None if none does.

    Ours read nothing where Triton runs. Of transformers' implementations ``batched_mm`` reads nothing, and
    ``grouped_mm`` nothing in bfloat16; in other dtypes it asks for the number of tokens of each expert.
    """
    stacked = {id(module): name for name, module in find_experts(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            return f"the experts of {name} run one by one"
        if id(module) not in stacked:
            continue
        if is_spread(module):
            return f"the experts of {name} are spread over ranks, which read how many tokens each gets"
        weight = module.down_proj
        if LAYOUT in module.__dict__:
            if weight.is_cuda and not runs_triton(weight):
                return f"the experts of {name} have no kernel for {weight.dtype}"
            continue
        own = str(getattr(getattr(module, "config", None), "_experts_implementation", None))
        if own != "batched_mm" and (own != "grouped_mm" or weight.dtype != torch.bfloat16):
            return f"the experts of {name} run on {own}, which may read from the device"
    return None


def _layouts(decoder: nn.Module, experts: Mapping[str, nn.Module]) -> dict[str, ExpertsLayout | str]:
    """The layout of each module of experts, or the reason why it keeps the implementation that it names."""
    layers = (module for module in decoder.modules() if isinstance(module, DecoderLayer))
    inside = {id(inner) for layer in layers for inner in layer.modules()}
    outside = "they are outside of a decoder layer"
    return {name: _layout(module) if id(module) in inside else outside for name, module in experts.items()}


def _layout(module: nn.Module) -> ExpertsLayout | str:
    if is_spread(module):
        return "expert parallelism spreads them over ranks"
    if has_own_forward(module):
        return "somebody set a forward on this instance"
    kind = original_class(module)
    if getattr(kind.forward, "__globals__", {}).get("__name__") != _DECORATOR:
        return f"{kind.__name__} has another forward than the one that transformers hands to implementations"
    return layout_of(module)


def _layer_forward(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call of a decoder layer, which says whose tokens its experts get."""
    return run_with("layer", forward_among((*args, *kwargs.values())), call, *args, **kwargs)


def _passing_layer_forward(layer: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _layer_forward(layer, partial(segments_passed_on, layer, call), *args, **kwargs)


def _experts_forward(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    layout = module.__dict__[LAYOUT]
    if THREAD.layer is None or kwargs or len(args) != 3 or not layout.is_current(module):
        return call(*args, **kwargs)
    return run_experts(module, layout, *args, {})


def _adapter_forward(wrapper: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # PEFT cannot add to weights that are made in every call: its own forward raises in the backward
    inside = _innermost(wrapper)
    stock = THREAD.layer is None and not makes_weights(inside) and not holds_4_bits(inside)
    if stock or kwargs or len(args) != 3:
        return call(*args, **kwargs)
    module, adapters = wrapper, dict[str, Adapter]()
    while type(module).__name__ == _WRAPPER:
        if module.merged or module.disable_adapters or (module is not wrapper and _is_changed(module)):
            return call(*args, **kwargs)
        active = [name for name in module.active_adapters if name in module.lora_A]
        if len(active) > 1 or module.parameter_name in adapters:
            return call(*args, **kwargs)
        if active:
            adapters[module.parameter_name] = _adapter_of(module, active[0])
        module = module.base_layer
    layout = module.__dict__[LAYOUT]
    if adapters.keys() - {layout.up, "down_proj"} or _is_changed(module) or not layout.is_current(module):
        return call(*args, **kwargs)  # PEFT's own, which calls what is inside; of a bias too
    return run_experts(module, layout, *args, adapters)


def _is_changed(module: nn.Module) -> bool:
    """Returns whether calls of a module inside do more than its override, by hooks or a forward that was set on it."""
    return has_foreign_hooks(module) or not is_reached(module) or has_own_forward(module)


def _adapter_of(wrapper: Any, name: str) -> Adapter:
    """The adapter of PEFT's wrapper, as [E, R, in] and [E, out, R] of a weight [E, out, in].

    PEFT keeps [R E, from] and [to, R E], expert by expert in the one and rank by rank in the other, and means by "from"
    the first axis of the stored weight [E, from, to], or the second one if it says that it swapped them.
    """
    first, second, count = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a = first.view(count, -1, first.shape[1])  # [E, R, from]
    b = second.view(second.shape[0], -1, count).permute(2, 0, 1)  # [E, to, R]
    along_first = not getattr(wrapper, "_did_swap_in_out_features", False)
    if along_first != bool(getattr(_innermost(wrapper), "is_transposed", False)):
        a, b = b.mT, a.mT
    return Adapter(_dense(a), _dense(b), float(wrapper.scaling[name]))


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The factor of an adapter, copied unless its rows or its columns lie without gaps, as kernels read them."""
    return x if 1 in x.stride()[1:] else x.contiguous()


def _innermost(wrapper: Any) -> nn.Module:
    while type(wrapper).__name__ == _WRAPPER:
        wrapper = wrapper.base_layer
    module: nn.Module = wrapper
    return module
