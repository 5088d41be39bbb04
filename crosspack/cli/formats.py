"""Files to records, one at a time and with their places: JSON Lines, JSON, Parquet and Arrow.

A file goes in; each record comes out as a :class:`Row`, a dict that knows its file and its line (``data.jsonl:17``) or
its number from 0 (``data.parquet[16]``). Only some of a file is in memory at a time. Anything that a file may hold
gives records or a PackingError that names the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from packing_core.errors import PackingError, first_line
from packing_core.extras import require

_ROWS = 64  # of a Parquet or Arrow file that become Python objects at once
_BLOCK = 1 << 16  # characters of a .json file that are read at once


class Row(dict[str, Any]):
    """A record and ``where`` it stands."""

    __slots__ = ("where",)

    def __init__(self, record: Any, where: str) -> None:
        if not isinstance(record, dict):
            raise PackingError(f"{where}: a record is an object with named columns, not {_kind(record)}")
        super().__init__(record)
        self.where = where


def read_file(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    """The records of a file of one of ``FORMATS``.

    Args:
        path: the file.
        columns: what to read of a file that stores columns one by one; if it has none of them, all are read.

    Raises:
        PackingError: the file cannot be read, with the place.
    """
    try:
        yield from FORMATS[path.suffix](path, frozenset(columns))
    except PackingError:
        raise
    except UnicodeDecodeError as error:
        raise PackingError(f"--data {path}: it is not UTF-8 ({first_line(error)}): save it as UTF-8") from error
    except Exception as error:  # Arrow may raise anything over a damaged file
        raise PackingError(f"--data {path}: {first_line(error)}") from error


def _jsonl(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield Row(json.loads(text), where)
            except UnicodeDecodeError as error:
                raise PackingError(f"{where}: it is not UTF-8 ({first_line(error)}): save it as UTF-8") from error
            except json.JSONDecodeError as error:
                raise PackingError(f"{where}: it is not JSON, {error.msg} at column {error.colno}") from error
            except (ValueError, RecursionError) as error:
                raise _unreadable(where, error) from error


def _json(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    """One list of objects, or objects one after the other; a file of any size, a record at a time."""
    decoder, line, text, at = json.JSONDecoder(), 1, "", 0
    listed: bool | None = None  # whether the objects stand in a list; None before the first sign
    ended = False
    with open(path, encoding="utf-8-sig", newline="") as file:
        while True:
            skipped = _BETWEEN.match(text, at) if listed and not ended else _SPACE.match(text, at)
            assert skipped is not None  # both match nothing too
            line += skipped[0].count("\n")
            at = skipped.end()
            if at == len(text):
                text, at = file.read(_BLOCK), 0
                if text:
                    continue
                if listed and not ended:
                    raise PackingError(f"{path}:{line}: the file ends inside the list of records: it is not complete")
                return
            if listed is None and text[at] == "[":
                listed, at = True, at + 1
            elif listed and not ended and text[at] == "]":
                ended, at = True, at + 1
            else:
                listed = bool(listed)
                where = f"{path}:{line}"
                if ended:
                    raise PackingError(f"{where}: something follows the list of records: remove it")
                try:
                    record, end = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:
                    unfinished = error.msg.startswith("Unterminated string") or error.pos > len(text) - 16
                    more = file.read(max(_BLOCK, len(text) - at)) if unfinished else ""
                    if not more:
                        raise PackingError(f"{where}: the record that begins here is not JSON, {error.msg}") from error
                    text, at = text[at:] + more, 0
                except (ValueError, RecursionError) as error:
                    raise _unreadable(where, error) from error
                else:
                    line += text.count("\n", at, end)
                    at = end
                    yield Row(record, where)


_SPACE, _BETWEEN = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


def _parquet(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", extra="hf")
    with parquet.ParquetFile(path) as file:
        names = list(file.schema_arrow.names)
        yield from _rows(path, file.iter_batches(_ROWS, columns=[n for n in names if n in columns] or None))


def _arrow(path: Path, columns: frozenset[str]) -> Iterator[Row]:
    """An IPC stream, as ``datasets`` writes, or an IPC file."""
    pyarrow = require("pyarrow", extra="hf")
    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(source))
        parts = (batch.slice(begin, _ROWS) for batch in batches for begin in range(0, batch.num_rows, _ROWS))
        yield from _rows(path, (_chosen(part, columns) for part in parts))


def _chosen(batch: Any, columns: frozenset[str]) -> Any:
    names = [name for name in batch.schema.names if name in columns]
    return batch.select(names) if names else batch


def _rows(path: Path, batches: Iterable[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts offsets that a damaged file holds
        names = batch.schema.names
        for cells in zip(*map(_cells, batch.columns), strict=True):
            yield Row(dict(zip(names, cells, strict=True)), f"{path}[{number}]")
            number += 1


def _cells(column: Any) -> list[Any]:
    """The values of an Arrow column: lists of numbers as arrays, which are not copied, the rest as Python objects."""
    types = require("pyarrow", extra="hf").types
    if not (types.is_list(column.type) or types.is_large_list(column.type)):
        return list(column.to_pylist())
    kind = column.type.value_type
    ends = column.offsets.to_numpy().tolist()
    values = column.values.slice(ends[0], ends[-1] - ends[0])
    if values.null_count or not (types.is_integer(kind) or types.is_floating(kind)):
        return list(column.to_pylist())
    flat, nulls = values.to_numpy(), column.is_null().to_pylist()
    pieces = zip(ends[:-1], ends[1:], nulls, strict=True)
    return [None if null else flat[begin - ends[0] : end - ends[0]] for begin, end, null in pieces]


def _unreadable(where: str, error: Exception) -> PackingError:
    """Valid JSON that Python does not take: a number of thousands of digits, thousands of levels."""
    return PackingError(f"{where}: {first_line(error)}")


def _kind(value: Any) -> str:
    names = {type(None): "null", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "a number")


FORMATS: dict[str, Callable[[Path, frozenset[str]], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
