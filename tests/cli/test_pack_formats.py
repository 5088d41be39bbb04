"""The formats that training stacks map from disk, against their own readers where these are installed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

import crosspack
from crosspack.packing.row_files import Rows, joined
from crosspack.packing.writers import mds_index, write_file
from packing_core.errors import PackingError


@pytest.fixture(params=["uint16", "int32"])
def rows(request) -> Rows:
    """40 rows of 1 to 4 segments."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 5, 40)
    segments = rng.integers(1, 9, counts.sum())
    tokens = int(segments.sum())
    return Rows(rng.integers(0, 60_000, tokens).astype(request.param), rng.random(tokens) < 0.7, segments, counts)


def each_row(rows: Rows):
    """Ids, labels and lengths of each row, cut one by one."""
    token = segment = 0
    for count in rows.counts:
        lengths = rows.segments[segment : segment + count]
        end = token + lengths.sum()
        labels = np.where(rows.trained[token:end], rows.ids[token:end].astype(np.int64), -100)
        labels[np.cumsum([0, *lengths[:-1]])] = -100
        yield rows.ids[token:end], labels, lengths
        token, segment = end, segment + count


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_tables_hold_the_rows(rows, tmp_path, form):
    written = write_file(tmp_path, 3, form, [rows[:7], rows[7:7], rows[7:]])
    assert (written.name, written.rows, written.tokens) == (f"train-00003.{form}", 40, len(rows.ids))
    read = list(crosspack.read(tmp_path / written.name))
    for row, (ids, labels, lengths) in zip(read, each_row(rows), strict=True):
        assert row["input_ids"].dtype == rows.ids.dtype
        for name, expected in (("input_ids", ids), ("labels", labels), ("seq_lengths", lengths)):
            assert np.array_equal(row[name], expected)


def test_a_shard_of_mds_has_its_published_layout(rows, tmp_path):
    """The header, then samples: sizes of the columns in order of their names, then arrays with their shape."""
    written = write_file(tmp_path, 0, "mds", [rows])
    data = (tmp_path / "shard.00000.mds").read_bytes()
    (count,) = struct.unpack_from("<I", data)
    offsets = np.frombuffer(data, np.uint32, count + 1, 4)
    assert (count, offsets[-1]) == (40, len(data)) == (written.rows, written.size)
    config = json.loads(data[4 + 4 * (count + 1) : offsets[0]])
    assert config["column_names"] == sorted(config["column_names"])
    for begin, expected in zip(offsets[:-1], each_row(rows), strict=True):
        sizes, at = struct.unpack_from("<3I", data, begin), begin + 12
        for size, encoding, values in zip(sizes, config["column_encodings"], expected, strict=True):
            dtype = np.dtype(encoding.removeprefix("ndarray:"))
            assert data[at] == 1 << 2 and data[at + 1] == len(values)  # one dimension, of a length below 256
            assert np.array_equal(np.frombuffer(data[at + 2 : at + size], dtype), values)
            at += size


def test_the_mds_reader_reads_the_rows(rows, tmp_path):
    readers = pytest.importorskip("streaming.base.format", reason="mosaicml-streaming is not installed")
    written = [write_file(tmp_path, n, "mds", [part]) for n, part in enumerate((rows[:15], rows[15:]))]
    (tmp_path / "index.json").write_text(mds_index(written, rows.ids.dtype.name))
    shards = json.loads((tmp_path / "index.json").read_text())["shards"]
    samples = [
        reader[n]
        for reader in (readers.reader_from_json(str(tmp_path), "", shard) for shard in shards)
        for n in range(reader.samples)
    ]
    for sample, (ids, labels, lengths) in zip(samples, each_row(rows), strict=True):
        for name, expected in (("input_ids", ids), ("labels", labels), ("seq_lengths", lengths)):
            assert np.array_equal(sample[name], expected)


def test_megatron_files_have_a_sequence_for_each_segment_and_a_document_for_each_row(rows, tmp_path):
    written = write_file(tmp_path, 0, "megatron", [rows[:9], rows[9:]])
    assert {written.name, *written.beside} == {path.name for path in tmp_path.iterdir()}
    for name, code, values in (
        ("train", {"uint16": 8, "int32": 4}[rows.ids.dtype.name], rows.ids),
        ("train_loss_mask", 1, rows.targets.astype(np.uint8)),
    ):
        index = (tmp_path / f"{name}.idx").read_bytes()
        assert index[:18] == b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code)
        sequences, documents = struct.unpack_from("<QQ", index, 18)
        lengths = np.frombuffer(index, np.int32, sequences, 34)
        begins = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
        ends = np.frombuffer(index, np.int64, documents, 34 + 12 * sequences)
        assert np.array_equal(lengths, rows.segments) and np.array_equal(np.diff(ends), rows.counts)
        assert np.array_equal(begins, (np.cumsum(lengths) - lengths) * values.itemsize)
        assert np.array_equal(np.fromfile(tmp_path / f"{name}.bin", values.dtype), values)


def test_megatrons_reader_reads_the_rows(rows, tmp_path):
    dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    write_file(tmp_path, 0, "megatron", [rows])
    ids = dataset.IndexedDataset(str(tmp_path / "train"), mmap=True)
    mask = dataset.IndexedDataset(str(tmp_path / "train_loss_mask"), mmap=True)
    ends = np.cumsum(rows.segments)
    for number, (begin, end) in enumerate(zip(ends - rows.segments, ends, strict=True)):
        assert np.array_equal(ids[number], rows.ids[begin:end])
        assert np.array_equal(mask[number], rows.targets[begin:end])
    assert np.array_equal(np.diff(ids.document_indices), rows.counts)


@pytest.mark.parametrize("form", ["mds", "megatron"])
def test_formats_without_further_columns_refuse_them(rows, tmp_path, form):
    rows.values = {"id": [0] * len(rows.segments)}
    with pytest.raises(PackingError, match=f"--keep id: {form} files hold no further columns: pass --format parquet"):
        write_file(tmp_path, 0, form, [rows])


def test_rows_are_saved_cut_and_joined_as_they_are(rows, tmp_path):
    rows.values = {"id": [f"é{n}" for n in range(len(rows.segments))]}
    rows.tokens = {"weight": np.arange(len(rows.ids)) / 3}
    rows.save(Path(tmp_path, "rows"))
    for found in (Rows.load(Path(tmp_path, "rows")), joined([rows[:11], rows[11:12], rows[12:]])):
        assert found.values == rows.values and np.array_equal(found.tokens["weight"], rows.tokens["weight"])
        for name in ("ids", "trained", "segments", "counts", "lengths", "labels"):
            assert np.array_equal(getattr(found, name), getattr(rows, name))
            assert getattr(found, name).dtype == getattr(rows, name).dtype
