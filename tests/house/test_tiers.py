"""The tiers and shards of the suite: the same for the same commit, whole together, and no test in two of them."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, tiers
from tests.durations import seconds_by_file
from tests.imports import ROOT
from tests.processes import run

MANY = [f"tests/torch_backend/test_x.py::test_many[{case}]" for case in range(9)]
OTHERS = [f"tests/torch_backend/test_y.py::test_{name}[{case}]" for name in "abcdefgh" for case in range(9)]
QUICK = [f"tests/packing_core/test_x.py::test_all[{case}]" for case in range(9)]
ALONE = ["tests/cli/test_x.py::test_alone"]
SLOW = ["tests/cli/test_x.py::test_slow", "tests/house/test_x.py::test_slow"]
IDS = [*MANY, *OTHERS, *QUICK, *ALONE, *SLOW]


def test_the_quick_tier_takes_one_case_of_every_test_and_whole_folders() -> None:
    taken = tiers.quick(IDS, SLOW)
    assert len(taken & set(MANY)) == 1
    assert taken >= {*QUICK, *ALONE}
    assert not taken & set(SLOW)
    assert taken == tiers.quick(IDS, SLOW)


def test_a_file_that_takes_little_time_runs_with_all_cases_but_its_slow_ones() -> None:
    seconds = {"tests/torch_backend/test_x.py": tiers.CHEAP, "tests/torch_backend/test_y.py": tiers.CHEAP + 1}
    taken = tiers.quick(IDS, [*SLOW, MANY[4]], durations=seconds)
    assert taken & set(MANY) == {*MANY} - {MANY[4]}
    assert len(taken & set(OTHERS)) == 8


def test_what_runs_whole_is_there() -> None:
    assert all((ROOT / name).exists() for name in tiers.WHOLE)


def test_tests_take_different_cases_so_that_together_they_meet_all() -> None:
    taken = {name.partition("[")[2] for name in tiers.quick(OTHERS, ())}
    assert len(taken) > 3


def test_a_test_whose_chosen_case_is_slow_or_needs_a_gpu_takes_another() -> None:
    (chosen,) = tiers.quick(MANY, ())
    (other,) = tiers.quick(MANY, [chosen])
    assert other != chosen


def test_a_file_that_a_change_reaches_runs_whole_with_its_slow_tests() -> None:
    assert tiers.quick(IDS, SLOW, ["tests/cli/test_x.py"]) >= {SLOW[0]}
    assert set(MANY) <= tiers.quick(IDS, SLOW, ["tests/torch_backend/test_x.py"])


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("packing_core/planning/plan.py", "tests/packing_core/test_plan.py"),
        ("torch_backend/patching.py", "tests/torch_backend/hf/test_patch.py"),  # by its public name
        ("tests/torch_backend/models.py", "tests/torch_backend/hf/test_patch.py"),
        ("tests/house/test_tiers.py", "tests/house/test_tiers.py"),
    ],
)
def test_a_change_reaches_the_tests_that_import_it(changed: str, reached: str) -> None:
    assert reached in tiers.reached([changed])


def collected(marks: dict[str, str]) -> list[SimpleNamespace]:
    """Stands for the cases of eight tests, each with its mark."""
    path = ROOT / "tests" / "torch_backend" / "ops" / "test_conv.py"
    name = path.relative_to(ROOT).as_posix()
    return [
        SimpleNamespace(nodeid=f"{name}::test_{test}[{case}]", path=path, get_closest_marker=mark.__eq__)
        for test in "abcdefgh"
        for case, mark in marks.items()
    ]


def test_no_case_that_needs_a_gpu_or_is_slow_stands_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "changed_files", list)  # a branch that changes what the file tests takes all cases
    items = collected({"a": "gpu", "b": "slow", "c": "", "d": "two_gpus"})
    options = {"tier": "quick", "keyword": "", "shard": None}
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=["tests"], getoption=options.get, hook=hook), items)
    assert [item.nodeid.partition("[")[2] for item in items] == ["c]"] * 8


def test_the_set_up_of_the_suite_imports_no_framework() -> None:
    """Tests of NumPy's packages start at once, as does the process that hands tests to workers."""
    code = "import sys, tests.conftest; print({'torch', 'jax', 'triton', 'transformers'} & set(sys.modules))"
    assert run([sys.executable, "-c", code], cwd=ROOT).stdout.strip() == "set()"


def test_what_collection_imported_is_out_of_garbage_collections() -> None:
    assert gc.get_freeze_count() > 10_000


def test_a_page_of_the_docs_reaches_no_test() -> None:
    assert not tiers.reached(["README.md", "docs/data.md"])


@pytest.mark.parametrize("of", [1, 2, 6])
def test_shards_hold_every_file_once_and_are_of_about_equal_time(of: int) -> None:
    durations = tiers.recorded()
    parts = [tiers.shard(durations, durations, number, of) for number in range(1, of + 1)]
    assert sorted(file for part in parts for file in part) == sorted(durations)
    loads = [sum(durations[file] for file in part) for part in parts]
    assert max(loads) <= max(1.1 * sum(loads) / of, max(durations.values()))


def test_every_recorded_file_exists() -> None:
    assert all((ROOT / file).exists() for file in tiers.recorded())


def test_durations_add_up_over_the_tests_and_fixtures_of_a_file() -> None:
    lines = [
        '{"id": "tests/a/test_x.py::test_a[1]", "outcome": "fixture", "seconds": 2.0}',
        '{"id": "tests/a/test_x.py::test_a[1]", "outcome": "passed", "seconds": 0.5}',
        '{"id": "tests/a/test_y.py::test_b", "outcome": "failed", "seconds": 1.0}',
    ]
    assert seconds_by_file(lines) == {"tests/a/test_x.py": 2.5, "tests/a/test_y.py": 1.0}


def test_a_run_is_recorded_as_it_goes_and_a_late_test_fails_by_name(tmp_path: Path) -> None:
    record, file = tmp_path / "record.jsonl", tmp_path / "test_timed.py"
    file.write_text("import time\ndef test_late():\n    time.sleep(30)\ndef test_after():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(file)]
    assert run([*command, "--record", str(record), "--limit", "1"], cwd=ROOT).returncode == 1
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["id"].partition("::")[2], line["outcome"]) for line in lines if line["outcome"] != "fixture"] == [
        ("test_late", "failed"),
        ("test_after", "passed"),
    ]
    assert "took longer than 1 s" in lines[1]["error"]


def test_a_file_that_cannot_be_imported_is_recorded_once_as_a_failure(tmp_path: Path) -> None:
    record, file = tmp_path / "record.jsonl", tmp_path / "test_broken.py"
    file.write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.recording", "--rootdir", str(tmp_path)]
    assert run([*command, str(file), "--record", str(record)], cwd=ROOT).returncode == 1
    (line,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert (line["id"], line["outcome"]) == ("test_broken.py", "failed")
    assert "no_such_module" in line["error"]
