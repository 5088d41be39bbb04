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
from packing_core.training.files import check_own_folder, inside, remove_inside, replace, sha256, sync_tree
from packing_core.training.job import TrainJob
from packing_core.training.options import Options
from packing_core.training.records import StepRecord, best_record

FOLDER, STATE, PARTIAL = "checkpoints", "state.json", ".crosspack-partial-"
# parts of a job's identity -> the options that decide them, where these have another name
_DECIDED_BY = {
    "data": "--data, --split, --tokenizer, --loss, --bos or --eos",
    "rows": "--capacity, --overflow, --context, --min-piece, --max-segments, --rows-per-step, --packing, --order, "
    "--order-by, --equal-cost or --epochs",
    "learning rates": "--steps or --epochs",
}


def save_checkpoint(job: TrainJob, records: list[StepRecord], write: Callable[[Path], None]) -> None:
    """Save what ``write`` puts into a folder, after ``len(records)`` steps; remove what the job does not keep."""
    home = _home(job)
    if home is None:
        raise PackingError("--save-every needs --output, the folder that checkpoints go to")
    home.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(home)
    partial = home / f"{PARTIAL}{uuid4().hex}"
    partial.mkdir()
    try:
        write(partial)
        written = [path for path in partial.rglob("*") if path.is_file()]
        files = {
            path.relative_to(partial).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in written
        }
        recorded = [asdict(record) for record in records]
        state = {"identity": job.identity(len(records)), "records": recorded, "files": files}
        (partial / STATE).write_text(json.dumps(state))
        sync_tree(partial)
    except BaseException:
        shutil.rmtree(partial)  # the disk may be full of it
        raise
    older = _finished(home)
    target = _folder_after(home, len(records))
    if target in older:  # of a run that this one overwrites
        _remove(target)
    if target.exists():
        raise PackingError(f"{target} holds files that crosspack did not write: move them elsewhere")
    replace(partial, target)
    # those of a later step are of a run that this one overwrites
    kept = [target, *sorted(folder for folder in older if folder < target)[::-1][: job.keep_checkpoints - 1]]
    best = best_record(records) if job.keep_best else None
    for folder in older:
        if folder not in kept and (best is None or folder != _folder_after(home, best.step + 1)):
            _remove(folder)


def best_checkpoint(job: TrainJob, records: list[StepRecord]) -> Path | None:
    """Returns the checkpoint of the step with the lowest evaluation loss; None if that is the last one.

    Raises:
        PackingError: it is not there in whole.
    """
    best, home = best_record(records), _home(job)
    if best is None or home is None or best is records[-1]:
        return None
    folder = _folder_after(home, best.step + 1)
    if not (folder / STATE).is_file():
        raise PackingError(f"--keep-best: {folder} is gone, the checkpoint of the best step: start again")
    _check_files(folder, _state(folder)["files"])
    return folder


def newest_checkpoint(job: TrainJob) -> tuple[Path, list[StepRecord]]:
    """The folder of the newest checkpoint and the records of the steps before it.

    Raises:
        PackingError: there is none, or it is of another job.
    """
    home = _home(job)
    if home is None:
        raise PackingError("--resume needs --output, the folder of the run to continue")
    newest = _newest(home)
    state = _state(newest)
    _check_files(newest, state["files"])
    records = [StepRecord(**record) for record in state["records"]]
    _compare(newest, state["identity"], job.identity(len(records)))
    return newest, records


def check_resume(output: Path, options: Options, model: str | None) -> None:
    """Compare what is known before the data is read with the newest checkpoint below ``output``.

    Args:
        model: the folder or hub name of its model; None compares no model.

    Raises:
        PackingError: there is no checkpoint, or it is of a run with other options.
    """
    known = asdict(options) | ({} if model is None else {"model": model})
    folder = _newest(output / FOLDER)
    _compare(folder, _state(folder)["identity"], known)


def has_checkpoint(output: Path) -> bool:
    """Returns whether a run that writes to ``output`` has saved a checkpoint in whole."""
    return bool(_finished(output / FOLDER))


def _newest(home: Path) -> Path:
    folders = _finished(home)
    if not folders:
        raise PackingError(f"--resume: {home.parent} has no checkpoint: start it without --resume, with --save-every N")
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


def remove_checkpoints(home: Path) -> None:
    """Remove the checkpoints below ``home``, and ``home`` if nothing else is in it."""
    _remove_unfinished(home)
    for folder in _finished(home):
        _remove(folder)
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def remove_older(home: Path, keep: int = 1) -> None:
    """Remove all checkpoints below ``home`` but the newest ones, as a run ends that keeps so many."""
    _remove_unfinished(home)
    for folder in _finished(home)[:-keep]:
        _remove(folder)


def _folder_after(home: Path, steps: int) -> Path:
    return home / f"step-{steps:08d}"


def _home(job: TrainJob) -> Path | None:
    return job.checkpoints or (None if job.output is None else job.output / FOLDER)


def _remove_unfinished(home: Path) -> None:
    """Remove what a run that was killed while it saved has left."""
    for folder in home.glob(f"{PARTIAL}*"):
        check_own_folder(folder)
        shutil.rmtree(folder)


def _finished(home: Path) -> list[Path]:
    return sorted(state.parent for state in home.glob(f"step-*/{STATE}"))


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE).read_text())
    except ValueError:
        state = None
    kinds = {"identity": dict, "records": list, "files": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise PackingError(f"{folder / STATE} is not of a checkpoint that crosspack wrote: move {folder} elsewhere")
    return state


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    """Raise if a file of a checkpoint is not as it was written; a run would train on from damaged weights."""
    for name, found in files.items():
        path = inside(folder, name, folder / STATE)
        about = found if isinstance(found, dict) else {"size": found}  # 0.1 noted sizes alone
        if not path.is_file() or path.stat().st_size != about.get("size"):
            raise PackingError(f"--resume: {path} is not there in whole: start again without --resume")
        if "sha256" in about and sha256(path) != about["sha256"]:
            raise PackingError(f"--resume: {path} was changed since it was written: start again without --resume")


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, and its folders unless somebody put others there."""
    names = list(_state(folder)["files"])
    for name in names:
        inside(folder, name, folder / STATE)
    for name in names:
        remove_inside(folder, name)
    (folder / STATE).unlink()
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()
