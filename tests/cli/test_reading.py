"""``crosspack.read``: every format and compression, from any piece on, in the same order and with the same places."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import crosspack
from crosspack.reading import records
from crosspack.reading.files import File, Unchanged
from crosspack.reading.records import read, read_pieces
from packing_core.errors import PackingError

RECORDS = [{"text": f'{"é" * (n % 7)} word, "{n}"'} for n in range(300)]


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def table(records: list[dict[str, Any]], *, stream: bool) -> bytes:
    sink, content = pa.BufferOutputStream(), pa.Table.from_pylist(records)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, content.schema) as out:
        out.write_table(content, max_chunksize=70)
    return sink.getvalue().to_pybytes()


def parquet(records: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), sink, row_group_size=120)
    return sink.getvalue()


def values(records: list[dict[str, Any]], delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


FILES: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "data.jsonl": jsonl,
    "data.json": lambda records: json.dumps(records, indent=1).encode(),
    "data.jsonl.gz": lambda records: gzip.compress(jsonl(records)),
    "data.jsonl.bz2": lambda records: bz2.compress(jsonl(records)),
    "data.jsonl.xz": lambda records: lzma.compress(jsonl(records)),
    "data.jsonl.zst": lambda records: pa.compress(jsonl(records), codec="zstd", asbytes=True),
    "data.csv": lambda records: values(records, ","),
    "data.tsv": lambda records: values(records, "\t"),
    "data.txt": lambda records: "".join(record["text"] + "\n" for record in records).encode(),
    "data.parquet": parquet,
    "data.arrow": lambda records: table(records, stream=True),
    "data.file.arrow": lambda records: table(records, stream=False),
}


@pytest.mark.parametrize("name", FILES)
def test_parts_of_a_file_hold_every_record_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "_SMALLEST", 100)
    (tmp_path / name).write_bytes(FILES[name](RECORDS))
    whole = crosspack.read(tmp_path / name)
    parts = [[dict(row) for row in whole.part(index, 3)] for index in range(3)]
    assert all(len(part) > 30 for part in parts)
    numbers = [[RECORDS.index(record) for record in part] for part in parts]
    assert all(part == sorted(part) for part in numbers)
    assert sorted(number for part in numbers for number in part) == list(range(300))


def test_a_part_of_a_file_of_lines_reads_only_its_bytes(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(jsonl([{"text": str(n) * 30}]) for n in range(60_000)))
    read = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            read.append(super().readinto(buffer))
            return read[-1]

    monkeypatch.setattr(File, "open_plain", lambda file: io.BufferedReader(Counting(file.path)))
    count = sum(1 for _ in crosspack.read(path).part(3, 8))
    assert 0.1 < count / 60_000 < 0.15 and sum(read) < path.stat().st_size / 7
    with pytest.raises(PackingError, match="part 8 of 8: pass an index from 0 to count - 1"):
        crosspack.read(path).part(8, 8)


@pytest.fixture
def memory():
    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_each_format_is_read_here_and_behind_a_url(tmp_path, memory, name):
    (tmp_path / name).write_bytes(FILES[name](RECORDS))
    memory.pipe(f"/{name}", FILES[name](RECORDS))
    here, there = crosspack.read(tmp_path / name), crosspack.read(f"memory://{name}")
    assert [dict(row) for row in here] == [dict(row) for row in there] == RECORDS
    places = [row.where.removeprefix(str(tmp_path)) for row in here]
    assert places == [row.where.removeprefix("memory:/") for row in there]
    assert len(set(places)) == 300
    assert next(iter(crosspack.read(f"file://{tmp_path}/{name}"))).where.startswith("file://")


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("name", FILES)
def test_stretches_and_every_third_piece_hold_the_same_records_with_the_same_places(tmp_path, name, size):
    (tmp_path / name).write_bytes(FILES[name](RECORDS))
    records = crosspack.read(tmp_path / name)
    found = {}
    for number, stretch in enumerate(records.stretches(size)):
        for start in (2, 0, 1):
            for piece in read_pieces(stretch, size, start, 3):
                for item in piece.items:
                    found[number, piece.number, item.number] = dict(item), item.where
    assert [found[key] for key in sorted(found)] == [(dict(row), row.where) for row in records]


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.csv", "data.txt"])
@pytest.mark.parametrize("size", [None, 1, 8, 64])
def test_what_is_no_record_is_an_error_with_its_line_or_an_item_of_its_own(tmp_path, name, size):
    header, good, bad = {".csv": (b"text,n\n", b"a,1", b"b"), ".txt": (b"a\n", b"c", b"\xff")}.get(
        Path(name).suffix, (b'{"text": 0}\n', b'{"text": "a"}', b'{"text": \xff"b"}')
    )
    content = header + b"\n".join([good, b"", bad, good, bad])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    records = crosspack.read(tmp_path / name)
    with pytest.raises(PackingError, match=r"data\.\w+(\.gz)?:4: it (is not UTF-8|has 1 values and the file has 2)"):
        list(records)
    stretches = records.stretches(size)
    items = [item for stretch in stretches for piece in read_pieces(stretch, size or 1 << 20) for item in piece.items]
    wrong = [item for item in items if isinstance(item, crosspack.BadRecord)]
    assert [item.where.rpartition(":")[2] for item in wrong] == ["4", "6"]
    assert len(items) == (4 if name == "data.csv" else 5)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.jsonl", '{"text": "a"}\n{"text": "b", "text": "c"}\n', "jsonl:2: .* two values for the key 'text'"),
        ("data.json", '[{"text": "a"},\n{"text": "b", "text": "c"}]', r"data.json:2: .* two values for the key 'text'"),
        ("data.json", '[{"text": "a"},\n,{"text": "b"}]', r"data.json:2: a comma without a record before it"),
        ("data.json", '[,{"text": "a"}]', r"data.json:1: a comma without a record before it"),
        ("data.json", '[{"text": "a"}\n{"text": "b"}]', r"data.json:2: a comma is missing before this record"),
    ],
)
def test_what_json_would_lose_without_a_word_is_an_error_with_its_line(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(PackingError, match=says):
        list(crosspack.read(tmp_path / name))


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow"])
def test_two_columns_of_one_name_are_an_error(tmp_path, name):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(PackingError, match=rf"{name}: two columns are named 'text': rename one of them"):
        list(crosspack.read(tmp_path / name))


def test_a_value_of_csv_may_have_several_lines(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes('\ufefftext,"the, id"\r\n"two\r\nlines, ""quoted""",1\r\n\r\nplain 5" pipe,2\r\n'.encode())
    rows = list(crosspack.read(path))
    assert [dict(row) for row in rows] == [
        {"text": 'two\r\nlines, "quoted"', "the, id": "1"},
        {"text": 'plain 5" pipe', "the, id": "2"},
    ]
    assert [row.where for row in rows] == [f"{path}:2", f"{path}:5"]


