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

from torch_backend.hf.edits.late_hooks import WatchedHook
from torch_backend.hf.edits.override import added_forward, original_class

# Packages whose classes and hooks are a model's own, or act on each token alone. Code that comes with a checkpoint
# (trust_remote_code) is in transformers_modules.
_KNOWN = (
    *("torch", "transformers", "transformers_modules", "peft", "accelerate", "bitsandbytes", "torchao", "liger_kernel"),
    *("deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "composer"),
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
        elif _has_added_forward(module):
            found[f"forward of {place}"] = module
        elif any(not is_known_hook(hook) for hook in _hooks(module)):
            found[f"a hook on {place}"] = module
        if not kind.__module__.startswith("transformers"):
            inside = ((f"{name}.{child}".lstrip("."), m) for child, m in module.named_children())
            found |= {f"{at} ({type(m).__name__})": m for at, m in inside if isinstance(m, _READ_SEVERAL)}
    return found


def kinds_added(model: nn.Module) -> Counter[str]:
    """Counts what was added to a model by its class or function, which are the same in its copies.

    Modules of torch that read several tokens are counted wherever they stand: only what was added after others were
    counted says something. The forward of ``model`` itself is left out, because it calls a decoder that takes packed
    batches, and hooks are (:mod:`~..edits.late_hooks`).
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        kind = _kind(module)
        if not _is_known(kind.__module__) or isinstance(module, _READ_SEVERAL):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
        if module is not model and _has_added_forward(module):
            found[f"another forward of {kind.__name__}"] += 1
    return found


class Structure:
    """The modules of a model with their classes, forwards and hooks, compared by identity.

    A comparison costs 0.4 microseconds a module, a tenth of what :func:`kinds_added` costs. The output layer may be
    exchanged for another that reads each token alone, as losses do during a call. A copied or unpickled structure is of
    no model, and so is the one that is made without a model.
    """

    def __init__(self, model: Any = None) -> None:
        self.modules: list[nn.Module] = [] if model is None else list(model.modules())
        self.hooks = [hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        output = None if model is None else model.get_output_embeddings()
        children = [(m._modules, name, child) for m in self.modules for name, child in m._modules.items()]
        self.slots = [(of, name) for of, name, child in children if child is not output or child is None]
        self.outputs = [(of, name) for of, name, child in children if child is output and child is not None]
        self.seen = self._look() if self.modules else None

    def unchanged(self) -> bool:
        """Returns whether the model is as it was."""
        return self.seen is not None and self.seen == self._look()

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, ()

    def _look(self) -> tuple[Any, ...]:
        own = [m.__dict__ for m in self.modules[1:]]
        return (
            list(map(type, self.modules)),
            list(map(len, self.hooks)),
            [id(d.get("_old_forward") or d.get("forward")) for d in own],
            [len(m._modules) for m in self.modules],
            [id(of.get(name)) for of, name in self.slots],
            [_reads_each_token_alone(of.get(name)) for of, name in self.outputs],
        )


def _reads_each_token_alone(layer: nn.Module | None) -> bool:
    parts = () if layer is None else layer.modules()
    return all(_is_known(_kind(part).__module__) and not isinstance(part, _READ_SEVERAL) for part in parts)


def _has_added_forward(module: nn.Module) -> bool:
    own = added_forward(module)
    return own is not None and not _is_known(_module_of(own))


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


def is_known_hook(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook is of a package whose hooks act on each token alone."""
    return _is_known(_module_of(hook.hook if isinstance(hook, WatchedHook) else hook))


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
