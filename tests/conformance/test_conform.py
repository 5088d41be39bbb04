"""``crosspack conform`` runs the installed suite from anywhere, whatever the caller's pytest is set to."""

import json
import os
import shutil
import sys
import zipfile
from types import SimpleNamespace

import pytest
import typer

from packing_core.errors import PackingError
from tests import processes
from tests.conformance.stacks import ROOT

RUN = "import typer; from crosspack.cli.conform import conform; app = typer.Typer(); app.command()(conform); app()"


def conform(folder, *options, **environment):
    done = processes.run([sys.executable, "-c", RUN, *options], cwd=folder, env=os.environ | environment)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def hostile(tmp_path):
    """A folder whose pytest configuration would break any run that reads it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--no-such-option"\n')
    (tmp_path / "conftest.py").write_text("raise RuntimeError('the conftest of the caller was loaded')\n")
    return tmp_path


def test_the_callers_pytest_settings_do_not_touch_it(hostile):
    before = sorted(hostile.iterdir())
    code, output = conform(
        hostile, "--backend", "reference", "--requirement", "ISO-01", "--report", "reports/found.json", "-n", "2",
        PYTEST_ADDOPTS="--no-such-option", PYTEST_PLUGINS="no_such_plugin",
    )  # fmt: skip
    assert code == 0, output
    report = json.loads((hostile / "reports" / "found.json").read_text())
    assert report["backends"]["reference"]["requirements"]["ISO-01"]["status"] == "pass"
    assert sorted(hostile.iterdir()) == sorted([*before, hostile / "reports"])


def test_a_backend_of_the_callers_folder_is_found(tmp_path):
    (tmp_path / "mystack.py").write_text(
        "import numpy as np\nfrom conformance.reference import Reference\n"
        "class stack(Reference):\n"
        "    def carries(self, ids):\n        return np.broadcast_to(np.arange(ids.shape[1]) > 0, ids.shape)\n"
    )
    code, output = conform(tmp_path, "--backend", "mystack:stack", "--requirement", "ISO-06")
    assert code == 1
    assert "segment 0 changed, and output of other segments moved" in output


def test_its_exit_status_is_the_suites(tmp_path):
    code, output = conform(tmp_path, "--backend", "nobody")
    assert code == 4 and "was asked for and does not load" in output


@pytest.mark.slow
def test_it_runs_from_an_installed_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("crosspack", "packing_core", "torch_backend", "jax_backend", "conformance"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = processes.run([*build, "--wheel-dir", str(tmp_path), str(source)])
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("crosspack-*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    caller = tmp_path / "caller"
    caller.mkdir()
    code, output = conform(
        caller, "--backend", "reference", "--requirement", "LAY-05", "--requirement", "MASK-01", "--report", "r.json",
        PYTHONPATH=str(installed),
    )  # fmt: skip
    assert code == 0, output
    found = processes.run(
        [sys.executable, "-c", "import conformance; print(conformance.__file__)"],
        cwd=caller,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    assert found.stdout.strip().startswith(str(installed))


def test_all_judges_every_registered_backend_in_parallel(monkeypatch, tmp_path):
    from crosspack.cli import conform as command

    started = []
    monkeypatch.setattr(
        command.subprocess, "run", lambda line, **_: started.append(line) or SimpleNamespace(returncode=0)
    )
    with pytest.raises(typer.Exit):
        command.conform(every=True)
    (line,) = started
    assert "--report=conformance.json" in line and line[line.index("-n") + 1] == "auto"
    assert not any(part.startswith("--backend") for part in line)
    with pytest.raises(PackingError, match="--all judges every registered backend and --backend names one"):
        command.conform(every=True, backend=["reference"])
