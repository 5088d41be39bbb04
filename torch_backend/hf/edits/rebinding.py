"""A copy of a layer's forward in which some global names mean something else; the original module is not touched.

Modeling files of transformers call rotations, convolutions and scans by global names. Rebinding such a name would
change every model of the family, so one layer's packed calls run a copy of the forward over a copy of its module's
namespace.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_copies = count()


def names(forward: Callable[..., Any]) -> set[str]:
    """All global and attribute names in the code of a forward, under all that decorates it, and of functions in it."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return set() if code is None else set(_names(code))


def called(forward: Callable[..., Any]) -> dict[str, Any]:
    """Everything that can be called among the globals that a forward names; functions, not modules around them."""
    known: dict[str, Any] = getattr(inspect.unwrap(forward), "__globals__", {})
    found = {name: as_function(known.get(name)) for name in names(forward)}
    return {name: value for name, value in found.items() if callable(value)}


def as_function(value: Any) -> Any:
    """Returns the function in a module that the library ``kernels`` made of it, which hides its parameters."""
    if not isinstance(value, nn.Module):
        return value
    held = [cell.cell_contents for cell in type(value).forward.__closure__ or ()]
    return next((x for x in held if inspect.isfunction(x)), value)


def rebound(forward: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A copy of ``forward`` and of what decorates it in which the global names of ``values`` mean these.

    None if a decorator does not hold the function in its closure, as :func:`functools.wraps` leaves it.
    """
    innermost: Any = inspect.unwrap(forward)
    # A module that can be imported by its name, because that is how torch.compile guards the globals of a function.
    module = ModuleType(f"{__name__}.{innermost.__module__}.{next(_copies)}")
    module.__dict__.update(innermost.__globals__, __name__=module.__name__)
    module.__dict__.update(values)
    sys.modules[module.__name__] = module
    return _copied(forward, innermost, module.__dict__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _copied(function: Any, innermost: Any, namespace: dict[str, Any]) -> Callable[..., Any] | None:
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__ or ()
    if function is innermost:
        copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    else:
        replaced = _copied(inner, innermost, namespace)
        if replaced is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        cells = tuple(CellType(replaced) if cell.cell_contents is inner else cell for cell in cells)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
