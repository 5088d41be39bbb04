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
_SPACE = re.compile(r"[ \t\r\n]*")


class Json(FileStretch):
    """A file of JSON objects. After something that is not JSON nothing can be found again, so that is an error."""

    def pieces(self, size: int, start: int = 0, step: int = 1) -> Iterator[Piece]:
        with io.TextIOWrapper(self.origin.open(), encoding="utf-8-sig", newline="") as file:
            yield from grouped(_records(file, Place(self.file, "line"), self.origin), size, start, step)


def grouped(records: Iterable[tuple[int, Item]], size: int, start: int, step: int) -> Iterator[Piece]:
    """Pieces of records that come with the byte or character at which each begins."""
    for number, group in groupby(records, key=lambda record: record[0] // size):
        if number >= start and (number - start) % step == 0:
            yield Piece(number, (item for _, item in group), size)


def _records(file: TextIO, place: Place, origin: File) -> Iterator[tuple[int, Item]]:
    decoder, line, text, at, before = json.JSONDecoder(object_pairs_hook=unique), 0, "", 0, 0
    listed: bool | None = None  # whether the objects stand in a list; None before the first sign
    ended = False
    comma: bool | None = None  # whether one came after the last record of a list; None where none may come
    while True:
        skipped = _SPACE.match(text, at)
        assert skipped is not None  # it matches nothing too
        line += skipped[0].count("\n")
        at = skipped.end()
        if at == len(text):
            before += len(text)
            text, at = file.read(_BLOCK), 0
            if text:
                continue
            if listed and not ended:
                raise PackingError(f"{place.where(line)}: the file ends inside the list of records: it is not complete")
            return
        if listed is None and text[at] == "[":
            listed, at = True, at + 1
        elif listed and not ended and text[at] == "]":
            ended, at = True, at + 1
        elif listed and not ended and text[at] == ",":
            if comma is not False:
                raise PackingError(f"{place.where(line)}: a comma without a record before it: remove it")
            comma, at = True, at + 1
        else:
            if comma is False and not ended:
                raise PackingError(f"{place.where(line)}: a comma is missing before this record")
            listed = bool(listed)
            if ended:
                raise PackingError(f"{place.where(line)}: something follows the list of records: remove it")
            try:
                record, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string") or error.pos > len(text) - 16
                if unfinished and len(text) - at > origin.max_record:
                    raise PackingError(
                        f"{place.where(line)}: the record that begins here has no end: {origin.too_long()}"
                    ) from error
                more = file.read(max(_BLOCK, len(text) - at)) if unfinished else ""
                if not more:
                    reason = error.msg.removesuffix(" starting at")
                    raise PackingError(
                        f"{place.where(line)}: the record that begins here is not JSON, {reason}"
                    ) from error
                text, at, before = text[at:] + more, 0, before + at
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
                raise PackingError(f"{place.where(line)}: {first_line(error)}") from error
            else:
                if end - at > origin.max_record:
                    yield before + at, BadRecord(place, line, origin.too_long(), text[at : at + _BLOCK])
                else:
                    yield before + at, row_or_bad(record, place, line, text[at:end])
                line += text.count("\n", at, end)
                at = end
                comma = False if listed else None
