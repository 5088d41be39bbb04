"""A layer's own forward in which one global name means something else, without touching the module it comes from.

Modeling files of transformers call a rotation and a convolution by global names. Rebinding such a name would change
every model of the family; a copy of the forward over a copy of its module's namespace changes one layer's packed calls.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType
from typing import Any


def called(forward: Callable[..., Any], name: str) -> Any:
    """What a forward, under all that decorates it, calls by the global ``name``; None if it calls nothing by it."""
    innermost: Any = inspect.unwrap(forward)
    if name not in getattr(getattr(innermost, "__code__", None), "co_names", ()):
        return None
    return innermost.__globals__.get(name)


def rebound(forward: Callable[..., Any], name: str, value: Any) -> Callable[..., Any] | None:
    """A copy of ``forward`` and of what decorates it in which the global ``name`` means ``value``.

    None if a decorator does not hold the function in its closure, as :func:`functools.wraps` leaves it.
    """
    innermost: Any = inspect.unwrap(forward)
    # A module that can be imported by its name, because that is how torch.compile guards the globals of a function.
    module = ModuleType(f"{__name__}.{name}.{innermost.__module__}")
    module.__dict__.update(innermost.__globals__, __name__=module.__name__)
    module.__dict__[name] = value
    sys.modules[module.__name__] = module
    return _copied(forward, innermost, module.__dict__)


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
