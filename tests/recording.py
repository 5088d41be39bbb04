"""A plugin of pytest, ``-p tests.recording --record FILE``: every result as it comes, so that a run that is stopped has
named what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crosspack")
    group.addoption("--record", type=Path, metavar="FILE", help="write each result as it comes, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record") and not hasattr(config, "workerinput"):  # workers report to the process that records
        config.pluginmanager.register(Record(config.getoption("record")))


class Record:
    """Appends the results to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.not_collected: set[str] = set()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report, "fixture" if report.when != "call" else "passed", report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.not_collected:  # every process collects
            self.not_collected.add(report.nodeid)
            self._add(report, "passed", 0)

    def _add(self, report: pytest.TestReport | pytest.CollectReport, passed: str, seconds: float) -> None:
        outcome = passed if report.passed else report.outcome
        line = {"id": report.nodeid, "outcome": outcome, "seconds": round(seconds, 3)}
        if report.failed:
            line["error"] = report.longreprtext[-4000:]
        elif report.skipped:
            line["reason"] = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
        with self.file.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
