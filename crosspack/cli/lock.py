"""The lock of an output folder: a file that says who writes there, and shows signs of life while they do.

A file and not ``flock``, which network file systems do not all have. A lock is taken over when its process has ended,
as far as that can be known here, or when it has shown no sign of life for a minute: containers may have one host name
and other process ids, and other machines' processes cannot be seen at all.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from packing_core.errors import PackingError

BEAT, SILENT = 5.0, 60.0  # seconds between signs of life, and without one
EMPTY = 1.0  # seconds after which an empty lock is nobody's


class Lock:
    """A lock that this process holds."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._text = text

    def check(self) -> None:
        """Check that no other process took the lock over, as one may if this process is stopped for a minute.

        Raises:
            PackingError: another process writes in the folder by now.
        """
        if not self._is_ours():
            raise PackingError(
                f"--output {self.path.parent}: another process took the folder over while this one showed no sign of "
                f"life for {SILENT:.0f} s: run the command again"
            )

    def release(self) -> None:
        if self._is_ours():
            self.path.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        with suppress(OSError, UnicodeError):
            return not self.path.is_symlink() and self.path.read_text() == self._text
        return False


@contextmanager
def locked(path: Path, temporary: str) -> Iterator[Lock]:
    """Hold a lock.

    Args:
        temporary: how names of temporary files in the folder begin.

    Raises:
        PackingError: somebody holds it.
    """
    mine = {
        "token": uuid4().hex,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "processes": _namespace(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    while True:
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            break
        except FileExistsError:
            _take_over(path, temporary)
    lock = Lock(path, json.dumps(mine))
    ended = threading.Event()
    try:
        try:
            os.write(descriptor, lock._text.encode())
            os.fsync(descriptor)
        except OSError:  # a full disk: an empty lock would stand in everybody's way
            path.unlink(missing_ok=True)
            raise
        beats = threading.Thread(target=_beat, args=(descriptor, ended), daemon=True)
        beats.start()
        try:
            yield lock
        finally:
            ended.set()
            beats.join()
            lock.release()
    finally:
        os.close(descriptor)


def _beat(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with suppress(OSError):
            os.utime(descriptor)


def _take_over(path: Path, temporary: str) -> None:
    """Remove a lock whose process is gone."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise PackingError(f"--output {path.parent}: {path} is a link or no file, so it is no lock: remove it")
        if not path.stat().st_size:
            time.sleep(EMPTY)  # whoever makes a lock writes into it at once, unless it ends in between
        text, silent = path.read_text(errors="replace"), _silence(path, temporary)
    except FileNotFoundError:
        return
    if not text:
        who, dead, beats = "", True, False
    elif (holder := _holder(text)) is None:
        who, dead, beats = "another process is about to write there", False, True
    else:
        who = f"process {holder['pid']} on {holder['host']} has been writing there since {holder['since']}"
        here = holder["host"] == socket.gethostname() and holder.get("processes", _namespace()) == _namespace()
        dead, beats = here and not _runs(int(holder["pid"])), "token" in holder
    over = silent > SILENT or silent < -BEAT  # a sign of life in the future: the clock may have been set
    if not dead and not (beats and over and _is_still(path)):
        raise PackingError(
            f"--output {path.parent}: {who}: wait for it, or pass another folder; if it no longer runs, remove {path}"
        )
    taken = path.with_name(f"{temporary}{uuid4().hex}")
    with suppress(FileNotFoundError):
        os.replace(path, taken)  # of several who find it stale, one renames it
        if taken.read_text(errors="replace") != text:  # somebody was faster and holds it by now
            os.replace(taken, path)
        else:
            taken.unlink()


def _holder(text: str) -> dict[str, Any] | None:
    """Reads the process from the text of a lock; None if the text is not understood."""
    try:
        holder = json.loads(text)
        return {**holder, "pid": int(holder["pid"]), "host": str(holder["host"]), "since": str(holder["since"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _silence(path: Path, temporary: str) -> float:
    """Seconds since the last sign of life, by the clock of the file system."""
    probe = path.with_name(f"{temporary}{uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()


def _is_still(path: Path) -> bool:
    """Returns whether a lock shows no sign of life while it is watched, or is gone."""
    with suppress(FileNotFoundError):
        before = path.stat().st_mtime_ns
        time.sleep(2 * BEAT)
        return path.stat().st_mtime_ns == before
    return True


def _namespace() -> str:
    """Identifies the namespace of this process's id: several containers may share one host name."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
