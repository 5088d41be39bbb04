"""Backends that are wrong beyond a constant are rejected, whatever the constant; SPEC.md says how far the cases go."""

import random

import pytest

from conformance import sizes
from conformance.judge import Judge, Rejected
from conformance.spec import requirements
from tests.conformance.mutants.sizes import KINDS, holding


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
