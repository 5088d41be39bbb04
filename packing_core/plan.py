"""Lengths in, PackPlan out: which piece of which document goes into which row. No tokens pass through here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Rows of pieces of documents, as CSR arrays; piece p is ``length[p]`` tokens of document ``source[p]`` from ``start[p]``.

    Attributes:
        row_offsets: int64 [R+1]; row r holds pieces ``row_offsets[r]:row_offsets[r+1]``, in the order they stand in the row.
        source: int64 [P] document index.
        start: int64 [P] first token of the piece within its document (0 unless the document was split).
        length: int64 [P] tokens of the piece, at least 1.
        capacity: tokens a row can hold.
        alignment: every piece starts at a multiple of this within its row.
        n_documents: how many lengths the plan was made from.
        dropped: int64, ids of documents left out under ``overflow="drop"``.
        truncated: int64, ids of documents cut under ``overflow="truncate"``.
    """

    row_offsets: Int64
    source: Int64
    start: Int64
    length: Int64
    capacity: int
    alignment: int = 1
    n_documents: int = 0
    dropped: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    truncated: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def n_rows(self) -> int:
        return len(self.row_offsets) - 1
