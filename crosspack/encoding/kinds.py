"""Records by what they hold: a chat, prompt and completion, a text or token ids, and runs of one kind in order.

Keys are that by which ``--order-by`` orders documents: a number or a text in a column of each record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from crosspack.encoding.layouts import as_read, canonical
from crosspack.reading.places import BadRecord, Item, Place, Row
from crosspack.reading.records import Record, size_of
from packing_core.errors import PackingError, first_line

Where = Any  # str() of it says where a record stands
Located = tuple[Where, Record]


class LazyPlace(NamedTuple):
    """The place of a record, which is written out only where somebody reads it."""

    place: Place
    number: int

    def __str__(self) -> str:
        return self.place.where(self.number)


Refuse = Callable[[BadRecord, PackingError], None]


def raise_error(found: BadRecord, error: PackingError) -> None:
    """Refuses a record by ending the run."""
    raise error


def refusing(skipped: list[str] | None) -> Refuse:
    """Returns what refuses records by adding the reasons to a list; without one, by ending the run."""
    return raise_error if skipped is None else lambda _, error: skipped.append(first_line(error))


# What the tokenizer sees at once: so many records, or so many bytes. A token takes over a hundred bytes meanwhile.
_CHUNK, _CHUNK_BYTES = 1000, 1 << 20


def located(records: Iterable[Record]) -> Iterator[Located]:
    """Yields each record with its place, or its number if it has none."""
    for number, record in enumerate(records):
        if isinstance(record, Row):
            yield _place(record), record
        else:
            yield getattr(record, "where", f"record {number}"), record


def _place(record: Row) -> LazyPlace:
    return LazyPlace(record.place, record.number)


def chunks(
    records: Iterable[Record], refuse: Refuse, fields: tuple[tuple[str, str], ...]
) -> Iterator[tuple[str, list[Located]]]:
    """Records in order by runs of one kind, so that the tokenizer works on many texts, but not too many, at once."""
    chunk: list[Located] = []
    kind, size = "", 0
    for where, given in located(records):
        try:
            record = canonical(given, where, fields)
            own = kind_of(record, where)
        except PackingError as error:
            refuse(bad_record(where, given, error), error)
            continue
        if chunk and (own != kind or len(chunk) == _CHUNK or size >= _CHUNK_BYTES):
            yield kind, chunk
            chunk, size = [], 0
        kind, size = own, size + size_of(record)
        chunk.append((where, record))
    if chunk:
        yield kind, chunk


def kind_of(record: Record, where: Where) -> str:
    """Returns the kind of a record by the first of the known columns that it has, and checks that texts are strings."""
    if record.get("input_ids") is not None:
        return "input_ids"
    if record.get("messages") is not None:
        return "messages"
    if record.get("prompt") is not None and record.get("completion") is not None:
        kinds = {type(record["prompt"]), type(record["completion"])}
        if kinds == {list}:
            return "messages"
        if kinds != {str}:
            found = " and ".join(f"{name} is a {type(record[name]).__name__}" for name in ("prompt", "completion"))
            raise PackingError(f"{where}: {found}: both must be strings, or both lists of messages")
        for name in ("prompt", "completion"):
            encodable(record[name], where)
        return "completion"
    if record.get("text") is not None:
        if not isinstance(record["text"], str):
            raise PackingError(f"{where}: text is a {type(record['text']).__name__}, not a string")
        encodable(record["text"], where)
        return "text"
    if record.get("chosen") is not None and record.get("rejected") is not None:
        raise PackingError(f"{where} has chosen and rejected answers: `crosspack train --task dpo` trains preferences")
    raise PackingError(
        f"{where} has the columns {', '.join(map(str, record)) or 'none'}: a record needs text, prompt + completion, "
        "messages, conversations, instruction + output or input_ids, and none of them null; name a column that is "
        "called otherwise: --column text=NAME, and --text-column NAME of pack"
    )


def kind_of_row(record: Row, fields: tuple[tuple[str, str], ...] = ()) -> str:
    """Returns the kind of a record in any layout, by the columns of ``fields`` if there are any."""
    return kind_of(canonical(record, record.where, fields), record.where)


Key = str | int | float
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,2})?")


def key_of(where: Where, record: Record, column: str) -> Key:
    """Returns the key of a record.

    Raises:
        PackingError: the record has none that is a number or a text.
    """
    value: Any = record.get(column)
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, date):  # of Parquet and Arrow; datetimes are dates too
        return value.isoformat()
    if not isinstance(value, str | int | float) or value != value:
        what = f"has no {column}" if value is None else f"has {value!r} in {column}"
        raise PackingError(f"{where} {what}, by which --order-by orders: give every record a number or a text")
    return value


def check_key(record: Row, column: str | None) -> None:
    """Raises PackingError if a column is named and the record has no key in it."""
    if column is not None:
        key_of(record.where, record, column)


def checked(items: Iterable[Item], check: Callable[[Row], Any], refuse: Refuse) -> Iterator[Row]:
    """Yields the records; what is no record, or makes ``check`` raise an error, is refused with the error."""
    for item in items:
        try:
            if isinstance(item, BadRecord):
                raise item.error()
            check(item)
        except PackingError as error:
            refuse(item if isinstance(item, BadRecord) else bad_record(_place(item), item, error), error)
        else:
            yield item


def as_numbers(keys: Sequence[Key]) -> list[Any]:
    """Returns keys that order as numbers do where all are texts of numbers, as those of a CSV are; else the keys.

    >>> sorted(as_numbers(["10", "9", "1e1"])), as_numbers(["10", "a"])
    ([9, 10, 10], ['10', 'a'])
    """
    if not all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in keys):
        return list(keys)
    return [int(key) if str(key).lstrip("+-").isdecimal() else float(key) for key in keys]


def encodable(text: str, where: Where) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PackingError(f"{where}: {first_line(error)}: the text is not valid Unicode, repair it") from None
    return text


def bad_record(where: Where, record: Record, error: PackingError) -> BadRecord:
    place, number = where if isinstance(where, LazyPlace) else (Place(str(where), "row"), 0)
    text = json.dumps(dict(as_read(record)), default=repr, ensure_ascii=True)
    return BadRecord(place, number, str(error).removeprefix(f"{where}").lstrip(": "), text)
