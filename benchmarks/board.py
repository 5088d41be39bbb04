"""Judges released stacks by a perturbation test: does one packed document change another one?

    python -m benchmarks.board --install FOLDER          # the stacks that are not here, each in a folder of its own
    python -m benchmarks.board --folder FOLDER           # all of it
    python -m benchmarks.board --folder FOLDER --stack trl --model nemotron_h    # one cell, printed
    python -m benchmarks.board --stack crosspack --model qwen3                   # a minute

Every stack runs in a process of its own. It makes batches of the same documents by its released code, which a tiny
random model takes on the CPU. A document of the batch is exchanged, and no other document's logits or loss may move.
``flash`` rows call FlashAttention's functions in plain torch (``_board_flash.py``); the boundaries are the stack's own.

- exact: no other document's logits or loss move by more than 1e-4 of the largest value, and the gradients are those of
  each document alone.
- contaminated: they move, and the figures say by how much.
- differs: no document moves another one, but the gradients are not those of each document alone.
- refused: the stack raises instead of training. Fused kernels that need a GPU may lift it there.
- not run: the stack, or this part of it, could not be run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._board_probe import Cell
from benchmarks._board_stacks import STACKS, Stack
from benchmarks.report import table, versions

MODELS = {
    "qwen3": "full attention",
    "gemma3_text": "sliding windows",
    "qwen3_next": "gated delta hybrid",
    "nemotron_h": "Mamba-2 hybrid",
    "lfm2": "convolution hybrid",
    "qwen3_moe": "mixture of experts",
}
LENGTHS, CAPACITY = (37, 21, 46, 18), 128  # of the documents whose cross-talk is tested, and the row they lie in
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Line:
    """One row of the board: a stack's version, and a cell for each class of models."""

    stack: str
    version: str
    cells: dict[str, Cell]
    note: str = ""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, help="where --install put the stacks")
    options.add_argument(
        "--install", type=Path, metavar="FOLDER", help="install the newest release of each stack, and end"
    )
    options.add_argument("--stack", action="append", choices=list(STACKS), help="only this one; may be repeated")
    options.add_argument("--model", action="append", choices=list(MODELS), help="only this one; may be repeated")
    options.add_argument("--line", type=Path, help=argparse.SUPPRESS)  # where a process writes its line
    chosen = options.parse_args()
    models = chosen.model or list(MODELS)
    if chosen.install:
        install(chosen.install)
    elif chosen.line:
        stack = STACKS[chosen.stack[0]]
        line = Line(stack.name, _version(stack), {family: _cell(stack, family) for family in models}, stack.note)
        chosen.line.write_text(json.dumps(asdict(line)))
    else:
        print(report([run(name, chosen.folder, models) for name in chosen.stack or STACKS], models))


def install(folder: Path) -> None:
    """Installs the packages of every stack, without what they depend on, into ``folder/NAME``."""
    for packages in dict.fromkeys(stack.packages for stack in STACKS.values() if stack.packages):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder / packages[0]), *packages], check=True)


def run(name: str, folder: Path | None, models: Sequence[str]) -> Line:
    """Measures a stack in a process of its own; one that ends without a line has cells that say why."""
    stack = STACKS[name]
    if stack.packages and (folder is None or not (folder / stack.packages[0]).is_dir()):
        return _not_run(stack, models, f"{stack.packages[0]} is not in --folder")
    own = [str(folder / stack.packages[0])] if stack.packages and folder else []
    with TemporaryDirectory() as temporary:
        path = Path(temporary, "line.json")
        command = [sys.executable, "-m", "benchmarks.board", "--stack", name, "--line", str(path)]
        command += [word for model in models for word in ("--model", model)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *own]), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, cwd=temporary, capture_output=True, text=True, timeout=1800)
        if not path.exists():
            reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
            return _not_run(stack, models, reason[:240])
        fields: dict[str, Any] = json.loads(path.read_text())
    return Line(**fields | {"cells": {model: Cell(**cell) for model, cell in fields["cells"].items()}})


def _cell(stack: Stack, family: str) -> Cell:
    from benchmarks import _board_flash, _board_probe
    from torch_backend.auditing.compare import random_documents
    from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model

    try:
        patch = stack.prepare(family)
        model = tiny_model(tiny_config(family_config(family), positions=4 * CAPACITY)).train()
        model.config.use_cache = model.config.use_cache and stack.cache
        documents = random_documents(model, LENGTHS)
        alone = _board_probe.each_alone(model, documents)
        if stack.attention == _board_flash.NAME:
            _board_flash.register()
            model.set_attn_implementation(_board_flash.NAME)
        if patch is not None:
            patch(model)
    except Exception as error:  # whatever a stack's patches and a family's constructor raise is the result
        return _board_probe.failed(error)
    return _board_probe.judge(model, documents, lambda lists: stack.batches(lists, CAPACITY, model), alone)


def _not_run(stack: Stack, models: Sequence[str], reason: str) -> Line:
    return Line(stack.name, "", {model: Cell("not run", reason=reason) for model in models}, stack.note)


def _version(stack: Stack) -> str:
    name = stack.packages[0] if stack.packages else stack.name.partition(",")[0].lower()
    return next((d.version for d in distributions(name=name)), "")


def report(lines: Sequence[Line], models: Sequence[str]) -> str:
    """Returns the table, what was raised by number, and the notes."""
    reasons = list(dict.fromkeys(cell.reason for line in lines for cell in line.cells.values() if cell.reason))

    def text(cell: Cell) -> str:
        return f"{cell.text()} [{reasons.index(cell.reason) + 1}]" if cell.reason else cell.text()

    header = ["stack", "version", *(f"{MODELS[model]} ({model})" for model in models)]
    rows = [[line.stack, line.version, *(text(line.cells[model]) for model in models)] for line in lines]
    numbered = [f"{number}. `` {reason} ``" for number, reason in enumerate(reasons, 1)]
    notes = [f"- {line.stack}: {line.note}." for line in lines if line.note]
    return "\n".join([versions("torch", "transformers", "trl"), "", table(header, rows), "", *numbered, "", *notes])


if __name__ == "__main__":
    main()
