"""Records of ``crosspack pack``: bad ones, files that change, and the columns that are read and carried."""

from __future__ import annotations

import json
import os
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from crosspack.packing.unit import make_unit
from tests import processes
from tests.cli.console import one_line, run
from tests.cli.packs import arguments, pack, rows_of
from tests.cli.packs import corpus as corpus

BAD = [{"text": "fox"}, {"other": 1}, {"text": 7}, {"text": "dog jump"}, {"input_ids": [1, "x"]}, {"text": ""}]


@pytest.fixture
def damaged(tmp_path) -> Path:
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in BAD) + "{broken\n")
    return path


def test_a_bad_record_stops_the_run_is_skipped_or_kept_aside(corpus, damaged, tmp_path):
    given = ("--data", damaged, "--tokenizer", corpus[1], "--capacity", 64, "--block-size", 40)
    stopped = pack(*given, "--output", tmp_path / "stop", code=2)
    assert "damaged.jsonl:2 has the columns other: a record needs text" in stopped
    with processes.limited():
        assert pack(*given, "--output", tmp_path / "stop", "--workers", 3, code=2) == stopped
    for policy in ("skip", "quarantine"):
        said = pack(*given, "--output", tmp_path / policy, "--on-error", policy)
        assert "4 records could not be used, see bad_records.jsonl" in said
        manifest = json.loads((tmp_path / policy / "manifest.json").read_text())
        counted = {name: manifest[name] for name in ("records", "bad_records", "documents", "left_out")}
        assert counted == {"records": 7, "bad_records": 4, "documents": 2, "left_out": 1}
        lines = [json.loads(x) for x in (tmp_path / policy / "bad_records.jsonl").read_text().splitlines()]
        assert [line["where"] for line in lines] == [f"{damaged}:{n}" for n in (2, 3, 5, 7)]
        assert [line["error"].split(":")[0].split(",")[0] for line in lines] == [
            "has the columns other",
            "text is a int",
            "input_ids is not a list of whole numbers of at most 64 bits",
            "it is not JSON",
        ]
        records = [line.get("record") for line in lines]
        assert records == (
            [None] * 4 if policy == "skip" else [*map(json.dumps, BAD[1:3]), json.dumps(BAD[4]), "{broken"]
        )


def test_what_was_finished_before_a_bad_record_counts_under_another_policy(corpus, damaged, tmp_path):
    given = ("--data", damaged, "--tokenizer", corpus[1], "--capacity", 64, "--block-size", 10, "--workers", 1)
    damaged.write_text("".join(json.dumps({"text": "fox " * n}) + "\n" for n in range(1, 9)) + "{broken\n")
    pack(*given, "--output", tmp_path / "out", code=2)
    assert "going on: " in pack(*given, "--output", tmp_path / "out", "--on-error", "skip")


