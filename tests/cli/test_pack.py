"""``crosspack pack``: what it writes, that it reads back exactly, and that it holds little at a time."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from crosspack.cli import app
from crosspack.cli.pack import _Files
from crosspack.cli.records import open_records
from crosspack.cli.text import Encoder, Policy, load_tokenizer


def pack(*arguments: object):
    return CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["pack", *map(str, arguments)])


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
    encoder = Encoder(load_tokenizer(str(tokenizer_folder)), Policy())
    return sorted(
        (document.ids.tolist(), [False, *document.trained[1:].tolist()])
        for document in encoder(open_records(str(data)))
    )


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
    assert pack(*arguments, "--rows-per-file", 7).exit_code == 0
    packed = tmp_path / "packed"
    manifest = json.loads((packed / "manifest.json").read_text())
    expected = documents(data, tokenizer_folder)
    assert manifest["documents"] == len(expected) == 90
    assert manifest["tokens"] == sum(len(ids) for ids, _ in expected)
    assert manifest["trained_tokens"] == sum(sum(targets) for _, targets in expected)
    assert manifest["efficiency"] == manifest["tokens"] / (manifest["rows"] * 64) > 0.9
    assert [file["rows"] for file in manifest["files"][:-1]] == [7] * (len(manifest["files"]) - 1)
    assert sum(file["rows"] for file in manifest["files"]) == manifest["rows"]
    assert sum(file["tokens"] for file in manifest["files"]) == manifest["tokens"]
    for file in manifest["files"]:
        assert hashlib.sha256((packed / file["name"]).read_bytes()).hexdigest() == file["sha256"]


def test_the_same_arguments_write_the_same_bytes_and_another_seed_another_order(arguments, tmp_path):
    def digests(*more: object) -> list[str]:
        assert pack(*arguments, "--overwrite", *more).exit_code == 0
        return [file["sha256"] for file in json.loads((tmp_path / "packed/manifest.json").read_text())["files"]]

    first = digests()
    assert digests() == first
    assert digests("--seed", 1) != first


@pytest.mark.parametrize(("overflow", "listed"), [("truncate", "truncated"), ("drop", "dropped")])
def test_what_is_cut_or_left_out_is_listed(arguments, tmp_path, overflow, listed):
    result = pack(*arguments, "--capacity", 20, "--overflow", overflow)
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "packed/manifest.json").read_text())
    assert 0 < len(manifest[listed]) < 90
    assert f"{len(manifest[listed])} documents {listed}" in result.output
    if overflow == "drop":
        assert manifest["documents"] == 90 - len(manifest["dropped"])


def test_split_documents_are_counted_once(arguments, tmp_path):
    assert pack(*arguments, "--capacity", 20, "--overflow", "split").exit_code == 0
    manifest = json.loads((tmp_path / "packed/manifest.json").read_text())
    assert manifest["documents"] == 90


def test_rows_are_written_while_the_data_is_still_being_read(arguments, monkeypatch):
    read, held = [0], []
    encode, write = Encoder.__call__, _Files.write

    def counting(self, records):
        for document in encode(self, records):
            read[0] += 1
            yield document

    def watching(self, batch):
        write(self, batch)
        held.append(read[0] - self.documents)

    monkeypatch.setattr(Encoder, "__call__", counting)
    monkeypatch.setattr(_Files, "write", watching)
    assert pack(*arguments, "--buffer", 10).exit_code == 0
    assert len(held) > 5
    assert max(held) <= 10


def test_an_interrupted_run_leaves_nothing_that_looks_finished(arguments, tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(_Files, "close", full)
        result = pack(*arguments)
    assert result.exit_code == 2
    assert "packed: No space left on device: pass a folder that can be written" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "packed").exists()
    assert pack(*arguments).exit_code == 0


def test_a_folder_that_holds_something_is_not_replaced_unasked(arguments, tmp_path):
    assert pack(*arguments).exit_code == 0
    again = pack(*arguments)
    assert again.exit_code == 2
    assert "is not empty: pass --overwrite or another folder" in " ".join(again.stderr.split())


def test_overwrite_replaces_only_what_pack_wrote(arguments, tmp_path):
    packed = tmp_path / "packed"
    assert pack(*arguments, "--rows-per-file", 7).exit_code == 0
    (packed / "notes.txt").write_text("mine")
    assert pack(*arguments, "--overwrite").exit_code == 0
    assert (packed / "notes.txt").read_text() == "mine"
    assert [path.name for path in packed.glob("train-*")] == ["train-00000.parquet"]


def test_a_strangers_manifest_is_never_replaced(arguments, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "manifest.json").write_text("theirs")
    for more, says in (((), "is not empty"), (("--overwrite",), "has no crosspack-files.json")):
        result = pack(*arguments, *more)
        assert result.exit_code == 2
        assert says in " ".join(result.stderr.split())
    assert [path.read_text() for path in packed.iterdir()] == ["theirs"]


def test_a_document_that_does_not_fit_is_one_line(arguments, tmp_path):
    result = pack(*arguments, "--capacity", 8)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("crosspack: document 0 has ")
    assert not (tmp_path / "packed").exists()
