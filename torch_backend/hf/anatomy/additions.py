"""Finds what of a model its config does not make: other classes, hooks, forwards and kinds of parameters.

A tiny model of the same config is made without them, so what is proved on it says nothing of them. Nothing is known by
its package: what stands at the same place of the tiny model is the config's own, and all else is an addition. What is
added or exchanged later is noticed by :class:`Structure`.

Of one module, :func:`why_changed` tells whether it runs its library's code and nothing else, so that tiles
(:mod:`torch_backend.steps.tiled_layers`) and kernels may compute the same instead. A name, or the class of which it is
an instance, says too little: subclasses, hooks and parametrisations compute something else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from torch_backend.hf.override import STANDS_FOR, added_forward, original_class
from torch_backend.ops.mxfp4 import Mxfp4Weight

# Packages whose modules, hooks and functions say where weights lie, what is compiled and what runs again, and compute
# nothing themselves.
_PLACING = ("torch.distributed", "torch._dynamo", "torch.utils.checkpoint", "accelerate", "deepspeed", "torch_backend")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(\.|$)")
# Attributes of layers and rotary modules by which they are packed: the kind of frequencies, and of Llama 4 whether a
# layer counts positions along the row.
_READ_ONCE = ("config", "rope_type", "attn_temperature_tuning", "use_rope")
Part = tuple[str, str, Any]
_CLASS = "class"
_LIBRARIES = ("transformers", "torch", "peft")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


# -- of a model --------------------------------------------------------------------------------------------------------


def parts_of(model: nn.Module) -> frozenset[Part]:
    """Returns what a model consists of: kinds of parts, each with its place, in which all layers are one."""
    return frozenset(part for part, *_ in _parts(model))


def added_objects(model: nn.Module, own: frozenset[Part]) -> tuple[Any, ...]:
    """The classes, functions and hooks that a model has beside its ``own`` parts; several may have one name."""
    return tuple(x for part, _, _, x in _parts(model) if part not in own)


def additions(model: nn.Module, own: frozenset[Part]) -> dict[str, nn.Module]:
    """Finds what a model has beside its ``own`` parts: each by name, with the module that it is or stands on.

    What shards, moves or compiles modules is left out, and so are modules of the model's own kinds in added ones.
    """
    others: dict[str, nn.Module] = {}
    kinds = {kind for sort, _, kind in own if sort == _CLASS}
    inside: set[nn.Module] = set()
    for part, name, module, _ in _parts(model):
        if part not in own and not (part[0] == _CLASS and part[2] in kinds and module in inside):
            others[name] = module
            if part[0] == _CLASS:
                inside.update(module.modules())
    return others


def _parts(model: nn.Module) -> Iterator[tuple[Part, str, nn.Module, Any]]:
    for path, module in model.named_modules():
        name = _WRAPPERS.sub("", path).rstrip(".")
        at, place, kind = re.sub(r"\b\d+\b", "#", name), name or "the model", _kind(module)
        if not _places(kind):
            yield (_CLASS, at, kind), f"{place} ({kind.__name__})", module, kind
        functions = {key: x for key, x in vars(module).items() if isinstance(x, FunctionType | MethodType | partial)}
        functions |= {"forward": added_forward(module)}
        for key, function in functions.items():
            if (
                function is not None
                and key != "_old_forward"
                and not key.startswith("_crosspack")
                and not _places(function)
            ):
                yield (key, at, _name_of(function)), f"{key} of {place} ({_name_of(function)})", module, function
        for hook in _hooks(module):
            # Those of transformers collect outputs, or let embeddings require gradients; trainers set them at any time.
            if not _places(hook) and _counts(hook):
                yield ("hook", at, _name_of(hook)), f"a hook on {place} ({_name_of(hook)})", module, hook
        for parameter in module._parameters.values():
            of = type(parameter)
            if parameter is not None and of is not nn.Parameter and (of is Mxfp4Weight or not _places(of)):
                yield ("parameter", at, of), f"{place} ({of.__name__})", module, of


class Structure:
    """Holds what a patch rests on: settings, and modules with their classes, forwards and hooks, by identity.

    Hooks of transformers do not count: trainers let embeddings require gradients and take it back, in every step. Where
    a stand-in of ours takes the place of the output layer, as it does while a loss runs, that layer is taken as it was.
    A comparison costs 0.4 microseconds a module. Copied or unpickled, it is None: it says nothing of another model.
    """

    def __init__(self, model: Any) -> None:
        self.modules: list[nn.Module] = list(model.modules())
        self.hooks = [hooks for m in self.modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        output = model.get_output_embeddings()
        children = [(m._modules, name, child) for m in self.modules for name, child in m._modules.items()]
        self.outputs = [child for child in children if child[2] is output is not None]
        configs = {id(c): vars(c) for m in self.modules if hasattr(c := vars(m).get("config"), "__dict__")}
        settings = [(of, name) for of in configs.values() for name in of if not name.startswith("_")]
        settings += [(vars(m), name) for m in self.modules for name in _READ_ONCE if name in vars(m)]
        self.values = [(of, name, of[name]) for of, name in settings]
        self.values += [child for child in children if child[2] is not output or output is None]
        self.seen = self._look()

    def unchanged(self) -> bool:
        """Returns whether the model is as it was."""
        return (
            all(of.get(name) is value for of, name, value in self.values)
            and all(of.get(name) is value or _places(type(of.get(name))) for of, name, value in self.outputs)
            and self.seen == self._look()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _look(self) -> tuple[Any, ...]:
        own = [m.__dict__ for m in self.modules[1:]]
        return (
            [vars(kind).get(STANDS_FOR, kind) for kind in map(type, self.modules)],
            [[number for number, x in hooks.items() if _counts(x)] if hooks else [] for hooks in self.hooks],
            [d.get("_old_forward") or d.get("forward") for d in own],
            [len(m._modules) for m in self.modules],
        )


def _counts(hook: Callable[..., Any]) -> bool:
    return not module_of(hook).startswith("transformers.")


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class of a module as it was written, without what a patch or torch put over it."""
    kinds = (kind for kind in original_class(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not _is_made_by_torch(kind))


def _is_made_by_torch(kind: type[nn.Module]) -> bool:
    """Returns whether torch made a class for one module, as FSDP2 and parametrizations do.

    It stands in no module of torch by its name; that of an abstract class says to be of the module ``abc``.
    """
    place = kind.__module__
    return place == "abc" or (place.startswith("torch.") and not is_in_its_module(kind))


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def _places(value: Any) -> bool:
    """Returns whether a class, a hook or a forward is of a package that moves weights and computes nothing."""
    return f"{module_of(value)}.".startswith(tuple(f"{package}." for package in _PLACING))


def computes_its_own(kind: type[nn.Module]) -> bool:
    """Returns whether a class of modules is somebody's own: of no library, and of no package that moves weights."""
    return not _places(kind) and _package(kind) not in _LIBRARIES


def _name_of(function: Any) -> str:
    function = written(function)
    return f"{module_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


# -- of a module -------------------------------------------------------------------------------------------------------


def why_changed(module: nn.Module) -> str | None:
    """Explains why calls of a module may do something else than its library's code says; None if they do not.

    Reasons are a hook of any kind but our own, a forward that was set on the instance, and :func:`why_other_code`.
    """
    if torch_modules._has_any_global_hook():
        return "a hook stands on all modules"
    for hook in (h for name in _HOOKS for h in getattr(module, name).values()):
        if _package(hook) != "torch_backend":
            return f"a hook stands on it ({getattr(hook, '__qualname__', type(hook).__name__)})"
    if "forward" in module.__dict__:
        return "somebody set a forward on it"
    return why_other_code(module)


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a hook of any kind stands on a module, as compiled layers can ask."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def has_foreign_hooks(module: nn.Module) -> bool:
    """Returns whether a hook stands on a module that is none of the library which makes its weights (bitsandbytes)."""
    if not has_hooks(module):
        return False
    lists = getattr(module, "parametrizations", {}).values()
    makers = {_package(type(parametrization)) for parametrizations in lists for parametrization in parametrizations}
    return any(_package(hook) not in makers for name in _HOOKS for hook in getattr(module, name).values())


def why_other_code(module: nn.Module) -> str | None:
    """Explains why the class of a module is none of its library's, or has another forward; None if neither is so.

    Classes that are made for one module (parametrisations, weights that ranks share) are none of a library's either.
    """
    kind = original_class(module)
    if not is_in_its_module(kind) or kind.__module__.partition(".")[0] not in _LIBRARIES:
        return f"its class {kind.__name__} is none of {', '.join(_LIBRARIES)}"
    function: Any = kind.forward
    while function is not None:  # and all that decorates it
        if function.__globals__.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            return f"the forward of {kind.__name__} was replaced"
        function = getattr(function, "__wrapped__", None)
    return None


def written(function: Any) -> Any:
    """Returns a function without what binds it."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)


def module_of(function: Any) -> str:
    """The module in which a class, a function, a method or a callable object was written."""
    function = written(function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return str(name)


def is_in_its_module(kind: type) -> bool:
    """Returns whether a class stands in its module by its name, as one that was made for a single module does not."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _package(function: Any) -> str:
    return module_of(function).partition(".")[0]
