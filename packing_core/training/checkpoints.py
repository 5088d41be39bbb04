"""Checkpoints of a training run: one folder per saved step below the output, written whole or not at all.

The backend writes its own files (safetensors) into the folder it is handed; ``state.json`` beside them says which step
comes next, what was recorded so far, and of which job it is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from packing_core.errors import PackingError
from packing_core.training.files import replace, sync_tree
from packing_core.training.job import StepRecord, TrainJob

FOLDER, STATE, PARTIAL = "checkpoints", "state.json", ".crosspack-partial-"


def save_checkpoint(job: TrainJob, records: list[StepRecord], write: Callable[[Path], None]) -> None:
    """Save what ``write`` puts into a folder, after ``len(records)`` finished steps; older checkpoints are removed."""
    home = _home(job)
    if home is None:
        raise PackingError("--save-every needs --output, the folder that checkpoints go to")
    home.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(home)
    partial = home / f"{PARTIAL}{uuid4().hex}"
    partial.mkdir()
    write(partial)
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    state = {"identity": job.identity(), "records": [asdict(record) for record in records], "files": files}
    (partial / STATE).write_text(json.dumps(state))
    sync_tree(partial)
    older = _finished(home)
    target = home / f"step-{len(records):08d}"
    if target in older:  # of a run that this one overwrites
        _remove(target)
    if target.exists():
        raise PackingError(f"{target} holds files that crosspack did not write: move them elsewhere")
    replace(partial, target)
    for folder in older:
        if folder != target:
            _remove(folder)


def newest_checkpoint(job: TrainJob) -> tuple[Path, list[StepRecord]]:
    """The folder of the newest checkpoint and the records of the steps before it.

    Raises:
        PackingError: there is none, or it is of another job.
    """
    home = _home(job)
    if home is None:
        raise PackingError("--resume needs --output, the folder of the run to continue")
    folders = _finished(home)
    if not folders:
        raise PackingError(f"--resume: {home.parent} has no checkpoint; start it with --save-every N")
    state = _state(folders[-1])
    stored, wanted = state["identity"], job.identity()
    different = [name for name in wanted if stored.get(name) != wanted[name]]
    if different:
        raise PackingError(
            f"--resume: {folders[-1]} was written with another {', '.join(different)}: pass the options it was started "
            f"with"
        )
    return folders[-1], [StepRecord(**record) for record in state["records"]]


def remove_checkpoints(home: Path) -> None:
    """Remove the checkpoints below ``home``, and ``home`` if nothing else is in it."""
    _remove_unfinished(home)
    for folder in _finished(home):
        _remove(folder)
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def _home(job: TrainJob) -> Path | None:
    return job.checkpoints or (None if job.output is None else job.output / FOLDER)


def _remove_unfinished(home: Path) -> None:
    """Remove what a run that was killed while it saved has left."""
    for folder in home.glob(f"{PARTIAL}*"):
        shutil.rmtree(folder)


def _finished(home: Path) -> list[Path]:
    return sorted(state.parent for state in home.glob(f"step-*/{STATE}"))


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_text())
    except ValueError:
        state = None
    if not isinstance(state, dict) or not {"identity", "records", "files"} <= state.keys():
        raise PackingError(f"{folder / STATE} is not of a checkpoint that crosspack wrote: move {folder} elsewhere")
    return state


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, and its folders unless somebody put others there."""
    for name in _state(folder)["files"]:
        (folder / name).unlink(missing_ok=True)
    (folder / STATE).unlink()
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()
