"""Judges released stacks by a perturbation test: does one packed document change another one?

    python -m benchmarks.board --install FOLDER          # the stacks that are not here, each in a folder of its own
    python -m benchmarks.board --folder FOLDER           # all of it, as a page
    python -m benchmarks.board --folder FOLDER --stack trl --model nemotron_h    # one cell, printed
    python -m benchmarks.board --stack crosspack --model qwen3 --tiny            # a minute

Every stack runs in a process of its own. It makes batches of the same documents by its released code, which a tiny
random model takes on the CPU. A document of the batch is exchanged, and no other document's logits or loss may move.
``flash`` rows call FlashAttention's functions in plain torch (``_board_flash.py``); the boundaries are the stack's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._board_probe import Cell
from benchmarks._board_stacks import STACKS, Stack
from benchmarks._report import table, versions

MODELS = {
    "qwen3": "full attention",
    "gemma3_text": "sliding windows",
    "qwen3_next": "gated delta hybrid",
    "nemotron_h": "Mamba-2 hybrid",
    "lfm2": "convolution hybrid",
    "qwen3_moe": "mixture of experts",
}
LENGTHS, CAPACITY = (37, 21, 46, 18), 128  # of the documents whose cross-talk is tested, and the row they lie in
DOCUMENTS, ROW = 5_000, 2048  # whose rows are planned; see planned()
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Line:
    """One row of the board: a stack's version, its rows, and a cell for each class of models."""

    stack: str
    version: str
    kept: float | None
    filled: float | None
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
    options.add_argument("--tiny", action="store_true", help="plan 200 documents, and measure no speed")
    options.add_argument("--found", type=Path, help=argparse.SUPPRESS)  # where a process writes its line
    chosen = options.parse_args()
    if chosen.install:
        install(chosen.install)
    elif chosen.found:
        line = measure(STACKS[chosen.stack[0]], chosen.model or list(MODELS), tiny=chosen.tiny)
        chosen.found.write_text(json.dumps(asdict(line)))
    else:
        names = chosen.stack or list(STACKS)
        lines = [run(name, chosen.folder, chosen.model or list(MODELS), tiny=chosen.tiny) for name in names]
        page: dict[str, Any] = {
            "lines": lines,
            "models": {m: MODELS[m] for m in chosen.model or MODELS},
            "day": date.today(),
        }
        print(markdown(**page))


def install(folder: Path) -> None:
    """Installs the packages of every stack, without what they depend on, into ``folder/NAME``."""
    for packages in dict.fromkeys(stack.packages for stack in STACKS.values() if stack.packages):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python", "--upgrade"]
        subprocess.run([*pip, "--target", str(folder / packages[0]), *packages], check=True)


def run(name: str, folder: Path | None, models: Sequence[str], *, tiny: bool = False) -> Line:
    """Measures a stack in a process of its own; one that ends without a line has cells that say why."""
    stack = STACKS[name]
    if stack.packages and (folder is None or not (folder / stack.packages[0]).is_dir()):
        return _not_run(stack, models, f"{stack.packages[0]} is not in --folder")
    own = [str(folder / stack.packages[0])] if stack.packages and folder else []
    with TemporaryDirectory() as temporary:
        found = Path(temporary, "line.json")
        command = [sys.executable, "-m", "benchmarks.board", "--stack", name, "--found", str(found)]
        command += [word for model in models for word in ("--model", model)] + ["--tiny"] * tiny
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *own]), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, cwd=temporary, capture_output=True, text=True, timeout=1800)
        if not found.exists():
            reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
            return _not_run(stack, models, reason[:240])
        fields: dict[str, Any] = json.loads(found.read_text())
    return Line(**fields | {"cells": {model: Cell(**cell) for model, cell in fields["cells"].items()}})


def measure(stack: Stack, models: Sequence[str], *, tiny: bool = False) -> Line:
    """Measures a stack in this process, whose libraries it may change."""
    kept, filled = planned(stack, 200 if tiny else DOCUMENTS)
    cells = {family: _cell(stack, family, tiny) for family in models}
    return Line(stack.name, _version(stack), kept, filled, cells, stack.note)


def planned(stack: Stack, count: int) -> tuple[float | None, float | None]:
    """Returns the share of real tokens that are trained, and of slots that hold one, of lognormal lengths.

    The lengths have a mean of 600 and rows 2,048 tokens, so 4% of the documents are too long for a row.
    """
    import numpy as np

    if stack.rows is None:
        return None, None
    drawn = np.random.default_rng(0).lognormal(np.log(600) - 0.405, 0.9, count)
    lengths = np.clip(drawn, 2, 4 * ROW).astype(np.int64)
    kept, slots = stack.rows(lengths, ROW)
    return kept / int(lengths.sum()), kept / slots


