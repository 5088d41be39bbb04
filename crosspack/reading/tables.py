"""Parquet and Arrow: row groups and record batches, each of which can be read by itself, and pieces of rows in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from crosspack.reading.files import File, is_url
from crosspack.reading.places import BadRecord, Item, Piece, Place, Row, check_columns
from packing_core.errors import PackingError
from packing_core.extras import require

_ROWS = 64  # that become Python objects at once
_BUFFER = 1 << 20  # bytes that are read ahead of each column; without it a row group of any size would be read at once


@dataclass(frozen=True)
class Group:
    """A row group of a Parquet file, or a record batch of an Arrow file, or a whole Arrow stream.

    Attributes:
        number: of the group; None for a stream, which is read from its begin.
        first: number within the file of its first row.
        rows, size: of the group; of a stream, whose rows nobody has counted, those of the file.
    """

    origin: File
    columns: frozenset[str]
    number: int | None
    first: int
    rows: int
    size: int

    @property
    def file(self) -> str:
        return self.origin.name

    def pieces(self, size: int) -> Iterator[Piece]:
        place = Place(self.file, "row", 0)
        with ExitStack() as stack:
            batches = _opened(self, stack)
            held: list[Any] = []
            number, bytes_held, first = 0, 0, self.first
            for part in _parts(batches):
                if held and bytes_held + part.nbytes > size:
                    yield Piece(number, _rows(held, place, first, self.origin), bytes_held)
                    first += sum(batch.num_rows for batch in held)
                    number, held, bytes_held = number + 1, [], 0
                held.append(part)
                bytes_held += part.nbytes
            if held:
                yield Piece(number, _rows(held, place, first, self.origin), bytes_held)


def _parts(batches: Iterable[Any]) -> Iterator[Any]:
    """Slices of batches, each of at most ``_ROWS`` rows."""
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts offsets that a damaged file holds
        for begin in range(0, batch.num_rows, _ROWS):
            yield batch.slice(begin, _ROWS)


def _opened(group: Group, stack: ExitStack) -> Iterator[Any]:
    if group.origin.suffix == ".parquet":
        file = stack.enter_context(_parquet(group.origin))
        names = [name for name in file.schema_arrow.names if name in group.columns] or None
        yield from file.iter_batches(_ROWS, row_groups=[group.number], columns=names, use_threads=False)
        return
    source = stack.enter_context(_arrow_source(group.origin))
    ipc = require("pyarrow", extra="hf").ipc
    if group.number is None:
        reader = ipc.open_stream(source)
        check_columns(reader.schema.names, group.origin.name)
        yield from (_chosen(batch, group.columns) for batch in reader)
    else:
        yield _chosen(ipc.open_file(source).get_batch(group.number), group.columns)


def _parquet(origin: File) -> Any:
    parquet = require("pyarrow.parquet", extra="hf")
    source = origin.open() if origin.compression or is_url(origin.path) else origin.path
    return parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)


def _arrow_source(origin: File) -> Any:
    pyarrow = require("pyarrow", extra="hf")
    if origin.compression or is_url(origin.path):
        return pyarrow.PythonFile(origin.open(), mode="r")
    return pyarrow.memory_map(origin.path)


def table_stretches(origin: File, columns: frozenset[str]) -> Iterator[Group]:
    """The row groups or record batches of a file.

    Raises:
        PackingError: the file is compressed as a whole.
    """
    if origin.compression:
        raise PackingError(f"{origin.name}: {origin.suffix} files compress their columns themselves: decompress it")
    first = 0
    if origin.suffix == ".parquet":
        with _parquet(origin) as file:
            check_columns(file.schema_arrow.names, origin.name)
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                yield Group(origin, columns, number, first, group.num_rows, group.total_byte_size)
                first += group.num_rows
        return
    ipc = require("pyarrow", extra="hf").ipc
    with _arrow_source(origin) as source:
        is_file = source.read(6) == b"ARROW1"
        if not is_file:  # a stream, as `datasets` writes
            yield Group(origin, columns, None, 0, 0, origin.size())
            return
        source.seek(0)
        reader = ipc.open_file(source)
        check_columns(reader.schema.names, origin.name)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            yield Group(origin, columns, number, first, batch.num_rows, batch.nbytes)
            first += batch.num_rows


def _chosen(batch: Any, columns: frozenset[str]) -> Any:
    names = [name for name in batch.schema.names if name in columns]
    return batch.select(names) if names else batch


def _rows(batches: list[Any], place: Place, first: int, origin: File) -> Iterator[Item]:
    number = first
    for batch in batches:
        names = batch.schema.names
        if batch.nbytes > origin.max_record and batch.num_rows > 1:
            yield from _rows([batch.slice(row, 1) for row in range(batch.num_rows)], place, number, origin)
            number += batch.num_rows
            continue
        if batch.nbytes > origin.max_record:
            yield BadRecord(place, number, origin.too_long(), "")
            number += 1
            continue
        for cells in zip(*map(_cells, batch.columns), strict=True):
            yield Row(zip(names, cells, strict=True), place, number)
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
