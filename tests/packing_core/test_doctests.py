"""Every example in a docstring of packing_core, and in docs/data.md, gives what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import packing_core

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(packing_core.__path__, "packing_core.")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0


def test_pack_shows_its_shapes():
    examples = doctest.DocTestFinder(recurse=False).find(packing_core.pack)
    assert "shape" in "".join(example.source for test in examples for example in test.examples)


def test_examples_in_the_guide_to_data(tmp_path, monkeypatch):
    guide = Path(__file__).parents[2] / "docs" / "data.md"
    monkeypatch.chdir(tmp_path)  # the guide writes a folder
    result = doctest.testfile(str(guide), module_relative=False, optionflags=FLAGS)
    assert result.attempted > 20
    assert result.failed == 0
