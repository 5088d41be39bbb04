"""The suite as a pytest run: options, who is judged, what each test's outcome is called, and the report at the end.

--backend --> registry --> Judge per test --> one Record per test (as user properties, so that xdist workers hand it
over) --> report and table, in the controlling process
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from conformance import registry, sharing
from conformance import report as reporting
from conformance.judge import Judge, NotDeclared, Rejected
from conformance.spec import requirements
from packing_core.protocol.capabilities import OPTIONS

ROSTER = pytest.StashKey[registry.Roster]()
REDUCED = pytest.StashKey[dict[str, tuple[int, int]]]()
REJECTED = pytest.StashKey[set[str]]()
MUTANTS = pytest.StashKey[dict[str, Any]]()  # name -> a backend's class with `rejected_by` and `breaks()`; mostly empty


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--backend", action="append", default=[], metavar="NAME",
        help="judge this one: an entry point's name, name:backend, or package.module:attribute (repeatable)",
    )  # fmt: skip
    group.addoption("--requirement", action="append", default=[], metavar="ID", help="only this one (repeatable)")
    group.addoption("--report", type=Path, metavar="FILE", help="write the outcome as JSON")
    group.addoption(
        "--all", action="store_true", help="of the registered ones, also those whose kernels run in an interpreter"
    )
    group.addoption("--thorough", action="store_true", help="the large shapes too, and no reduced selection")
    group.addoption(
        "--part", type=_part, default=(1, 1), metavar="K/N",
        help="every N-th test of each backend, from the K-th on, and from the next one for the next backend",
    )  # fmt: skip
    group.addoption(
        "--each", action="store_true",
        help="with --part: also a test of each requirement that it leaves to no backend that must serve it",
    )  # fmt: skip
    group.addoption(
        "--mutants", metavar="MODULE",
        help="judge its MUTANTS, deliberately wrong backends: each must fail the requirement that it names",
    )  # fmt: skip


def _part(text: str) -> tuple[int, int]:
    """K and N of ``K/N``."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, such as 2/7")
    return int(number), int(of)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two processes for a run of all backends, if nothing is said of processes; before xdist reads its options."""
    option = config.option
    chosen = option.backend or option.requirement or option.keyword or option.markexpr or option.mutants
    whole = not chosen and option.part == (1, 1) and not (option.collectonly or option.usepdb or _is_worker(config))
    if whole and _has_xdist(config) and option.numprocesses is None and (os.cpu_count() or 1) > 1:
        option.numprocesses, option.dist = 2, "loadgroup"


def _has_xdist(config: pytest.Config) -> bool:
    """Returns whether pytest-xdist is loaded, as "xdist" by itself or as "xdist.plugin" by ``-p``."""
    return hasattr(config.option, "numprocesses")


def _is_worker(config: pytest.Config) -> bool:
    """Returns whether this is a process that xdist has started."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requirement(id): the requirement of SPEC.md that the test is about")
    config.addinivalue_line("markers", "heavy: too much for kernels that run in an interpreter")
    config.addinivalue_line("markers", "thorough: a large shape, run with --thorough only")
    config.stash[REDUCED] = {}
    config.stash[REJECTED] = set()
    compiled = config.cache.mkdir("compiled") if config.pluginmanager.hasplugin("cacheprovider") else None
    for name, value in sharing.environment(compiled).items():  # for the backends, and for workers
        os.environ.setdefault(name, value)
    config.pluginmanager.register(RunRecorder(config), "conformance-run")
    unknown = sorted(set(config.getoption("requirement")) - set(requirements()))
    if unknown:
        raise pytest.UsageError(f"SPEC.md has no requirement {', '.join(unknown)}")
    module = config.getoption("mutants")
    try:
        config.stash[MUTANTS] = import_module(module).MUTANTS if module else {}
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--mutants {module}: {error}") from error
    if module:
        config.stash[ROSTER] = registry.Roster({name: mutant() for name, mutant in config.stash[MUTANTS].items()})
        return
    try:
        config.stash[ROSTER] = registry.load(config.getoption("backend"), interpreted=config.getoption("all"))
    except registry.LoadError as error:
        raise pytest.UsageError(str(error)) from error


