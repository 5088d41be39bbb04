"""``--data`` to records: a local file, a local folder, a hub name, or the built-in text.

Local files are read by ``formats``, without a framework; hub data sets are streamed by the ``datasets`` library. A
record is a ``Row``, which knows its place for messages. Nothing is held in memory or written to a cache, and iterating
again reads again, so the same object serves one pass that trains a tokenizer and another that encodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from crosspack.cli.corpus import standard_library_records
from crosspack.cli.formats import FORMATS, Row, read_file
from packing_core.errors import PackingError, first_line
from packing_core.extras import require
from packing_core.training.job import is_hub_name

Record = Mapping[str, Any]

# words in the names of files and folders that say which split they belong to, as the `datasets` library reads them
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# The library's own notes beside the data.
_NO_DATA = frozenset(["dataset_info.json", "dataset_infos.json", "state.json"])


@dataclass(frozen=True)
class Records:
    """Records that can be read more than once; ``name`` is what tables and manifests call them."""

    name: str
    read: Callable[[], Iterator[Row]]

    def __iter__(self) -> Iterator[Row]:
        return self.read()


def open_records(data: str | None, *, split: str = "train", columns: Iterable[str] = ()) -> Records:
    """Open ``data``; None opens the built-in question-and-answer pairs of the standard library's docstrings.

    Args:
        data: a ``.jsonl``, ``.json``, ``.parquet`` or ``.arrow`` file, a folder of them, or a hub data set.
        split: which split of a folder or a hub data set; a single file has only ``train``.
        columns: all that need to be read of a file that has any of them; by default every column.

    Raises:
        PackingError: the file is absent or has another format, or the folder does not say what to read.
    """
    if data is None:
        name = "docstrings of the Python standard library"
        return Records(name, lambda: _numbered(name, standard_library_records()))
    path = Path(data)
    wanted = frozenset(columns)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
        files = [path] if is_file else _files_of_split(path, split) if is_folder else []
    except OSError as error:
        raise PackingError(f"--data {data}: {error.strerror or first_line(error)}") from error
    if files:
        if is_file and path.suffix not in FORMATS:
            found = path.suffix or "a file without suffix"
            raise PackingError(f"--data {data}: cannot read {found}; it reads {', '.join(FORMATS)}")
        if is_file and split != "train":
            raise PackingError(f"--data {data}: a file has no split {split!r}: leave --split out, or pass a folder")
        return Records(data, lambda: (row for file in files for row in read_file(file, wanted)))
    if not is_hub_name(data) or path.suffix in FORMATS:
        raise PackingError(f"--data {data}: no such file or folder, and not a hub name (`owner/name`)")
    return Records(data, lambda: _hub_rows(data, split))


def _hub_rows(name: str, split: str) -> Iterator[Row]:
    try:
        rows = require("datasets", extra="hf").load_dataset(name, split=split, streaming=True)
        yield from _numbered(name, rows)
    except PackingError:
        raise
    except Exception as error:  # what the library raises for the network, for scripts, for formats, has no common base
        raise PackingError(f"--data {name}: {first_line(error)}") from error


def _numbered(name: str, records: Iterable[Any]) -> Iterator[Row]:
    return (Row(record, f"{name}[{number}]") for number, record in enumerate(records))


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """The data files of a split, in order: those that README.md names, or else those whose names say the split.

    Raises:
        PackingError: there are none, they have several formats, or one lies outside of the folder.
    """
    declared = _declared(folder)
    files = _by_name(folder, split) if declared is None else _by_pattern(folder, split, declared)
    formats = sorted({file.suffix for file in files})
    if len(formats) > 1:
        raise PackingError(f"--data {folder}: it holds {' and '.join(formats)} files: pass one of them")
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache, whose files are links to its blobs
        inside.append(folder.resolve().parents[1] / "blobs")
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in inside):
            raise PackingError(f"--data {folder}: {file} is a link to a file outside of the folder: pass that file")
    return files


def _by_name(folder: Path, split: str) -> list[Path]:
    found: dict[Path, set[str]] = {}
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for file in (Path(root, name) for name in names if not name.startswith((".", "__"))):
            if file.suffix in FORMATS and file.name not in _NO_DATA and file.is_file():
                found[file] = _splits_of(file.relative_to(folder), split)
    if any(file.suffix != ".json" for file in found):  # then .json files describe the data, as our manifest does
        found = {file: splits for file, splits in found.items() if file.suffix != ".json"}
    if not found:
        raise PackingError(f"--data {folder}: the folder holds no {', '.join(FORMATS)} file")
    named = set().union(*found.values())
    if not named and split == "train":
        return sorted(found)
    if split not in named:
        there = f"its files are of {', '.join(sorted(named))}" if named else "no file's name says a split"
        raise PackingError(f"--data {folder}: no file of the split {split}, {there}: pass another --split")
    return sorted(file for file, splits in found.items() if split in splits)


def _raise(error: OSError) -> None:
    raise error


def _splits_of(path: Path, wanted: str) -> set[str]:
    """The splits that the file's name says, or else that of the nearest folder that says one."""
    words = {wanted: (wanted.lower(),), **_SPLITS}
    for part in reversed(path.with_suffix("").parts):
        said = {split for split, names in words.items() if any(_says(part.lower(), name) for name in names)}
        shards = re.match(r"(.+)-\d{5}-of-\d{5}", part)
        if said and shards:  # the hub's form, where the whole name is the split's: train_sft is not train
            return {next((split for split, names in _SPLITS.items() if shards[1] in names), shards[1])}
        if said:
            return said
    return set()


