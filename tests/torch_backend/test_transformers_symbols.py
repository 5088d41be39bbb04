"""Symbols of transformers that torch_backend uses: listed in one place, and there in the installed version."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from torch_backend.hf.anatomy.families import TOUCHED

PACKAGE = Path(__file__).parents[2] / "torch_backend"


@pytest.mark.parametrize("symbol", TOUCHED)
def test_every_listed_symbol_exists(symbol: str) -> None:
    module, _, path = symbol.partition(":")
    found = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)


def test_nothing_else_is_imported_from_transformers() -> None:
    imported = {
        f"{node.module}:{name.name}"
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for name in node.names
    }
    assert imported and imported <= set(TOUCHED)
