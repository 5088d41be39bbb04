"""The list of a result's files, ``crosspack-files.json``: which files of a folder are ours, and of which run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosspack.reading.folders import LISTING
from packing_core.errors import PackingError
from packing_core.training.files import inside, is_plain, sha256, written_beside

LOCK, TEMPORARY = ".crosspack-lock", ".crosspack-partial-"
_FORMAT = "crosspack files 1"


@dataclass(frozen=True)
class Listed:
    """A file that a command wrote: its path below the output, with ``/``, its size and its SHA-256."""

    name: str
    size: int
    sha256: str

    @staticmethod
    def of(path: Path, name: str) -> Listed:
        return Listed(name, path.stat().st_size, sha256(path))

    @staticmethod
    def read(entry: Any) -> Listed:
        """
        Raises:
            ValueError, TypeError: it is no entry of a listing.
        """
        file = Listed(**entry)
        kinds = isinstance(file.size, int) and isinstance(file.sha256, str)
        if not (kinds and is_plain(file.name)) or file.name.startswith(TEMPORARY) or file.name in (LISTING, LOCK):
            raise ValueError(file.name)
        return file


def is_one_of(path: Path, versions: list[Listed]) -> bool:
    """Returns whether a file is as one of these entries describes it."""
    if not path.is_file() or path.stat().st_size not in {version.size for version in versions}:
        return False
    return Listed.of(path, versions[0].name) in versions


def read_listing(folder: Path) -> list[Listed]:
    """Reads a listing; refuses one that is not ours or names files outside the folder."""
    path = folder / LISTING
    files, _ = parse_listing(path.read_bytes(), str(path))
    for file in files:
        inside(folder, file.name, path)
    return files


def parse_listing(content: bytes, path: str) -> tuple[list[Listed], str | None]:
    """The files that a listing names, and the run that they are the result of, if that is complete and known.

    Raises:
        PackingError: crosspack did not write it; the message names its ``path``.
    """
    try:
        fields = json.loads(content)
        files, run = [Listed.read(file) for file in fields["files"]], fields.get("run")
        if fields["format"] != _FORMAT or fields["sha256"] != _digest(files, run):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        raise PackingError(f"--overwrite: {path} is not a list that crosspack wrote: pass another folder") from None
    return files, run


def is_result_of(folder: Path, run: str) -> bool:
    """Returns whether a folder holds the complete and unchanged result of a run."""
    path = folder / LISTING
    try:
        files, of_run = parse_listing(path.read_bytes(), str(path))
        return of_run == run and all(is_one_of(inside(folder, file.name, path), [file]) for file in files)
    except (OSError, PackingError):
        return False


def write_listing(folder: Path, files: list[Listed], run: str | None = None) -> None:
    """Writes the list of a folder; with a run if the files are its complete result."""
    content: dict[str, Any] = {"format": _FORMAT, "files": [asdict(file) for file in files]}
    content |= {"sha256": _digest(files, run)} | ({} if run is None else {"run": run})
    with written_beside(folder / LISTING, prefix=TEMPORARY) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))


def digest(content: Any) -> str:
    """Returns the SHA-256 of plain values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest(files: Iterable[Listed], run: str | None = None) -> str:
    listed = json.dumps([asdict(file) for file in files])
    return hashlib.sha256(f"{listed}{run or ''}".encode()).hexdigest()
