"""Formats of lines, JSON Lines and text, read in pieces of bytes.

A piece holds the records that begin in its range of the (decompressed) bytes, so plain files can be read from any piece
on and by many processes. Compressed files are read from their begin.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal

from crosspack.reading.files import File
from crosspack.reading.places import BadRecord, FileStretch, Item, Piece, Place, Row, row_or_bad, unique
from packing_core.errors import first_line

SampleBy = Literal["line", "document"]
_SKIPPED = 1 << 20  # bytes of a line too long that are read at once
_SHOWN = 1 << 16  # bytes of it that are kept


@dataclass(frozen=True)
class Range(FileStretch):
    """Bytes ``begin`` to ``end`` of a plain file of one record a line: one piece of any size."""

    begin: int
    end: int | None  # None: to the end of the file

    @property
    def size(self) -> int:
        return (self.origin.size() if self.end is None else self.end) - self.begin

    def pieces(self, size: int) -> Iterator[Piece]:
        place = Place(self.file, "line", self._count if self.begin else 0)
        yield Piece(0, parsed(self._lines(), place, self.origin, first=not self.begin), self.size)

    def _lines(self) -> Iterator[bytes]:
        with self.origin.open_plain() as file:
            most = self.origin.max_record + 1
            if self.begin:  # the line that holds the byte before belongs to the range before
                file.seek(self.begin - 1)
                _skip_line(file)
            at = file.tell() if self.begin else 0
            while (self.end is None or at < self.end) and (line := file.readline(most)):
                at += len(line)
                if len(line) == most and not line.endswith(b"\n"):
                    at += _skip_line(file)
                yield line

    def _count(self) -> int:
        with self.origin.open_plain() as file:
            file.seek(self.begin - 1)
            starts_here = file.read(1) == b"\n"
        return self.origin.lines_before(self.begin) + (not starts_here)


class Whole(FileStretch):
    """A compressed file of lines, which is read from its begin."""

    def pieces(self, size: int) -> Iterator[Piece]:
        with self.origin.open() as file:
            first = 0
            for number, data in cut(file, size, self.origin.max_record):
                lines = parsed(io.BytesIO(data), Place(self.file, "line", first), self.origin, first=not first)
                yield Piece(number, lines, len(data))
                first += data.count(b"\n")


def _skip_line(file: IO[bytes]) -> int:
    """Reads to the end of a line of any length; returns its bytes."""
    skipped = 0
    while part := file.readline(_SKIPPED):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def cut(file: IO[bytes], size: int, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yields number and bytes of each piece: the lines that begin in its ``size`` bytes of the file.

    Args:
        size: bytes of a piece, not counting the end of its last line.
        longest: bytes of a line. Of a longer one that goes beyond its piece, little more than that is kept.
    """
    pending: list[bytes] = []  # of a piece whose last line goes on
    owner = 0
    for number, block in enumerate(iter(lambda: file.read(size), b"")):
        at = 0
        if pending:
            at = block.find(b"\n") + 1 or len(block)
            room = max(longest + 1 - sum(map(len, pending[1:])), 0)  # the first part also holds the lines before
            ended = block[at - 1 : at] == b"\n"
            pending.append(block[:at] if at <= room else block[:room] + b"\n" * ended)
            if ended:
                yield owner, b"".join(pending)
                pending = []
        if at == len(block):
            continue
        pending, owner = [block[at:] if at else block], number
        if block.endswith(b"\n"):
            yield owner, pending.pop()
    if pending:
        yield owner, b"".join(pending)


def parsed(lines: Iterable[bytes], place: Place, origin: File, *, first: bool) -> Iterator[Item]:
    """The records of lines, of which blank ones are none; ``first`` if they are the first ones of the file."""
    loads, text_file = partial(json.loads, object_pairs_hook=unique), origin.suffix == ".txt"
    for number, line in enumerate(lines):
        if not text_file and line.isspace():
            continue
        if len(line) > origin.max_record:
            yield BadRecord(place, number, origin.too_long(), line[:_SHOWN].decode("utf-8", "backslashreplace"))
            continue
        try:
            text = line.decode("utf-8-sig" if first and number == 0 else "utf-8")
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 ({first_line(error)}): save it as UTF-8"
            yield BadRecord(place, number, reason, line.decode("utf-8", "backslashreplace").rstrip("\r\n"))
            continue
        if text_file:
            if text := text.rstrip("\r\n"):
                yield Row({"text": text}, place, number)
            continue
        try:
            record = loads(text)
        except json.JSONDecodeError:
            if not text.strip():  # spaces of Unicode
                continue
            reason = f"it is not JSON, {_why_not_json(text)}"
            yield BadRecord(place, number, reason, text.rstrip("\r\n"))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
            yield BadRecord(place, number, first_line(error), text.rstrip("\r\n"))
        else:
            if type(record) is dict:
                yield Row(record, place, number)
            else:
                yield row_or_bad(record, place, number, text.rstrip("\r\n"))


def _why_not_json(text: str) -> str:
    """Says why a line is not JSON, and at which column; of a line that is cut off, where its text ends."""
    try:
        json.loads(line := text.rstrip(" \t\r\n"))
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            return f"it ends at column {len(line)}, inside the string that begins at column {error.pos + 1}"
        ends = ", where it ends" if error.pos >= len(line) else ""
        return f"{error.msg.removesuffix(' at')} at column {error.pos + 1}{ends}"
    raise AssertionError("it is JSON")


class SingleRecordFile(FileStretch):
    """A text file that is one record."""

    def pieces(self, size: int) -> Iterator[Piece]:
        with self.origin.open() as file:
            data = file.read(self.origin.max_record + 1)
        place = Place(self.file, "line", 0)
        item: Item
        try:
            item = Row({"text": data.decode("utf-8-sig")}, place, 0)
        except UnicodeDecodeError as error:
            reason = f"it is not UTF-8 ({first_line(error)}): save it as UTF-8"
            item = BadRecord(place, 0, reason, data[:_SHOWN].decode("utf-8", "backslashreplace"))
        if len(data) > self.origin.max_record:
            item = BadRecord(place, 0, self.origin.too_long(), data[:_SHOWN].decode("utf-8", "backslashreplace"))
        yield Piece(0, iter([item]), len(data))


def line_stretches(file: File, size: int | None, sample_by: SampleBy) -> Iterator[Range | Whole | SingleRecordFile]:
    """The stretches of a file of lines; of a plain one those of ``size`` bytes, or one if ``size`` is None."""
    if file.suffix == ".txt" and sample_by == "document":
        yield SingleRecordFile(file)
    elif file.compression:
        yield Whole(file)
    elif size is None:
        yield Range(file, 0, None)
    else:
        end = file.size()
        yield from (Range(file, begin, min(begin + size, end)) for begin in range(0, end, size))
