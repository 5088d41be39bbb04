"""``crosspack pack``: what it writes, that it reads back exactly, and that it holds little at a time."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from crosspack.cli.records import open_records
from crosspack.encoding.text import Encoder, Policy
from crosspack.encoding.tokenizer import load_tokenizer
from tests.cli import console

pack = partial(console.run, "pack")


@pytest.fixture
def tokenizer_folder(tokenizer, tmp_path) -> Path:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def data(write) -> Path:
    rng = np.random.default_rng(1)
    records = [
        {"prompt": "fox " * int(rng.integers(1, 5)), "completion": "dog " * int(rng.integers(1, 20))} for _ in range(90)
    ]
    return write("data.jsonl", records)


@pytest.fixture
def arguments(data, tokenizer_folder, tmp_path) -> tuple[object, ...]:
    return ("--data", data, "--tokenizer", tokenizer_folder, "--capacity", 64, "--output", tmp_path / "packed")


def documents(data: Path, tokenizer_folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Documents with, for each token, whether it is a target (the first never is)."""
    return sorted(located(data, tokenizer_folder))


def located(data: Path, tokenizer_folder: Path) -> list[tuple[list[int], list[bool]]]:
    """The same, in the order of the data."""
    encoder = Encoder(load_tokenizer(str(tokenizer_folder)), Policy())
    return [
        (document.ids.tolist(), [False, *document.trained[1:].tolist()])
        for document in encoder(open_records(str(data)))
    ]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_packed_files_read_back_as_the_same_documents(arguments, data, tokenizer_folder, tmp_path, form):
    result = pack(*arguments, "--format", form, "--rows-per-file", 7)
    assert result.exit_code == 0, result.output
    packed = tmp_path / "packed"
    assert documents(packed, packed / "tokenizer") == documents(data, tokenizer_folder)
    rows = list(open_records(str(packed)))
    assert max(len(row["input_ids"]) for row in rows) <= 64
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        starts = np.cumsum([0, *row["seq_lengths"][:-1]])
        assert all(row["labels"][start] == -100 for start in starts)


def test_the_manifest_says_what_was_done(arguments, data, tokenizer_folder, tmp_path):
    printed = pack(*arguments, "--rows-per-file", 7, "--json")
    packed = tmp_path / "packed"
    manifest = json.loads((packed / "manifest.json").read_text())
    assert json.loads(printed.stdout) == manifest
    expected = documents(data, tokenizer_folder)
    assert manifest["documents"] == len(expected) == 90
    assert manifest["packing"] == "mixed"
    assert manifest["tokens"] == sum(len(ids) for ids, _ in expected)
    assert manifest["trained_tokens"] == sum(sum(targets) for _, targets in expected)
    assert manifest["efficiency"] == manifest["tokens"] / (manifest["rows"] * 64) > 0.9
    assert [file["rows"] for file in manifest["files"][:-1]] == [7] * (len(manifest["files"]) - 1)
    assert sum(file["rows"] for file in manifest["files"]) == manifest["rows"]
    assert sum(file["tokens"] for file in manifest["files"]) == manifest["tokens"]
    for file in manifest["files"]:
        assert hashlib.sha256((packed / file["name"]).read_bytes()).hexdigest() == file["sha256"]
    assert pack(*arguments, "--capacity", 20, "--overflow", "split", "--overwrite").exit_code == 0
    assert json.loads((packed / "manifest.json").read_text())["documents"] == 90, "split documents are counted once"
    assert [path.name for path in packed.glob("train-*")] == ["train-00000.parquet"], "nothing of the first is left"


def test_the_same_arguments_write_the_same_bytes_and_another_seed_another_order(arguments, tmp_path):
    def digests(*more: object) -> list[str]:
        assert pack(*arguments, "--overwrite", *more).exit_code == 0
        return [file["sha256"] for file in json.loads((tmp_path / "packed/manifest.json").read_text())["files"]]

    first = digests()
    assert digests() == first
    assert digests("--seed", 1) != first


@pytest.mark.parametrize(("overflow", "listed"), [("truncate", "truncated"), ("drop", "dropped")])
def test_what_is_cut_or_left_out_is_listed(arguments, data, tokenizer_folder, tmp_path, overflow, listed):
    result = pack(*arguments, "--capacity", 20, "--overflow", overflow)
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "packed/manifest.json").read_text())
    notes = [json.loads(line) for line in (tmp_path / "packed/incomplete.jsonl").read_text().splitlines()]
    assert 0 < manifest[listed] == len(notes) < 90
    assert f"{manifest[listed]} documents {listed}, see incomplete.jsonl" in result.output
    lengths = [len(ids) for ids, _ in located(data, tokenizer_folder)]
    assert [(note["what"], note["where"], note["tokens"]) for note in notes] == [
        (listed, f"{data}:{line}", length) for line, length in enumerate(lengths, 1) if length > 20
    ]
    assert manifest["documents"] == 90 - manifest["dropped"]


