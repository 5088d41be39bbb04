"""Packed rows without padding: what units spool, what leftovers are, and what is written to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError, first_line
from packing_core.storage.arrays import Array
from packing_core.storage.segment_indexing import offsets_of, ranges


@dataclass
class Rows:
    """R rows of P segments of T tokens.

    Attributes:
        ids: uint16 or int32 [T].
        trained: bool [T], as documents have it: the first token of a segment may be marked.
        segments: int64 [P], tokens of each.
        counts: int64 [R], segments of each row.
        values: name -> [P] values of the records that the segments come from.
        tokens: name -> numbers [T], a value for each token.
    """

    ids: Array
    trained: NDArray[np.bool_]
    segments: NDArray[np.int64]
    counts: NDArray[np.int64]
    values: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [R]: tokens of each row."""
        return np.diff(offsets_of(self.segments)[offsets_of(self.counts)])

    @property
    def targets(self) -> NDArray[np.bool_]:
        """bool [T]: trained tokens that are not the first of their segment."""
        targets = self.trained.copy()
        targets[offsets_of(self.segments)[:-1]] = False
        return targets

    @property
    def labels(self) -> NDArray[np.int32]:
        """int32 [T]: unshifted, -100 where nothing is trained."""
        return np.where(self.targets, self.ids.astype(np.int32), np.int32(IGNORE_INDEX))

    def __getitem__(self, part: slice) -> Rows:
        begin, end, _ = part.indices(len(self))
        first, last = offsets_of(self.counts)[[begin, end]]
        start, stop = offsets_of(self.segments)[[first, last]]
        return self._picked(slice(start, stop), slice(first, last), self.counts[begin:end])

    def take(self, segments: NDArray[np.int64], counts: NDArray[np.int64]) -> Rows:
        """Rows of other segments: numbers of segments of these rows, and how many make each new row."""
        lengths = self.segments[segments]
        at = np.repeat(offsets_of(self.segments)[segments], lengths) + ranges(lengths)
        return self._picked(at, segments, counts)

    def _picked(self, at: Any, segments: Any, counts: NDArray[np.int64]) -> Rows:
        numbers = range(len(self.segments))[segments] if isinstance(segments, slice) else segments.tolist()
        return Rows(
            self.ids[at],
            self.trained[at],
            self.segments[segments],
            counts,
            {name: [column[number] for number in numbers] for name, column in self.values.items()},
            {name: column[at] for name, column in self.tokens.items()},
        )

    def save(self, path: Path) -> None:
        """Write the rows, the same bytes for the same rows."""
        columns: dict[str, Any] = {f"token {name}": column for name, column in self.tokens.items()}
        columns |= {name: getattr(self, name) for name in ("ids", "segments", "counts")}
        columns["trained"] = np.packbits(self.trained)
        kept = {"values": self.values, "dtypes": {name: column.dtype.str for name, column in self.tokens.items()}}
        columns["kept"] = np.frombuffer(json.dumps(kept, default=_as_text).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez(file, **columns)

    @staticmethod
    def outline(path: Path) -> Outline:
        """Reads the outline of saved rows, without their tokens."""
        with np.load(path) as held:
            return Outline(held["segments"], **json.loads(held["kept"].tobytes()))

    @staticmethod
    def load(path: Path) -> Rows:
        with np.load(path) as held:
            ids = held["ids"]
            return Rows(
                ids,
                np.unpackbits(held["trained"], count=len(ids)).astype(np.bool_),
                held["segments"],
                held["counts"],
                json.loads(held["kept"].tobytes())["values"],
                {name[6:]: held[name] for name in held.files if name.startswith("token ")},
            )


class Outline(NamedTuple):
    """The tokens of each segment, the values of the records, and the dtypes of columns of tokens."""

    segments: NDArray[np.int64]
    values: dict[str, list[Any]]
    dtypes: dict[str, str]


def _as_text(value: Any) -> str:
    """Returns a date as text, which JSON has in its place.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"of type {type(value).__name__}")


def check_values(record: Mapping[str, Any], keep: Iterable[str], where: Any) -> None:
    """Raises PackingError if a column to carry has a value of which a file has no type."""
    for name in keep:
        value = record.get(name)
        if value is None or isinstance(value, str | int | float):
            continue
        try:
            json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, default=_as_text)
        except (TypeError, ValueError) as error:
            raise PackingError(
                f"{where}: --keep {name} has a value {first_line(error)}, and numbers, texts, dates, and lists and "
                "objects of them are carried: leave the column out"
            ) from None


def check_kept(values: Iterable[str], tokens: Iterable[str]) -> None:
    """Raises PackingError if a column is among the values of records and among the columns of tokens."""
    for name in {*values}.intersection(tokens):
        raise PackingError(
            f"--keep {name}: some records have a number for each token and others do not: give all of them such a "
            "list, or leave the column out"
        )


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one after the other; there is at least one part.

    Raises:
        PackingError: a column has numbers for tokens in one part, and values for records in another.
    """
    first = parts[0]
    check_kept((name for part in parts for name in part.values), (name for part in parts for name in part.tokens))
    if len(parts) == 1:
        return first
    return Rows(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.trained for part in parts]),
        np.concatenate([part.segments for part in parts]),
        np.concatenate([part.counts for part in parts]),
        {name: [value for part in parts for value in part.values[name]] for name in first.values},
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in first.tokens},
    )


@dataclass
class Gathered:
    """Documents that are added one by one and become Rows of one segment each."""

    dtype: type[np.unsignedinteger[Any]] | type[np.signedinteger[Any]]
    ids: list[Array] = field(default_factory=list)
    trained: list[Array] = field(default_factory=list)
    values: dict[str, list[Any]] = field(default_factory=dict)
    tokens: dict[str, list[Array]] = field(default_factory=dict)

    def add(self, ids: Array, trained: Array, values: Mapping[str, Any], tokens: Mapping[str, Array]) -> None:
        self.ids.append(ids)
        self.trained.append(trained)
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)
        for name, column in tokens.items():
            self.tokens.setdefault(name, []).append(column)

    def rows(self) -> Rows:
        """Each document as a row.

        Raises:
            PackingError: a token id does not fit the dtype, or a column has numbers for the tokens of some documents.
        """
        check_kept(self.values, self.tokens)
        ids = np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)
        if len(ids) and (largest := int(ids.max())) > np.iinfo(self.dtype).max:
            raise PackingError(
                f"there is the token id {largest} and the tokenizer has no more than {np.iinfo(self.dtype).max + 1:,} "
                f"entries: pass the tokenizer that the ids were made with"
            )
        return Rows(
            ids.astype(self.dtype, copy=False),
            np.concatenate(self.trained) if self.trained else np.zeros(0, np.bool_),
            np.array([len(document) for document in self.ids], np.int64),
            np.ones(len(self.ids), np.int64),
            self.values,
            {name: np.concatenate(columns) for name, columns in self.tokens.items()},
        )
