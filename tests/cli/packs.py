"""Runs of ``crosspack pack`` over a small corpus, and what they wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import crosspack
from tests.cli.console import run

WORDS = np.array(["fox", "dog", "box", "jugs", "quick", "lazy", "zebras", "jump"])


def pack(*arguments: object, code: int = 0) -> str:
    result = run("pack", *arguments)
    assert result.exit_code == code, result.output + result.stderr
    return " ".join((result.output if not code else result.stderr).split())


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory) -> tuple[Path, Path]:
    """A folder with 600 documents in several formats and files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer.save_pretrained(folder / "tokenizer")
    rng = np.random.default_rng(3)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(600)]
    lines = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(texts))
    (folder / "data.jsonl").write_text(lines)
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    pq.write_table(pa.table({"text": texts, "id": range(600)}), folder / "data.parquet", row_group_size=250)
    return folder, folder / "tokenizer"


def arguments(corpus: tuple[Path, Path], *more: object, name: str = "data.jsonl") -> tuple[object, ...]:
    folder, tokenizer = corpus
    return ("--data", folder / name, "--tokenizer", tokenizer, "--capacity", 64, "--block-size", 4000, *more)


def result(folder: Path) -> dict[str, bytes]:
    """Every file of a result but the listing, whose order of files follows from the rest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "crosspack-files.json"
    }


def documents(folder: Path) -> list[tuple[int, ...]]:
    found = []
    for row in crosspack.read(folder):
        ends = np.cumsum(row["seq_lengths"])[:-1]
        found += [tuple(part.tolist()) for part in np.split(np.asarray(row["input_ids"]), ends)]
    return sorted(found)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in crosspack.read(path)]
