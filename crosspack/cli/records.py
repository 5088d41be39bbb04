"""``--data``, given once or several times, to records: those of ``crosspack.read``, in turn or mixed by weight."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crosspack.packing.mixture import Mixed
from crosspack.reading import Records, read
from crosspack.reading.files import MAX_RECORD
from crosspack.reading.lines import SampleBy
from crosspack.reading.records import has_splits
from packing_core.errors import PackingError


def open_records(
    data: str | None,
    *,
    split: str | None = "train",
    option: str = "--data",
    columns: Iterable[str] = (),
    sample_by: SampleBy = "line",
    max_record: int = MAX_RECORD,
) -> Records:
    """Open one data set, as :func:`crosspack.read` does.

    Without a ``split``, reads files as they are and the split ``validation`` of a folder or hub data set.

    Raises:
        PackingError: it cannot be opened; the error names ``option``, which names the data.
    """
    try:
        if split is None:
            split = "validation" if has_splits(data) else "train"
        return read(data, split=split, columns=columns, sample_by=sample_by, max_record=max_record)
    except PackingError as error:
        named = error.reworded(f"{option} {error}")
        if option == "--eval-data":
            named = type(error)(named.with_names(lambda _, value: f"{option_of_split(option)} {value}".rstrip()))
        raise named from error


def option_of_split(option: str) -> str:
    """The option that names a split of what ``option`` names."""
    return "--eval-split" if option == "--eval-data" else "--split"


def weighted(data: str, option: str = "--data") -> tuple[str, float | None]:
    """Splits ``a.jsonl:0.3`` into the data and its weight, unless there is a file of that name.

    >>> weighted("a.jsonl:0.3"), weighted("s3://bucket/a"), weighted("a.jsonl")
    (('a.jsonl', 0.3), ('s3://bucket/a', None), ('a.jsonl', None))
    """
    match = re.fullmatch(r"(.+):(-?(?:\d+\.?\d*|\.\d+)|nan|-?inf)", data)
    if match is None or os.path.exists(data):
        return data, None
    if not 0 < (weight := float(match[2])) < float("inf"):
        raise PackingError(f"{option} {data}: a weight is a number above 0: leave the data out, or give it one")
    return match[1], weight


def read_columns(given: Sequence[str] | None, known: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
    """``prompt=question`` as (name, column) pairs.

    >>> read_columns(["prompt=question", "completion=answer"])
    (('prompt', 'question'), ('completion', 'answer'))

    Args:
        known: the names that may be read; any if there are none.

    Raises:
        PackingError: one is no NAME=COLUMN, names what is not read, or comes twice.
    """
    pairs: list[tuple[str, str]] = []
    for text in given or ():
        name, equals, column = (part.strip() for part in text.partition("="))
        if not (name and equals and column):
            raise PackingError(f"--column {text}: pass what is read and the column that holds it, prompt=question")
        if known and name not in known:
            raise PackingError(f"--column {text}: {name} is not read: name one of {', '.join(known)}")
        if name in dict(pairs):
            raise PackingError(f"--column {name} is given twice: keep one of them")
        pairs.append((name, column))
    return tuple(pairs)


def join(sources: Sequence[tuple[Records, float | None]], option: str = "--data") -> Records:
    """Joins data sets: one after the other, or mixed if they have weights.

    Raises:
        PackingError: some have a weight and some have none, or one of several is a hub data set.
    """
    if len(sources) == 1 and sources[0][1] is None:
        return sources[0][0]
    if len({weight is None for _, weight in sources}) > 1:
        raise PackingError(f"{option}: some have a weight and some have none: give all of them one, FILE:0.3, or none")
    if any(records.listed for records, _ in sources):
        raise PackingError(f"{option}: a hub data set is read by itself: pass its files, as hf://datasets/owner/name")
    weights = [weight for _, weight in sources if weight is not None]
    if weights:
        name = ", ".join(f"{records.name}:{weight:g}" for records, weight in sources)
        shares = tuple((records, weight / sum(weights)) for (records, _), weight in zip(sources, weights, strict=True))
        return Mixed(name, sources=shares)
    files = tuple(file for records, _ in sources for file in records.files)
    return replace(sources[0][0], name=", ".join(records.name for records, _ in sources), files=files)
