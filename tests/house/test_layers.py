"""Imports between parts: one direction between packages, floors inside torch_backend, no cycles anywhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.imports import files_of, imports_of, module_of

# package -> the packages of the project that it may import
PACKAGES: dict[str, set[str]] = {
    "packing_core": set(),
    "torch_backend": {"packing_core"},
    "jax_backend": {"packing_core"},
    "conformance": {"packing_core"},
    "crosspack": {"packing_core", "conformance"},
}
# the floors of torch_backend, from the ground up; a part imports itself and what stands before it
FLOORS = [
    "pieces",
    "segments",
    "packed_tokens",
    "ops",
    "context_parallel",
    "hf",
    "collate",
    "losses",
    "auditing",
    "patching",
    "steps",
    "trainers",
    "job",
]
FLOORS += ["stacks", "doctor", "interpretation", "conformance"]
# the same of crosspack
CONSOLE = ["integrations", "reading", "encoding", "packing", "cli", "__main__"]


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
    require_one_direction(graph)


def test_the_parts_of_hf_import_in_one_direction() -> None:
    """A folder is a part, and so is a module beside the folders."""
    graph = defaultdict[str, set[str]](set)
    for file in files_of("torch_backend/hf"):
        _, _, part, *_ = (*module_of(file).split("."), "")
        for name in imports_of(file, everywhere=True):
            if name.startswith("torch_backend.hf."):
                graph[part] |= {name.split(".")[2]} - {part}
    assert len(graph) > 10
    require_one_direction(graph)


def require_one_direction(graph: Mapping[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"these import each other: {' -> '.join(cycle.args[1])}")


def test_operations_do_not_know_transformers() -> None:
    for file in files_of("torch_backend/ops"):
        assert not [name for name in imports_of(file, everywhere=True) if name.partition(".")[0] == "transformers"]
