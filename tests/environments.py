"""Environments that hold a wheel and chosen requirements, made of what is installed here: no network, a second each.

A real environment and not blocked imports: entry points, metadata and data files come from the wheel as they do for a
user, and nothing of the checkout is on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests import processes

ROOT = Path(__file__).parents[1]
PACKAGES = ("crosspack", "packing_core", "torch_backend", "jax_backend", "conformance")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist from a copy of the sources, so that nothing is left in the checkout."""
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    done = processes.run(command, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


class Environment:
    """A virtual environment with a wheel and some installed distributions, all that these require included.

    Args:
        folder: where to make it.
        wheel: what is installed in it.
        requirements: as in pyproject.toml, without versions that matter: what is installed here is what it gets.
    """

    def __init__(self, folder: Path, wheel: Path, requirements: Iterable[str]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (site,) = folder.glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        for name in closure(requirements):
            files = distribution(name).files or []
            for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
                there = Path(str(distribution(name).locate_file(top)))
                if not (site / top).exists() and there.exists():
                    (site / top).symlink_to(there)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` in the environment's own folder, without the variables that lead to the checkout."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return processes.run([str(self.python), *arguments], cwd=self.folder, env={**env, "COLUMNS": "200"})


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of all installed distributions that requirements need, on this platform.

    Raises:
        PackageNotFoundError: one of ``requirements`` itself is not installed.
    """
    found: set[str] = set()
    open_ones = [(Requirement(text), True) for text in requirements]
    while open_ones:
        requirement, direct = open_ones.pop()
        try:
            needs = distribution(requirement.name).requires or []
        except PackageNotFoundError:
            if direct:
                raise
            continue  # of another platform, or replaced by hand
        if requirement.name in found and not requirement.extras:
            continue
        found.add(requirement.name)
        for need in map(Requirement, needs):
            extras = requirement.extras or {""}
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                open_ones.append((need, False))
    return found
