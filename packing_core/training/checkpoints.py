"""Checkpoints of a training run: one folder per saved step below the output, written whole or not at all.

The backend writes its own files (safetensors) into the folder it is handed; ``state.json`` beside them says which step
comes next, what was recorded so far, and of which job it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packing_core.errors import PackingError
from packing_core.training.job import Options, StepRecord, TrainJob

FOLDER, STATE, PARTIAL = "checkpoints", "state.json", "partial"
# parts of a job's identity -> the options that decide them, where these have another name
_DECIDED_BY = {
    "data": "--data, --split, --tokenizer, --loss, --bos or --eos",
    "rows": "--capacity, --overflow, --rows-per-step or --epochs",
    "learning rates": "--steps or --epochs",
}


def save_checkpoint(job: TrainJob, records: list[StepRecord], write: Callable[[Path], None]) -> None:
    """Save what ``write`` puts into a folder, after ``len(records)`` finished steps; older checkpoints are removed."""
    if job.output is None:
        raise PackingError("--save-every needs --output, the folder that checkpoints go to")
    home = job.output / FOLDER
    partial = home / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    state = {"identity": job.identity(len(records)), "records": [asdict(record) for record in records]}
    (partial / STATE).write_text(json.dumps(state))
    older = _finished(home)
    os.replace(partial, home / f"step-{len(records):08d}")
    for folder in older:
        shutil.rmtree(folder)


def newest_checkpoint(job: TrainJob) -> tuple[Path, list[StepRecord]]:
    """The folder of the newest checkpoint and the records of the steps before it.

    Raises:
        PackingError: there is none, or it is of another job.
    """
    if job.output is None:
        raise PackingError("--resume needs --output, the folder of the run to continue")
    newest = _newest(job.output)
    state = json.loads((newest / STATE).read_text())
    records = [StepRecord(**record) for record in state["records"]]
    _compare(newest, state["identity"], job.identity(len(records)))
    return newest, records


def check_resume(output: Path, options: Options, model: str | None) -> None:
    """Compare what is known before the data is read with the newest checkpoint below ``output``.

    Args:
        output: the folder of the run.
        options: those of the job to continue.
        model: the folder or hub name of its model; None compares no model.

    Raises:
        PackingError: there is no checkpoint, or it is of a run with other options.
    """
    known = asdict(options) | ({} if model is None else {"model": model})
    folder = _newest(output)
    _compare(folder, json.loads((folder / STATE).read_text())["identity"], known)


def _newest(output: Path) -> Path:
    folders = _finished(output / FOLDER)
    if not folders:
        raise PackingError(f"--resume: {output} has no checkpoint; start it with --save-every N")
    return folders[-1]


def _compare(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise unless a checkpoint was written under what is ``wanted``; the message names the options."""
    different = [name for name in wanted if stored.get(name) != wanted[name]]
    if different == ["learning rates"]:
        raise PackingError(
            f"--resume: the {len(wanted['learning rates'])} steps of {folder} had other learning rates, because "
            "--warmup and --decay follow the number of steps: pass the --steps and --epochs that the run was started "
            "with; a run that will be extended needs --decay constant and --warmup 0 from its start"
        )
    if different:
        names = ", ".join(_DECIDED_BY.get(name, f"--{name.replace('_', '-')}") for name in different)
        raise PackingError(f"--resume: {folder} was written with another {names}: pass the options it was started with")


def _finished(home: Path) -> list[Path]:
    return sorted(home.glob("step-*"))