# -- which tests -----------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "judge" not in metafunc.fixturenames:
        return
    names = list(metafunc.config.stash[ROSTER].backends)
    mutants = metafunc.config.stash[MUTANTS]
    if mutants:
        names = [name for name in names if mutants[name].rejected_by == _id(metafunc.definition)]
    metafunc.parametrize("judge", names or [None], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if "judge" in getattr(item, "fixturenames", ())]
    asked = config.getoption("requirement")
    within = [item for item in ours if _judged(item) is not None and (not asked or _id(item) in asked)]
    kept = _of_part(within, config)
    if not config.getoption("thorough"):
        kept = _quick(kept, config)
    dropped = set(ours).difference(kept)
    if config.getoption("each"):
        dropped -= _one_of_each(within, dropped, config.stash[ROSTER])
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _of_part(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Returns the tests of one part; in each part backends try different ones, so that together they try all."""
    number, of = config.getoption("part")
    kept: list[pytest.Item] = []
    for offset, name in enumerate(config.stash[ROSTER].backends):
        mine = [item for item in items if _judged(item) == name]
        kept += [item for place, item in enumerate(mine) if (place + offset) % of == number - 1]
    return kept


def _quick(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Returns the tests without the thorough ones and, on interpreted backends, without the heavy ones.

    How many of the tests are left of an interpreted backend is recorded for the report.
    """
    quick = [item for item in items if not item.get_closest_marker("thorough")]
    for name, backend in config.stash[ROSTER].backends.items():
        if backend.capabilities.interpreted:
            mine = [item for item in quick if _judged(item) == name]
            heavy = {item for item in mine if item.get_closest_marker("heavy")}
            if heavy:
                config.stash[REDUCED][name] = (len(mine) - len(heavy), len(mine))
                quick = [item for item in quick if item not in heavy]
    return quick


def _one_of_each(within: list[Any], dropped: set[Any], roster: registry.Roster) -> set[Any]:
    """Returns a test of each requirement of which no test is left on a backend that declares most about its method.

    The reference counts only where it is alone: it is the oracle.
    """

    def declared(item: Any) -> int:
        backend, method = roster.backends[str(_judged(item))], requirements()[_id(item)].method
        heavy = backend.capabilities.interpreted and item.get_closest_marker("heavy")
        if heavy or item.get_closest_marker("thorough") or not backend.provides(method):
            return -2
        if _judged(item) == "reference":
            return -1
        return len(OPTIONS[method].keys() & backend.capabilities.options)

    found = set()
    for name in dict.fromkeys(_id(item) for item in within):
        tests = [item for item in within if _id(item) == name]
        most = max(map(declared, tests))
        able = [item for item in tests if declared(item) == most >= -1]
        if able and not set(able) - dropped:
            found.add(able[-1])
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups the tests of a method for one worker."""
    from conformance.scheduling import ByMethod  # xdist may not be installed

    return ByMethod(config, log, config.stash[ROSTER].backends) if config.option.dist == "loadgroup" else None


def _id(item: Any) -> str:
    """The requirement that a test, or a test function, names."""
    marker = item.get_closest_marker("requirement")
    return str(marker.args[0])


def _judged(item: Any) -> str | None:
    """The backend that a test is about."""
    name: str | None = item.callspec.params["judge"]
    return name


def pytest_collection_finish() -> None:
    """Takes what collection imported out of all garbage collections to come, and makes them rarer.

    Tracing makes many objects at a time: walking those that stay took a seventh of a run.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


# -- one test --------------------------------------------------------------------------------------------------------


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    """The backend before the requirement that the test names."""
    if request.param in request.config.stash[REJECTED]:
        pytest.skip("a mutant that an earlier test has rejected")
    backend = request.config.stash[ROSTER].backends[request.param]
    requirement = requirements()[_id(request.node)]
    return Judge(backend, method=requirement.method, required=requirement.need == "required")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except NotDeclared as reason:
        pyfuncitem.user_properties.append(("outcome", reporting.UNSUPPORTED))
        pytest.skip(f"unsupported: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    judge = getattr(item, "funcargs", {}).get("judge")
    if call.when != "call" or judge is None:
        return (yield)
    said = dict(item.user_properties)
    error = None if call.excinfo is None else call.excinfo.value
    outcome = said.get("outcome", reporting.PASS if error is None else reporting.FAIL)
    item.user_properties += [
        ("backend", _judged(item)),
        ("requirement", _id(item)),
        ("outcome", outcome),
        ("reason", str(error).partition("\n")[0] if error is not None else ""),
        ("worst", judge.worst),
    ]
    report = yield
    if item.config.getoption("mutants") and isinstance(error, Rejected):
        item.config.stash[REJECTED].add(str(_judged(item)))
        report.outcome, report.longrepr = "passed", None  # what a mutant is there for; whether any survived: at the end
    elif outcome == reporting.FAIL:
        report.longrepr = _explained(item, error, report.longrepr)
    return report


def _explained(item: Any, error: BaseException | None, trace: Any) -> str:
    """A failure for those who have not read the suite: the requirement, what broke it, and how to run it alone."""
    name, requirement = _id(item), requirements()[_id(item)]
    lines = [f"{name}: {requirement.text}", f"{_judged(item)}: {error}"]
    if not isinstance(error, Rejected):
        lines.append(str(trace))
    alone = f"--backend {_judged(item)} --requirement {name}"
    return "\n".join([*lines, f"({requirement.need}, about {requirement.method}(); alone: crosspack conform {alone})"])


# -- the whole run ---------------------------------------------------------------------------------------------------


class RunRecorder:
    """Gathers the records of a run, in the process that controls it, and says at the end what they amount to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._records: list[reporting.Record] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said: dict[str, Any] = dict(report.user_properties)
        if report.when == "call" and "requirement" in said:
            self._records.append(reporting.Record(**{name: said[name] for name in reporting.FIELDS}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """An xdist worker ends: it knows what the selection left out, the controller does not collect."""
        self._config.stash[REDUCED].update(getattr(node, "workeroutput", {}).get("reduced", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["reduced"] = self._config.stash[REDUCED]
            return
        passing = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if passing and not self._config.getoption("collectonly") and (self._nothing_ran() or self._survivors()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if _is_worker(self._config) or self._config.getoption("collectonly"):
            return
        found = reporting.report(self._config.stash[ROSTER], self._records, requirements(), self._absent())
        path = self._config.getoption("report")
        if path is not None:
            reporting.write(path, found)
        terminalreporter.section("conformance")
        lines = self._mutant_lines() if self._config.getoption("mutants") else reporting.table(found)
        for name, (kept, every) in self._config.stash[REDUCED].items():
            lines.append(f"{name}: interpreted, reduced selection of {kept} out of {every} tests (--thorough for all)")
        number, of = self._config.getoption("part")
        if of > 1:
            lines.append(f"part {number} of {of}: each backend was judged by one test in {of}")
        if self._nothing_ran():
            lines.append("FAILED: not one test was executed")
        for line in lines:
            terminalreporter.write_line(line)

    def _nothing_ran(self) -> bool:
        return not any(record.outcome in (reporting.PASS, reporting.FAIL) for record in self._records)

    def _absent(self) -> str:
        return "left out by the selection of this run"

    def _survivors(self) -> list[str]:
        """Mutants that no test of the requirement that names them has rejected."""
        asked = self._config.getoption("requirement")
        rejected = {record.backend for record in self._records if record.outcome == reporting.FAIL}
        expected = [name for name, m in self._config.stash[MUTANTS].items() if not asked or m.rejected_by in asked]
        return [name for name in expected if name not in rejected]

    def _mutant_lines(self) -> list[str]:
        survivors = self._survivors()
        judged = {record.backend for record in self._records}
        return [
            f"{'SURVIVED' if name in survivors else 'rejected'}  {mutant.rejected_by:<9} {name}: {mutant.breaks()}"
            for name, mutant in self._config.stash[MUTANTS].items()
            if name in judged or name in survivors
        ]
