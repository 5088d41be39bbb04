"""The journal of a run: a line of JSON for each finished unit, on the device before the run continues.

A run that was killed leaves a journal and the files that it names. Started again, it reads the journal and does the
rest. The first line says what the run is; a journal of another run is put aside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packing_core.training.files import sync

Entry = dict[str, Any]


class Journal:
    """Appends entries, each with its kind as ``{"kind": .., ..}``; ``entries`` are those of earlier runs."""

    def __init__(self, path: Path, entries: list[Entry], descriptor: int) -> None:
        self.path = path
        self.entries = entries
        self._descriptor = descriptor

    def append(self, kind: str, **content: Any) -> None:
        """Write an entry; it is on the device when this returns."""
        os.write(self._descriptor, json.dumps({"kind": kind, **content}).encode() + b"\n")
        os.fsync(self._descriptor)


def read_journal(path: Path) -> tuple[list[Entry], int]:
    """The entries, and how many bytes they take: a line that a kill cut off does not count."""
    entries, size = [], 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                entries.append(json.loads(line))
            except ValueError:
                break
            size += len(line)
    return entries, size


@contextmanager
def journal(path: Path, run: Entry) -> Iterator[Journal]:
    """Open the journal of a run, or begin one.

    Args:
        run: what the run is; the entries of a journal with another first line are not read.
    """
    entries, size = read_journal(path)
    if not entries or entries[0] != run:
        entries, size = [run], 0
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
        if not size:
            os.write(descriptor, json.dumps(run).encode() + b"\n")
        os.fsync(descriptor)
        sync(path.parent)
        yield Journal(path, entries[1:], descriptor)
    finally:
        os.close(descriptor)
