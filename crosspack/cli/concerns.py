"""Finds data that will train badly, for ``crosspack report``: documents as they are read in, warnings in words out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import plural
from packing_core.planning.packplan import PackPlan
from packing_core.planning.plan import plan
from packing_core.training.schedule import Document

Int64 = NDArray[np.int64]

ROWS_PER_STEP = 8
NEAR_EMPTY = 0.1  # of the targets of the median step
FULL = 0.95  # of shorter rows
FEW, TAIL = 0.01, 4  # documents that are the tail, and how many times shorter rows would hold the others


@dataclass(frozen=True)
class Concern:
    """A warning.

    Attributes:
        kind: its name among the figures.
        count: documents or steps that it is about.
        text: what is wrong, what it does to training, and the way out.
    """

    kind: str
    count: int
    text: str


class DocumentFigures:
    """Keeps two numbers and a digest of each document as it is read.

    Attributes:
        one_token: documents of one token, which are no segments of rows here: nothing predicts their token.
        unanswered: longer documents of which no token is trained.
    """

    def __init__(self) -> None:
        self._lengths, self._trained, self._digests = array("q"), array("q"), array("Q")
        self.one_token = self.unanswered = 0

    def add(self, document: Document) -> None:
        """Keep the figures of a document that is packed."""
        self._lengths.append(len(document.ids))
        self._trained.append(int(np.count_nonzero(document.trained[1:])))
        self._digests.append(int.from_bytes(blake2b(document.ids.tobytes(), digest_size=8).digest(), "little"))

    def leave_out(self, where: Any, tokens: int) -> None:
        """Count a document that has nothing to train on; an empty one is no concern."""
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
