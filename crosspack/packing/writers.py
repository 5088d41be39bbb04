"""Packed rows to Parquet and Arrow files.

Rows come in as parts, in order; a file comes out, the same bytes for the same rows. Padding is never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crosspack.packing.row_files import Rows, joined
from packing_core.errors import naming
from packing_core.extras import require
from packing_core.storage.segment_indexing import offsets_of
from packing_core.training.files import sha256

Format = Literal["parquet", "arrow"]
PACKED = ("input_ids", "labels", "seq_lengths")  # the columns of packed files
GROUP_TOKENS = 1 << 20  # of a row group or record batch
Kept = dict[str, Any]  # kept column -> Arrow type of its values, or dtype of those of tokens


@dataclass
class Written:
    """A finished file, as the manifest lists it."""

    name: str
    rows: int = 0
    tokens: int = 0
    sha256: str = ""


def kept_types(files: Iterable[Path]) -> Kept:
    """Returns the types of the kept columns, which hold the values of all of these files of rows.

    Raises:
        PackingError: the values of a column have no common type.
    """
    kept: Kept = {}
    for path in files:
        _, values, dtypes = Rows.outline(path)
        for name, dtype in dtypes.items():
            with _of_one_type(name):
                kept[name] = np.result_type(kept.get(name, dtype), dtype)
        for name, column in values.items():
            pyarrow = require("pyarrow", extra="hf")
            with _of_one_type(name):
                kinds = [pyarrow.array(column).type, *([kept[name]] if name in kept else [])]
                schemas = [pyarrow.schema({name: kind}) for kind in kinds]
                kept[name] = pyarrow.unify_schemas(schemas, promote_options="permissive").field(name).type
    return kept


def _of_one_type(name: str) -> AbstractContextManager[None]:
    arrows = TypeError, ValueError, OverflowError, NotImplementedError
    return naming(f"--keep {name}: its values have not all one type", arrows, way_out="leave the column out")


def write_file(folder: Path, number: int, form: Format, parts: Iterable[Rows], kept: Kept) -> Written:
    """Writes file ``number`` of a result; there is at least one row.

    Raises:
        PackingError: a value of a kept column is not of its type.
    """
    pyarrow = require("pyarrow", extra="hf")
    written = Written(file_name(form, number))
    path = folder / written.name
    with ExitStack() as stack:
        writer: Any = None
        for rows in _grouped(parts):
            table = _table(rows, pyarrow, kept)
            if writer is None:
                writer = stack.enter_context(_table_writer(path, form, table.schema, pyarrow))
            writer.write_table(table)
            written.rows += len(rows)
            written.tokens += len(rows.ids)
    written.sha256 = sha256(path)
    return written


def file_name(form: Format, number: int) -> str:
    """Returns the name of file ``number`` of a result."""
    return f"train-{number:05d}.{form}"


def _grouped(parts: Iterable[Rows]) -> Iterator[Rows]:
    """Regroups the rows into parts of about ``GROUP_TOKENS`` tokens."""
    held: list[Rows] = []
    tokens = 0
    for part in parts:
        lengths = np.cumsum(part.lengths)
        begin = 0
        while begin < len(part):
            before = int(lengths[begin - 1]) if begin else 0
            end = min(int(np.searchsorted(lengths, before + GROUP_TOKENS - tokens)) + 1, len(part))
            held.append(part[begin:end])
            tokens += int(lengths[end - 1]) - before
            begin = end
            if tokens >= GROUP_TOKENS:
                yield joined(held)
                held, tokens = [], 0
    if held:
        yield joined(held)


def _table_writer(path: Path, form: str, schema: Any, pyarrow: Any) -> Any:
    if form == "arrow":
        return pyarrow.ipc.new_stream(path, schema)
    parquet = require("pyarrow.parquet", extra="hf")
    # Token ids have no order that a dictionary would find; lengths are few.
    return parquet.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False
    )


def _table(rows: Rows, pyarrow: Any, kept: Kept) -> Any:
    """The rows as a table: ``input_ids``, ``labels`` and ``seq_lengths``, then what is carried."""
    tokens, segments = _offsets(rows.lengths), _offsets(rows.counts)
    columns = {
        "input_ids": _lists(tokens, rows.ids, pyarrow),
        "labels": _lists(tokens, rows.labels, pyarrow),
        "seq_lengths": _lists(segments, rows.segments.astype(np.int32), pyarrow),
    }
    columns |= {name: _lists(tokens, column.astype(kept[name]), pyarrow) for name, column in rows.tokens.items()}
    for name, values in rows.values.items():
        with _of_one_type(name):
            array = pyarrow.array(values, type=kept[name])
        columns[name] = pyarrow.ListArray.from_arrays(_array(segments, pyarrow), array)
    return pyarrow.table(columns)


def _lists(offsets: Any, values: Any, pyarrow: Any) -> Any:
    return pyarrow.ListArray.from_arrays(_array(offsets, pyarrow), _array(values, pyarrow))


def _array(values: Any, pyarrow: Any) -> Any:
    """The numbers as Arrow has them, not copied. ``pyarrow.array`` would import pandas, which takes half a second."""
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(stored)])


def _offsets(counts: Any) -> Any:
    return offsets_of(counts).astype(np.int32)
