"""Public names of torch_backend, imported on first use so that ``import torch_backend`` loads no framework."""

from importlib import import_module
from typing import Any

from packing_core.extras import require

# name -> module that defines it
_HOME: dict[str, str] = {}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("torch", extra="torch")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
