"""Selection of backends for a run that names none, and the number of its processes."""

from types import SimpleNamespace

import pytest

from conformance import conftest, registry
from conformance.reference import Reference
from tests.conformance.stacks import Interpreted


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
