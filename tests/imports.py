"""The import graph of the project, read from its source: for the house tests and for the choice of tests."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("packing_core", "torch_backend", "jax_backend", "conformance", "crosspack")


def module_of(file: Path) -> str:
    """Returns the dotted name of a file's module."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def files_of(package: str) -> list[Path]:
    """Returns the files of a package, given as a path below the root."""
    return sorted((ROOT / package).rglob("*.py"))


@cache
def imports_of(file: Path, *, everywhere: bool) -> tuple[str, ...]:
    """Returns the modules that a file imports; without ``everywhere`` only those imported when it is loaded."""
    found: list[str] = []
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if (everywhere or not (inside or typing)) and not isinstance(child, ast.expr):  # no import is in one
                nodes.append(child)
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [home(node.module, name.name) for name in node.names]
    return tuple(found)


def home(module: str, name: str) -> str:
    """Returns the module that ``from module import name`` reads: a submodule, or the home of a public name."""
    path = ROOT / f"{module}.{name}".replace(".", "/")
    if path.with_suffix(".py").exists() or path.is_dir():
        return f"{module}.{name}"
    return _public_names(module).get(name, module)


def modules_of(files: Iterable[str]) -> set[str]:
    """Returns the modules of packages, ``tools`` and test helpers among files given as paths below the root."""
    folders = (*PACKAGES, "tools", "tests")
    paths = [ROOT / file for file in files if file.endswith(".py") and file.split("/")[0] in folders]
    return {module_of(path) for path in paths}


def closure_files(test: Path) -> set[str]:
    """Returns the modules that a test file imports, and those that the helpers of ``tests`` import for it."""
    found: set[str] = set()
    waiting = [test]
    while waiting:
        for name in imports_of(waiting.pop(), everywhere=True):
            if name in found:
                continue
            found.add(name)
            path = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if name.startswith("tests.") and path.exists():
                waiting.append(path)
    return found


@cache
def _public_names(package: str) -> dict[str, str]:
    """Returns the homes of the names that a top-level package re-exports."""
    file = ROOT / package / "__init__.py"
    if package not in PACKAGES or not file.exists():
        return {}
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for name in node.names:
                public = name.asname or name.name
                found[public] = _public_names(node.module).get(name.name, node.module)
    return found
