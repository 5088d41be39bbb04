"""``overflow``: documents of any length in, documents of at most a row out.

The planner could cut them too, but knows them by number; here each is cut as it comes and known by file and line. Every
document that does not reach the rows, or not whole, is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from crosspack.encoding.text import Encoded
from crosspack.encoding.tokens import check_length
from packing_core.planning.pieces import Overflow, parts_of
from packing_core.training.schedule import Document


@dataclass
class Fit:
    """Cuts documents to the capacity, and leaves out what has nothing to train on afterwards.

    Attributes:
        capacity: tokens of a row.
        overflow: what to do with a longer document.
        note: called with what happened to a document, or a piece of one, its place and its tokens: ``dropped``,
            ``truncated``, and ``untrained`` for pieces that have no trained token and are left out.
        documents: documents so far that are in the rows, whole or not.
    """

    capacity: int
    overflow: Overflow
    note: Callable[[str, Any, int], None]
    documents: int = 0

    def pieces(self, documents: Iterable[Encoded]) -> Iterator[Encoded]:
        """The documents, or what is kept of them.

        Raises:
            CapacityError: one is too long and ``overflow`` is ``"error"``.
        """
        for found in documents:
            document, length, whole = found.document, len(found.document.ids), self.documents
            if length <= self.capacity:
                self.documents += 1
                yield found
                continue
            if self.overflow == "error":
                check_length(str(found.where), document, self.capacity)
            elif self.overflow != "split":
                self.note("dropped" if self.overflow == "drop" else "truncated", found.where, length)
            for begin, end in parts_of(length, self.capacity, self.overflow):
                cut = slice(begin, end)
                piece = Document(document.ids[cut].copy(), document.trained[cut].copy())
                if piece.has_target:
                    self.documents = whole + 1
                    columns = {name: column[cut].copy() for name, column in found.columns.items()}
                    yield Encoded(found.where, found.record, piece, columns)
                else:
                    self.note("untrained", found.where, len(piece.ids))
