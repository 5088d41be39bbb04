"""SPEC.md, tests and mutants speak of the same requirements; pairs of their cases; which backends a run takes."""

from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

import conformance
from conformance import conftest, registry
from conformance.draws import ATTENTION_PAIRS, SELECTED_PAIRS, AttentionCase
from conformance.pairwise import declared_pairs, pairwise
from conformance.reference import Reference
from conformance.spec import SPEC, requirements
from packing_core.protocol import ALL_OPTIONS, LEVELS, OPTIONS, Capabilities
from tests.conformance.mutants import MUTANTS
from tests.conformance.stacks import Interpreted

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


@pytest.fixture
def family(monkeypatch):
    """One registered family, of a backend that runs here and one that needs an interpreter."""
    offered = {"native": Reference, "slow": Interpreted}
    groups = {registry.GROUP: {"mine": lambda: lambda: offered}}
    monkeypatch.setattr(registry, "registered", lambda group=registry.GROUP: groups.get(group, {}))


def test_kernels_that_need_an_interpreter_are_left_out_unless_asked_for(family):
    roster = registry.load()
    assert list(roster.backends) == ["mine:native"]
    assert roster.not_run == {"mine:slow": "its kernels would run in an interpreter: name it, or pass --all"}
    assert list(registry.load(interpreted=True).backends) == ["mine:native", "mine:slow"]
    assert list(registry.load(["mine:slow"]).backends) == ["mine:slow"]


@pytest.mark.parametrize(
    ("said", "processes"),
    [
        ({}, 2),
        ({"numprocesses": 0}, 0),
        ({"requirement": ["ISO-01"]}, None),
        ({"backend": ["reference"]}, None),
        ({"part": (1, 7)}, None),
        ({"collectonly": True}, None),
    ],
)
def test_a_whole_run_takes_two_processes_if_nothing_else_is_said(monkeypatch, said, processes):
    option = settled(monkeypatch, said)
    assert option.numprocesses == processes
    assert option.dist == ("loadgroup" if processes == 2 else None)


def test_those_processes_start_none_of_their_own(monkeypatch):
    assert settled(monkeypatch, {}, workerinput={}).numprocesses is None


def settled(monkeypatch, said, **config):
    """pytest's options after the suite has seen them, where xdist is installed."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    unsaid = dict.fromkeys(("backend", "requirement", "keyword", "markexpr", "mutants", "numprocesses", "dist"))
    option = SimpleNamespace(**{**unsaid, "part": (1, 1), "collectonly": False, "usepdb": False, **said})
    plugins = SimpleNamespace(hasplugin=lambda name: name == "xdist")
    conftest.pytest_cmdline_main(SimpleNamespace(option=option, pluginmanager=plugins, **config))
    return option


FACTORS = [
    {"a": (0, 1), "b": (0, 1), "c": (0, 1)},
    {"a": (0, 1, 2, 3), "b": ("x", "y", "z"), "c": (None,), "d": (False, True), "e": (1, 2)},
]


@pytest.mark.parametrize("factors", FACTORS)
def test_every_pair_of_values_meets(factors):
    cases = pairwise(factors)
    for one, other in combinations(factors, 2):
        met = {(case[one], case[other]) for case in cases}
        assert met == set(product(factors[one], factors[other]))
    longest = sorted(len(values) for values in factors.values())[-2:]
    assert len(cases) <= 1.5 * longest[0] * longest[1]


def test_cases_hold_what_is_declared_and_nothing_else():
    declared = Capabilities(("float32", "float16"), ALL_OPTIONS - {"sinks", "gqa", "narrow_values"}, head_dims=(40, 64))
    pairs = declared_pairs(AttentionCase, declared, ATTENTION_PAIRS)
    assert {dtype for _, dtype in pairs} == {"float32", "float16"}
    cases = [case for case, _ in pairs]
    assert {case.width for case in cases} == {40, 64}
    assert {case.window for case in cases} == {None, 9}
    assert {case.causal for case in cases} == {case.alibi for case in cases} == {False, True}
    assert {case.softcap for case in cases} == {None, 4.0}
    assert not any(case.sinks or case.kv_heads < case.heads or case.value_width for case in cases)
    assert not declared_pairs(AttentionCase, Capabilities(options=frozenset()), SELECTED_PAIRS)
