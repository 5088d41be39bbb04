"""Documents that a stream has read and no row has taken yet: how they are measured and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NamedTuple

import numpy as np

from packing_core.batches.columns import TRAINED
from packing_core.errors import LayoutError, PackingError
from packing_core.planning.pieces import PieceSpan, integer, too_long
from packing_core.planning.rule import RowRule
from packing_core.storage.arrays import Int64
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import offsets_of

Piece = tuple[int, int, int, int, Any]  # document number, first token, length, context, content

PROMPT = "prompt_length"  # the one column that is a number per document


class Pending(NamedTuple):
    """Pieces that no row has taken yet: document number, first token, length, context and content of each."""

    ids: Int64
    starts: Int64
    lengths: Int64
    context: Int64
    contents: list[Any]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Pending:
        *columns, contents = zip(*pieces, strict=True) if pieces else ((), (), (), (), ())
        ids, starts, lengths, context = (np.array(column, np.int64) for column in columns)
        return cls(ids, starts, lengths, context, list(contents))

    def and_then(self, other: Pending) -> Pending:
        columns = map(np.concatenate, zip(self[:-1], other[:-1], strict=True))
        return Pending._make([*columns, self.contents + other.contents])

    def keep(self, places: Int64) -> Pending:
        columns = (column[places] for column in self[:-1])
        return Pending._make([*columns, [self.contents[i] for i in places.tolist()]])


@dataclass(frozen=True)
class Read:
    """Documents ``first``, ``first + 1``, ... that a round has read.

    Attributes:
        lengths: tokens of each. It may have one entry more than ``documents`` where an interrupt came between the two.
        cut: the pieces of the documents that are not one piece as they are, by place in ``documents``.
    """

    first: int
    documents: list[Any]
    lengths: list[int]
    cut: dict[int, list[Piece]]

    @property
    def end(self) -> int:
        """Number of the first document that was not read."""
        return self.first + len(self.documents)

    def pending(self) -> Pending:
        """Their pieces."""
        lengths = self.lengths[: len(self.documents)]
        if self.cut:
            whole = zip(count(self.first), repeat(0), lengths, repeat(0), self.documents)
            return Pending.of([piece for at, one in enumerate(whole) for piece in self.cut.get(at, (one,))])
        ids = np.arange(self.first, self.end)
        none = np.zeros_like(ids)
        return Pending(ids, none, np.array(lengths, np.int64), none, self.documents)


class Later:
    """A stretch of a document of known length, which is read when it is needed.

    Args:
        source, number, length: where the document is read, its number there, and its tokens.
        context: how many of its first tokens the document's beginning replaces.
    """

    __slots__ = ("context", "length", "number", "source", "start", "stop")

    def __init__(self, source: Any, number: int, length: int, start: int, stop: int, context: int = 0) -> None:
        self.source, self.number, self.length, self.start, self.stop = source, number, length, start, stop
        self.context = context

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, tokens: slice) -> Later:
        start, stop, _ = tokens.indices(len(self))
        return Later(self.source, self.number, self.length, self.start + start, self.start + stop)

    def read(self) -> Any:
        """The tokens, or the mapping that holds them.

        Raises:
            LayoutError: the document has another length than it was said to have.
        """
        document = self.source[self.number]
        length = length_of(document, self.number)
        if length != self.length:
            raise LayoutError(
                f"document {self.number} has {length:,} tokens and lengths says {self.length:,}: pass its own length"
            )
        whole = len(self) == length
        span = PieceSpan(self.start, self.stop, self.context, restarts=True)
        return document if whole else part(document, span, self.number)


def read_now(contents: list[Any]) -> list[Any]:
    """The documents, those that wait being read."""
    return [content.read() if type(content) is Later else content for content in contents]


def length_of(document: Any, number: int) -> int:
    """Tokens of a document.

    Raises:
        LayoutError: it is no document.
    """
    ids = document
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            found = ", ".join(map(str, document)) or "nothing"
            raise LayoutError(f"document {number} has {found} and no input_ids: tokenise it first")
        ids = document["input_ids"]
    try:
        if isinstance(ids, (str, bytes)):
            raise TypeError
        return len(ids)
    except TypeError:
        raise LayoutError(
            f"document {number} is a {type(ids).__name__}: pass an array of token ids, or a mapping with input_ids"
        ) from None


def cut(number: int, document: Any, length: int, rule: RowRule) -> list[Piece]:
    """The pieces of a document of ``length`` tokens: none where it is dropped.

    Raises:
        PackingError: it is empty, or too long (CapacityError).
    """
    if 0 < length <= rule.capacity:
        return [(number, 0, length, 0, document)]
    if length == 0:
        raise PackingError(f"document {number} is empty: leave empty documents out of the source")
    if rule.overflow == "error":
        raise too_long(number, length, rule.capacity)
    return [
        (number, span.begin, span.end - span.begin, span.context, part(document, span, number))
        for span in rule.parts_of(length)
    ]


def part(document: Any, span: PieceSpan, number: int) -> Any:
    """A part of a document and of all its columns.

    Raises:
        LayoutError: a column has not one entry per token, or the prompt is longer than the document.
    """
    start, stop, context, restarts = span

    def taken(column: Any) -> Any:
        if not (restarts and context):
            return column[start:stop]
        if isinstance(column, Later):
            return Later(column.source, column.number, column.length, start, stop, context)
        pieces = column[:context], column[start + context : stop]
        return pieces[0] + pieces[1] if isinstance(column, list | tuple) else np.concatenate(pieces)

    if not isinstance(document, Mapping):
        return taken(document)
    length = len(document["input_ids"])
    parts: dict[str, Any] = {}
    for name, column in _columns(document).items():
        if name == PROMPT:
            prompt = integer(column)
            if prompt is None or not 0 <= prompt <= length:
                raise LayoutError(f"{PROMPT} of document {number} is {column!r}: pass an integer from 0 to {length:,}")
            parts[name] = min(max(prompt - start, 0), stop - start)
            continue
        try:
            entries = len(column)
            parts[name] = taken(column)
        except Exception:  # it has no length, or cannot be sliced
            raise LayoutError(
                f"{name} of document {number} is a {type(column).__name__}: give it one entry per token"
            ) from None
        if entries != length:
            raise LayoutError(
                f"{name} of document {number} has {entries:,} entries and input_ids {length:,}: give one per token"
            )
    return parts


def columns_of(contents: list[Any], numbers: Int64) -> dict[str, Any]:
    """The arguments of ``pack`` that hold these documents; a token is trained if all of their masks train it.

    Raises:
        LayoutError: they have not all the same columns, or a mask is not one of each token.
    """
    if not any(issubclass(kind, Mapping) for kind in set(map(type, contents))):
        return {"sequences": contents}
    documents = [_columns(content) for content in contents]
    first = documents[0]
    for document, number in zip(documents, numbers.tolist(), strict=True):
        if document.keys() != first.keys():
            raise LayoutError(
                f"document {number} has {_listed(document)} and the first one has {_listed(first)}: "
                "give every document the same columns"
            )
    columns = {name: [document[name] for document in documents] for name in first}
    sequences = columns.pop("input_ids")
    masks = {name: columns.pop(name) for name in TRAINED if name in columns}
    arguments = {
        "sequences": sequences,
        "labels": columns.pop("labels", None),
        "loss_mask": _trained(masks, sequences),
        "prompt_lengths": columns.pop(PROMPT, None),
    }
    return {**arguments, "columns": columns}


def _trained(masks: Mapping[str, list[Any]], sequences: list[Any]) -> Ragged | None:
    """Reads one mask of each document out of those of all names.

    Raises:
        LayoutError: one has another length than its document, or something else than 0 and 1.
    """
    if not masks:
        return None
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    both = np.ones(int(lengths.sum()), np.bool_)
    for name, column in masks.items():
        mask = Ragged.of(column, name=name)
        if not np.array_equal(mask.lengths, lengths):
            raise LayoutError(f"{name} has not as many entries as input_ids: give one per token")
        entries = mask.flat().values
        if entries.dtype.kind not in "biu" or entries.min() < 0 or entries.max() > 1:
            raise LayoutError(f"{name} has entries other than 0 and 1: pass 1 (or True) at tokens that may be trained")
        both &= entries != 0
    return Ragged(both, offsets_of(lengths), name="loss_mask")


def _columns(content: Any) -> Mapping[str, Any]:
    """A document's columns; None stands for one that it does not have."""
    if not isinstance(content, Mapping):
        return {}
    return {name: column for name, column in content.items() if column is not None}


def _listed(columns: Mapping[str, Any]) -> str:
    return ", ".join(map(str, columns)) or "no columns"
