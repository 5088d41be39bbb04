"""``--overflow`` for ``crosspack pack``: documents of any length in, documents of at most a row out, in blocks.

The stream could cut them too, but it would hold whole documents meanwhile and know them by number; here each is cut as
it comes and known by file and line. Every document that does not reach the rows, or not whole, is noted in a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from crosspack.cli.options import check_length
from packing_core._pieces import Overflow
from packing_core.training.schedule import Document

# A block's pending documents take about 30 bytes a token while rows are made of them.
_BLOCK_TOKENS, _BLOCK_ROWS = 1 << 24, 16


@dataclass
class Fit:
    """Cuts documents to the capacity, and leaves out what has nothing to train on afterwards.

    Attributes:
        capacity: tokens of a row.
        overflow: what to do with a longer document.
        notes: the file that lists documents which are not whole in the rows, one JSON object a line.
        documents: documents so far that are in the rows, whole or not.
        counts: how many notes say what: ``left_out``, ``dropped``, ``truncated``, and ``untrained`` for pieces of
            documents that have no trained token and are left out.
    """

    capacity: int
    overflow: Overflow
    notes: TextIO
    documents: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, what: str, where: str, tokens: int) -> None:
        """Count and list a document, or a piece of one."""
        self.counts[what] += 1
        self.notes.write(json.dumps({"what": what, "where": where, "tokens": tokens}) + "\n")

    def blocks(self, documents: Iterable[tuple[str, Document]]) -> Iterator[Iterator[dict[str, Any]]]:
        """The pieces in blocks, each to be read to its end before the next: so much is packed together at most."""
        pieces = self._pieces(documents)
        limit = max(_BLOCK_TOKENS, _BLOCK_ROWS * self.capacity)
        for first in pieces:
            yield _block(first, pieces, limit)

    def _pieces(self, documents: Iterable[tuple[str, Document]]) -> Iterator[Document]:
        for where, document in documents:
            length, whole = len(document.ids), self.documents
            if self.overflow == "error":
                check_length(where, document, self.capacity)
            elif length > self.capacity and self.overflow != "split":
                self.note("dropped" if self.overflow == "drop" else "truncated", where, length)
                length = 0 if self.overflow == "drop" else self.capacity
            for begin in range(0, length, self.capacity):
                end = begin + self.capacity
                piece = Document(document.ids[begin:end].copy(), document.trained[begin:end].copy())
                if piece.has_target:
                    self.documents = whole + 1
                    yield piece
                else:
                    self.note("untrained", where, len(piece.ids))


def _block(first: Document, others: Iterator[Document], limit: int) -> Iterator[dict[str, Any]]:
    tokens, piece = 0, first
    while True:
        tokens += len(piece.ids)
        yield {"input_ids": piece.ids, "loss_mask": piece.trained}
        if tokens >= limit or (following := next(others, None)) is None:
            return
        piece = following
