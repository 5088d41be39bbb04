"""Files on this machine and behind URLs, plain and compressed: one way to open, measure and recognise them.

``s3://``, ``gs://``, ``hf://``, ``memory://`` and every other protocol that fsspec knows are opened by fsspec.
"""

from __future__ import annotations

import atexit
import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
MAX_RECORD = 64 << 20  # bytes that a record may take, decompressed
_COUNTED = 1 << 22  # bytes that are counted at once
# Text shrinks to a tenth or, in logs, a fiftieth. A file that grows by more, past so many bytes, is made to do harm.
_MAX_RATIO, _RATIO_FROM = 200, 1 << 26
_XZ_MEMORY = 1 << 28  # bytes for the dictionary that an .xz file asks for; `xz -9` asks for 65 MB
_BLOCK = 1 << 18


def is_url(path: str) -> bool:
    """Returns whether fsspec opens the path: it begins with a protocol."""
    return "://" in path


def masked(text: str) -> str:
    """Returns a text whose URLs have neither a password nor a query, which may be a signature.

    >>> masked("https://me:secret@host/a.jsonl?sig=abc is gone"), masked("what?")
    ('https://me:***@host/a.jsonl?*** is gone', 'what?')
    """
    return _QUERY.sub(r"\1?***", _PASSWORD.sub(r"\1:***@", text))


_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):[^/\s@]*@")
_QUERY = re.compile(r"(\w+://[^\s?]*)\?[^\s\"'\]]+")


@dataclass(frozen=True)
class File:
    """A file by its path or URL.

    Attributes:
        max_record: bytes that a record of it may take, decompressed.
    """

    path: str
    max_record: int = field(default=MAX_RECORD, compare=False)

    @property
    def name(self) -> str:
        """The path as places, manifests and messages show it."""
        return masked(self.path)

    @property
    def compression(self) -> str | None:
        """``.gz`` of ``data.jsonl.gz``; None of a plain file."""
        suffix = self._plain_path.suffix.lower()
        return suffix if suffix in COMPRESSIONS else None

    @property
    def suffix(self) -> str:
        """``.jsonl`` of ``data.jsonl`` and of ``data.jsonl.gz``."""
        path = self._plain_path
        return (path.with_suffix("") if self.compression else path).suffix.lower()

    @property
    def _plain_path(self) -> PurePosixPath:
        """The path without the query of a URL."""
        return PurePosixPath(self.path.split("?")[0] if is_url(self.path) else self.path)

    def size(self) -> int:
        """Bytes that it takes where it lies."""
        return self._state()[0]

    def state(self) -> list[Any]:
        """Returns a value that changes when the file does: its path, size and time of modification (or tag)."""
        return [self.name, *self._state()]

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
        """Opens the content, decompressed; only a plain file can be searched.

        Reading raises PackingError once the content is more than 64 MB and 200 times the compressed bytes.
        """
        plain = self.open_plain()
        match self.compression:
            case ".gz":
                stream: Any = gzip.GzipFile(fileobj=plain)
            case ".bz2":
                stream = bz2.BZ2File(plain)
            case ".xz":
                stream = _Xz(plain)
            case ".zst":
                stream = require("pyarrow", extra="hf").CompressedInputStream(plain, "zstd")
            case _:
                return plain
        return io.BufferedReader(_Decompressed(stream, plain, self.name), _BLOCK)

    def too_long(self) -> str:
        """Says that a record takes more bytes than it may, and the way out."""
        return f"it takes more than {size_text(self.max_record)}: split it, or pass a larger --max-record"

    def open_plain(self) -> IO[bytes]:
        """The bytes as they are stored."""
        if not is_url(self.path):
            return open(self.path, "rb")
        with remote(self.path) as (system, path):
            return io.BufferedReader(system.open(path, "rb"), _BLOCK)

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
        self._seen: dict[File, list[Any]] = {}
        for file in files:
            try:
                self._seen[file] = file.identity()
            except FileNotFoundError as error:
                raise PackingError(f"{file.name}: no such file") from error

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
                    f"{each.name} changed while it was read: run the command again when nothing writes to it"
                )


def size_text(size: int) -> str:
    """Returns a number of bytes as people write it.

    >>> size_text(64 << 20), size_text(1000), size_text(3 << 30)
    ('64 MB', '1000 bytes', '3072 MB')
    """
    return f"{size >> 20} MB" if size >= 1 << 20 and size % (1 << 20) == 0 else f"{size} bytes"


def to_size(text: str) -> int:
    """Reads a number of bytes: ``64MB``, ``500 kB``, ``1GB`` or ``1000``, with units of 1024.

    Raises:
        PackingError: it is none: the option --max-record is named.

    >>> to_size("64MB"), to_size("1000")
    (67108864, 1000)
    """
    match = re.fullmatch(r"(\d{1,15}) ?([kKMG]?)B?", text.strip())
    if match is None or not int(match[1]):
        raise PackingError(f"--max-record {text}: pass bytes, or a number of kB, MB or GB: 64MB")
    return int(match[1]) << {"": 0, "k": 10, "K": 10, "M": 20, "G": 30}[match[2]]


class _Xz:
    """The content of an .xz file, decompressed in bounded memory, which ``lzma.open`` does not offer."""

    def __init__(self, plain: IO[bytes]) -> None:
        self._plain = plain
        self._begin()

    def _begin(self) -> None:
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def read(self, size: int) -> bytes:
        while True:
            given = b""
            if self._decompressor.eof:  # another stream may follow, after padding
                given = self._decompressor.unused_data.lstrip(b"\0")
                while not given:
                    if not (block := self._plain.read(_BLOCK)):
                        return b""
                    given = block.lstrip(b"\0")
                self._begin()
            elif self._decompressor.needs_input and not (given := self._plain.read(_BLOCK)):
                raise EOFError("the compressed file is cut off")
            if data := self._decompressor.decompress(given, size):
                return data

    def close(self) -> None:
        self._plain.close()


class _Decompressed(io.RawIOBase):
    """A decompressing stream for ``io.BufferedReader``, which refuses content that grows beyond measure."""

    def __init__(self, stream: Any, plain: IO[bytes], path: str) -> None:
        self._stream = stream
        self._plain = plain
        self._path = path
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._size += len(data)
        if self._size > _RATIO_FROM and self._size > _MAX_RATIO * self._plain.tell():
            raise PackingError(
                f"{self._path}: it grows to more than {_MAX_RATIO} times its size: decompress it first if it is data"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._plain.close()
        super().close()


@contextmanager
def remote(url: str) -> Iterator[tuple[Any, str]]:
    """Yields the file system of a URL and the path in it; errors become one line with the URL."""
    fsspec = require("fsspec", extra="hf")
    try:
        yield fsspec.core.url_to_fs(url)  # which raises for an unknown protocol, or one whose package is missing
    except PackingError:
        raise
    except FileNotFoundError as error:
        raise PackingError(f"{masked(url)}: no such file or folder") from error
    except Exception as error:
        raise PackingError(masked(f"{url}: {first_line(error)}")) from error


@cache
def spooled(pipe: str) -> str:
    """Copies what a pipe brings, such as ``/dev/stdin``, to a file of JSON lines that lives as long as the process.

    A pipe can be read once, and files are read again: for their first record, by each process and in each epoch.
    """
    folder = tempfile.mkdtemp(prefix="crosspack-pipe-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, f"{Path(pipe).name}.jsonl")
    with open(pipe, "rb") as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    return path


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
