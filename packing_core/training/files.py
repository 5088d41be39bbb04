"""Writes files that survive a crash, and checks that paths and folders are ours.

Written to the device before they are renamed, and the rename too. Journals, listings and states of checkpoints are
input: somebody else may have written them. :func:`inside` decides which files they may name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

from packing_core.errors import PackingError


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


def is_plain(name: object) -> bool:
    """Returns whether a name is a relative path with ``/`` that stays below its folder, even through links."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == name


def inside(folder: Path, name: object, named_by: Path) -> Path:
    """The file below ``folder`` that a journal, a listing or a state names.

    Args:
        folder: itself may be reached through links.
        name: a relative path with ``/``.
        named_by: the file that names it, for messages.

    Raises:
        PackingError: the name is no plain one, or a link stands on the way, so it may be anybody's file.
    """
    if not is_plain(name):
        raise PackingError(
            f"{named_by} names the file {name!r}, which is not one below its folder: nothing was changed"
        )
    path = folder
    for part in PurePosixPath(str(name)).parts:
        path = path / part
        if path.is_symlink():
            raise PackingError(f"{named_by} names {name}, and {path} is a link: nothing was changed; remove the link")
    return path


def check_own_folder(folder: Path, *, private: bool = False) -> None:
    """Check that a folder for temporary files is one that this user made.

    Args:
        folder: need not exist.
        private: whether nobody else may write there or read it.

    Raises:
        PackingError: it is a link or no folder, belongs to somebody else, or holds links.
    """
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return
    way = f"crosspack did not make {folder}, and changed nothing in it: remove it"
    if not stat.S_ISDIR(found.st_mode):
        raise PackingError(f"{folder} is a link or a file and not a folder of temporary files; {way}")
    if os.name == "posix" and found.st_uid != os.geteuid():
        raise PackingError(f"{folder} belongs to another user; {way}, or set TMPDIR")
    if private and os.name == "posix" and found.st_mode & 0o077:
        raise PackingError(f"{folder} is open to other users; {way}, or set TMPDIR")
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            if Path(root, name).is_symlink():
                raise PackingError(f"{Path(root, name)} is a link; {way}")


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
