"""Finds data that will train badly, for ``crosspack report``: documents as they are read in, warnings in words out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosspack.encoding.kinds import Where
from crosspack.encoding.text import Encoder
from crosspack.encoding.tokens import check_length, token_documents
from crosspack.packing.unit import Key, Outcome
from crosspack.reading.places import Piece, Row, strictly
from packing_core.errors import PackingError, plural
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan
from packing_core.storage.arrays import Int64
from packing_core.training.schedule import EncodedDocument

ROWS_PER_STEP = 8
KEPT = 20_000  # documents of which it is remembered which tokens carry loss, for the rows that the page shows
NEAR_EMPTY = 0.1  # of the targets of the median step
FULL = 0.95  # of shorter rows
FEW, TAIL = 0.01, 4  # documents that are the tail, and how many times shorter rows would hold the others


@dataclass(frozen=True)
class Concern:
    """A warning.

    Attributes:
        count: documents or steps that it is about.
    """

    kind: str
    count: int
    text: str


class DocumentFigures:
    """Keeps two numbers and a digest of each document as it is read.

    Attributes:
        one_token: documents of one token, which are no segments of rows here: nothing predicts their token.
        unanswered: longer documents of which no token is trained.
        left_out: all documents that have nothing to train on.
        masks: of the first ``KEPT`` documents which tokens are trained, as bits.
    """

    def __init__(self) -> None:
        self._lengths, self._trained, self._digests = array("q"), array("q"), array("Q")
        self.one_token = self.unanswered = self.left_out = 0
        self.masks: list[NDArray[np.uint8]] = []

    def add(self, document: EncodedDocument) -> None:
        """Keep the figures of a document that is packed."""
        self._lengths.append(len(document.ids))
        self._trained.append(int(np.count_nonzero(document.trained[1:])))
        self._digests.append(int.from_bytes(blake2b(document.ids.tobytes(), digest_size=8).digest(), "little"))
        if len(self.masks) < KEPT:
            self.masks.append(np.packbits(document.trained))

    def extend(self, later: DocumentFigures) -> None:
        """Keep the figures of documents that follow."""
        for name in ("_lengths", "_trained", "_digests"):
            getattr(self, name).extend(getattr(later, name))
        for name in ("one_token", "unanswered", "left_out"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.masks += later.masks[: KEPT - len(self.masks)]

    def __len__(self) -> int:
        return len(self._lengths)

    def leave_out(self, where: Any, tokens: int) -> None:
        """Count a document that has nothing to train on; an empty one is no concern."""
        self.left_out += 1
        self.one_token += tokens == 1
        self.unanswered += tokens > 1

    @property
    def lengths(self) -> Int64:
        """int64 [N] tokens of each document."""
        return np.array(self._lengths, np.int64)

    @property
    def trained(self) -> Int64:
        """int64 [N] targets of each document."""
        return np.array(self._trained, np.int64)

    @property
    def repeated(self) -> int:
        """Documents that repeat an earlier one, token for token."""
        return len(self._digests) - len(np.unique(np.array(self._digests, np.uint64)))


def read_figures(
    encoder: Encoder | None, capacity: int | None, key: Key, piece: Piece
) -> tuple[Outcome, DocumentFigures]:
    """Returns the count and the figures of a piece of the data.

    Args:
        encoder: of the records; None where they hold token ids.
        capacity: a longer document is an error that names its place; None if there is none.
    """
    seen = DocumentFigures()
    if encoder is None:
        documents = _held(strictly(piece.items), seen)
    else:
        encoded = encoder.encoded(strictly(piece.items), left_out=seen.leave_out)
        documents = ((found.where, found.document) for found in encoded)
    for where, document in documents:
        if capacity is not None:
            check_length(str(where), document, capacity)
        seen.add(document)
    return Outcome(*key, piece.size, documents=len(seen), left_tokens=int(seen.lengths.sum())), seen


def _held(records: Iterator[Row], seen: DocumentFigures) -> Iterator[tuple[Where, EncodedDocument]]:
    """Yields the documents of records of token ids; packed rows are cut into theirs."""
    for record in records:
        if record.get("input_ids") is None:
            raise PackingError(f"{record.where} holds no token ids, as the records before it do: pass --tokenizer")
        for document, _ in token_documents(record, record.where, {}):
            if document.has_target:
                yield record.where, document
            else:
                seen.leave_out(record.where, len(document.ids))


def concerns(seen: DocumentFigures, rows: PackPlan) -> list[Concern]:
    """The warnings about documents and the rows that were planned of them."""
    lengths, trained = seen.lengths, seen.trained
    last_alone = int(np.count_nonzero((trained == 1) & (lengths > 2)))
    tail, enough = _tail(lengths, rows.capacity)
    empty = near_empty_steps(rows, lengths, trained)
    found = [
        Concern(
            "one_token",
            seen.one_token,
            f"{plural(seen.one_token, 'document')} of one token: nothing predicts it, so nothing is trained; put it "
            "into the document that it belongs to",
        ),
        Concern(
            "unanswered",
            seen.unanswered,
            f"{plural(seen.unanswered, 'document')} without a trained token, such as prompts without an answer: they "
            "are left out; add the answers, or pass --loss all",
        ),
        Concern(
            "last_token_alone",
            last_alone,
            f"{plural(last_alone, 'document')} of which one token is trained, such as prompts that EOS alone follows: "
            "they teach the model to end; leave them out, or add the answers",
        ),
        Concern(
            "repeated",
            seen.repeated,
            f"{plural(seen.repeated, 'document')} ({seen.repeated / len(lengths):.1%}) the same as an earlier one, "
            "token for token: they are trained once more each; remove them if you do not mean that",
        ),
        Concern(
            "tail",
            tail,
            f"{plural(tail, 'document')} ({tail / len(lengths):.2%}) set the capacity of {rows.capacity:,}: rows of "
            f"{enough:,} hold all others, in less memory; pass --capacity {enough} and an --overflow for the rest",
        ),
        Concern(
            "near_empty_steps",
            empty,
            f"{plural(empty, 'step')} of {ROWS_PER_STEP} rows with less than a tenth of the median step's targets: "
            "their gradients are noise at full learning rate; take more rows a step, or leave out long prompts",
        ),
    ]
    return [concern for concern in found if concern.count]


def _tail(lengths: Int64, capacity: int) -> tuple[int, int]:
    """Documents that alone need rows of this capacity, and the capacity whose rows all others fill; else 0."""
    most = int(np.quantile(lengths, 1 - FEW, method="lower"))
    enough = 1 << (most - 1).bit_length()
    others = lengths[lengths <= enough]
    while TAIL * enough <= capacity and plan(others, enough, strategy="best_fit").efficiency < FULL:
        enough *= 2
    longer = int(np.count_nonzero(lengths > enough))
    return (longer if longer <= FEW * len(lengths) and TAIL * enough <= capacity else 0), enough


def near_empty_steps(rows: PackPlan, lengths: Int64, trained: Int64) -> int:
    """Counts steps with less than ``NEAR_EMPTY`` of the targets of the median step.

    A piece of a document that was cut counts by its share of the document's tokens.
    """
    share = rows.length / lengths[rows.source]
    of_row = np.add.reduceat(trained[rows.source] * share, rows.row_offsets[:-1])
    of_step = np.add.reduceat(of_row, np.arange(0, rows.n_rows, ROWS_PER_STEP))
    return int(np.count_nonzero(of_step < NEAR_EMPTY * np.median(of_step)))