def _says(part: str, word: str) -> bool:
    return re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", part) is not None


def _declared(folder: Path) -> Any:
    """The ``data_files`` that the header of README.md names for its only or default configuration; None without."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    header = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", readme.read_text("utf-8", "replace"), flags=re.DOTALL)
    if header is None or "configs" not in header[1]:
        return None
    yaml = require("yaml", extra="hf", distribution="pyyaml")
    try:
        configs = (yaml.safe_load(header[1]) or {}).get("configs") or []
        by_name = {str(config["config_name"]): config for config in configs}
        default = [name for name, config in by_name.items() if config.get("default") or name == "default"]
        data_files = [by_name[name].get("data_files") for name in default or by_name]
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PackingError(f"--data {folder}: the header of README.md cannot be read: {first_line(error)}") from error
    if not by_name:
        return None
    if len(data_files) > 1 or not data_files[0]:
        raise PackingError(
            f"--data {folder}: README.md has the configurations {', '.join(by_name)}, and no files for one of them "
            f"that is the default: pass the folder or the files of one"
        )
    return data_files[0]


def _by_pattern(folder: Path, split: str, declared: Any) -> list[Path]:
    patterns: dict[str, list[str]] = {}
    for entry in declared if isinstance(declared, list) else [declared]:
        named = entry if isinstance(entry, dict) else {"path": entry}
        paths = named.get("path")
        patterns.setdefault(str(named.get("split", "train")), []).extend(
            map(str, paths if isinstance(paths, list) else [paths])
        )
    if split not in patterns:
        raise PackingError(
            f"--data {folder}: README.md has the splits {', '.join(patterns)}: pass one of them as --split"
        )
    files: set[Path] = set()
    for pattern in patterns[split]:
        if "://" in pattern or PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
            raise PackingError(
                f"--data {folder}: README.md names {pattern}, outside of the folder: pass that file itself"
            )
        try:
            found = [file for file in folder.glob(pattern) if file.is_file() and file.suffix in FORMATS]
        except (ValueError, NotImplementedError) as error:
            raise PackingError(f"--data {folder}: README.md names {pattern!r}: {first_line(error)}") from error
        if not found:
            raise PackingError(f"--data {folder}: README.md names {pattern}, and there is no {', '.join(FORMATS)} file")
        files.update(found)
    return sorted(files)
