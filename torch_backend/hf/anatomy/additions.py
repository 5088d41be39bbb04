"""Finds what somebody added to a model: modules, hooks and forwards that no model of its config has.

A tiny model of the same config is made without them, so what is proved on it says nothing of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from torch_backend.hf.edits.override import OUTER, has_own_forward, original_class

# Packages whose classes and hooks are a model's own, or act on each token alone. Code that comes with a checkpoint
# (trust_remote_code) is in transformers_modules.
_KNOWN = (
    *("torch", "transformers", "transformers_modules", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel"),
    *("torch_backend", "crosspack"),
)
# torch's modules that read several tokens, where no model of transformers made them
_READ_SEVERAL = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)


def additions(model: nn.Module) -> dict[str, nn.Module]:
    """Finds what was added to a model: each by name, with the module that it is or stands on."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        place, kind = name or "the model", _kind(module)
        if not _is_known(kind.__module__):
            found[f"{place} ({kind.__name__})"] = module
        elif has_own_forward(module) and not _is_known(_module_of(_own_forward(module))):
            found[f"forward of {place}"] = module
        elif any(not _is_known(_module_of(hook)) for hook in _hooks(module)):
            found[f"a hook on {place}"] = module
        if not kind.__module__.startswith("transformers"):
            inside = ((f"{name}.{child}".lstrip("."), m) for child, m in module.named_children())
            found |= {f"{at} ({type(m).__name__})": m for at, m in inside if isinstance(m, _READ_SEVERAL)}
    return found


def kinds_added(model: nn.Module) -> Counter[str]:
    """Counts the modules that were added to a model by their class, which is the same in its copies."""
    kinds = map(_kind, model.modules())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if not _is_known(kind.__module__))


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was written, without what a patch or torch put over it."""
    kinds = (kind for kind in original_class(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not _is_made_by_torch(kind))


def _is_made_by_torch(kind: type[nn.Module]) -> bool:
    """Returns whether torch made a class for one module, as FSDP2 and parametrizations do.

    It stands in no module of torch by its name; that of an abstract class says to be of the module ``abc``.
    """
    place = kind.__module__
    written = getattr(sys.modules.get(place), kind.__qualname__, None) is kind
    return place == "abc" or (place.startswith("torch.") and not written)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _own_forward(module: nn.Module) -> Any:
    own = module.__dict__
    return own.get(OUTER, own.get("_old_forward", own.get("forward")))


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _module_of(function: Any) -> str:
    """The module in which a function, a method or a callable object was written."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return str(name)
