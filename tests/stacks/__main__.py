"""Trains a tiny model in the released version of a stack, packed by Crosspack, against each document alone.

``python -m tests.stacks axolotl --folder DIR`` installs the stack, without its dependencies on CUDA, into
``DIR/axolotl`` (once; pip needs the package index), makes a tiny model and data in ``DIR/data``, runs the stack's own
command on the CPU (:mod:`.training`), and prints its versions with what differed. Without a name it does so for all
stacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import distributions
from pathlib import Path

from tests import processes
from tests.imports import ROOT
from tests.stacks.released import STACKS
from tests.stacks.tiny import make_data

LIMIT = 1800  # seconds to download a stack, or to train in it


def install(name: str, folder: Path) -> Path:
    """Returns the folder that holds a stack, installed if it was not."""
    target = folder / name
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
        done = processes.run([*pip, *STACKS[name].packages], limit=LIMIT)
        assert done.returncode == 0, done.stderr
    return target


def train(name: str, folder: Path) -> int:
    """Run a stack in a process of its own; returns its exit status."""
    target, stack = install(name, folder), STACKS[name]
    shown = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in distributions(path=[str(target)])}
    print(name, *(f"{each} {shown[each]}" for each in stack.shown if each in shown), flush=True)
    paths = os.pathsep.join([str(target), str(ROOT)])
    environment = {
        **os.environ,
        **stack.environment,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    work = folder / f"{name}-run"
    command = [sys.executable, "-m", "tests.stacks.training", name, str(folder / "data"), str(work)]
    done = processes.run(command, env=environment, limit=LIMIT)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    found = [line for line in lines if line.startswith("stacks: ") or "gradient cosine" in line]
    print(*(found if done.returncode == 0 else lines[-40:]), sep="\n", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stacks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STACKS)}; all if none is given")
    parser.add_argument("--folder", type=Path, default=Path("stacks"), help="where to install and to run (./stacks)")
    arguments = parser.parse_args()
    make_data(arguments.folder.resolve() / "data")
    return max(train(name, arguments.folder.resolve()) for name in arguments.names or STACKS)


if __name__ == "__main__":
    sys.exit(main())
