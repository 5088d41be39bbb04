"""``crosspack conform``: the conformance suite against any backend, from anywhere, under the suite's own settings.

The suite runs in a process of its own, so that the caller's pytest configuration, options and plugins do not touch it
and the caller's folder stays as it is. That folder is on the path, so a backend of one's own can be named as
``package.module:attribute``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from conformance import sharing
from packing_core.errors import MissingExtraError, PackingError
from packing_core.extras import require

REPORT = "conformance.json"


def conform(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Judge this one: a registered name, name:backend, or package.module:attribute. Repeatable."),
    ] = None,
    requirement: Annotated[
        list[str] | None, typer.Option(help="Only this requirement of SPEC.md, such as ISO-01. Repeatable.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the outcome per requirement and backend as JSON.")] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="The large shapes too.")] = False,
    workers: Annotated[
        str | None, typer.Option("--workers", "-n", help="Processes, or auto; one without it. Needs pytest-xdist.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Every registered backend, in parallel; the report goes to {REPORT} by default."),
    ] = False,
) -> None:
    """Decide whether a backend trains on packed rows without contamination; the exit status says it."""
    if every and backend:
        raise PackingError("--all judges every registered backend and --backend names one: give either")
    if every:
        workers, report = workers or "auto", report or Path(REPORT)
    require("pytest", extra="test")
    if workers is not None:
        require("xdist", extra="test", distribution="pytest-xdist")
    command = command_line(backend or [], requirement or [], report, thorough, workers, every)
    with TemporaryDirectory() as compiled:
        raise typer.Exit(subprocess.run(command, env=environment(Path(compiled)), check=False).returncode)


def command_line(
    backends: list[str],
    requirements: list[str],
    report: Path | None,
    thorough: bool,
    workers: str | None,
    every: bool,
) -> list[str]:
    """The pytest command that runs the installed suite."""
    suite = find_spec("conformance")
    if suite is None or suite.origin is None:
        raise MissingExtraError("the package conformance is not installed beside packing_core: reinstall crosspack")
    folder = Path(suite.origin).parent
    options = [f"--backend={name}" for name in backends] + [f"--requirement={name}" for name in requirements]
    options += [f"--report={report}"] if report is not None else []
    options += ["--thorough"] if thorough else []
    options += ["--all"] if every else []
    options += ["-p", "xdist.plugin", "-n", workers, "--dist", "loadgroup"] if workers is not None else []
    own = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--confcutdir", str(folder)]
    return [sys.executable, "-m", "pytest", str(folder), *own, "-p", "no:cacheprovider", "-q", *options]


def environment(compiled: Path) -> dict[str, str]:
    """The caller's environment without what would change how pytest runs."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return sharing.environment(compiled) | kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
