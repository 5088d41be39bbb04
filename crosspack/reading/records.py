"""``read``: a file, a folder, a URL or a hub data set as records, streamed, each of which knows its place.

Nothing is held in memory or written to a cache, and iterating again reads again, so the same object serves one pass
that trains a tokenizer and another that encodes. ``stretches`` gives the same records in parts that several processes
can read, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from crosspack.reading.corpus import standard_library_records
from crosspack.reading.csvfiles import DELIMITERS, Csv
from crosspack.reading.files import MAX_RECORD, File, Unchanged, is_url, masked, remote, spooled
from crosspack.reading.folders import FORMATS, files_of_split
from crosspack.reading.lines import Range, SampleBy, SingleRecordFile, line_stretches
from crosspack.reading.objects import Json, grouped
from crosspack.reading.places import Item, Piece, Place, Row, Stretch, row_or_bad, strictly
from crosspack.reading.tables import table_stretches
from packing_core.errors import PackingError, first_line, naming
from packing_core.extras import require
from packing_core.training.job import is_hub_name

Record = Mapping[str, Any]

STANDARD_LIBRARY = "docstrings of the Python standard library"
_PIECE = 1 << 20  # bytes that are read at once where records are read one after the other
_SMALLEST, _LARGEST = 1 << 13, 1 << 24  # bytes of a range of a file of lines that one of several readers has


@dataclass(frozen=True)
class Records:
    """Records that can be read more than once.

    Attributes:
        name: what tables and manifests call them.
        files: where they come from; none for a hub data set.
        columns: all that is read of files that store columns one by one; empty for every column.
        sample_by: whether a line of a text file is a record, or the file.
        listed: gives the records where there are no files.
        share: (index, count): which of ``count`` readers this one is; see :meth:`part`.
    """

    name: str
    files: tuple[File, ...] = ()
    columns: frozenset[str] = frozenset()
    sample_by: SampleBy = "line"
    listed: Callable[[], Iterable[Any]] | None = None
    share: tuple[int, int] = (0, 1)

    def part(self, index: int, count: int) -> Records:
        """Returns the share of one of ``count`` readers: each record is in one part, the same one every time.

        A reader opens only ranges of bytes of plain JSON Lines and text files, and only files, row groups or record
        batches of other formats if there are at least four of these for each reader; otherwise it reads past the
        records of the others. Parts have about equally many bytes, not equally many records.

        Raises:
            PackingError: ``index`` is not one of ``count``.
        """
        if not 0 <= index < count:
            raise PackingError(f"part {index!r} of {count!r}: pass an index from 0 to count - 1")
        return replace(self, share=(index, count))

    def __iter__(self) -> Iterator[Row]:
        return strictly(self.items())

    def items(self) -> Iterator[Item]:
        """The records, and a :class:`BadRecord` in place of each that cannot be read.

        Raises:
            PackingError: a file cannot be read from some place on, or changed meanwhile.
        """
        seen = Unchanged(self.local_files())
        index, count = self.share
        size = None if count == 1 else min(max(self.size() // (16 * count), _SMALLEST), _LARGEST)
        stretches = self.stretches(size)
        shares = ((0, one, 0, 1) for one in stretches) if count == 1 else dealt(list(stretches), index, count)
        for _, stretch, start, step in shares:
            for piece in read_pieces(stretch, min(size or _PIECE, _PIECE), start, step):
                yield from piece.items
                seen.check(stretch.file)

    def stretches(self, size: int | None) -> Iterator[Stretch]:
        """All records in order, for any ``share``, in parts that can be read independently.

        Args:
            size: bytes of a part of a plain file of lines; None for whole files.

        Raises:
            PackingError: a file cannot be read.
        """
        if self.listed is not None:
            yield FilelessRecords(self.name, self.listed)
        for file in self.files:
            with _in_one_line(file.name):
                yield from _stretches_of(file, size, self.columns, self.sample_by)

    def all_files(self) -> list[File]:
        """Returns the files of all data sets in it."""
        return list(self.files)

    def local_files(self) -> list[File]:
        """Returns those that are looked at again while they are read; a look at a URL takes a request."""
        return [file for file in self.all_files() if not is_url(file.path)]

    def size(self) -> int:
        """Bytes of all files; 0 where there are none."""
        return sum(file.size() for file in self.files)

    def state(self) -> list[Any]:
        """Returns a value that changes when the files do."""
        return [file.state() for file in self.files] or [self.name]


@dataclass(frozen=True)
class FilelessRecords:
    """Records that come from no file: of a hub data set, or the built-in ones."""

    file: str
    records: Callable[[], Iterable[Any]]
    size: int = 0

    def pieces(self, size: int) -> Iterator[Piece]:
        yield from grouped(self._rows(Place(self.file, "row")), size)

    def _rows(self, place: Place) -> Iterator[tuple[int, Item]]:
        at = 0
        for number, record in enumerate(self.records()):
            yield at, row_or_bad(record, place, number)
            at += size_of(record)


def size_of(value: Any) -> int:
    """Bytes that a value takes, roughly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return sum(map(size_of, value))
    return 8 * len(value) if hasattr(value, "__len__") else 8


