"""Packed rows to files: Parquet, Arrow, MosaicML's MDS and Megatron's ``.bin`` with ``.idx``.

Rows come in as parts, in order; a file comes out, the same bytes for the same rows. Padding is never written.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crosspack.packing.row_files import Rows, joined
from packing_core.errors import PackingError
from packing_core.extras import require
from packing_core.training.files import sha256

Format = Literal["parquet", "arrow", "mds", "megatron"]
PACKED = ("input_ids", "labels", "seq_lengths")  # the columns of packed files
GROUP_TOKENS = 1 << 20  # of a row group or record batch

# Megatron's numbers for the types that are written here (megatron/core/datasets/indexed_dataset.py, DType)
_MEGATRON_TYPES = {"uint8": 1, "int32": 4, "uint16": 8}


@dataclass
class Written:
    """A finished file, as the manifest lists it; ``files`` are the names it consists of, ``shard`` is for an index."""

    name: str
    rows: int = 0
    tokens: int = 0
    sha256: str = ""
    size: int = 0
    beside: dict[str, str] = field(default_factory=dict)  # further files and their SHA-256


def write_file(folder: Path, number: int, form: Format, parts: Iterable[Rows]) -> Written:
    """Write file ``number`` of a result; there is at least one row.

    Raises:
        PackingError: the format cannot hold the rows.
    """
    return _WRITERS[form](folder, number, _grouped(parts))


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


def _tables(folder: Path, number: int, groups: Iterator[Rows], form: str) -> Written:
    pyarrow = require("pyarrow", extra="hf")
    written = Written(f"train-{number:05d}.{form}")
    path = folder / written.name
    with ExitStack() as stack:
        writer: Any = None
        for rows in groups:
            table = _table(rows, pyarrow, writer and writer.schema)
            if writer is None:
                writer = stack.enter_context(_table_writer(path, form, table.schema, pyarrow))
            writer.write_table(table)
            _count(written, rows)
    return _finished(written, path)


def _table_writer(path: Path, form: str, schema: Any, pyarrow: Any) -> Any:
    if form == "arrow":
        return _Stream(pyarrow.ipc.new_stream(path, schema), schema)
    parquet = require("pyarrow.parquet", extra="hf")
    # Token ids have no order that a dictionary would find; lengths are few.
    return parquet.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=False
    )


class _Stream:
    """Arrow's stream writer, with its schema, as Parquet's has it."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self.schema = schema
        self._writer = writer

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *raised: object) -> None:
        self._writer.close()

    def write_table(self, table: Any) -> None:
        self._writer.write_table(table)


def _table(rows: Rows, pyarrow: Any, schema: Any) -> Any:
    """The rows as a table: ``input_ids``, ``labels`` and ``seq_lengths``, then what is carried."""
    tokens, segments = _offsets(rows.lengths), _offsets(rows.counts)
    columns = {
        "input_ids": _lists(tokens, rows.ids, pyarrow),
        "labels": _lists(tokens, rows.labels, pyarrow),
        "seq_lengths": _lists(segments, rows.segments.astype(np.int32), pyarrow),
    }
    columns |= {name: _lists(tokens, column, pyarrow) for name, column in rows.tokens.items()}
    for name, values in rows.values.items():
        kind = None if schema is None else schema.field(name).type.value_type
        try:
            columns[name] = pyarrow.ListArray.from_arrays(_array(segments, pyarrow), pyarrow.array(values, type=kind))
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise PackingError(
                f"--keep {name}: its values have not all one type ({str(error).splitlines()[0]}): leave the column out"
            ) from error
    return pyarrow.table(columns)


def _lists(offsets: Any, values: Any, pyarrow: Any) -> Any:
    return pyarrow.ListArray.from_arrays(_array(offsets, pyarrow), _array(values, pyarrow))


def _array(values: Any, pyarrow: Any) -> Any:
    """The numbers as Arrow has them, not copied. ``pyarrow.array`` would import pandas, which takes half a second."""
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(stored)])


def _offsets(counts: Any) -> Any:
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return ends.astype(np.int32)