def test_a_text_file_is_a_record_a_line_or_one(tmp_path):
    (tmp_path / "data.txt").write_text("one\n\ntwo\n")
    assert [row["text"] for row in crosspack.read(tmp_path / "data.txt")] == ["one", "two"]
    assert [row["text"] for row in crosspack.read(tmp_path / "data.txt", sample_by="document")] == ["one\n\ntwo\n"]


def test_a_folder_behind_a_url_is_read_by_the_names_of_its_files(memory):
    for name, text in {"train-0.jsonl": "a", "train-1.jsonl.gz": "b", "test.jsonl": "c", ".hidden.jsonl": "d"}.items():
        content = jsonl([{"text": text}])
        memory.pipe(f"/data/{name}", gzip.compress(content) if name.endswith(".gz") else content)
    assert [row["text"] for row in crosspack.read("memory://data")] == ["a", "b"]
    assert [row["text"] for row in crosspack.read("memory://data", split="test")] == ["c"]
    with pytest.raises(PackingError, match=r"^memory://nowhere: no such file or folder"):
        crosspack.read("memory://nowhere")
    with pytest.raises(PackingError, match=r"^nothing://x: "):
        crosspack.read("nothing://x")


WRONG = [(name, FILES[name](RECORDS)[:-9]) for name in FILES if name.startswith("data.jsonl.")]  # they end early
WRONG += [(name, x * 9) for name in ("data.parquet", "data.arrow") for x in (b"", b"PAR1", b"ARROW1", b"\xff")]