@contextmanager
def _in_one_line(file: str) -> Iterator[None]:
    """Turns any error raised inside, by a file or the library that reads it, into one line with the file."""
    with naming(file):  # Arrow may raise anything
        try:
            yield
        except UnicodeDecodeError as error:
            raise PackingError(f"{file}: it is not UTF-8 ({first_line(error)}): save it as UTF-8") from error
        except FileNotFoundError as error:
            raise PackingError(f"{file}: no such file") from error


def read_pieces(stretch: Stretch, size: int, start: int = 0, step: int = 1) -> Iterator[Piece]:
    """Pieces ``start``, ``start + step``, ... of a stretch; errors, its records' too, are one line with the file.

    Where a piece begins and ends depends on ``size`` alone.

    Raises:
        PackingError: the file cannot be read.
    """
    with _in_one_line(stretch.file):
        for piece in stretch.pieces(size):
            if piece.number >= start and (piece.number - start) % step == 0:
                piece.items = _guarded(stretch.file, piece.items)
                yield piece


def dealt(stretches: Sequence[Stretch], index: int, count: int) -> Iterator[tuple[int, Stretch, int, int]]:
    """Yields the share of one of ``count`` readers: numbered stretches, with the first piece and the step of pieces.

    Stretches are dealt whole if there are at least four for each reader, else piece by piece.
    """
    few = len(stretches) < 4 * count
    for number, stretch in enumerate(stretches):
        start = (index - number) % count
        if few and not isinstance(stretch, Range | SingleRecordFile):  # which are one piece
            yield number, stretch, start, count
        elif not start:
            yield number, stretch, 0, 1


def _guarded(file: str, items: Iterator[Item]) -> Iterator[Item]:
    with _in_one_line(file):
        yield from items


def _stretches_of(file: File, size: int | None, columns: frozenset[str], sample_by: SampleBy) -> Iterator[Stretch]:
    if file.suffix in (".jsonl", ".txt"):
        yield from line_stretches(file, size, sample_by)
    elif file.suffix in DELIMITERS:
        yield Csv(file)
    elif file.suffix == ".json":
        yield Json(file)
    else:
        yield from table_stretches(file, columns)


