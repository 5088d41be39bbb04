"""``.json``: one list of objects, or objects one after the other; a file of any size, a record at a time."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TextIO

from crosspack.reading.files import File
from crosspack.reading.places import BadRecord, FileStretch, Item, Piece, Place, row_or_bad, unique
from packing_core.errors import PackingError, first_line

_BLOCK = 1 << 16  # characters that are read at once
_SPACES = " \t\r\n"
_SPACE = re.compile(f"[{_SPACES}]+")


class Json(FileStretch):
    """A file of JSON objects. After something that is not JSON nothing can be found again, so that is an error."""

    def pieces(self, size: int) -> Iterator[Piece]:
        with io.TextIOWrapper(self.origin.open(), encoding="utf-8-sig", newline="") as file:
            yield from grouped(_records(file, Place(self.file, "line"), self.origin), size)


def grouped(records: Iterable[tuple[int, Item]], size: int) -> Iterator[Piece]:
    """Pieces of records that come with the byte or character at which each begins."""
    for number, group in groupby(records, key=lambda record: record[0] // size):
        yield Piece(number, (item for _, item in group), size)


def _records(file: TextIO, place: Place, origin: File) -> Iterator[tuple[int, Item]]:
    """Yields the records of a list or of no list, each with the character at which it begins."""
    text = _Text(file, place, origin)
    if text.next_sign() == "[":
        yield from _listed(text)
    else:
        while text.next_sign():
            yield text.record()


def _listed(text: _Text) -> Iterator[tuple[int, Item]]:
    """Yields the records of a list. A comma may follow the last one, as many programs write it."""
    before = text.take_sign()
    while (sign := text.next_sign()) != "]":
        if not sign:
            raise text.error("the file ends inside the list of records: it is not complete")
        if sign == ",":
            if before != "record":
                raise text.error("a comma without a record before it: remove it")
            before = text.take_sign()
        else:
            if before == "record":
                raise text.error("a comma is missing before this record")
            yield text.record()
            before = "record"
    text.take_sign()
    if text.next_sign():
        raise text.error("something follows the list of records: remove it")


class _Text:
    """The text of a file, of which as much is held as the record at hand takes."""

    def __init__(self, file: TextIO, place: Place, origin: File) -> None:
        self.file, self.place, self.origin = file, place, origin
        self.decoder = json.JSONDecoder(object_pairs_hook=unique)
        self.held, self.at = "", 0  # and where the next character stands in it
        self.line = self.before = 0  # lines that are read, and characters before those that are held

    def next_sign(self) -> str:
        """Returns the next character that is no space, without taking it; none at the end of the file."""
        while (sign := self.held[self.at : self.at + 1]) in _SPACES:
            if sign:
                spaces = _SPACE.match(self.held, self.at)
                assert spaces is not None
                self.line += spaces[0].count("\n")
                self.at = spaces.end()
                continue
            self.before += len(self.held)
            self.held, self.at = self.file.read(_BLOCK), 0
            if not self.held:
                break
        return sign

    def take_sign(self) -> str:
        """Takes the character that :meth:`next_sign` returned."""
        self.at += 1
        return self.held[self.at - 1]

    def record(self) -> tuple[int, Item]:
        """Takes the record that begins at the next sign; it comes with the character at which it begins."""
        while True:
            try:
                record, end = self.decoder.raw_decode(self.held, self.at)
                break
            except json.JSONDecodeError as error:
                self._read_on(error)
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
                raise self.error(first_line(error)) from error
        written, begins = self.held[self.at : end], self.before + self.at
        if len(written) > self.origin.max_record:
            item: Item = BadRecord(self.place, self.line, self.origin.too_long(), written[:_BLOCK])
        else:
            item = row_or_bad(record, self.place, self.line, written)
        self.line += written.count("\n")
        self.at = end
        return begins, item

    def _read_on(self, error: json.JSONDecodeError) -> None:
        """Reads on if an error may be that the record's end is not held yet, and raises otherwise."""
        length = len(self.held) - self.at
        unfinished = error.msg.startswith("Unterminated string") or error.pos > len(self.held) - 16
        if unfinished and length > self.origin.max_record:
            raise self.error(f"the record that begins here has no end: {self.origin.too_long()}") from error
        more = self.file.read(max(_BLOCK, length)) if unfinished else ""
        if not more:
            reason = error.msg.removesuffix(" starting at")
            raise self.error(f"the record that begins here is not JSON, {reason}") from error
        self.before += self.at
        self.held, self.at = self.held[self.at :] + more, 0

    def error(self, reason: str) -> PackingError:
        return PackingError(f"{self.place.where(self.line)}: {reason}")