def test_what_is_cut_to_its_prompt_is_left_out_and_counted(tokenizer_folder, write, tmp_path):
    data = write("data.jsonl", [{"prompt": "fox " * 30, "completion": "dog"}, {"text": "lazy dog"}, {"text": ""}])
    options = ("--data", data, "--tokenizer", tokenizer_folder, "--capacity", 20, "--output", tmp_path / "packed")
    result = pack(*options, "--overflow", "truncate")
    assert result.exit_code == 0, result.output
    assert "in 1 row of 20" in result.output
    manifest = json.loads((tmp_path / "packed/manifest.json").read_text())
    counts = {name: manifest[name] for name in ("documents", "left_out", "truncated", "dropped", "untrained")}
    assert counts == {"documents": 1, "left_out": 1, "truncated": 1, "dropped": 0, "untrained": 1}
    assert "1 piece of long documents left out, nothing to train on, see incomplete.jsonl" in result.output
    assert "1 document left out, nothing to train on, see incomplete.jsonl" in result.output
    for row in open_records(str(tmp_path / "packed")):
        assert (row["labels"] != -100).any()
    notes = [json.loads(line) for line in (tmp_path / "packed/incomplete.jsonl").read_text().splitlines()]
    assert {(note["what"], note["where"].rpartition(":")[2]) for note in notes} == {
        ("truncated", "1"),
        ("untrained", "1"),
        ("left_out", "3"),
    }


def test_the_tokenizer_that_is_trained_on_the_data_is_named(write, tmp_path):
    records = [{"text": "lazy dog quick fox"}] * 20
    result = pack("--data", write("data.jsonl", records), "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    entries = len(json.loads((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"])
    assert f"tokenizer: byte-level BPE of the data, {entries:,} entries" in " ".join(result.output.split())


def test_ids_that_the_tokenizer_does_not_have_are_refused_by_place(tokenizer_folder, write, tmp_path):
    path = write("data.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 65_537]}])
    options = ("--tokenizer", tokenizer_folder, "--capacity", 8, "--output", tmp_path / "out")
    result = pack("--data", path, *options)
    assert result.exit_code == 2
    assert f"{path}:2: input_ids has 65,537 and the tokenizer 320 entries: pass" in " ".join(result.stderr.split())
    kept = pack("--data", path, *options, "--on-error", "skip")
    assert kept.exit_code == 0 and "1 record could not be used" in kept.output


@pytest.mark.parametrize("name", ["input_ids", "labels", "seq_lengths"])
def test_a_column_that_packed_files_have_themselves_cannot_be_kept(tmp_path, name):
    """It stood in the files in place of what was packed."""
    (tmp_path / "data.jsonl").write_text('{"text": "a b", "labels": 1, "input_ids": 2, "seq_lengths": 3}\n')
    options = ["--capacity", "16", "--output", str(tmp_path / "out"), "--keep", name]
    result = pack("--data", tmp_path / "data.jsonl", *options)
    assert result.exit_code == 2 and f"--keep {name}: packed files have a column of that name" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "bad", ['{"x": 1}', "not json", "[1]", '{"messages": [{"role": 3}]}', '{"text": "a", "text": "b"}']
)
@pytest.mark.parametrize("first", [True, False])
def test_the_first_record_too_may_be_one_that_cannot_be_used(tmp_path, bad, first):
    lines = ['{"text": "hello world"}', '{"text": "b c d"}']
    lines.insert(0 if first else 1, bad)
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    options = ("--data", tmp_path / "data.jsonl", "--capacity", "16", "--output", tmp_path / "out")
    assert pack(*options).exit_code == 2
    result = pack(*options, "--on-error", "quarantine")
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["documents"] == 2
    (tmp_path / "data.jsonl").write_text(bad)
    empty = pack(*options, "--on-error", "skip", "--overwrite")
    assert empty.exit_code == 2
    assert re.search("has no records that can be used|no document has a token to train on", empty.output)


def test_token_ids_that_no_row_can_hold_are_skipped_like_others(tmp_path, tokenizer_folder):
    lines = ["[1, 99999999999]", "[-1, 5]", "[5, 6]", "[5, 18446744073709551616]"]
    (tmp_path / "data.jsonl").write_text("".join(f'{{"input_ids": {line}}}\n' for line in lines))
    options = ("--data", tmp_path / "data.jsonl", "--capacity", "16", "--output", tmp_path / "out")
    result = pack(*options, "--tokenizer", tokenizer_folder, "--on-error", "skip")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out/manifest.json").read_text())["documents"] == 1
