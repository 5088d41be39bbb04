"""SPEC.md, the tests and the mutants speak of the same requirements."""

from importlib import import_module
from pathlib import Path

import pytest

import conformance
from conformance.reference import Reference
from conformance.spec import SPEC, requirements
from packing_core.protocol import LEVELS, OPTIONS
from tests.conformance.mutants import MUTANTS

FOLDER = Path(conformance.__file__).parent


def ids_and_tests(config):
    """(ids, test) of every test function of the suite."""
    for marker in ("requirement", "heavy", "thorough"):
        config.addinivalue_line("markers", f"{marker}: of the suite")
    for path in sorted(FOLDER.glob("test_*.py")):
        for name, function in vars(import_module(f"conformance.{path.stem}")).items():
            if name.startswith("test_"):
                marks = [mark for mark in function.pytestmark if mark.name == "requirement"]
                yield [mark.args[0] for mark in marks], f"{path.stem}.{name}"


def test_every_test_names_one_requirement_and_every_requirement_has_one_test(pytestconfig):
    assert all(len(ids) == 1 for ids, _ in ids_and_tests(pytestconfig))
    named = sorted(ids[0] for ids, _ in ids_and_tests(pytestconfig))
    assert named == sorted(requirements())


def test_every_line_of_the_tables_is_a_requirement():
    rows = [
        line for line in SPEC.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "-" in line[:10]
    ]
    assert len(rows) == len(requirements())


def test_requirements_are_of_methods_of_the_protocol():
    methods = {method for level in LEVELS.values() for method in level}
    assert {requirement.method for requirement in requirements().values()} == methods == set(OPTIONS)


@pytest.mark.parametrize("group", sorted({name.partition("-")[0] for name in requirements()}))
def test_ids_count_up_without_a_gap(group):
    numbers = [int(name.partition("-")[2]) for name in requirements() if name.partition("-")[0] == group]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_requirement_rejects_a_mutant_so_none_of_them_is_vacuous():
    assert set(requirements()) == {mutant.rejected_by for mutant in MUTANTS.values()}


def test_mutants_stand_at_all_four_levels_and_say_what_they_break():
    levels = {requirements()[mutant.rejected_by].level for mutant in MUTANTS.values()}
    assert levels == set(LEVELS)
    assert all(mutant.breaks().endswith(".") for mutant in MUTANTS.values())


def test_the_reference_has_every_method():
    assert all(Reference.provides(method) for level in LEVELS.values() for method in level)
