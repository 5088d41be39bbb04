"""Which part may import which: one direction between packages, floors inside torch_backend, no cycles anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# package -> the packages of the project that it may import
PACKAGES: dict[str, set[str]] = {
    "packing_core": set(),
    "torch_backend": {"packing_core"},
    "jax_backend": {"packing_core"},
    "conformance": {"packing_core"},
    "crosspack": {"packing_core", "conformance"},
}
# the floors of torch_backend, from the ground up; a part imports itself and what stands before it
FLOORS = ["segments", "ops", "hf", "collate", "losses", "auditing", "patching", "steps", "trainers", "job"]
FLOORS += ["stacks", "doctor", "conformance"]
# the same of crosspack
CONSOLE = ["reading", "encoding", "packing", "cli", "__main__"]


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(file: Path, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports; without ``everywhere`` only those that are imported when it is loaded."""
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if everywhere or not (inside or typing):
                nodes.append(child)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                is_module = (ROOT / f"{node.module}.{name.name}".replace(".", "/")).with_suffix(".py").exists()
                is_package = (ROOT / f"{node.module}.{name.name}".replace(".", "/")).is_dir()
                yield f"{node.module}.{name.name}" if is_module or is_package else node.module


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_in_one_direction(package: str) -> None:
    allowed = PACKAGES[package] | {package}
    # crosspack re-exports the backends' names for type checkers alone
    wrong = {
        (module_of(file), name)
        for file in files_of(package)
        for name in imports_of(file, everywhere=package != "crosspack")
        if (top := name.partition(".")[0]) in PACKAGES and top not in allowed
    }
    assert not wrong


@pytest.mark.parametrize(("package", "floors"), [("torch_backend", FLOORS), ("crosspack", CONSOLE)])
def test_the_floors_of_a_package_import_downwards(package: str, floors: list[str]) -> None:
    wrong = set()
    for file in files_of(package):
        own = module_of(file).split(".")
        if len(own) == 1:
            continue  # the public names
        for name in imports_of(file, everywhere=True):
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1 and floors.index(parts[1]) > floors.index(own[1]):
                wrong.add((".".join(own), name))
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    modules = {module_of(file): file for file in files_of(package)}
    graph = {
        module: {name for name in imports_of(file, everywhere=module != package) if name in modules and name != module}
        for module, file in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"these import each other: {' -> '.join(cycle.args[1])}")


def test_operations_do_not_know_transformers() -> None:
    for file in files_of("torch_backend/ops"):
        assert not [name for name in imports_of(file, everywhere=True) if name.partition(".")[0] == "transformers"]