def _cell(stack: Stack, family: str, tiny: bool) -> Cell:
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
    cell = _board_probe.judge(model, documents, lambda lists: stack.batches(lists, CAPACITY, model), alone)
    if tiny or not stack.own_model or cell.verdict in ("refused", "not run"):
        return cell
    longer = [document.tolist() for document in random_documents(model, [4 * n for n in LENGTHS])]
    seconds = _board_probe.clock(model, stack.batches(longer, 4 * CAPACITY, model))
    return Cell(**asdict(cell) | {"seconds": seconds})


def _not_run(stack: Stack, models: Sequence[str], reason: str) -> Line:
    cells = {model: Cell("not run", reason=reason) for model in models}
    return Line(stack.name, "", None, None, cells, stack.note)


def _version(stack: Stack) -> str:
    name = stack.packages[0] if stack.packages else stack.name.partition(",")[0].lower()
    return next((d.version for d in distributions(name=name)), "")


# -- the page

TITLE = "What released stacks do with packed documents"
LEGEND = """\
Each cell is a test that anyone can rerun: the stack's released code packs four documents, a tiny random model of the
class runs them on the CPU in float32, and then one document after the other is exchanged.

- **exact**: no other document's logits or loss move by more than 1e-4 of the largest value, and the gradients are those
  of each document alone.
- **contaminated**: they move, and the figures say by how much.
- **differs**: no document moves another one, but the gradients are not those of each document alone.
- **refused**: the stack raises instead of training. Fused kernels that need a GPU may lift it there.
- **not run**: the stack, or this part of it, could not be run on the CPU.

`flash` rows run the stack's FlashAttention path with FlashAttention's two functions written in plain torch. For MaxText
and EasyDeL the board runs the released packers and loss masks, in our patched model, which honours their segments: what
it finds is in their batches. `kept` is the share of real tokens that are trained (lognormal lengths of mean 600, rows
of 2,048; some documents are longer), `filled` is the share of slots that hold one. Speed is tokens/s relative to
crosspack in the same run, on tiny models and a CPU that other work shared: halves and doubles are noise, and nothing
follows for a GPU."""


def markdown(lines: Sequence[Any], models: dict[str, str], day: date) -> str:
    """Returns the page."""
    header, rows, reasons = _table(lines, models)
    speeds = table(["tokens/s, relative to crosspack", *header[4:]], _speeds(lines, models))
    parts = [f"# {TITLE}", f"{day}, {_versions()}.", LEGEND, table(header, rows)]
    notes = "\n".join(f"- {line.stack}: {line.note}." for line in lines if line.note)
    numbered = "\n".join(f"{number}. `` {reason} ``" for number, reason in enumerate(reasons, 1))
    again = "Run it again, all of it or one cell:\n\n```text\n" + "\n".join(COMMANDS) + "\n```"
    return (
        "\n\n".join(
            [*parts, "What was raised:", numbered, "## Speed", speeds, "## Notes", notes, "## How to run it", again]
        )
        + "\n"
    )


COMMANDS = (
    "python -m benchmarks.board --install FOLDER",
    "python -m benchmarks.board --folder FOLDER",
    "python -m benchmarks.board --folder FOLDER --stack axolotl --model qwen3_next",
)


def _versions() -> str:
    return versions("torch", "transformers", "trl")


def _table(lines: Sequence[Any], models: dict[str, str]) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the header, the rows, and the reasons that cells give by number."""
    header = ["stack", "version", "kept", "filled", *(f"{kind} ({model})" for model, kind in models.items())]
    reasons = list(dict.fromkeys(cell.reason for line in lines for cell in line.cells.values() if cell.reason))

    def text(cell: Any) -> str:
        return f"{cell.text()} [{reasons.index(cell.reason) + 1}]" if cell.reason else cell.text()

    rows = [
        [line.stack, line.version, _share(line.kept), _share(line.filled), *(text(line.cells[m]) for m in models)]
        for line in lines
    ]
    return header, rows, reasons


def _speeds(lines: Sequence[Any], models: dict[str, str]) -> list[list[str]]:
    ours = next((line for line in lines if line.stack == "crosspack"), None)

    def relative(line: Any, model: str) -> str:
        seconds, base = line.cells[model].seconds, ours.cells[model].seconds if ours else 0.0
        return f"{base / seconds:.1f}" if seconds and base else ""

    return [[line.stack, *(relative(line, model) for model in models)] for line in lines]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


if __name__ == "__main__":
    main()
