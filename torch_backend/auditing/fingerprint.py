"""Names what a proof on a tiny clone holds for, so that a changed class or function is proved again."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn

from torch_backend.hf.anatomy.structure import execution_device
from torch_backend.hf.attention import stands_over
from torch_backend.hf.override import original_class

_VALUES = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(root: Any, implementation: str | Sequence[str]) -> Hashable:
    """Returns a key of a model's kind: config, implementation, versions, device, dtype and the code that runs.

    The code is that of all methods of the classes of its modules, and of all functions in the files of these classes,
    each with its defaults and what it closes over. It costs 10 milliseconds. What one module holds beyond its class
    (hooks, a forward of its own, another module in its place) belongs to no clone and is proved on the model itself.
    """
    kinds = {kind: None for module in root.modules() for kind in original_class(module).__mro__[:-1]}
    files = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
    return (
        original_class(root),
        root.config.to_json_string(),
        stands_over(root.config),
        str(implementation),
        (torch.__version__, transformers.__version__),
        execution_device(root).type,
        dtype_of(root),
        tuple((kind, _contents(vars(kind))) for kind in kinds),
        tuple((name, _contents(_functions(file))) for name, file in files.items()),
    )


def dtype_of(root: nn.Module) -> torch.dtype:
    """Returns the dtype of a model's first floating-point parameter."""
    return next(p.dtype for p in root.parameters() if p.is_floating_point())


def _functions(file: Any) -> dict[str, Any]:
    return {name: x for name, x in (vars(file) if file else {}).items() if isinstance(x, FunctionType | partial)}


def _contents(names: Any) -> tuple[Any, ...]:
    return tuple((name, _code(value, ())) for name, value in names.items() if name != "__weakref__")


def _code(value: Any, outer: tuple[Any, ...]) -> Hashable:
    """Returns the code of a function, in whatever it is wrapped; a constant by value, anything else by identity.

    Args:
        outer: the functions that hold it, of which it may be one.
    """
    value = getattr(value, "__func__", value)  # of a method, a static method, a class method
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, partial):
        value, held = value.func, (*value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        held = ()
    else:
        return value if isinstance(value, _VALUES) else id(value)
    if not isinstance(value, FunctionType) or any(value is each for each in outer):
        return id(value)
    held += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    for cell in value.__closure__ or ():
        try:
            held += (cell.cell_contents,)
        except ValueError:  # not assigned yet
            held += (None,)
    return value.__code__, tuple(_code(each, (*outer, value)) for each in held)
