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
from packing_core.planning.pieces import CUTS
from packing_core.planning.rule import RowRule
from packing_core.training.schedule import Document


@dataclass
class Fit:
    """Cuts documents to the capacity, and leaves out what has nothing to train on afterwards.

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
                piece = Document(document.ids[span.places], document.trained[span.places].copy())
                piece.trained[: span.untrained] = False
                if piece.has_target:
                    self.documents = whole + 1
                    columns = {name: column[span.places] for name, column in encoded.columns.items()}
                    yield Encoded(encoded.where, encoded.record, piece, columns)
                else:
                    self.note("untrained", encoded.where, len(piece.ids))
