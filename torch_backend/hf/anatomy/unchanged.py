"""Decides whether a module runs its library's code and nothing else, so that other code may compute the same instead.

Tiles (:mod:`torch_backend.steps.tiled_layers`) and kernels of experts replace what a module does. A name, or the class
of which a module is an instance, says too little: subclasses, hooks and parametrisations compute something else.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from torch_backend.hf.override import original_class

_LIBRARIES = ("transformers", "torch", "peft")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
    makers = {type(made).__module__.partition(".")[0] for each in lists for made in each}
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
