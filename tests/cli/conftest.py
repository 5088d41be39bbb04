"""A small tokenizer, trained once, ways to write data files, and the arguments of a small training run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs.",
    "How vexingly quick daft zebras jump!",
    "user assistant system question answer",
]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as wide as on a wide terminal, wherever the tests run: a narrow one folds the names in them."""
    monkeypatch.setenv("COLUMNS", "130")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from crosspack.encoding.tokenizer import train_tokenizer

    return train_tokenizer(SENTENCES * 4, 320)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, list[dict[str, Any]]], Path]:
    """Write records to a file whose suffix says the format."""

    def write(name: str, records: list[dict[str, Any]]) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(records), path)
        else:
            table = pa.Table.from_pylist(records)
            with pa.ipc.new_stream(path, table.schema) as out:
                out.write_table(table)
        return path

    return write


@pytest.fixture
def data(write) -> Path:
    rng = np.random.default_rng(7)
    vocabulary = ["fox", "dog", "box", "jugs", "quick", "lazy", "zebras", "jump"]
    records = [
        {"prompt": " ".join(rng.choice(vocabulary, rng.integers(1, 6))), "completion": " fox" * rng.integers(1, 12)}
        for _ in range(60)
    ]
    return write("data.jsonl", records)


@pytest.fixture
def model(tokenizer, tmp_path) -> Path:
    """A folder with a config.json and a tokenizer, and no weights."""
    folder = tmp_path / "start"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder / "config.json"


@pytest.fixture
def small(model, data) -> tuple[object, ...]:
    return ("train", "--model", model, "--data", data, "--capacity", 64, "--device", "cpu", "--lr", 0.01)
