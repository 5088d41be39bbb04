"""Selects the files of a folder: those that the header of its README.md names, or whose names contain the split."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from crosspack.reading.files import COMPRESSIONS, File, is_url, walk
from crosspack.reading.yaml_text import MAX_TEXT, load_yaml
from packing_core.errors import PackingError, first_line, naming

FORMATS = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt")
# words in the names of files and folders that say which split they belong to, as the `datasets` library reads them
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
LISTING = "crosspack-files.json"  # lists the files of an output folder of ours
# The library's own notes beside the data.
_NO_DATA = frozenset(["dataset_info.json", "dataset_infos.json", "state.json"])


def files_of_split(folder: str, split: str) -> list[File]:
    """The data files of a split, in order: those that README.md names, or else those whose names say the split.

    Raises:
        PackingError: there are none, or one lies outside of the folder.
    """
    declared = None if is_url(folder) else _declared(Path(folder))
    files = _by_name(folder, split) if declared is None else _by_pattern(Path(folder), split, declared)
    if not is_url(folder):
        _check_inside(Path(folder), files)
    return files


def _check_inside(folder: Path, files: Iterable[File]) -> None:
    inside = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # the hub's cache, whose files are links to its blobs
        inside.append(folder.resolve().parents[1] / "blobs")
    for file in files:
        if not any(Path(file.path).resolve().is_relative_to(place) for place in inside):
            raise PackingError(f"{folder}: {file.path} is a link to a file outside of the folder: pass that file")


def _by_name(folder: str, split: str) -> list[File]:
    found: dict[File, set[str]] = {}
    files = list(walk(folder))
    outputs = [relative.removesuffix(LISTING) for _, relative in files if relative.endswith(f"/{LISTING}")]
    for path, relative in files:
        if relative.startswith(tuple(outputs)):  # what a command wrote below the data is not the data
            continue
        file = File(path)
        if file.suffix in FORMATS and PurePosixPath(relative).name not in _NO_DATA:
            found[file] = _splits_of(PurePosixPath(relative), split)
    for beside in (".txt", ".json"):  # which describe the data where there are other files, as our manifest does
        if any(file.suffix != beside for file in found):
            found = {file: splits for file, splits in found.items() if file.suffix != beside}
    if not found:
        raise PackingError(f"{folder}: the folder holds no {', '.join(FORMATS)} file")
    named = set().union(*found.values())
    if not named and split == "train":
        return sorted(found, key=_path)
    if split not in named:
        there = f"its files are of {', '.join(sorted(named))}" if named else "their names say none"
        raise PackingError(f"{folder}: no file is of split={split!r}, {there}: pass another split", option="split")
    return sorted((file for file, splits in found.items() if split in splits), key=_path)


def _path(file: File) -> str:
    return file.path


def _splits_of(path: PurePosixPath, wanted: str) -> set[str]:
    """Returns the splits in the file's name, or else the split in the name of the nearest folder."""
    words = {wanted: (wanted.lower(),), **_SPLITS}
    while path.suffix in (*FORMATS, *COMPRESSIONS):
        path = path.with_suffix("")
    for part in reversed(path.parts):
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
    with open(readme, encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_TEXT)
    header = re.match(r"---[ \t\r]*\n(.*?)\n---[ \t\r]*(\n|$)", text, flags=re.DOTALL)
    if header is None or "configs" not in header[1]:
        return None
    try:
        configs = (load_yaml(header[1]) or {}).get("configs") or []
        by_name = {str(config["config_name"]): config for config in configs}
        default = [name for name, config in by_name.items() if config.get("default") or name == "default"]
        data_files = [by_name[name].get("data_files") for name in default or by_name]
    except (PackingError, TypeError, KeyError, AttributeError) as error:
        raise PackingError(f"{folder}: the header of README.md cannot be read: {first_line(error)}") from error
    if not by_name:
        return None
    if len(data_files) > 1 or not data_files[0]:
        raise PackingError(
            f"{folder}: README.md has the configurations {', '.join(by_name)}, and no files for one of them "
            f"that is the default: pass the folder or the files of one"
        )
    return data_files[0]


def _by_pattern(folder: Path, split: str, declared: Any) -> list[File]:
    patterns: dict[str, list[str]] = {}
    for entry in declared if isinstance(declared, list) else [declared]:
        named = entry if isinstance(entry, dict) else {"path": entry}
        given = named.get("path")
        patterns.setdefault(str(named.get("split", "train")), []).extend(
            map(str, given if isinstance(given, list) else [given])
        )
    if split not in patterns:
        raise PackingError(
            f"{folder}: README.md has the splits {', '.join(patterns)}: pass one of them as split", option="split"
        )
    files: set[File] = set()
    for pattern in patterns[split]:
        if "://" in pattern or PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
            raise PackingError(f"{folder}: README.md names {pattern}, outside of the folder: pass that file itself")
        with naming(f"{folder}: README.md names {pattern!r}", (ValueError, NotImplementedError)):
            paths = [path for path in folder.glob(pattern) if path.is_file()]
        found = [file for file in map(File, map(str, paths)) if file.suffix in FORMATS]
        if not found:
            raise PackingError(f"{folder}: README.md names {pattern}, and there is no {', '.join(FORMATS)} file")
        files.update(found)
    return sorted(files, key=_path)
