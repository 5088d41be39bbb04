"""Output folders of ``pack`` and ``train``: results appear complete, one writer at a time, and no other file is lost.

A command writes into a temporary folder of its own inside the output, so the output may be a link or a mount point.
When the result is complete, :meth:`Output.publish` moves its files into place and lists them, with sizes and SHA-256,
in ``crosspack-files.json``. Only that list shows that a file is ours: ``--overwrite`` replaces and deletes listed
files that are unchanged, and nothing else, and only in ``publish``. A lock file says who is writing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path, PurePosixPath
from uuid import uuid4

from crosspack.cli.listing import LOCK, TEMPORARY, Listed, is_one_of, is_result_of, read_listing, write_listing
from crosspack.cli.lock import Lock, locked
from crosspack.reading.folders import LISTING
from packing_core.errors import PackingError, first_line
from packing_core.training.checkpoints import FOLDER as CHECKPOINTS
from packing_core.training.files import (
    check_own_folder,
    inside,
    move_inside,
    remove_folder_inside,
    remove_inside,
    sync_tree,
    written_beside,
)

PART = ".crosspack-part-"  # folders of the parts of a result that are merged later
_WORK, _MOVES = f"{TEMPORARY}run", "publish.json"
# What a folder may hold and still count as empty; new file systems begin with lost+found.
_INVISIBLE = (LISTING, LOCK, "lost+found")


@dataclass
class Output:
    """An output folder that this process alone writes.

    Attributes:
        partial: the temporary folder for the result; everything in it is published.
        summary: the file of the result that says what it is; it goes first and comes last.
        work: for what a run that is started again goes on from; it is deleted when the result is published.
        keep: whether ``work`` and ``partial`` stay where the run ends without a result.
        run: what the result is the result of; None for one that is always made anew.
        finished: the folder holds the complete result of an earlier run of the same.
    """

    folder: Path
    partial: Path
    summary: str
    lock: Lock
    old: list[Listed] = field(default_factory=list)
    work: Path | None = None
    keep: bool = False
    run: str | None = None
    finished: bool = False

    def clear(self) -> None:
        """Remove what an earlier run that was killed left of its result."""
        shutil.rmtree(self.partial)
        self.partial.mkdir()

    def publish(self) -> None:
        """Put the complete result in place of what an earlier run listed.

        Raises:
            PackingError: a file that is not ours has the name of one of the result, or another process took the folder
                over.
        """
        self.lock.check()
        new = [Listed.of(path, path.relative_to(self.partial).as_posix()) for path in _files(self.partial)]
        new.sort(key=lambda file: (file.name == self.summary, file.name))
        _check_unchanged(self.folder, self.old)
        names, ours = {file.name for file in new}, {file.name for file in self.old}
        _check_free(self.folder, names - ours)
        for file in new:  # safetensors writes files that nobody else may read, beside others that all may
            (self.partial / file.name).chmod(0o666 & ~_umask())
        sync_tree(self.partial)
        moves = _Moves(self.summary, self.run, self.old, new)
        if self.work is not None:
            moves.write(self.work / _MOVES)
        moves.make(self.folder, self.partial)
        self.keep = False


@dataclass(frozen=True)
class _Moves:
    """A publication: which files go and which come. It can be made again where it was interrupted."""

    summary: str
    run: str | None
    old: list[Listed]
    new: list[Listed]

    def make(self, folder: Path, partial: Path) -> None:
        names = {file.name for file in self.new}
        write_listing(folder, [*self.old, *self.new])  # from here on an interrupted run owns both
        if (partial / self.summary).exists():  # else it has been moved
            remove_inside(folder, self.summary)
        for file in self.old:
            if file.name not in names:
                remove_inside(folder, file.name)
        for file in self.new:
            if (partial / file.name).exists():
                move_inside(partial, folder, file.name)
        parents = {parent for file in self.old for parent in PurePosixPath(file.name).parents[:-1]}
        for parent in sorted(parents, reverse=True):  # the inner ones first
            remove_folder_inside(folder, str(parent))
        write_listing(folder, self.new, self.run)

    def write(self, path: Path) -> None:
        content = {"summary": self.summary, "run": self.run} | {
            name: [asdict(file) for file in getattr(self, name)] for name in ("old", "new")
        }
        with written_beside(path) as unfinished:
            unfinished.write_text(json.dumps(content))

    @staticmethod
    def read(path: Path) -> _Moves:
        """
        Raises:
            PackingError: it is no journal of a publication.
        """
        try:
            content = json.loads(path.read_bytes())
            old, new = ([Listed.read(file) for file in content[name]] for name in ("old", "new"))
            moves = _Moves(content["summary"], content["run"], old, new)
            if content["summary"] not in {file.name for file in new}:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PackingError(
                f"{path} is not a journal that crosspack wrote, and nothing was changed: remove {path.parent}"
            ) from None
        return moves

    def check(self, folder: Path, partial: Path, journal: Path, *, overwrite: bool) -> None:
        """Check that an interrupted publication is one of ours, before any part of it is completed.

        Raises:
            PackingError: it would touch a file that crosspack did not write, or its own files are not all there, or it
                replaces files and ``overwrite`` is not given.
        """
        known = {(file.name, file.size, file.sha256) for file in (*self.old, *self.new)}
        for file in (*self.old, *self.new):
            path = inside(folder, file.name, journal)
            if path.exists() and not (path.is_file() and astuple(Listed.of(path, file.name)) in known):
                raise PackingError(f"{journal} names {path}, which crosspack did not write: move it elsewhere first")
        coming = {file.name for file in self.new}
        for file in self.new:
            found = [path for path in (partial / file.name, folder / file.name) if path.is_file()]
            if not any(Listed.of(path, file.name) == file for path in found):
                raise PackingError(f"{journal} names {file.name}, which is not there: remove {journal.parent}")
        gone = [file.name for file in self.old if file.name not in coming and (folder / file.name).exists()]
        changed = [file.name for file in self.new if (folder / file.name).exists() and (partial / file.name).exists()]
        if (gone or changed) and not overwrite:
            name = (gone or changed)[0]
            raise PackingError(
                f"--output {folder}: an interrupted run was about to replace {name} and other files: pass --overwrite, "
                f"or remove {journal.parent}"
            )


@contextmanager
def writing(
    folder: Path,
    summary: str,
    *,
    names: Sequence[str] = (),
    overwrite: bool = False,
    run: str | None = None,
    checkpoints: bool = False,
) -> Iterator[Output]:
    """Lock ``folder`` and hand out a temporary folder in it; without ``publish`` nothing of the folder changes.

    Args:
        names: patterns of files that the result will have, so that a file in their place is an error at once.
        run: a digest of all that decides the result. With it, ``work`` is what an earlier run left when it was killed,
            of this digest or another, a publication that was interrupted is completed first, and a result that is
            complete is not made again without ``overwrite``.
        checkpoints: whether the run puts checkpoints into the folder before it has a result.

    Raises:
        PackingError: the folder holds files that are not ours to replace, another process writes there, or the
            operating system refuses.
    """
    if "\0" in str(folder):
        raise PackingError("--output holds a null character: pass a folder")
    with _errors_of(folder), _made(folder), locked(folder / LOCK, TEMPORARY) as lock:
        work = folder / _WORK
        resumable = run is not None
        check_own_folder(work)
        interrupted = resumable and (work / _MOVES).exists()
        if interrupted:
            moves = _Moves.read(work / _MOVES)
            moves.check(folder, work / "result", work / _MOVES, overwrite=overwrite)
            moves.make(folder, work / "result")
            _remove_work(work)
            _remove_stale(folder, None)
        if run is not None and (interrupted or not overwrite) and is_result_of(folder, run):
            _remove_stale(folder, None)
            yield Output(folder, folder, summary, lock, finished=True)
            return
        old = _check(folder, [summary, *names], overwrite)
        _remove_stale(folder, work if resumable else None)
        marked = checkpoints and not (folder / LISTING).exists()
        if marked:
            write_listing(folder, [])  # says whose checkpoints these are, should the run be interrupted
        partial = work / "result" if resumable else folder / f"{TEMPORARY}{uuid4().hex}"
        partial.mkdir(parents=True, exist_ok=resumable)
        output = Output(folder, partial, summary, lock, old, work if resumable else None, run=run)
        try:
            yield output
        finally:
            if not output.keep:
                if resumable:
                    _remove_work(work)
                elif partial.exists():  # whoever took the folder over has removed it
                    shutil.rmtree(partial)
            if marked and set(os.listdir(folder)) <= {LISTING, LOCK}:
                (folder / LISTING).unlink()


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    """Names the folder in errors of the operating system, also in those that libraries raise as their own."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a library's own message, about something else
            raise
        named = error.filename
        if isinstance(named, str) and not Path(named).absolute().is_relative_to(folder.absolute()):
            raise PackingError(f"{named}: {error.strerror}") from error
        raise PackingError(f"--output {folder}: {_reason(error)}") from error
    except Exception as error:
        # safetensors and tokenizers raise errors of their own, and name the operating system's in the text
        if not re.search(r"I/O error|os error \d+", str(error)):
            raise
        raise PackingError(f"--output {folder}: {first_line(error)}: pass a folder that can be written") from error


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes the folder if need be, and removes it again if it is left empty."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # it holds the result
                folder.rmdir()