def read(
    data: str | os.PathLike[str] | None,
    *,
    split: str = "train",
    columns: Iterable[str] = (),
    sample_by: SampleBy = "line",
    max_record: int = MAX_RECORD,
) -> Records:
    """The records of a file, a folder or a hub data set, streamed: iterate over what is returned, as often as need be.

    >>> import json, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "data.jsonl"
    >>> _ = path.write_text(json.dumps({"text": "one"}) + "\\n" + json.dumps({"text": "two"}) + "\\n")
    >>> [(record["text"], record.where.rpartition("/")[2]) for record in read(path)]
    [('one', 'data.jsonl:1'), ('two', 'data.jsonl:2')]

    Args:
        data: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.txt``, ``.parquet`` or ``.arrow`` file (those of lines and
            ``.json`` also with ``.gz``, ``.zst``, ``.bz2`` or ``.xz`` after it), a folder of them, either of these by a
            URL that fsspec opens (``s3://``, ``gs://``, ``hf://``, ``memory://``), or the name of a hub data set. None
            for the built-in questions and answers from the standard library's docstrings.
        split: which split of a folder or a hub data set; files have only ``train``.
        columns: what to read of files that store columns one by one; if they have none of these, all are read.
        sample_by: whether each ``line`` of a text file is a record, or the whole ``document``.
        max_record: bytes that a record may take, decompressed; a longer one is one that cannot be read.

    Returns:
        Records: an iterable of :class:`Row`, dicts with a ``where`` (``data.jsonl:17``). A record that cannot be read
        raises PackingError with its place while iterating; ``Records.items()`` yields it as a BadRecord instead.

    Raises:
        PackingError: there is no such file or folder, it has another format, or it does not say what to read.
    """
    path = STANDARD_LIBRARY if data is None else os.fspath(data)
    name, wanted = masked(path), frozenset(columns)
    paths, is_folder = ([], False) if data is None else _files_at(path)
    if (data is None or paths) and split != "train":
        raise PackingError(
            f"{name}: split={split!r} is of a folder or a hub data set, and this is neither: leave split out",
            option="split",
        )
    if data is None:
        return Records(name, listed=standard_library_records)
    files = tuple(File(path, max_record) for path in paths)
    if is_folder:
        try:
            files = tuple(replace(file, max_record=max_record) for file in files_of_split(path, split))
        except OSError as error:
            raise PackingError(f"{name}: {error.strerror or first_line(error)}") from error
    if files:
        formats = sorted({file.suffix for file in files})
        if len(formats) > 1:
            raise PackingError(f"{name}: it holds {' and '.join(formats)} files: pass those of one format")
        if formats[0] not in FORMATS:
            raise PackingError(
                f"{name}: cannot read {formats[0] or 'a file without suffix'}; it reads {', '.join(FORMATS)}"
            )
        return Records(name, files, wanted, sample_by)
    if is_url(name) or not is_hub_name(name) or File(name).suffix in FORMATS:
        raise PackingError(f"{name}: no such file or folder, and not a hub name (`owner/name`)")
    return Records(name, listed=partial(_hub_rows, name, split))  # and no lambda, which processes cannot hand on


def has_splits(data: str | None) -> bool:
    """Returns whether the data are a folder or a hub data set, of which one split is read.

    Raises:
        PackingError: a URL or a path cannot be looked at.
    """
    return data is not None and not _files_at(data)[0]


def _files_at(path: str) -> tuple[list[str], bool]:
    """The files that a path, URL, glob or pipe stands for, and whether it is a folder (then the list is empty)."""
    if is_url(path):
        with remote(path) as (system, inside):
            return ([path] if system.isfile(inside) else []), system.isdir(inside)
    try:
        if Path(path).is_fifo():
            return [spooled(path)], False
        if Path(path).is_file():
            return [path], False
        if Path(path).is_dir():
            return [], True
    except (OSError, ValueError) as error:
        raise PackingError(f"{masked(path)}: {getattr(error, 'strerror', None) or first_line(error)}") from error
    return sorted(filter(os.path.isfile, glob(path, recursive=True))), False


def _hub_rows(name: str, split: str) -> Iterator[Any]:
    with naming(name):  # what the library raises for the network, for scripts, for formats, has no common base
        yield from require("datasets", extra="hf").load_dataset(name, split=split, streaming=True)
