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

from packing_core.errors import PackingError
from packing_core.training.job import StepRecord, TrainJob

FOLDER, STATE, PARTIAL = "checkpoints", "state.json", "partial"


def save_checkpoint(job: TrainJob, records: list[StepRecord], write: Callable[[Path], None]) -> None:
    """Save what ``write`` puts into a folder, after ``len(records)`` finished steps; older checkpoints are removed."""
    if job.output is None:
        raise PackingError("--save-every needs --output, the folder that checkpoints go to")
    home = job.output / FOLDER
    partial = home / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    state = {"identity": job.identity(), "records": [asdict(record) for record in records]}
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
    folders = _finished(job.output / FOLDER)
    if not folders:
        raise PackingError(f"--resume: {job.output} has no checkpoint; start it with --save-every N")
    state = json.loads((folders[-1] / STATE).read_text())
    stored, wanted = state["identity"], job.identity()
    different = [name for name in wanted if stored.get(name) != wanted[name]]
    if different:
        raise PackingError(
            f"--resume: {folders[-1]} was written with another {', '.join(different)}: pass the options it was started "
            f"with"
        )
    return folders[-1], [StepRecord(**record) for record in state["records"]]


def _finished(home: Path) -> list[Path]:
    return sorted(home.glob("step-*"))
