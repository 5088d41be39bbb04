"""A small tokenizer, trained once, and ways to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen liquor jugs.",
    "How vexingly quick daft zebras jump!",
    "user assistant system question answer",
]


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as wide as on a wide terminal, wherever the tests run: a narrow one folds the names in them."""
    monkeypatch.setenv("COLUMNS", "130")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from crosspack.cli.text import train_tokenizer

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
