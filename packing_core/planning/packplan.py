"""PackPlan: assigns pieces of documents to rows, as a few flat arrays, with statistics derived from them.

``plan`` makes one, ``pack`` and ``PackedDataset`` materialise its rows, ``balance`` deals them to ranks.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import CapacityError, LayoutError, naming
from packing_core.planning import bins as _bins
from packing_core.planning.composition import Composition, composition
from packing_core.planning.pieces import MOST_TOKENS, positive
from packing_core.storage.arrays import Int64, as_int64, frozen, read_only
from packing_core.storage.segment_indexing import indexes, offsets_of, sliced

_NUMBERS = ("capacity", "n_documents")
_LATER = ("context", "restarts")  # what files of earlier versions lack


def _none() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Rows of pieces of documents, as CSR arrays: piece p is ``length[p]`` tokens of ``source[p]`` from ``start[p]``.

    A plan holds no tokens. Its arrays are read-only views, and its invariants are checked when it is made: every row
    has a piece and fits the capacity, and no token of a document stands in two places.

    >>> from packing_core import plan
    >>> packed = plan([5, 3, 4, 4], capacity=8, seed=None)
    >>> packed.to_lists(), packed.efficiency
    ([[0, 1], [2, 3]], 1.0)

    Attributes:
        row_offsets: int64 [R+1]; row r holds pieces ``row_offsets[r]:row_offsets[r+1]``, in their order in the row.
        source: int64 [P] document index.
        start: int64 [P] first token of the piece within its document (0 unless the document was split).
        length: int64 [P] tokens of the piece, at least 1.
        capacity: tokens a row can hold.
        n_documents: how many lengths the plan was made from.
        dropped: int64, ids of documents left out under ``overflow="drop"``, ascending.
        truncated: int64, ids of documents cut under ``overflow="truncate"``, ascending.
        context: int64 [P] how many first tokens of each piece are context, which an earlier piece trains; empty if
            there is none.
        restarts: the context of a piece is the beginning of its document, put in place of the tokens before its own.

    Args:
        check: False where the caller has made sure of the invariants, as ``plan`` has.

    Raises:
        LayoutError: the arrays contradict each other.
        CapacityError: a row holds more than ``capacity`` tokens.
    """

    row_offsets: Int64
    source: Int64
    start: Int64
    length: Int64
    _: KW_ONLY
    capacity: int
    n_documents: int
    dropped: Int64 = field(default_factory=_none)
    truncated: Int64 = field(default_factory=_none)
    context: Int64 = field(default_factory=_none)
    restarts: bool = False
    check: InitVar[bool] = True

    def __post_init__(self, check: bool) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _NUMBERS:
                value = positive(entry.name, value)
            else:
                value = bool(value) if entry.name == "restarts" else read_only(as_int64(value, entry.name))
            object.__setattr__(self, entry.name, value)
        if check:
            self._check_rows()
            self._check_documents()

    def _check_rows(self) -> None:
        pieces = len(self.source)
        if not pieces == len(self.start) == len(self.length):
            raise LayoutError(
                f"source, start and length have {pieces}, {len(self.start)} and {len(self.length)} entries: "
                "pass one of each per piece"
            )
        if len(self.row_offsets) < 2 or self.row_offsets[0] != 0 or self.row_offsets[-1] != pieces:
            raise LayoutError(
                f"row_offsets must run from 0 to the number of pieces, {pieces}, over at least one row; got "
                f"{len(self.row_offsets)} entries{_ends(self.row_offsets)}"
            )
        if (row := _first(self.row_offsets[1:] <= self.row_offsets[:-1])) is not None:
            raise LayoutError(f"row {row} has no piece: row_offsets must increase from row to row")
        if self.length.min() < 1:
            raise LayoutError(f"piece {_first(self.length < 1)} has length {self.length.min()}: leave empty pieces out")
        if self.length.max() > MOST_TOKENS // pieces:
            raise LayoutError(
                f"lengths up to {self.length.max():,} over {pieces:,} pieces pass 2**60 tokens: use several plans"
            )
        if self.row_tokens.max() > self.capacity:
            row = int(self.row_tokens.argmax())
            raise CapacityError(
                f"row {row} takes {self.row_tokens[row]:,} tokens and capacity is {self.capacity:,}: put fewer pieces "
                "into it, or raise capacity"
            )

    def _check_documents(self) -> None:
        if len(self.context) and len(self.context) != len(self.source):
            raise LayoutError(
                f"context has {len(self.context)} entries and there are {len(self.source)} pieces: pass one each"
            )
        if (piece := _first((self.context < 0) | (self.context >= self.length[: len(self.context)]))) is not None:
            raise LayoutError(
                f"piece {piece} has {self.context[piece]} tokens of context and length {self.length[piece]}: a piece "
                "has a token of its own after its context, so give it less context"
            )
        if self.source.min() < 0 or self.source.max() >= self.n_documents:
            piece = _first((self.source < 0) | (self.source >= self.n_documents))
            raise LayoutError(
                f"piece {piece} is of document {self.source[piece]}, and the plan has {self.n_documents:,} documents: "
                f"name 0 to {self.n_documents - 1}"
            )
        if self.start.min() < 0:
            raise LayoutError(f"piece {_first(self.start < 0)} starts at token {self.start.min()}: starts count from 0")
        if self.start.max() > MOST_TOKENS:
            raise LayoutError(
                f"piece {self.start.argmax()} starts at {self.start.max():,}: no document is that long, "
                "so pass the place of its first token in its document"
            )
        for name, ids in (("dropped", self.dropped), ("truncated", self.truncated)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.n_documents:
                raise LayoutError(f"{name} names a document outside 0..{self.n_documents - 1}")
        seen = np.unique(self.source)
        if len(seen) < len(self.source):  # a document in several pieces: they must not overlap
            own = self.start + self.context if len(self.context) else self.start
            order = np.lexsort((own, self.source))
            document, start = self.source[order], own[order]
            overlap = (document[1:] == document[:-1]) & (start[1:] < (self.start + self.length)[order[:-1]])
            if (at := _first(overlap)) is not None:
                raise LayoutError(
                    f"token {start[at + 1]} of document {document[at]} stands in two pieces, "
                    f"{order[at]} and {order[at + 1]}: a plan holds every token at most once"
                )
        if len(both := np.intersect1d(self.dropped, seen)):
            raise LayoutError(f"document {both[0]} is listed as dropped and stands in a row: list it once")

    @property
    def n_rows(self) -> int:
        """Number of rows R."""
        return len(self.row_offsets) - 1

    @property
    def n_pieces(self) -> int:
        """Number of pieces P, which become segments of the packed rows."""
        return len(self.source)

    @cached_property
    def n_tokens(self) -> int:
        """Real tokens in all rows, with the context of pieces."""
        return int(self.length.sum())

    @cached_property
    def untrained(self) -> Int64:
        """int64 [P] how many first tokens of each piece are no targets because of its context.

        Those are the context, and where a piece restarts its document the first token after it, which does not follow
        it there.
        """
        context = self.context if len(self.context) else np.zeros(self.n_pieces, np.int64)
        return frozen(context + (self.restarts & (context > 0)))

    @property
    def efficiency(self) -> float:
        """Packing efficiency: real tokens / (rows * capacity)."""
        return self.n_tokens / (self.n_rows * self.capacity)

    @cached_property
    def row_tokens(self) -> Int64:
        """int64 [R] real tokens of each row."""
        return frozen(np.add.reduceat(self.length, self.row_offsets[:-1]))

    @cached_property
    def offset(self) -> Int64:
        """int64 [P] where each piece begins within its row."""
        begin = np.cumsum(self.length) - self.length
        return frozen(begin - np.repeat(begin[self.row_offsets[:-1]], np.diff(self.row_offsets)))

    @cached_property
    def lower_bound(self) -> int:
        """No plan of these pieces has fewer rows (Martello and Toth 1990, bound L2)."""
        sizes, counts = np.unique(self.length, return_counts=True)
        return _bins.lower_bound(sizes[::-1], counts[::-1], self.capacity)

    @property
    def fingerprint(self) -> str:
        """Digest of which tokens stand in which row: plans are equal if theirs are."""
        hashed = blake2b(repr((self.capacity, self.n_documents)).encode(), digest_size=16)
        for array in (self.row_offsets, self.source, self.start, self.length, self.context):
            hashed.update(array.tobytes())
        if self.restarts:
            hashed.update(b"restarts")
        return hashed.hexdigest()

    def composition(self, rows_per_step: int = 8) -> Composition:
        """Measures how far rows and steps of ``rows_per_step`` rows are from random draws of the documents.

        Rows that do not make a whole step are left out of the figures of steps; fewer rows than a step are one step.
        """
        size = min(positive("rows_per_step", rows_per_step), self.n_rows)
        steps = np.arange(self.n_rows // size * size).reshape(-1, size)
        return composition(self.row_offsets, self.length, steps)

    def to_lists(self) -> list[list[int]]:
        """Document ids of each row, for samplers.

        Raises:
            LayoutError: a document was split, and an id alone does not say which piece of it is meant.
        """
        if np.count_nonzero(self.start):
            raise LayoutError(
                f"document {self.source[_first(self.start > 0)]} is split over several pieces, which a list of ids "
                "cannot say: read row_offsets, source, start and length instead"
            )
        flat = self.source.tolist()
        return [flat[begin:end] for begin, end in pairwise(self.row_offsets.tolist())]

    def select(self, rows: slice | Sequence[int] | Int64) -> PackPlan:
        """The plan of the given rows in the given order; ``n_documents``, ``dropped`` and ``truncated`` stay.

        Args:
            rows: a slice, or row numbers from 0 to R-1, each at most once.

        Raises:
            LayoutError: no row is left, a row does not exist, or a row is named twice.
        """
        if isinstance(rows, slice):
            chosen = sliced(rows, self.n_rows)
        else:
            chosen = as_int64(rows, "rows")
        if not len(chosen):
            raise LayoutError(f"no row of the {self.n_rows:,} is selected: a plan has at least one row")
        if chosen.min() < 0 or chosen.max() >= self.n_rows:
            wrong = chosen[(chosen < 0) | (chosen >= self.n_rows)][0]
            raise LayoutError(
                f"there is no row {wrong}: the plan has {self.n_rows:,} rows, so choose below that, from 0"
            )
        times = np.bincount(chosen)
        if times.max() > 1:
            raise LayoutError(f"row {times.argmax()} is selected twice: a plan holds every token at most once")
        counts = np.diff(self.row_offsets)[chosen]
        return self._of_pieces(indexes(self.row_offsets[chosen], counts), counts, self.capacity)

    def one_a_row(self, pieces: slice | Int64 = slice(None)) -> PackPlan:
        """The plan of pieces, each in a row of its own; rows are as long as the longest of them."""
        lengths = self.length[pieces]
        return self._of_pieces(pieces, np.ones_like(lengths), int(lengths.max()))

    def _of_pieces(self, pieces: slice | Int64, counts: Int64, capacity: int) -> PackPlan:
        return PackPlan(
            offsets_of(counts),
            self.source[pieces],
            self.start[pieces],
            self.length[pieces],
            capacity=capacity,
            n_documents=self.n_documents,
            dropped=self.dropped,
            truncated=self.truncated,
            context=self.context[pieces] if len(self.context) else self.context,
            restarts=self.restarts,
            check=False,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as an uncompressed ``.npz`` file of its arrays and numbers.

        Raises:
            PackingError: the file cannot be written.
        """
        with (
            naming(f"{path} cannot be written", way_out="pass the path of a file in a folder that exists"),
            open(path, "wb") as file,
        ):
            np.savez(file, allow_pickle=False, **{entry.name: getattr(self, entry.name) for entry in fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackPlan:
        """Read what ``save`` wrote, and check it again.

        Raises:
            LayoutError: what the file holds contradicts itself.
            PackingError: the file is not a plan.
        """
        with naming(f"{path} is not a saved plan", way_out="pass what PackPlan.save wrote"), open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise LayoutError(f"{os.fspath(path)!r} is not a saved plan: pass an .npz archive of PackPlan.save")
            file.seek(0)
            stored = np.load(file, allow_pickle=False)
            values: dict[str, Any] = {entry.name: stored[entry.name] for entry in fields(cls) if entry.name in stored}
            for entry in fields(cls):
                if entry.name not in values and entry.name not in _LATER:
                    raise LayoutError(
                        f"{os.fspath(path)!r} is not a saved plan, it has no {entry.name!r}: pass one of PackPlan.save"
                    )
            if stored.get("alignment", 1) != 1:  # of earlier versions
                raise LayoutError(f"{os.fspath(path)!r} has gaps by alignment={stored['alignment']}: plan it again")
            return cls(**values)

    def __reduce__(self) -> tuple[Any, ...]:  # pickling arrays would make them writeable
        return partial(PackPlan, check=False, **{entry.name: getattr(self, entry.name) for entry in fields(self)}), ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self))

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.n_rows:,} rows of {self.capacity:,}, {self.n_pieces:,} pieces, {self.n_tokens:,} tokens, "
            f"efficiency {self.efficiency:.4f})"
        )


def _first(wrong: NDArray[np.bool_]) -> int | None:
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else None


def _ends(array: Int64) -> str:
    return f" from {array[0]} to {array[-1]}" if len(array) else ""
