"""Everything a user of Crosspack needs, under one import.

Names are looked up on first use, so ``import crosspack`` loads no framework: ``crosspack.pack`` needs numpy only,
``crosspack.patch`` imports torch when it is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The first package that exports a name answers for it; what exists for both frameworks stays under its package's name.
_PACKAGES = ("packing_core", "torch_backend", "jax_backend")


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for package in _PACKAGES:
            module = import_module(package)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module 'crosspack' has no attribute {name!r}; its names are: {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted({name for package in _PACKAGES for name in import_module(package).__all__})
