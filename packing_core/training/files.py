"""Files that survive a crash: written to the device before they are renamed, and the rename too."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Write a file or the entries of a folder to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Write every file below ``folder``, and the folder itself, to the device."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which is replaced, for good: both folders reach the device."""
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync(folder)
