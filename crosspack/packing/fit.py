"""``overflow``: documents of any length in, documents of at most a row out.

The planner could cut them too, but knows them by number; here each is cut as it comes and known by file and line. Every
document that does not reach the rows, or not whole, is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        for found in documents:
            document, length, whole = found.document, len(found.document.ids), self.documents
            if length <= self.rule.capacity:
                self.documents += 1
                yield found
                continue
            overflow = self.rule.overflow
            if overflow == "error":
                check_length(str(found.where), document, self.rule.capacity)
            elif overflow not in CUTS:
                self.note("dropped" if overflow == "drop" else "truncated", found.where, length)
            for begin, end, context in self.rule.parts_of(length):
                restarts = overflow == "restart" and context > 0
                cut = np.arange(begin, end)
                if restarts:
                    cut[:context] = np.arange(context)
                piece = Document(document.ids[cut], document.trained[cut])
                piece.trained[: context + restarts] = False  # an earlier piece trains them
                if piece.has_target:
                    self.documents = whole + 1
                    columns = {name: column[cut] for name, column in found.columns.items()}
                    yield Encoded(found.where, found.record, piece, columns)
                else:
                    self.note("untrained", found.where, len(piece.ids))
