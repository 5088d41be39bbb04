"""Every deliberately wrong backend is rejected, whatever the constant beyond which it is wrong."""

from __future__ import annotations

import random

import pytest

from conformance import sizes
from conformance.judge import Judge, Rejected
from conformance.spec import requirements
from packing_core.protocol import LEVELS
from tests.conformance import mutants
from tests.conformance.mutants import MUTANTS
from tests.conformance.mutants.sizes import KINDS, holding
from tests.conformance.stacks import run

JUDGED = f"--mutants={mutants.__name__}"


@pytest.mark.parametrize("level", LEVELS)
def test_every_mutant_is_rejected_by_the_requirement_that_names_it(tmp_path, level):
    ids = [name for name, requirement in requirements().items() if requirement.level == level]
    outcome = run(tmp_path, JUDGED, *(f"--requirement={name}" for name in ids))
    assert outcome.code == 0, outcome.output
    verdicts = {
        name: outcome.report["backends"][name]["requirements"][mutant.rejected_by]["status"]
        for name, mutant in MUTANTS.items()
        if mutant.rejected_by in ids
    }
    assert len(verdicts) >= 15
    assert set(verdicts.values()) == {"fail"}, [name for name, status in verdicts.items() if status != "fail"]


def test_a_module_without_mutants_is_named(tmp_path):
    for module, said in (("nowhere", "No module named 'nowhere'"), ("json", "no attribute 'MUTANTS'")):
        outcome = run(tmp_path, f"--mutants={module}")
        assert outcome.code == 4 and f"--mutants {module}: " in outcome.output and said in outcome.output


def test_a_mutant_that_survives_fails_the_run(tmp_path):
    # The boundary target is no business of LOSS-02: a mutant filed under it must be reported.
    (tmp_path / "misfiled.py").write_text(
        "from tests.conformance.mutants import MUTANTS\nMUTANTS['BoundaryTargetKept'].rejected_by = 'LOSS-02'\n"
    )
    outcome = run(tmp_path, JUDGED, "--requirement=LOSS-02", "-p", "misfiled")
    assert outcome.code == 1
    assert "SURVIVED  LOSS-02   BoundaryTargetKept" in outcome.output
    assert "rejected  LOSS-02   PromptsAreTargets" in outcome.output


def rejected(backend, requirement, label):
    method = requirements()[requirement].method
    judge = Judge(backend(), method=method, required=True)
    try:
        sizes.CHECKS[method](judge, sizes.CASES[requirement][label])
    except Rejected:
        return True
    return False


@pytest.mark.parametrize(
    ("requirement", "label", "kind", "constants"), KINDS, ids=[f"{name}-{kind.__name__}" for name, _, kind, _ in KINDS]
)
def test_a_constant_that_is_drawn_falls_by_the_case_that_is_beyond_it(requirement, label, kind, constants):
    for limit in {constants[0], random.Random(f"{requirement} {kind.__name__}").choice(constants)}:
        assert rejected(holding(kind, limit), requirement, label), f"{kind.breaks()} ({limit})"


@pytest.mark.parametrize("name", sizes.CASES)
def test_the_specification_names_the_cases(name):
    assert requirements()[name].text.endswith(f": {'; '.join(sizes.CASES[name])}.")


@pytest.mark.parametrize("name", sizes.CASES)
def test_every_case_rejects_a_kind(name):
    assert set(sizes.CASES[name]) == {label for requirement, label, _, _ in KINDS if requirement == name}
