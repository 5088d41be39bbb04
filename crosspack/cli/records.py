"""``--data`` to records: a local file, a local folder or a hub name, read lazily with the ``datasets`` library.

A record is one row as a plain dict. Nothing is held in memory or written to a cache, and iterating again reads again,
so the same object serves one pass that trains a tokenizer and another that encodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosspack.cli.corpus import standard_library_records
from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name

Record = Mapping[str, Any]

# file suffix -> the `datasets` builder that reads it
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Records:
    """Records that can be read more than once; ``name`` is what tables and manifests call them."""

    name: str
    rows: Iterable[Record] | None = None

    def __iter__(self) -> Iterator[Record]:
        if self.rows is None:
            yield from standard_library_records()
            return
        try:
            yield from self.rows
        except PackingError:
            raise
        except (OSError, ValueError, _datasets_error()) as error:
            raise PackingError(f"--data {self.name}: {first_line(error)}") from error


def open_records(data: str | None, *, split: str = "train") -> Records:
    """Open ``data``; None opens the built-in question-and-answer pairs of the standard library's docstrings.

    Args:
        data: a ``.jsonl``, ``.json``, ``.parquet`` or ``.arrow`` file, a folder of them, or a hub data set.
        split: which split of a folder or a hub data set; a single file has only ``train``.

    Raises:
        PackingError: the file is absent, has another format, or the ``datasets`` library cannot open it.
    """
    if data is None:
        return Records("docstrings of the Python standard library")
    datasets = require("datasets", extra="hf")
    path = Path(data)
    if path.is_file():
        builder = BUILDERS.get(path.suffix)
        if builder is None:
            raise PackingError(
                f"--data {data}: cannot read {path.suffix or 'a file without suffix'}; it reads {_known()}"
            )
        arguments: tuple[str, dict[str, Any]] = (builder, {"data_files": str(path)})
    elif path.is_dir() or (is_hub_name(data) and path.suffix not in BUILDERS):
        arguments = (data, {})
    else:
        raise PackingError(f"--data {data}: no such file or folder, and not a hub name (`owner/name`)")
    try:
        rows = datasets.load_dataset(arguments[0], split=split, streaming=True, **arguments[1])
    except (OSError, ValueError, _datasets_error()) as error:
        raise PackingError(f"--data {data}: {first_line(error)}") from error
    return Records(data, rows)


def _known() -> str:
    return ", ".join(BUILDERS)


def _datasets_error() -> type[Exception]:
    error: type[Exception] = require("datasets.exceptions", extra="hf").DatasetsError
    return error
