"""Results of readers: records that know their place, pieces of files, and entries for unreadable records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from crosspack.reading.files import File
from packing_core.errors import PackingError


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON that has these keys, for ``json.loads(..., object_pairs_hook=unique)``.

    Raises:
        ValueError: a key comes twice, of which ``json`` would keep the last value without a word.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"it has two values for the key {_repeated(name for name, _ in pairs)!r}: keep one of them")
    return found


def check_columns(names: list[str], where: str) -> None:
    """Raise if two columns of a file have one name: a record could hold one of them alone."""
    if len(set(names)) < len(names):
        raise PackingError(f"{where}: two columns are named {_repeated(names)!r}: rename one of them")


def _repeated(names: Iterable[str]) -> str:
    return next(name for name, count in Counter(names).items() if count > 1)


class Place:
    """A stretch of a file whose records are numbered from 0.

    Args:
        kind: whether a number stands for a line (``data.jsonl:17``, from 1) or a row (``data.parquet[16]``, from 0).
        first: the number within the file of the first record, or a function that counts it when it is asked for.
    """

    __slots__ = ("_first", "file", "kind")

    def __init__(self, file: str, kind: Literal["line", "row"], first: int | Callable[[], int] = 0) -> None:
        self.file = file
        self.kind = kind
        self._first = first

    def where(self, number: int) -> str:
        """File and line, or file and row, of a record."""
        if not isinstance(self._first, int):
            self._first = self._first()
        number += self._first
        return f"{self.file}:{number + 1}" if self.kind == "line" else f"{self.file}[{number}]"


class Row(dict[str, Any]):
    """A record; ``where`` says where it stands: ``data.jsonl:17`` or ``data.parquet[16]``."""

    __slots__ = ("number", "place")

    def __init__(self, record: Any, place: Place, number: int) -> None:
        super().__init__(record)
        self.place = place
        self.number = number

    @property
    def where(self) -> str:
        return self.place.where(self.number)


class BadRecord(NamedTuple):
    """Something in the place of a record that is none: the reason, and the text as far as it can be shown."""

    place: Place
    number: int
    reason: str
    text: str

    @property
    def where(self) -> str:
        return self.place.where(self.number)

    def error(self) -> PackingError:
        return PackingError(f"{self.where}: {self.reason}")


Item = Row | BadRecord


@dataclass
class Piece:
    """Some records of a stretch, read as they are iterated over.

    Attributes:
        items: its records, and what could not be read as one.
        size: bytes of the file, or of the records, that it holds.
    """

    number: int
    items: Iterator[Item]
    size: int


class Stretch(Protocol):
    """A part of a file that can be read by itself, from its begin.

    Attributes:
        size: bytes of the file in it, for progress.
    """

    @property
    def file(self) -> str: ...
    @property
    def size(self) -> int: ...

    def pieces(self, size: int) -> Iterator[Piece]:
        """Pieces of about ``size`` bytes, each to be read before the next; one that is not read costs little."""
        ...


@dataclass(frozen=True)
class FileStretch:
    """A :class:`Stretch` that begins where its file does, or a part of one."""

    origin: File

    @property
    def file(self) -> str:
        return self.origin.name

    @property
    def size(self) -> int:
        return self.origin.size()


def row_or_bad(record: Any, place: Place, number: int, text: str = "") -> Item:
    """The record as a Row, if it is an object."""
    if isinstance(record, dict):
        return Row(record, place, number)
    return BadRecord(place, number, f"a record is an object with named columns, not {_kind(record)}", text)


def raise_bad(record: BadRecord) -> None:
    """Refuses what is no record by ending the run."""
    raise record.error()


def strictly(items: Iterable[Item], refuse: Callable[[BadRecord], None] = raise_bad) -> Iterator[Row]:
    """Yields the records; ``refuse`` is called with what is none, and raises PackingError with its place by default."""
    for item in items:
        if isinstance(item, BadRecord):
            refuse(item)
        else:
            yield item


def _kind(value: Any) -> str:
    names = {type(None): "null", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")
