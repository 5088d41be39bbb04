"""Every deliberately wrong backend is rejected by the requirement that names it."""

import pytest

from conformance.spec import requirements
from packing_core.protocol import LEVELS
from tests.conformance import mutants
from tests.conformance.mutants import MUTANTS
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