@pytest.mark.parametrize("change", ["rewritten", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(corpus, tmp_path, monkeypatch, change):
    data = tmp_path / "data.jsonl"
    shutil.copy(corpus[0] / "data.jsonl", data)
    given = ("--data", data, "--tokenizer", corpus[1], "--capacity", 64, "--block-size", 8192, "--workers", 1)

    def changing(*arguments: Any) -> Any:
        made = make_unit(*arguments)
        if made.key.piece == 0 and made.key.stretch == 1:
            lines, before = data.read_bytes(), data.stat()
            if change == "rewritten":
                data.write_bytes(lines[len(lines) // 2 :] + lines)
            else:  # same size, same time
                (tmp_path / "other").write_bytes(lines.replace(b"fox", b"box"))
                os.utime(tmp_path / "other", ns=(before.st_atime_ns, before.st_mtime_ns))
                os.replace(tmp_path / "other", data)
        return made

    with monkeypatch.context() as patched:
        patched.setattr("crosspack.packing.run.make_unit", changing)
        said = pack(*given, "--output", tmp_path / "out", code=2)
    assert f"{data.name} changed while it was read" in said
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert (tmp_path / "out" / ".crosspack-partial-run" / "journal").exists()


def test_a_kept_column_that_no_record_has_is_refused_before_packing(corpus, tmp_path):
    result = run("pack", *arguments(corpus), "--output", tmp_path / "out", "--keep", "idd")
    assert "--keep idd: none of the first 100 records has it: is it id?" in one_line(result)
    assert not (tmp_path / "out").exists()


def test_columns_and_weights_of_tokens_are_carried(corpus, tmp_path):
    pack(*arguments(corpus), "--output", tmp_path / "out", "--keep", "id", "--keep", "where")
    seen = []
    for row in rows_of(tmp_path / "out"):
        assert len(row["id"]) == len(row["seq_lengths"]) == len(row["where"])
        assert [place.rpartition(":")[2] for place in row["where"]] == [str(n + 1) for n in row["id"]]
        seen += list(row["id"])
    assert sorted(seen) == list(range(600))
    records = [
        {
            "input_ids": list(range(n)),
            "weights": [n / 8 + i for i in range(n)],
            "odd": [i % 2 == 1 for i in range(n)],
            "tag": str(n),
        }
        for n in (2, 3, 5, 6, 8)
    ]
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--tokenizer", corpus[1], "--capacity", 6, "--overflow", "split", "--keep", "weights", "--keep", "odd")
    pack("--data", path, *options, "--keep", "tag", "--output", tmp_path / "tokens")
    total = 0
    for row in rows_of(tmp_path / "tokens"):
        tags = np.repeat([int(tag) for tag in row["tag"]], row["seq_lengths"])
        assert np.array_equal(row["weights"], tags / 8 + row["input_ids"])
        assert np.array_equal(row["odd"], np.asarray(row["input_ids"]) % 2 == 1)
        total += len(tags)
    assert total == 24


def test_columns_are_carried_and_ordered_by_as_they_are_in_the_data_whatever_is_read_of_them(corpus, write, tmp_path):
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    records = [{"messages": chat, "prompt": f"p{n}", "text": f"t{n}", "body": "jump"} for n in (2, 0, 1)]
    data = ("--data", write("data.jsonl", records), "--tokenizer", corpus[1], "--max-segments", 1)
    for number, named in enumerate([(), ("--text-column", "body")]):
        out = tmp_path / f"out{number}"
        order = ("--order", "sorted", "--order-by", "prompt")
        pack(*data, *named, *order, "--keep", "prompt", "--keep", "text", "--output", out)
        kept = [(*row["prompt"], *row["text"]) for row in rows_of(out)]
        assert kept == [("p0", "t0"), ("p1", "t1"), ("p2", "t2")]


def test_a_kept_column_has_one_type_in_all_files_that_holds_every_value(corpus, write, tmp_path):
    half = [n < 60 for n in range(120)]
    records = [
        {
            "input_ids": [5, 6, n],
            "id": n,
            "late": None if first else f"text {n}",
            "meta": {"a": n} if first else {"b": [n]},
            "score": n if first else n + 0.5,
            "weights": [1, 0, 1] if first else [0.5, 1, 0],
        }
        for n, first in enumerate(half)
    ]
    kept = [part for name in records[0] if name != "input_ids" for part in ("--keep", name)]
    data = ("--data", write("data.jsonl", records), "--tokenizer", corpus[1], "--capacity", 12, "--block-size", 400)
    pack(*data, *kept, "--rows-per-file", 5, "--output", tmp_path / "out")
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert len(tables) > 3 and len({table.schema for table in tables}) == 1
    seen = set()
    for row in (row for table in tables for row in table.to_pylist()):
        for place, number in enumerate(row["id"]):
            record = records[number]
            assert (row["late"][place], row["score"][place]) == (record["late"], record["score"])
            assert row["meta"][place] == {"a": None, "b": None} | record["meta"]
            assert row["weights"][3 * place : 3 * place + 3] == record["weights"]
            seen.add(number)
    assert len(seen) == 120


def test_kept_columns_that_no_file_can_hold_are_refused(corpus, write, tmp_path):
    days = [date(2024, 2, 3), date(2024, 2, 4)]
    table = write("data.parquet", [{"input_ids": [5, 6, 7], "day": day, "raw": b"x"} for day in days])
    pack("--data", table, "--tokenizer", corpus[1], "--keep", "day", "--output", tmp_path / "out")
    assert sorted(rows_of(tmp_path / "out")[0]["day"]) == ["2024-02-03", "2024-02-04"]
    lines = [{"input_ids": [5, 6, 7], "w": [1, 2, 3], "mixed": 1}, {"input_ids": [5, 6, 7], "w": None, "mixed": "a"}]
    for path, name, says in (
        (table, "raw", f"{table}[0]: --keep raw has a value of type bytes, and numbers, texts, dates, and"),
        (write("data.jsonl", lines), "mixed", "--keep mixed: its values have not all one type"),
        (write("data.jsonl", lines), "w", "--keep w: some records have a number for each token and others do not"),
        (write("data.jsonl", lines * 9), "w", "--keep w: some records have a number for each token and others do not"),
    ):
        options = ("--data", path, "--tokenizer", corpus[1], "--keep", name, "--block-size", 60)
        assert says in pack(*options, "--output", tmp_path / "refused", code=2)
    some = write("some.parquet", [{"input_ids": [5, 6, 7], "raw": raw} for raw in (None, b"x", None)])
    options = ("--data", some, "--tokenizer", corpus[1], "--keep", "raw", "--on-error", "skip")
    pack(*options, "--output", tmp_path / "some")
    bad = json.loads((tmp_path / "some" / "bad_records.jsonl").read_text())
    assert bad["where"].endswith("[1]") and bad["error"].startswith("--keep raw has a value of type bytes")
    assert len(rows_of(tmp_path / "some")[0]["raw"]) == 2


def test_labels_beside_token_ids_count_whatever_the_column_of_the_ids_is_called(corpus, write, tmp_path):
    records = [{"ids": [5, 6, 7], "labels": [-100, -100, 7], "text": "fox"}]
    for name in ("data.jsonl", "data.parquet"):
        data = ("--data", write(name, records), "--tokenizer", corpus[1], "--tokens-column", "ids")
        pack(*data, "--output", tmp_path / f"out-{name}")
        assert list(rows_of(tmp_path / f"out-{name}")[0]["labels"]) == [-100, -100, 7]


@pytest.mark.parametrize(
    ("records", "options", "reads"),
    [
        ([{"body": "fox", "text": "dog"}], ("--text-column", "body"), "fox"),
        ([{"q": "fox", "a": " dog"}], ("--prompt-column", "q", "--completion-column", "a"), "fox dog"),
        (
            [{"instruction": "jump", "input": "fox", "output": "dog"}],
            (),
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\njump\n\n### Input:\nfox\n\n"
            "### Response:\ndog",
        ),
        (
            [{"instruction": "jump", "input": "", "output": "dog"}],
            (),
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\njump\n\n### Response:\ndog",
        ),
    ],
)
def test_common_layouts_and_columns_of_other_names_are_read(corpus, tokenizer, tmp_path, records, options, reads):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    pack("--data", path, "--tokenizer", corpus[1], "--no-eos", *options, "--output", tmp_path / "out")
    (row,) = rows_of(tmp_path / "out")
    assert tokenizer.decode(row["input_ids"]) == reads
    trained = np.asarray(row["input_ids"])[np.asarray(row["labels"]) != -100]
    assert len(trained) < len(row["input_ids"]) and reads.rstrip().endswith(tokenizer.decode(trained).strip())
