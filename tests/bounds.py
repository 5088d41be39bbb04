"""Tests wrapped models and the console with the oldest and the newest libraries allowed: ``make test-bounds``.

``python -m tests.bounds oldest`` runs with the oldest alone, which are the same for the same commit; ``python -m
tests.bounds main`` runs the quick tier of tests/torch_backend with the main branches of transformers and TRL.
Each set goes into a folder of its own, without dependencies, which stands before the packages of the environment.
So nothing that is installed moves. Lower bounds are read from pyproject.toml and ``packing_core.extras``; the newest
releases are those of the package index.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

from packing_core.extras import MINIMUM
from tests.processes import run

ROOT = Path(__file__).parents[1]
BOUNDS, MAIN = ("oldest", "newest"), "main"
LIBRARIES = ("accelerate", "peft", "trl", "transformers", "typer")
# What the oldest transformers asks for and later ones do not, or in other versions.
WITH_OLDEST = ("tokenizers<=0.23.0", "huggingface_hub<2", "httpx", "httpcore", "h11", "anyio", "certifi", "idna")
TESTS = (
    "torch_backend/hf/test_conditions.py",
    "torch_backend/steps/test_sft_step.py",
    "torch_backend/hf/test_entry.py",
    "cli/test_train_options.py",
)
QUICK_TIER = ("--tier", "quick", "--numprocesses", "2", "--dist", "loadscope", "tests/torch_backend")
CHOSEN = "lora or LoRA or wrapper or entry or (test_train_options and not adapters)"


def oldest() -> list[str]:
    """The lower bounds as requirements, ``peft==0.18``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(text) for text in project["optional-dependencies"]["hf"]]
    needed = [*map(Requirement, project["dependencies"]), *extra]
    bounds = {r.name: next(iter(r.specifier)).version for r in needed if r.specifier} | MINIMUM
    return [f"{name}=={bounds[name]}" for name in LIBRARIES]


def requirements(which: str) -> list[str]:
    """Lists what is installed for a set: ``oldest``, ``newest`` or ``main``.

    >>> requirements("main")[1]
    'git+https://github.com/huggingface/trl'
    """
    if which == MAIN:
        return [f"git+https://github.com/huggingface/{name}" for name in ("transformers", "trl")]
    return [*oldest(), *WITH_OLDEST] if which == "oldest" else list(LIBRARIES)


def run_with(which: str, folder: str) -> int:
    """Install a set into a folder and run its tests with it; the exit status of the first command that fails."""
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", folder]
    chosen = QUICK_TIER if which == MAIN else ("-k", CHOSEN, *(f"tests/{name}" for name in TESTS))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), folder)), "OMP_NUM_THREADS": "1"}
    for arguments in ([*install, *requirements(which)], ["-m", "pytest", "--quiet", *chosen]):
        done = run([sys.executable, *arguments], cwd=ROOT, env=env, limit=3600 if which == MAIN else 600)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
            return done.returncode
    print(*requirements(which), done.stdout.splitlines()[-1], flush=True)
    return 0


def main(chosen: list[str]) -> int:
    for which in chosen or BOUNDS:
        with TemporaryDirectory() as folder:
            if status := run_with(which, folder):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
