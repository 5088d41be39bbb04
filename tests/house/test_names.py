"""A public name and a sub-package never share a name: ``import package.name as x`` would bind the one or the other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    ".".join(folder.relative_to(ROOT).parts)
    for top in ("torch_backend", "jax_backend", "conformance", "crosspack", "packing_core")
    for folder in sorted(path.parent for path in (ROOT / top).rglob("__init__.py"))
]


def hidden(package: ModuleType, folder: Path) -> set[str]:
    """Sub-packages of the folder whose name is also that of a public name, or of anything else that is no module."""
    subpackages = {path.parent.name for path in folder.glob("*/__init__.py")}
    others = {name for name, value in vars(package).items() if not isinstance(value, ModuleType)}
    return subpackages & {*getattr(package, "__all__", ()), *others}


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_name_hides_a_sub_package(name: str) -> None:
    assert not hidden(import_module(name), ROOT / Path(*name.split(".")))


def test_a_name_that_hides_a_sub_package_is_found(tmp_path: Path) -> None:
    for name in ("attention", "rope"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    package = ModuleType("package")
    package.rope = ModuleType("package.rope")  # what importing the sub-package leaves behind
    assert hidden(package, tmp_path) == set()
    package.__all__ = ["rope"]  # a lazy name
    package.attention = lambda: None
    assert hidden(package, tmp_path) == {"attention", "rope"}
