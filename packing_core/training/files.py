"""Writes files that survive a crash, and checks that paths and folders are ours.

Written to the device before they are renamed, and the rename too. Journals, listings and states of checkpoints are
input: somebody else may have written them. :func:`inside` decides which files they may name.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from uuid import uuid4

from packing_core.errors import PackingError

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)


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


@contextmanager
def written_beside(path: Path, prefix: str = ".") -> Iterator[Path]:
    """Yields a path beside ``path`` with its suffix; what is written there takes its place if the block succeeds.

    A full disk or an interruption leaves what was there before; a kill may leave the file, whose name has the prefix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{prefix}{uuid4().hex}{path.suffix}")
    try:
        yield partial
        sync(partial)
        replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def remove_inside(folder: Path, name: str) -> None:
    """Remove the file of a plain name below a folder, if it is there; nothing is followed that is a link by now."""
    with suppress(FileNotFoundError), _holding(folder, name) as (parent, last):
        os.unlink(last, dir_fd=parent)


def remove_folder_inside(folder: Path, name: str) -> None:
    """Remove the empty folder of a plain name below a folder; leave one that holds something."""
    with suppress(OSError), _holding(folder, name) as (parent, last):
        os.rmdir(last, dir_fd=parent)


def move_inside(source: Path, target: Path, name: str) -> None:
    """Rename a file below ``source`` to the same plain name below ``target``, for good, through no link.

    Folders on the way are made.
    """
    with _holding(source, name) as (old, last), _holding(target, name, make=True) as (new, _):
        os.replace(last, last, src_dir_fd=old, dst_dir_fd=new)
        for parent in (old, new):
            os.fsync(parent)


@contextmanager
def _holding(folder: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Opens the folder that holds a file below ``folder``, and yields its descriptor and the file's name in it.

    :func:`inside` has looked at the way before. A link that is put there afterwards is not followed: each folder is
    opened from the one before, and not by its path.
    """
    *parents, last = PurePosixPath(name).parts
    descriptor, path = os.open(folder, _FOLDER), folder
    try:
        for part in parents:
            path = path / part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            try:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                raise PackingError(f"{path} is a link or a file by now, and was not followed: remove it") from error
            os.close(descriptor)
            descriptor = inner
        yield descriptor, last
    finally:
        os.close(descriptor)


def check_own_folder(folder: Path, *, private: bool = False) -> None:
    """Check that a folder for temporary files is one that this user made.

    Args:
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
