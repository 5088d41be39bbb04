"""Files on this machine and behind URLs, plain and compressed: one way to open, measure and recognise them.

``s3://``, ``gs://``, ``hf://``, ``memory://`` and every other protocol that fsspec knows are opened by fsspec.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
_COUNTED = 1 << 22  # bytes that are counted at once


def is_url(path: str) -> bool:
    """Whether fsspec opens the path: it begins with a protocol."""
    return "://" in path


@dataclass(frozen=True)
class File:
    """A file by its path or URL."""

    path: str

    @property
    def compression(self) -> str | None:
        """``.gz`` of ``data.jsonl.gz``; None of a plain file."""
        suffix = PurePosixPath(self.path).suffix
        return suffix if suffix in COMPRESSIONS else None

    @property
    def suffix(self) -> str:
        """``.jsonl`` of ``data.jsonl`` and of ``data.jsonl.gz``."""
        path = PurePosixPath(self.path)
        return path.with_suffix("").suffix if self.compression else path.suffix

    def size(self) -> int:
        """Bytes that it takes where it lies."""
        return self._state()[0]

    def state(self) -> list[Any]:
        """What changes when the file does: its path, size and time of modification (or tag)."""
        return [self.path, *self._state()]

    def identity(self) -> list[Any]:
        """Returns the state as it is now, with the inode of a local file, which another file under the name changes."""
        if not is_url(self.path):
            found = os.stat(self.path)
            return [found.st_size, found.st_mtime_ns, found.st_ino]
        with remote(self.path) as (system, path):
            system.invalidate_cache(system._parent(path))
        return self.state()

    def _state(self) -> tuple[int, Any]:
        if not is_url(self.path):
            found = os.stat(self.path)
            return found.st_size, found.st_mtime_ns
        with remote(self.path) as (system, path):
            info = system.info(path)
        tag = next(
            (str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "created") if name in info), ""
        )
        return int(info["size"] or 0), tag

    def open(self) -> IO[bytes]:
        """The content, decompressed; only a plain file can be searched."""
        plain = self.open_plain()
        match self.compression:
            case ".gz":
                return gzip.open(plain)  # type: ignore[return-value]
            case ".bz2":
                return bz2.open(plain)
            case ".xz":
                return lzma.open(plain)
            case ".zst":
                pyarrow = require("pyarrow", extra="hf")
                return io.BufferedReader(_Raw(pyarrow.CompressedInputStream(plain, "zstd")))
        return plain

    def open_plain(self) -> IO[bytes]:
        """The bytes as they are stored."""
        if not is_url(self.path):
            return open(self.path, "rb")
        with remote(self.path) as (system, path):
            opened: IO[bytes] = system.open(path, "rb")
        return opened

    def lines_before(self, end: int) -> int:
        """Newlines among the first ``end`` bytes of a plain file. Asked for ever later ends, a file is read once."""
        at, count = _LINES.get(self.path, (0, 0))
        if at > end:
            at = count = 0
        with self.open_plain() as file:
            file.seek(at)
            while at < end and (block := file.read(min(_COUNTED, end - at))):
                count, at = count + block.count(b"\n"), at + len(block)
        _LINES[self.path] = at, count
        return count


_LINES: dict[str, tuple[int, int]] = {}  # path -> so many newlines among so many first bytes


class Unchanged:
    """Remembers the state of files, and refuses those that change while they are read."""

    def __init__(self, files: Iterable[File]) -> None:
        self._seen = {file: file.identity() for file in files}

    def check(self, path: str | None = None) -> None:
        """Compares the file of a path, or all files if the path is none of theirs, with what was there at first.

        Raises:
            PackingError: a file has changed or is gone.
        """
        file = File(path or "")
        for each in [file] if file in self._seen else self._seen:
            try:
                same = each.identity() == self._seen[each]
            except FileNotFoundError:
                same = False
            if not same:
                raise PackingError(
                    f"{each.path} changed while it was read: run the command again when nothing writes to it"
                )


class _Raw(io.RawIOBase):
    """Arrow's stream as one of Python's, which ``io.BufferedReader`` reads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class remote:
    """The file system of a URL and the path in it; whatever it raises becomes one line with the URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> tuple[Any, str]:
        fsspec = require("fsspec", extra="hf")
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self._url)
        except Exception as error:  # an unknown protocol, or one whose package is missing
            raise PackingError(f"{self._url}: {first_line(error)}") from error
        return found

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if isinstance(error, FileNotFoundError):
            raise PackingError(f"{self._url}: no such file or folder") from error
        if isinstance(error, Exception) and not isinstance(error, PackingError):
            raise PackingError(f"{self._url}: {first_line(error)}") from error


def walk(folder: str) -> Iterator[tuple[str, str]]:
    """Every file below a folder: its path or URL, and its path relative to the folder. Hidden ones are left out."""
    if not is_url(folder):
        for root, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not _hidden(name)]
            for name in names:
                file = Path(root, name)
                if not _hidden(name) and file.is_file():
                    yield str(file), file.relative_to(folder).as_posix()
        return
    with remote(folder) as (system, path):
        for name in system.find(path.rstrip("/")):
            relative = name.removeprefix(path.rstrip("/")).lstrip("/")
            if not any(map(_hidden, relative.split("/"))):
                yield system.unstrip_protocol(name), relative


def _hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _raise(error: OSError) -> None:
    raise error