def clean(folder: Path) -> None:
    """Remove what runs that were killed left beside a result that is complete."""
    with locked(folder / LOCK, TEMPORARY):
        _remove_stale(folder, None)


def _remove_stale(folder: Path, keep: Path | None) -> None:
    """Remove what runs that were killed left: we hold the lock."""
    for stale in folder.glob(f"{TEMPORARY}*"):
        if stale != keep:
            if stale.is_dir() or stale.is_symlink():
                check_own_folder(stale)
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def _remove_work(work: Path) -> None:
    """Remove a work folder; a publication, which may have to be made again until then, goes last."""
    for path in work.iterdir():
        if path.name != _MOVES:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (work / _MOVES).unlink(missing_ok=True)
    work.rmdir()


def check(folder: Path, *, overwrite: bool, ways: str = "--overwrite", run: str | None = None) -> None:
    """Raise at once where :func:`writing` would, as far as the contents of the folder are concerned.

    Args:
        ways: the options that the error about a folder that is not empty offers.
    """
    try:
        if run is not None and ((folder / _WORK / _MOVES).exists() or is_result_of(folder, run)):
            return
        _check(folder, [], overwrite, ways)
    except OSError as error:
        raise PackingError(f"--output {folder}: {_reason(error)}") from error


def _check(folder: Path, names: Iterable[str], overwrite: bool, ways: str = "--overwrite") -> list[Listed]:
    """The files that may be replaced."""
    held = {path.name for path in folder.iterdir() if not _without_checkpoint(path)} if folder.exists() else set()
    if not {name for name in held - {*_INVISIBLE} if not name.startswith((TEMPORARY, PART))}:
        return []
    if not overwrite:
        raise PackingError(f"--output {folder} is not empty: pass {ways} or another folder")
    if LISTING not in held:
        raise PackingError(f"--overwrite: {folder} has no {LISTING}, so it holds something else: pass another folder")
    old = read_listing(folder)
    _check_unchanged(folder, old)
    ours = {file.name for file in old}
    there = {path.relative_to(folder).as_posix() for pattern in names for path in folder.glob(pattern)}
    _check_free(folder, there - ours - {*_INVISIBLE})
    return old


