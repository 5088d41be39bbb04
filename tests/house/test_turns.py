"""What waits for another day comes up within a week, and CONTRIBUTING.md names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import turns

ROOT = Path(__file__).parents[2]
SLOW_FILE = next(file for file, names in turns.WEEKLY.items() if names)
SHARED = [f"{next(file for file, names in turns.WEEKLY.items() if not names)}::test_x[{case}]" for case in range(9)]
SLOW = f"{SLOW_FILE}::{turns.WEEKLY[SLOW_FILE][0]}"
RARE = next(file for file, days in turns.SPREAD.items() if days == turns.WEEK)
IDS = [
    *(f"tests/conformance/test_x.py::test_many[{case}]" for case in range(20)),
    *(f"tests/conformance/test_x.py::test_three[{case}]" for case in range(3)),
    "tests/conformance/test_x.py::test_alone",
    "tests/packing_core/test_x.py::test_alternating",
    *(f"tests/torch_backend/test_x.py::test_two[{case}]" for case in range(2)),
    f"{RARE}::test_rare",
    *(f"tests/house/test_x.py::test_quick[{case}]" for case in range(9)),
    SLOW,
    *SHARED,
]


def test_a_week_runs_everything_and_a_day_a_part() -> None:
    days = [set(IDS) - turns.waiting(IDS, day) for day in range(1000, 1000 + turns.WEEK)]
    assert set.union(*days) == set(IDS)
    for ran in days:
        assert 2 <= sum("test_many" in name for name in ran) <= 3
        assert sum("test_three" in name for name in ran) == 1
        assert sum("test_quick" in name for name in ran) == 9
        assert "tests/conformance/test_x.py::test_alone" in ran
    assert 3 <= sum("tests/packing_core/test_x.py::test_alternating" in ran for ran in days) <= 4
    assert sum(f"{RARE}::test_rare" in ran for ran in days) == 1
    assert sum("test_two" in name for ran in days for name in ran) == 2
    assert sum(SLOW in ran for ran in days) == 1
    assert [len(ran & set(SHARED)) for ran in days if ran & set(SHARED)] == [len(SHARED)]


def test_a_file_that_is_named_runs_whole(monkeypatch) -> None:
    monkeypatch.delenv("CROSSPACK_TEST_ALL", raising=False)
    assert not turns.everything([str(ROOT / "tests")])
    assert turns.everything([str(ROOT / "tests" / "house" / "test_turns.py")])
    assert turns.everything([str(ROOT / "tests" / "house" / "test_turns.py") + "::test_a[x]"])
    monkeypatch.setenv("CROSSPACK_TEST_ALL", "1")
    assert turns.everything([str(ROOT / "tests")])


def test_every_weekly_test_exists() -> None:
    for file, names in turns.WEEKLY.items():
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= there, file


def test_contributing_names_what_waits() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, section = page.partition("## What `make test` leaves for another day")
    section = section.partition("\n## ")[0]
    rows = re.findall(r"^\| `(\S+)` \| (.*) \|$", section, re.MULTILINE)
    listed = {file: tuple(re.findall(r"`(\w+)`", names)) for file, names in rows}
    assert listed == turns.WEEKLY
    assert all(f"`{path}`" in section for path in (*turns.CASES, *turns.SPREAD))
    assert all((ROOT / path).exists() for path in (*turns.CASES, *turns.SPREAD))
