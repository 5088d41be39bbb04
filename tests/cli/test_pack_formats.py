"""Packed files hold the rows, and rows are saved as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import crosspack
from crosspack.packing.row_files import Rows, joined
from crosspack.packing.writers import write_file


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
    written = write_file(tmp_path, 3, form, [rows[:7], rows[7:7], rows[7:]], {})
    assert (written.name, written.rows, written.tokens) == (f"train-00003.{form}", 40, len(rows.ids))
    read = list(crosspack.read(tmp_path / written.name))
    for row, (ids, labels, lengths) in zip(read, each_row(rows), strict=True):
        assert row["input_ids"].dtype == rows.ids.dtype
        for name, expected in (("input_ids", ids), ("labels", labels), ("seq_lengths", lengths)):
            assert np.array_equal(row[name], expected)


def test_rows_are_saved_cut_and_joined_as_they_are(rows, tmp_path):
    rows.values = {"id": [f"é{n}" for n in range(len(rows.segments))]}
    rows.tokens = {"weight": np.arange(len(rows.ids)) / 3}
    rows.save(Path(tmp_path, "rows"))
    for found in (Rows.load(Path(tmp_path, "rows")), joined([rows[:11], rows[11:12], rows[12:]])):
        assert found.values == rows.values and np.array_equal(found.tokens["weight"], rows.tokens["weight"])
        for name in ("ids", "trained", "segments", "counts", "lengths", "labels"):
            assert np.array_equal(getattr(found, name), getattr(rows, name))
            assert getattr(found, name).dtype == getattr(rows, name).dtype