def _without_checkpoint(path: Path) -> bool:
    """Returns whether a path is the checkpoint folder of a run that was killed before its first one was complete."""
    if path.name != CHECKPOINTS or path.is_symlink() or not path.is_dir():
        return False
    return all(inner.name.startswith(TEMPORARY) for inner in path.iterdir())


def _check_unchanged(folder: Path, files: Iterable[Listed]) -> None:
    """Raise if a listed file is there and has other content; an interrupted publication lists old and new content."""
    known: dict[str, list[Listed]] = {}
    for file in files:
        known.setdefault(file.name, []).append(file)
    for name, versions in known.items():
        path = folder / name
        if path.is_symlink() or (path.exists() and not is_one_of(path, versions)):
            raise PackingError(f"--overwrite: {path} was changed since crosspack wrote it: move it elsewhere first")


def _check_free(folder: Path, names: set[str]) -> None:
    """Raise where a file of the result would replace one, or would leave the folder through a link."""
    parents = {str(parent) for name in names for parent in PurePosixPath(name).parents[:-1]}
    for name in sorted([*names, *parents]):
        path = folder / name
        if path.is_symlink() or (path.exists() and not (name in parents and path.is_dir())):
            raise PackingError(f"--output {folder}: {name} is not a file that crosspack wrote: move it elsewhere first")


def _files(folder: Path) -> Iterator[Path]:
    return (Path(root, name) for root, _, names in os.walk(folder) for name in names)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _reason(error: OSError) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "a file stands in the way: pass a folder"
    return f"{error.strerror or first_line(error)}: pass a folder that can be written"
