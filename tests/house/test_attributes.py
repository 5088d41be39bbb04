"""Names that are imported from the project, and attributes that are read of a module behind one name, exist.

This holds for code that only a GPU or another library runs too: the source is read, and nothing is imported.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from symtable import symtable

import pytest

from tests.imports import PACKAGES, ROOT, files_of

READERS = ("tests", "benchmarks", "tools", "docs", "examples")


def of_project(module: str) -> bool:
    return module.partition(".")[0] in (*PACKAGES, *READERS)


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Returns what a module of the project binds at its top level, its submodules included; None if there is none."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {x.stem for x in path.iterdir()} | {"__path__"} if path.is_dir() else set()
    if not file.exists():
        return frozenset(names) or None
    source = file.read_text()
    symbols = symtable(source, str(file), "exec").get_symbols()
    names |= {x.get_name() for x in symbols if x.is_assigned() or x.is_imported()}
    for origin in re.findall(r"^ *from (\S+) import \*", source, flags=re.MULTILINE):
        names |= names_of(origin) or set()
    return frozenset(names | {"__name__", "__file__", "__doc__"})


def absent(source: str) -> list[str]:
    """Returns names that a source imports from the project, and attributes of its modules, which do not exist."""
    nodes = list(ast.walk(ast.parse(source)))
    local = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    local |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    bound: dict[str, set[str]] = defaultdict(set)  # name -> the names of the modules that it stands for
    missing = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in filter(lambda name: of_project(name.name), node.names):
                top = name.name.partition(".")[0]
                bound[name.asname or top] |= names_of(name.name if name.asname else top) or set()
                missing += [name.name] if names_of(name.name) is None else []
        elif isinstance(node, ast.ImportFrom) and node.module and of_project(node.module):
            names = names_of(node.module) or frozenset()
            missing += [f"{node.module}.{x.name}" for x in node.names if x.name not in names | {"*"}]
            for name in node.names:
                bound[name.asname or name.name] |= names_of(f"{node.module}.{name.name}") or set()
    read = {x for x in nodes if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
    modules = {name: names for name, names in bound.items() if names and name not in local}
    return missing + sorted(
        f"{x.value.id}.{x.attr}" for x in read if x.value.id in modules and x.attr not in modules[x.value.id]
    )


@pytest.mark.parametrize("folder", READERS)
def test_names_that_are_imported_and_attributes_of_modules_exist(folder):
    wrong = {str(file.relative_to(ROOT)): names for file in files_of(folder) if (names := absent(file.read_text()))}
    assert not wrong


def test_what_is_gone_is_named():
    assert absent("from torch_backend import patch\nimport crosspack\ncrosspack.pack, crosspack.plan") == []
    assert absent("from benchmarks import plan\nplan.MILLION, plan.gone") == ["plan.gone"]
    assert absent("from torch_backend.hf.entry import a\nfrom packing_core.gone import b\nimport jax_backend.gone") == [
        "torch_backend.hf.entry.a",
        "packing_core.gone.b",
        "jax_backend.gone",
    ]
