"""Imports one module of a released package without what it does not need here: stubs for third parties, bare parents.

A collator is a few lines of Python, and the package around it imports audio, cloud and GPU libraries. A stub stands
for such a library at import. Code that calls it gets a mock, so only modules that do not are loaded this way.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


def load(module: str, *, stubs: Sequence[str] = (), bare: Sequence[str] = ()) -> Any:
    """Returns the module.

    Args:
        module: its dotted name.
        stubs: top-level packages to put stubs for where they are not installed.
        bare: its parent packages whose ``__init__`` is not to run.
    """
    missing = [name for name in stubs if find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Stubs(missing))
    for name in bare:
        _put_bare(name)
    return importlib.import_module(module)


def _put_bare(name: str) -> None:
    parent, _, last = name.rpartition(".")
    folders = sys.modules[parent].__path__ if parent else sys.path
    found = next((str(Path(folder, last)) for folder in folders if Path(folder, last).is_dir()), None)
    if found is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    package = types.ModuleType(name)
    package.__path__ = [found]
    sys.modules[name] = package


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)  # classes are inherited from
        setattr(self, name, value)
        return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stubbed = fullname.partition(".")[0] in self.names
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