@pytest.mark.parametrize(("name", "content"), WRONG)
def test_a_file_that_is_not_of_its_format_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PackingError, match=rf"^{tmp_path}/{name}: [^\n]+$"):
        list(crosspack.read(tmp_path / name))


def test_a_file_behind_a_url_that_changes_is_refused_by_its_name(memory):
    memory.pipe("/bucket/data.jsonl", jsonl(RECORDS))
    files = Unchanged([File("memory://bucket/data.jsonl")])
    files.check()
    memory.pipe("/bucket/data.jsonl", jsonl(RECORDS[::-1]))  # of the same size
    with pytest.raises(PackingError, match=r"memory://bucket/data\.jsonl changed while it was read"):
        files.check()
    memory.rm("/bucket/data.jsonl")
    with pytest.raises(PackingError, match=r"memory://bucket/data\.jsonl"):
        files.check()


def test_a_large_row_group_is_read_a_piece_at_a_time(tmp_path):
    noise = np.random.default_rng(0).integers(97, 123, 24 << 20, dtype=np.uint8).tobytes().decode()
    texts = [noise[begin : begin + 4096] for begin in range(0, len(noise), 4096)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "data.parquet", row_group_size=len(texts))
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - before for _ in crosspack.read(tmp_path / "data.parquet"))
    assert most < 12 << 20


@pytest.mark.parametrize(("change", "count"), [("grows", 1), ("another", 2), ("gone", 1)])
def test_a_stream_ends_by_name_when_its_file_changes(tmp_path, count, change):
    path = tmp_path / "data.jsonl"
    path.write_bytes(jsonl(RECORDS * 300))
    stream = iter(crosspack.read(path).part(0, count))
    next(stream)
    if change == "grows":
        with open(path, "ab") as file:
            file.write(jsonl(RECORDS[:1]))
    elif change == "another":
        (tmp_path / "new").write_bytes(jsonl(RECORDS[::-1] * 300))
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    with pytest.raises(PackingError, match=r"data\.jsonl(: no such file$| changed while it was read)"):
        list(stream)


def test_a_url_shows_neither_its_password_nor_its_signature(memory):
    memory.pipe_file("/secret/data.jsonl", b'{"text": 1}\n')
    url = "memory://me:word@secret/data.jsonl?sig=abc"
    assert File(url).suffix == ".jsonl" and File("DATA.JSONL.GZ").suffix == ".jsonl"
    assert File(url).name == "memory://me:***@secret/data.jsonl?***"
    with pytest.raises(PackingError) as error:
        read(url)
    assert "word" not in str(error.value) and "abc" not in str(error.value)


def test_an_earlier_output_below_the_data_is_no_data(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "mine"}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00000.jsonl").write_text('{"text": "packed"}\n')
    (tmp_path / "out" / "crosspack-files.json").write_text("{}")
    assert [record["text"] for record in read(tmp_path)] == ["mine"]
    assert [record["text"] for record in read(tmp_path / "out")] == ["packed"]


def test_globs_names_in_capitals_and_pipes_are_read(tmp_path):
    for name in ("b.JSONL", "a.jsonl"):
        (tmp_path / name).write_text(f'{{"text": "{name}"}}\n')
    assert [record["text"] for record in read(f"{tmp_path}/*.[jJ]*")] == ["a.jsonl", "b.JSONL"]
    (tmp_path / "c.csv").write_text("text\nx\n")
    with pytest.raises(PackingError, match="it holds .csv and .jsonl files: pass those of one format"):
        read(f"{tmp_path}/*")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=['{"text": "piped"}\n'])
    writer.start()
    records = read(tmp_path / "pipe")
    assert [[record["text"] for record in records] for _ in range(2)] == [["piped"]] * 2
    writer.join()
