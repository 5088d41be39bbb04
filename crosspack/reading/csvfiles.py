"""CSV and TSV, whose first line names the columns; read from the begin, because a record may have several lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from crosspack.reading.files import File
from crosspack.reading.objects import grouped
from crosspack.reading.places import BadRecord, FileStretch, Item, Piece, Place, Row, check_columns
from packing_core.errors import PackingError, first_line

DELIMITERS = {".csv": ",", ".tsv": "\t"}


class Csv(FileStretch):
    """A file of comma- or tab-separated values."""

    def pieces(self, size: int) -> Iterator[Piece]:
        place = Place(self.file, "line", 0)
        with self.origin.open() as file:
            yield from grouped(self._records(_Lines(file, self.origin, place), place), size)

    def _records(self, lines: _Lines, place: Place) -> Iterator[tuple[int, Item]]:
        """Each record with the byte that it begins at; its number is that of its first line."""
        csv.field_size_limit(self.origin.max_record)
        reader = csv.reader(lines, delimiter=DELIMITERS[self.origin.suffix], strict=True)
        names = self._names(reader, place)
        while True:
            at, number = lines.at, lines.number
            lines.begin()
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield at, _bad(place, number, f"it is not CSV, {first_line(error)}", lines)
                continue
            if cells is None:
                return
            if not cells:  # a blank line
                continue
            try:
                "".join(cells).encode()
            except UnicodeEncodeError:
                yield at, _bad(place, number, "it is not UTF-8: save it as UTF-8", lines)
                continue
            if len(cells) != len(names):
                reason = f"it has {len(cells)} values and the file has {len(names)} columns"
                yield at, _bad(place, number, reason, lines)
            else:
                yield at, Row(zip(names, cells, strict=True), place, number)

    def _names(self, reader: Iterator[list[str]], place: Place) -> list[str]:
        try:
            names = next(reader, [])
            "".join(names).encode()
        except (csv.Error, UnicodeEncodeError) as error:
            raise PackingError(
                f"{place.where(0)}: the names of the columns cannot be read: save it as UTF-8"
            ) from error
        check_columns(names, place.where(0))
        return names


@dataclass
class _Lines:
    """The lines of a file as text, counted; bytes that are not UTF-8 become surrogates."""

    file: IO[bytes]
    origin: File
    place: Place
    at: int = 0  # bytes so far
    number: int = 0  # lines so far
    kept: list[str] = field(default_factory=list)  # of the present record
    began: tuple[int, int] = (0, 0)  # byte and line at which that begins

    def begin(self) -> None:
        self.kept, self.began = [], (self.at, self.number)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        at, number = self.began
        room = self.origin.max_record - (self.at - at)
        line = self.file.readline(room + 1)
        if not line:
            raise StopIteration
        if len(line) > room:
            raise PackingError(
                f"{self.place.where(number)}: the record that begins here, or its quote, has no end: "
                f"{self.origin.too_long()}"
            )
        text = line.decode("utf-8", "surrogateescape")
        text = text.removeprefix("\ufeff") if self.number == 0 else text
        self.at += len(line)
        self.number += 1
        self.kept.append(text)
        return text


def _bad(place: Place, number: int, reason: str, lines: _Lines) -> BadRecord:
    text = "".join(lines.kept).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return BadRecord(place, number, reason, text.rstrip("\r\n"))
