"""float8 training: the linear layers of a decoder multiply in float8, by a recipe of torchao.

A model and a precision -> which linear layers multiply in float8, and why the others do not -> each of them becomes a
``Float8Linear`` of torchao, in place -> :func:`to_bfloat16` takes it back. Weights, gradients, the optimizer's states
and what is saved keep their names and dtypes.

torchao's ``convert_to_float8_training`` makes new modules, which the hooks of a patch and of FSDP2 do not follow. So it
makes one beside each layer here, and the layer takes its class and its settings.

Scales run over what a product adds up. In the forward and for the gradients of inputs by rows that is one token, so a
document's numbers do not depend on what stands beside it in the row. Weights' gradients add up tokens:
``rowwise_with_gw_hp`` leaves them in bfloat16, ``rowwise`` scales each column over all tokens, and ``tensorwise`` has
one scale for all tokens in every product. These two pad the tokens to a multiple of 16 with zeros, which change
neither sums nor scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from packing_core.extras import require
from torch_backend.hf.anatomy.layers import find_experts, find_mixers
from torch_backend.hf.anatomy.structure import causal_lm, decoder_of, execution_device, own_modules
from torch_backend.hf.attention import DecoderLayer
from torch_backend.hf.override import original_class
from torch_backend.hf.quantised import quantised_layers

Precision = Literal["float8", "float8:rowwise_with_gw_hp", "float8:rowwise", "float8:tensorwise"]
RECIPES = ("rowwise_with_gw_hp", "rowwise", "tensorwise")
DEFAULT = RECIPES[0]
EMULATED = False  # by products of float32 on any device, as torchao does for tests
_MULTIPLE = 16  # of features, which the products of float8 take
_ADDED = "_crosspack_float8"  # attribute of a layer: the recipe, and the names of the settings that it was given
_ROUTERS = {"gate", "router", "shared_expert_gate"}
# torchao.prototype.moe_training of 0.18; it also takes groups of multiples of 16 tokens alone.
_EXPERTS = "experts, whose only products in float8 are a prototype of torchao that scales gradients over documents"


def recipe_of(precision: str) -> str:
    """Returns torchao's name of the recipe that a precision names; of ``"float8"``, the default.

    Raises:
        PackingError: there is no such precision.
    """
    kind, _, recipe = precision.partition(":")
    if kind != "float8" or (recipe or DEFAULT) not in RECIPES:
        names = ", ".join(f'"float8:{name}"' for name in RECIPES)
        raise PackingError(
            f'precision={precision!r} is not known: pass "float8", which is "float8:{DEFAULT}", or one of {names}',
            option="precision",
        )
    return recipe or DEFAULT


def check_float8(model: nn.Module, precision: str) -> list[nn.Linear]:
    """Returns the linear layers of a model that a precision lets multiply in float8.

    Raises:
        PackingError: there is no such precision.
        MissingExtraError: torchao is not installed.
        UnsupportedError: the device has no products of float8.
        UnsupportedModelError: the model's weights are quantised, cut by FSDP1, DeepSpeed ZeRO-3 or tensor parallelism,
            or in float8 by somebody else; or no linear layer is left.
    """
    recipe_of(precision)
    root = causal_lm(model)
    if not EMULATED and (reason := _why_not_here(execution_device(root))) is not None:
        raise UnsupportedError(f"precision={precision!r} is not possible, because {reason}", option="precision")
    require("torchao.float8", extra="float8")
    name = type(root).__name__
    if (reason := _why_not_weights(model, root)) is not None:
        raise UnsupportedModelError(f"{name} cannot train in float8, because {reason}")
    layers = list(_linear_layers(root))
    chosen = [layer for _, layer, reason in layers if reason is None]
    if not chosen:
        first = next((f": {reason}" for *_, reason in layers), "")
        raise UnsupportedModelError(f"no linear layer of {name} can multiply in float8{first}")
    return chosen


def to_float8(model: nn.Module, precision: str) -> None:
    """Let the linear layers of a decoder multiply in float8, in place; a second call takes the first one back.

    Raises:
        As :func:`check_float8`, before anything is changed.
    """
    layers = check_float8(model, precision)
    to_bfloat16(model)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = recipe_of(precision)
    named = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(named, emulate=EMULATED, pad_inner_dim=recipe != DEFAULT)
    for layer in layers:
        converted = convert_to_float8_training(nn.Sequential(layer), config=config)[0]
        settings = {name: value for name, value in vars(converted).items() if name not in vars(layer)}
        layer.__dict__.update(settings)
        layer.__dict__[_ADDED] = recipe, tuple(settings)
        layer.__class__ = type(converted)


def to_bfloat16(model: nn.Module) -> None:
    """Take :func:`to_float8` back; without effect on layers that somebody else has converted."""
    for layer in model.modules():
        if _ADDED in layer.__dict__:
            for name in (*layer.__dict__[_ADDED][1], _ADDED):
                del layer.__dict__[name]
            layer.__class__ = nn.Linear


def describe_float8(root: Any) -> str | None:
    """Describes which linear layers of a decoder multiply in float8, and why others and experts do not.

    Returns:
        None if no layer does.
    """
    layers = list(_linear_layers(root))
    inside = [layer for _, layer, _ in layers if _is_float8(layer)]
    if not inside:
        return None
    recipes = {layer.__dict__[_ADDED][0] for layer in inside if _ADDED in layer.__dict__}
    recipe = "/".join(sorted(recipes)) or "as torchao converted them"
    if "tensorwise" in recipes:
        recipe += ", so documents of a row see each other's largest value"
    elif "rowwise" in recipes:
        recipe += ", so documents of a row share the scales of weights' gradients"
    others: dict[str, list[str]] = {}
    for path, layer, reason in layers:
        if reason is not None and not _is_float8(layer):
            others.setdefault(reason, []).append(path)
    if experts := [*find_experts(decoder_of(root))]:
        others[_EXPERTS] = experts
    left = (
        f"; not {first}{f' and {len(more)} more' if more else ''}: {reason}"
        for reason, (first, *more) in others.items()
    )
    return f"{len(inside)} linear layers multiply in float8 ({recipe}){''.join(left)}"


def _linear_layers(root: Any) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """The linear layers inside the layers of a decoder, without what adapters add to them.

    Yields:
        The name of each, the layer, and why it keeps its precision; None if it need not.
    """
    decoder = decoder_of(root)
    own = list(own_modules(decoder))
    layers = tuple(f"{path}." for path, m in own if isinstance(m, DecoderLayer))
    mixers = tuple(f"{path}." for path in find_mixers(decoder))
    adapted = [f"{path}." for path, m in own if isinstance(getattr(m, "base_layer", None), nn.Module)]
    for path, module in own:
        adapter = any(path.startswith(around) and not path.startswith(f"{around}base_layer") for around in adapted)
        if isinstance(module, nn.Linear) and path.startswith(layers) and not adapter:
            yield path, module, "part of a recurrent layer" if path.startswith(mixers) else _why_not(path, module)


def _why_not(path: str, layer: nn.Linear) -> str | None:
    """Explains why a linear layer keeps its precision, None if it need not."""
    if _ROUTERS & set(path.split(".")):
        return "a router or a gate"
    if not _is_float8(layer) and original_class(layer) is not nn.Linear:
        return f"its class {type(layer).__name__} is not torch's Linear"
    if type(layer) is not original_class(layer) or "forward" in layer.__dict__:
        return "its forward was replaced"
    if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
        return f"{layer.in_features} x {layer.out_features} features, not multiples of {_MULTIPLE}"
    return None


def _why_not_here(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the model computes on {device.type}, which has no products of float8: leave precision out"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} (compute capability {major}.{minor}) has no products of float8, which begin with 8.9"
    return None


def _why_not_weights(model: nn.Module, root: Any) -> str | None:
    """Explains why the weights of a model cannot be cast to float8 in its products, None if they can."""
    if getattr(root, "is_quantized", False) or quantised_layers([root]):
        return "its weights are quantised: train adapters without precision"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FSDP1 has its weights as parts of one vector: use FSDP2 (fully_shard)"
    for path, layer, _ in _linear_layers(root):
        weight = layer.weight
        if _is_float8(layer) and _ADDED not in layer.__dict__:
            return f"torchao has converted {path} already: leave precision out"
        if hasattr(weight, "ds_id"):
            return "DeepSpeed ZeRO-3 partitions its weights: use FSDP2 or DDP"
        if isinstance(weight, DTensor) and not any(isinstance(module, FSDPModule) for module in model.modules()):
            return f"tensor parallelism cuts the weight of {path}: use FSDP2 or DDP"
        if type(weight) not in (Tensor, nn.Parameter, DTensor):
            return f"the weight of {path} is a {type(weight).__name__}"
    return None


def _is_float8(layer: nn.Module) -> bool:
    return any(c.__name__ == "Float8Linear" and c.__module__.startswith("torchao.") for c in type(layer).__mro__)
