"""The unit of work: a piece of the input in, full packed rows and a few documents left over out, on disk.

A unit knows nothing of the others, so any number of processes, or machines, can work on units in any order, and the
result is the same. Documents that would leave a row partly empty are not packed here: they are handed on, and those of
all units are packed together at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from crosspack.encoding.kinds import check_key, checked, key_of
from crosspack.encoding.text import Encoded, Encoder
from crosspack.encoding.tokens import check_length
from crosspack.packing.row_files import Gathered, Rows, check_values
from crosspack.reading.places import BadRecord, Item, Piece, Row
from packing_core.errors import PackingError
from packing_core.planning.pieces import CUTS
from packing_core.planning.plan import plan
from packing_core.planning.rule import RowRule
from packing_core.streaming.rounds import full_rows
from packing_core.training.files import written_beside
from packing_core.training.schedule import EncodedDocument

OnError = Literal["stop", "skip", "quarantine"]

# A unit defers at most max(tokens / 8, min(64 rows, 2**20 tokens)).
HANDED_ON, FEW_ROWS, FEW_TOKENS = 8, 64, 1 << 20
SHOWN = 1 << 16  # characters of a bad record that are kept
KEY = "order key"  # among the values of documents that are handed on to be ordered
PARTIAL = ".partial-"  # how names of files begin that are not finished


class Key(NamedTuple):
    """Identifies a unit: the number of its stretch of the input, and of its piece of the stretch."""

    stretch: int
    piece: int

    def file(self, folder: Path, kind: Literal["rows", "left", "notes", "bad"]) -> Path:
        """Returns the file of a unit: its full rows, the documents it hands on, its notes, or its bad records."""
        return folder / f"{self.stretch:07d}-{self.piece:07d}.{kind}"


@dataclass
class Fit:
    """Cuts documents to the capacity, and leaves out what has nothing to train on afterwards.

    The planner could cut them too, but knows them by number; here each is cut as it comes and known by file and line.

    Attributes:
        rule: what to do with a document longer than a row.
        note: called with what happened to a document, or a piece of one, its place and its tokens: ``dropped``,
            ``truncated``, and ``untrained`` for pieces that have no trained token and are left out.
        documents: documents so far that are in the rows, whole or not.
    """

    rule: RowRule
    note: Callable[[str, Any, int], None]
    documents: int = 0

    def pieces(self, documents: Iterable[Encoded]) -> Iterator[Encoded]:
        """The documents, or what is kept of them.

        Raises:
            CapacityError: one is too long and ``overflow`` is ``"error"``.
        """
        for encoded in documents:
            document, length, whole = encoded.document, len(encoded.document.ids), self.documents
            if length <= self.rule.capacity:
                self.documents += 1
                yield encoded
                continue
            overflow = self.rule.overflow
            if overflow == "error":
                check_length(str(encoded.where), document, self.rule.capacity)
            elif overflow not in CUTS:
                self.note("dropped" if overflow == "drop" else "truncated", encoded.where, length)
            for span in self.rule.parts_of(length):
                piece = EncodedDocument(document.ids[span.places], document.trained[span.places].copy())
                piece.trained[: span.untrained] = False
                if piece.has_target:
                    self.documents = whole + 1
                    columns = {name: column[span.places] for name, column in encoded.columns.items()}
                    yield Encoded(encoded.where, encoded.record, piece, columns)
                else:
                    self.note("untrained", encoded.where, len(piece.ids))


@dataclass(frozen=True)
class Rules:
    """Settings that decide the content of the rows.

    Attributes:
        rows: the rule of the rows, whose ``keys`` name the column that holds the key of each record.
        equal_step: rows of a step, which are to cost the same; None for rows of any cost.
        dtype: of the token ids, ``uint16`` or ``int32``.
        keep: columns of the records that are carried into the packed files.
    """

    rows: RowRule
    seed: int
    size: int
    dtype: str
    keep: tuple[str, ...] = ()
    equal_step: int | None = None

    @property
    def planned_at_once(self) -> bool:
        """Returns whether one plan of all documents decides the rows: units pack nothing and hand all of them on."""
        return self.rows.order != "random" or self.equal_step is not None


@dataclass
class Outcome:
    """Result of a finished unit, which is a line of the journal, or the sum over several.

    Attributes:
        stretch, piece: of the unit; -1 and -1 of a sum.
        left: documents handed on, and their tokens.
        keys: where the first record stands whose key is a text, and the first whose key is a number.
    """

    stretch: int
    piece: int
    size: int = 0
    records: int = 0
    documents: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    left: int = 0
    left_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return Key(self.stretch, self.piece)

    def add(self, unit: Outcome) -> None:
        """Adds what is counted of a unit."""
        for name in ("size", "records", "documents", "rows", "tokens", "trained", "left", "left_tokens"):
            setattr(self, name, getattr(self, name) + getattr(unit, name))
        self.counts = dict(Counter(self.counts) + Counter(unit.counts))


def make_unit(key: Key, piece: Piece, encoder: Encoder, rules: Rules, on_error: OnError, folder: Path) -> Outcome:
    """Encode and pack a piece, and write what comes of it to ``folder``, complete or not at all.

    Raises:
        PackingError: the piece has a record that cannot be used, under ``on_error="stop"``.
    """
    outcome = Outcome(*key, size=piece.size)
    notes: list[dict[str, Any]] = []
    bad: list[dict[str, str]] = []

    def refuse(record: BadRecord, error: PackingError) -> None:
        if on_error == "stop":
            raise error
        text = {"record": record.text[:SHOWN]} if on_error == "quarantine" else {}
        bad.append({"where": record.where, "error": record.reason, **text})

    fit = Fit(rules.rows, lambda what, where, n: notes.append(_note(what, where, n)))
    gathered = Gathered(np.dtype(rules.dtype).type)

    def counted() -> Iterator[Item]:
        for item in piece.items:
            outcome.records += 1
            yield item

    def check(record: Row) -> None:
        check_key(record, rules.rows.keys)
        check_values(record, rules.keep, record.where)

    records = checked(counted(), check, refuse)
    for encoded in fit.pieces(encoder.encoded(records, refuse, partial(fit.note, "left_out"))):
        values, tokens = _kept(encoded, rules.keep)
        if rules.rows.keys is not None:
            values[KEY] = key_of(encoded.where, encoded.record, rules.rows.keys)
            outcome.keys.setdefault("text" if isinstance(values[KEY], str) else "number", str(encoded.where))
        gathered.add(encoded.document.ids, encoded.document.trained, values, tokens)
    documents = gathered.rows()
    full, left = (documents[:0], documents) if rules.planned_at_once else pack_documents(documents, rules, key)
    outcome.documents = fit.documents
    outcome.rows, outcome.tokens, outcome.trained = len(full), len(full.ids), int(np.count_nonzero(full.targets))
    outcome.left, outcome.left_tokens = len(left), len(left.ids)
    outcome.counts = dict(Counter([*(note["what"] for note in notes), *("bad" for _ in bad)]))
    contents: dict[Any, Any] = {"rows": full, "left": left, "notes": notes, "bad": bad}
    for kind, content in contents.items():
        if len(content):
            write(key.file(folder, kind), content)
    return outcome


def _note(what: str, where: Any, tokens: int) -> dict[str, Any]:
    return {"what": what, "where": str(where), "tokens": tokens}


def _kept(encoded: Encoded, keep: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns to carry: a value of the record for its segments, or one for each token of the piece."""
    values: dict[str, Any] = {}
    tokens: dict[str, Any] = {}
    for name in keep:
        value = str(encoded.where) if name == "where" and name not in encoded.record else encoded.record.get(name)
        if isinstance(value, list | np.ndarray) and name in encoded.columns:
            tokens[name] = encoded.columns[name]
        else:
            values[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return values, tokens


def pack_documents(documents: Rows, rules: Rules, key: Key, *, all_rows: bool = False) -> tuple[Rows, Rows]:
    """The rows that are full, or all of them, and the documents of the others, in their order."""
    if not len(documents):
        return documents, documents
    seed = int(np.random.SeedSequence([rules.seed, *key]).generate_state(1)[0])
    rows = plan(documents.segments, rules.rows, seed=seed)
    counts = np.diff(rows.row_offsets)
    if all_rows:
        return documents.take(rows.source, counts), documents[:0]
    tokens = rows.row_tokens
    fullest, full = full_rows(rows)
    gone = np.cumsum(tokens[fullest])
    most = max(2 * rules.rows.capacity, min(FEW_ROWS * rules.rows.capacity, FEW_TOKENS), int(gone[-1]) // HANDED_ON)
    enough = int(np.searchsorted(gone, gone[-1] - most)) + 1 if gone[-1] > most else 0
    leave = np.zeros(rows.n_rows, np.bool_)
    leave[fullest[: max(enough, full)]] = True
    goes = np.repeat(leave, counts)
    left = np.sort(rows.source[~goes])
    return documents.take(rows.source[goes], counts[leave]), documents.take(left, np.ones(len(left), np.int64))


def write(path: Path, content: Rows | list[dict[str, Any]]) -> None:
    """Write a file that is whole under its name, also after a power cut."""
    with written_beside(path, PARTIAL) as unfinished:
        if isinstance(content, Rows):
            content.save(unfinished)
        else:
            unfinished.write_text("".join(json.dumps(line) + "\n" for line in content))
