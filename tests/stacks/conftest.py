"""Stand-ins for the stacks, importable for as long as a test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def stand_ins(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes the stand-ins importable; the name of the stack that a test file is named after."""
    name = request.path.stem.removeprefix("test_")
    kept = dict(sys.modules)
    monkeypatch.syspath_prepend(STAND_INS)
    yield name
    for module in sys.modules.keys() - kept.keys():
        stood_in = module.partition(".")[0] in {path.name for path in STAND_INS.iterdir()}
        if stood_in or module.startswith("crosspack.integrations."):
            del sys.modules[module]


@pytest.fixture
def plugin(stand_ins: str) -> ModuleType:
    """The integration that a test file is named after, imported against the stand-in of its stack."""
    return import_module(f"crosspack.integrations.{stand_ins}")