def _mds(folder: Path, number: int, groups: Iterator[Rows]) -> Written:
    """A shard of MDS, version 2; ``mds_index`` makes the index of all shards."""
    written = Written(f"shard.{number:05d}.mds")
    samples: list[bytes] = []
    dtype = "int32"
    for rows in groups:
        _refuse_carried(rows, "mds")
        dtype = rows.ids.dtype.name
        ends, segment_ends = _offsets(rows.lengths), _offsets(rows.counts)
        labels, lengths = rows.labels, rows.segments.astype(np.int32)
        for row in range(len(rows)):
            token, segment = slice(ends[row], ends[row + 1]), slice(segment_ends[row], segment_ends[row + 1])
            arrays = [_mds_array(x) for x in (rows.ids[token], labels[token], lengths[segment])]
            samples.append(struct.pack("<3I", *map(len, arrays)) + b"".join(arrays))
        _count(written, rows)
    config = json.dumps(mds_config(dtype), sort_keys=True).encode()
    offsets = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(config)
    if offsets[-1] >= 1 << 32:
        raise PackingError(
            f"a shard of MDS holds less than 4 GB and this one has {offsets[-1]:,}: pass --rows-per-file"
        )
    with open(folder / written.name, "wb") as file:
        file.write(struct.pack("<I", len(samples)) + offsets.astype(np.uint32).tobytes() + config)
        file.writelines(samples)
    return _finished(written, folder / written.name)


def _mds_array(array: Any) -> bytes:
    """A flat array as MDS encodes one of a known dtype: its number of dimensions and its length, then its values."""
    kind, size = next((kind, size) for kind, size in enumerate((1, 2, 4)) if len(array) < 1 << 8 * size)
    return bytes([1 << 2 | kind]) + len(array).to_bytes(size, "little") + array.tobytes()


def mds_config(dtype: str) -> dict[str, Any]:
    """Returns the header of an MDS shard."""
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": None,
        "column_names": list(PACKED),
        "column_encodings": [f"ndarray:{dtype}", "ndarray:int32", "ndarray:int32"],
        "column_sizes": [None, None, None],
    }


def mds_index(files: Iterable[Written], dtype: str) -> str:
    """``index.json`` of all shards."""
    shards = [
        {
            **mds_config(dtype),
            "samples": file.rows,
            "raw_data": {"basename": file.name, "bytes": file.size, "hashes": {}},
            "zip_data": None,
        }
        for file in files
    ]
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True)


def _megatron(folder: Path, number: int, groups: Iterator[Rows]) -> Written:
    """``train.bin`` and ``train.idx``: a sequence for each segment, a document for each row, and the same of the mask.

    ``train_loss_mask`` is 1 at trained tokens; Megatron reads it like any data set, as uint8.
    """
    written = Written("train.bin")
    segments: list[Any] = []
    counts: list[Any] = []
    dtype = "int32"
    with open(folder / "train.bin", "wb") as ids, open(folder / "train_loss_mask.bin", "wb") as mask:
        for rows in groups:
            _refuse_carried(rows, "megatron")
            dtype = rows.ids.dtype.name
            ids.write(rows.ids.tobytes())
            mask.write(rows.targets.astype(np.uint8).tobytes())
            segments.append(rows.segments)
            counts.append(rows.counts)
            _count(written, rows)
    lengths, documents = np.concatenate(segments), np.cumsum([0, *np.concatenate(counts)])
    for name, kind in (("train", dtype), ("train_loss_mask", "uint8")):
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]) * np.dtype(kind).itemsize
        with open(folder / f"{name}.idx", "wb") as index:
            index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, _MEGATRON_TYPES[kind]))
            index.write(struct.pack("<QQ", len(lengths), len(documents)))
            index.write(lengths.astype(np.int32).tobytes() + begins.tobytes() + documents.astype(np.int64).tobytes())
    written.beside = {
        name: sha256(folder / name) for name in ("train.idx", "train_loss_mask.bin", "train_loss_mask.idx")
    }
    return _finished(written, folder / "train.bin")


def _refuse_carried(rows: Rows, form: str) -> None:
    if carried := [*rows.values, *rows.tokens]:
        raise PackingError(f"--keep {carried[0]}: {form} files hold no further columns: pass --format parquet or arrow")


def _count(written: Written, rows: Rows) -> None:
    written.rows += len(rows)
    written.tokens += len(rows.ids)


def _finished(written: Written, path: Path) -> Written:
    written.size, written.sha256 = path.stat().st_size, sha256(path)
    return written


_WRITERS: dict[Format, Callable[[Path, int, Iterator[Rows]], Written]] = {
    "parquet": lambda folder, number, groups: _tables(folder, number, groups, "parquet"),
    "arrow": lambda folder, number, groups: _tables(folder, number, groups, "arrow"),
    "mds": _mds,
    "megatron": _megatron,
}
