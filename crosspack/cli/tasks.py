"""The data of ``crosspack train --task``: records with its columns, their media, and functions that score answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any

from crosspack.cli.console import OUT, warn
from crosspack.cli.models import may_take_media
from crosspack.cli.options import OrderOptions, TokenOptions
from crosspack.cli.progress import counted
from crosspack.cli.records import join, open_records, option_of_split, read_columns, weighted
from crosspack.cli.trainoptions import TrainOptions
from crosspack.encoding.kinds import checked, refusing
from crosspack.encoding.layouts import CHATS, LOOKED_AT, canonical, media_in
from crosspack.encoding.text import trains
from crosspack.reading import Records
from crosspack.reading.files import is_url
from crosspack.reading.places import Row
from packing_core.batches.media import KINDS, as_turn
from packing_core.errors import PackingError, UnsupportedError, naming, plural
from packing_core.training.tasks import TASKS

# options that only the next tokens of packed documents have, but for those that a task reads too (``Task.reads``)
UNREAD = frozenset(
    (
        *(field.name for group in (OrderOptions, TokenOptions) for field in fields(group) if field.name != "seed"),
        *("rows_per_step", "padded_batch", "compile", "deterministic", "compare", "sample", "master_weights"),
        "workers",
        *("strategy", "context_parallel", "mesh"),
    )
)


def saved(home: Path) -> list[Path]:
    """The checkpoints of a task's trainer below ``home``."""
    return [folder for folder in home.glob("checkpoint-*") if (folder / "trainer_state.json").is_file()]


def remove_saved(home: Path) -> None:
    """Removes the checkpoints of a task's trainer below ``home``, and ``home`` if nothing else is in it."""
    for folder in saved(home):
        shutil.rmtree(folder)
    (home / "README.md").unlink(missing_ok=True)  # of TRL, an empty form
    if (home / "eval").is_dir():
        (home / "eval").rmdir()  # of sentence-transformers, empty
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def open_examples(options: TrainOptions, data: Sequence[str] | None, split: str | None, option: str) -> Records:
    """Opens the records, and looks at the first of each data set.

    Raises:
        PackingError: it is nowhere, empty, or has not the columns of the task; under ``--on-error skip`` others may.
    """
    task = TASKS[options.task]
    if not data:
        columns = ", or ".join(" and ".join(columns) for columns in task.columns)
        raise PackingError(f"--task {options.task} needs --data, records with {columns}")
    sources = []
    for text in data:
        path, weight = weighted(text, option)
        records = open_records(path, split=split, option=option)
        first = next((record for record in records.items() if isinstance(record, Row)), None)
        if first is None:
            raise PackingError(f"{option} {records.name} has no records: check the file and {option_of_split(option)}")
        if options.on_error == "stop":
            task.columns_of(_renamed(first, read_columns(options.column)), first.where)
        sources.append((records, weight))
    return join(sources, option)


def read_examples(options: TrainOptions, records: Records, limit: int | None = None) -> list[Row]:
    """Reads all records, or as many as ``limit``, each with the columns that the task reads.

    Raises:
        PackingError: a record has not the columns, or under ``--on-error skip`` none can be used.
        UnsupportedError: one has media that the task does not read; under ``--on-error skip`` it is left out.
    """
    task, named = TASKS[options.task], read_columns(options.column)
    examples, skipped = list[Row](), list[str]()

    def read(item: Row) -> Row:
        record = _renamed(item, named)
        chats = {name: [as_turn(turn) for turn in record[name]] for name in CHATS if isinstance(record.get(name), list)}
        record = Row({**record, **chats}, record.place, record.number)
        task.columns_of(record, item.where)
        media = media_in(record)
        unread = next((column for kind, column in media.items() if kind not in task.media), None)
        if unread is not None:
            raise UnsupportedError(
                f"{item.where} has {unread}, which --task {options.task} does not read: leave that out, or build the "
                "trainer yourself and pass it to crosspack.enable_packing"
            )
        return _whole_chat(record) if options.task == "sft" else record

    usable = checked(
        counted(OUT, "records read", records.items()),
        read,
        refusing(skipped if options.on_error == "skip" else None),
    )
    for item in islice(usable, limit):
        record = read(item)
        examples.append(with_whole_paths(record) if task.media else record)
    if skipped and not examples:
        raise PackingError(f"none of the records of {records.name} can be used, the first because {skipped[0]}")
    warn_of_skipped(skipped)
    return examples


def have_images(options: TrainOptions) -> bool:
    """Returns whether a record has images or audio, of all up to ``--limit`` for a model that may take them.

    Of a model that takes text alone, or whose config cannot be read, the first records say what the data are.
    """
    most, named = None if may_take_media(options.model) else LOOKED_AT, read_columns(options.column)
    for text in options.data or ():
        with suppress(PackingError):  # raised again, under the name of its option, where the data is opened
            items = counted(
                OUT, "records looked at for images", open_records(weighted(text)[0], split=options.split).items()
            )
            rows = islice((item for item in items if isinstance(item, Row)), options.limit)
            for row in islice(rows, most):
                if media_in(_renamed(row, [x for x in named if x[1] in row])):
                    return True
    return False


def with_whole_paths(record: Row) -> Row:
    """Returns a record whose images or clips are named by paths from the root, or from here, not from its file."""
    file = Path(record.place.file)
    if not file.is_file():
        return record
    values = dict(record)
    for name in (name for kind in KINDS for name in (f"{kind}s", kind)):
        if values.get(name) is not None:
            values[name] = _whole(values[name], file.parent)
    for name in CHATS:
        if isinstance(values.get(name), list):
            values[name] = [_turn(turn, file.parent) for turn in values[name]]
    return Row(values, record.place, record.number)


def _turn(turn: Any, folder: Path) -> Any:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list):
        return turn
    parts = [_whole(part, folder) if isinstance(part, Mapping) else part for part in turn["content"]]
    return {**turn, "content": parts}


def _whole(image: Any, folder: Path) -> Any:
    """An image, a part of a message, or a list: a path from ``folder`` becomes one from here, all else stays."""
    if isinstance(image, list):
        return [_whole(each, folder) for each in image]
    if isinstance(image, Mapping) and image.get("bytes") is None:
        paths = ("image", "audio", "path")
        return {name: _whole(value, folder) if name in paths else value for name, value in image.items()}
    if isinstance(image, str) and not is_url(image) and not image.startswith(("data:", "file:")):
        return str(folder / image)
    return image


def _whole_chat(record: Row) -> Row:
    """A record whose chat has the ``system`` and the ``tools`` beside it, as chats without images have.

    Raises:
        PackingError: they contradict the chat, or an answer is marked as not trained.
    """
    whole = Row({**record, **canonical(record, record.where, (), media=True)}, record.place, record.number)
    answers = [whole[name] for name in ("messages", "completion") if isinstance(whole.get(name), list)]
    with naming(record.where, PackingError, ours=True):
        for number, turn in (place for chat in answers for place in enumerate(chat)):
            if isinstance(turn, Mapping) and turn.get("role") == "assistant" and not trains(turn, number):
                raise PackingError(
                    f"message {number} says that it is not trained, which chats with images cannot say: end the record "
                    "with the answer that is trained, as its completion"
                )
    return whole


def warn_of_skipped(skipped: Sequence[str]) -> None:
    """Warns of the records that were left out, each of which is named by a line."""
    if skipped:
        warn(f"left out {plural(len(skipped), 'record')} that cannot be used, the first: {skipped[0]}")


def _renamed(record: Row, named: Sequence[tuple[str, str]]) -> Row:
    """A record with the columns of ``--column`` under the names that the task reads."""
    for _, column in named:
        if column not in record:
            raise PackingError(f"{record.where} has no {column}, only {', '.join(record)}: check --column")
    return Row({**record, **{name: record[column] for name, column in named}}, record.place, record.number)


def reward_function(text: str) -> Callable[..., Any]:
    """Returns the function that ``FILE.py:NAME`` names, whose scores are counted.

    Raises:
        PackingError: there is no such file or function, or the file fails.
    """
    path, _, name = text.rpartition(":")
    spec = spec_from_file_location(Path(path).stem, path) if Path(path).is_file() else None
    if spec is None or spec.loader is None:
        raise PackingError(f"--reward {text}: pass FILE.py:FUNCTION, a Python file and a function in it")
    module = module_from_spec(spec)
    with naming(f"--reward {text}", with_kind=True, ours=True):  # the file may hold anything
        spec.loader.exec_module(module)
    score = getattr(module, name, None)
    if not callable(score):
        raise PackingError(f"--reward {text}: {path} has no function {name}")

    @wraps(score)
    def checked(*args: Any, **columns: Any) -> Any:
        with naming(f"--reward {text}", with_kind=True, ours=True):
            scores = score(*args, **columns)
            count = len(scores)
        if count != (wanted := len(columns.get("completions", scores))):
            raise PackingError(
                f"--reward {text} returned {plural(count, 'score')} for {plural(wanted, 'completion')}: return one "
                "for each, None where there is none"
            )
        return scores

    return checked
