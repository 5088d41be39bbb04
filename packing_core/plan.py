"""Lengths in, PackPlan out: which piece of which document goes into which row. No tokens pass through here.

``plan`` checks and cuts the lengths (``_pieces``), packs their counts into rows (``_bins``), shuffles the rows and
writes them down as a ``PackPlan``, which everything else reads: ``pack`` and ``PackedDataset`` materialise it,
``balance`` deals its rows to ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core import _bins
from packing_core._pieces import Overflow, check_lengths, choice, cut, positive
from packing_core.errors import CapacityError, LayoutError, PackingError

Int64 = NDArray[np.int64]
Strategy = Literal["best_fit", "first_fit", "sequential"]
Effort = Literal["fast", "max"]


def _none() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Rows of pieces of documents, as CSR arrays: piece p is ``length[p]`` tokens of ``source[p]`` from ``start[p]``.

    A plan holds no tokens. Its arrays are read-only views, and its invariants are checked when it is made: every row
    has a piece and fits the capacity, and no token of a document stands in two places.

    >>> packed = plan([5, 3, 4, 4], capacity=8, seed=None)
    >>> packed.to_lists(), packed.efficiency
    ([[0, 1], [2, 3]], 1.0)

    Attributes:
        row_offsets: int64 [R+1]; row r holds pieces ``row_offsets[r]:row_offsets[r+1]``, in their order in the row.
        source: int64 [P] document index.
        start: int64 [P] first token of the piece within its document (0 unless the document was split).
        length: int64 [P] tokens of the piece, at least 1.
        capacity: tokens a row can hold, a multiple of ``alignment``.
        alignment: every piece starts at a multiple of this within its row.
        n_documents: how many lengths the plan was made from.
        dropped: int64, ids of documents left out under ``overflow="drop"``, ascending.
        truncated: int64, ids of documents cut under ``overflow="truncate"``, ascending.

    Raises:
        LayoutError: the arrays contradict each other.
        CapacityError: a row holds more than ``capacity`` tokens, or ``alignment`` does not divide ``capacity``.
    """

    row_offsets: Int64
    source: Int64
    start: Int64
    length: Int64
    _: KW_ONLY
    capacity: int
    n_documents: int
    alignment: int = 1
    dropped: Int64 = field(default_factory=_none)
    truncated: Int64 = field(default_factory=_none)

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            given = _read_only(entry.name, value) if entry.name not in _NUMBERS else positive(entry.name, value)
            object.__setattr__(self, entry.name, given)
        check_alignment(self.capacity, self.alignment)
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
        if (row := _first(np.diff(self.row_offsets) < 1)) is not None:
            raise LayoutError(f"row {row} has no piece: row_offsets must increase from row to row")
        if self.length.min() < 1:
            raise LayoutError(f"piece {_first(self.length < 1)} has length {self.length.min()}: leave empty pieces out")
        room = self.length if self.alignment == 1 else -(-self.length // self.alignment) * self.alignment
        taken = np.add.reduceat(room, self.row_offsets[:-1])
        if taken.max() > self.capacity:
            row = int(taken.argmax())
            raise CapacityError(
                f"row {row} takes {taken[row]:,} tokens (alignment {self.alignment}) and capacity is {self.capacity:,}"
                ": put fewer pieces into it, or raise capacity"
            )

    def _check_documents(self) -> None:
        if self.source.min() < 0 or self.source.max() >= self.n_documents:
            piece = _first((self.source < 0) | (self.source >= self.n_documents))
            raise LayoutError(
                f"piece {piece} is of document {self.source[piece]}, and the plan has {self.n_documents:,} documents, "
                "counted from 0"
            )
        if self.start.min() < 0:
            raise LayoutError(f"piece {_first(self.start < 0)} starts at token {self.start.min()}: starts count from 0")
        for name, ids in (("dropped", self.dropped), ("truncated", self.truncated)):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.n_documents:
                raise LayoutError(f"{name} names a document outside 0..{self.n_documents - 1}")
        seen = np.zeros(self.n_documents, bool)
        seen[self.source] = True
        if np.count_nonzero(seen) < len(self.source):  # a document in several pieces: they must not overlap
            order = np.lexsort((self.start, self.source))
            document, start = self.source[order], self.start[order]
            overlap = (document[1:] == document[:-1]) & (start[1:] < start[:-1] + self.length[order[:-1]])
            if (at := _first(overlap)) is not None:
                raise LayoutError(
                    f"token {start[at + 1]} of document {document[at]} stands in two pieces, "
                    f"{order[at]} and {order[at + 1]}: a plan holds every token at most once"
                )
        if len(self.dropped) and seen[self.dropped].any():
            raise LayoutError(
                f"document {self.dropped[seen[self.dropped]][0]} is listed as dropped and stands in a row"
            )

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
        """Real tokens in all rows."""
        return int(self.length.sum())

    @property
    def efficiency(self) -> float:
        """Packing efficiency: real tokens / (rows * capacity)."""
        return self.n_tokens / (self.n_rows * self.capacity)

    @cached_property
    def row_tokens(self) -> Int64:
        """int64 [R] real tokens of each row."""
        return _frozen(np.add.reduceat(self.length, self.row_offsets[:-1]))

    @cached_property
    def offset(self) -> Int64:
        """int64 [P] where each piece begins within its row."""
        room = -(-self.length // self.alignment) * self.alignment
        begin = np.cumsum(room) - room
        return _frozen(begin - np.repeat(begin[self.row_offsets[:-1]], np.diff(self.row_offsets)))

    @cached_property
    def lower_bound(self) -> int:
        """No plan of these pieces has fewer rows (Martello and Toth 1990, bound L2, in units of the alignment)."""
        sizes, counts = np.unique(-(-self.length // self.alignment), return_counts=True)
        return _bins.lower_bound(sizes[::-1], counts[::-1], self.capacity // self.alignment)

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
            chosen = np.arange(self.n_rows)[rows]
        else:
            chosen = _read_only("rows", rows)
        if not len(chosen):
            raise LayoutError(f"no row of the {self.n_rows:,} is selected: a plan has at least one row")
        if chosen.min() < 0 or chosen.max() >= self.n_rows:
            wrong = chosen[(chosen < 0) | (chosen >= self.n_rows)][0]
            raise LayoutError(f"there is no row {wrong}: the plan has {self.n_rows:,} rows, counted from 0")
        counts = np.diff(self.row_offsets)[chosen]
        row_offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        pieces = np.arange(row_offsets[-1]) + np.repeat(self.row_offsets[chosen] - row_offsets[:-1], counts)
        return PackPlan(
            row_offsets,
            self.source[pieces],
            self.start[pieces],
            self.length[pieces],
            capacity=self.capacity,
            n_documents=self.n_documents,
            alignment=self.alignment,
            dropped=self.dropped,
            truncated=self.truncated,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path`` as an uncompressed ``.npz`` file of its arrays and numbers."""
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **{entry.name: getattr(self, entry.name) for entry in fields(self)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackPlan:
        """Read what ``save`` wrote, and check it again.

        Raises:
            LayoutError: the file is not a plan, or what it holds contradicts itself.
        """
        with np.load(path, allow_pickle=False) as stored:
            missing = [entry.name for entry in fields(cls) if entry.name not in stored]
            if missing:
                raise LayoutError(f"{os.fspath(path)!r} is not a saved plan: it has no {missing[0]!r}")
            values: dict[str, Any] = {entry.name: stored[entry.name] for entry in fields(cls)}
        return cls(**values | {name: int(values[name]) for name in _NUMBERS})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackPlan):
            return NotImplemented
        return all(np.array_equal(getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self))

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.n_rows:,} rows of {self.capacity:,}, {self.n_pieces:,} pieces, {self.n_tokens:,} tokens, "
            f"efficiency {self.efficiency:.4f})"
        )


_NUMBERS = ("capacity", "n_documents", "alignment")


def plan(
    lengths: ArrayLike,
    capacity: int,
    *,
    strategy: Strategy = "best_fit",
    effort: Effort = "fast",
    overflow: Overflow = "error",
    max_segments: int | None = None,
    alignment: int = 1,
    seed: int | None = 0,
    window: int | None = None,
) -> PackPlan:
    """Decide which document goes into which row.

    The same arguments give the same plan on every machine.

    >>> plan([5, 3, 4, 4, 9], capacity=8, overflow="split", seed=None).to_lists()
    Traceback (most recent call last):
    packing_core.errors.LayoutError: document 4 is split over several pieces, which a list of ids cannot say: read ...

    Args:
        lengths: [N] tokens of each document, integers of at least 1.
        capacity: tokens a row can hold.
        strategy: ``best_fit`` takes documents by decreasing length and puts each into the fullest row that takes it
            (best-fit-decreasing); ``first_fit`` into the earliest opened one (first-fit-decreasing); ``sequential``
            keeps the order of the documents and closes a row when the next one does not fit (next fit).
        effort: ``max`` improves on ``best_fit`` by column generation where that misses the lower bound by more than
            0.5%, at the cost of up to a second; the plan never gets worse.
        overflow: what to do with a document longer than ``capacity``. ``error`` raises, ``truncate`` keeps its first
            ``capacity`` tokens, ``split`` cuts it into pieces that become segments of their own, ``drop`` omits it.
        max_segments: most pieces in a row; None for no limit.
        alignment: every piece starts at a multiple of this within its row; it must divide ``capacity``.
        seed: shuffles the finished rows, so that planning order is not training order; None keeps the planner's.
        window: packs this many documents at a time, after shuffling the documents by ``seed``; rows are then shuffled
            inside their window only. None packs all at once.

    Returns:
        The plan. Documents dropped or truncated are listed in it.

    Raises:
        CapacityError: a document is longer than ``capacity`` under ``overflow="error"``, ``alignment`` does not divide
            ``capacity``, or nothing is left to pack.
        PackingError: any other argument makes no sense.
    """
    capacity, alignment = positive("capacity", capacity), positive("alignment", alignment)
    check_alignment(capacity, alignment)
    choice("strategy", strategy, _STRATEGIES)
    choice("effort", effort, ("fast", "max"))
    if effort == "max" and strategy != "best_fit":
        raise PackingError(f'effort="max" improves on strategy="best_fit" and cannot be combined with {strategy!r}')
    limit = None if max_segments is None else positive("max_segments", max_segments)
    shuffle = None if seed is None else np.random.PCG64(_seed(seed))
    lengths = check_lengths(lengths)
    pieces = cut(lengths, capacity, overflow)
    sizes = pieces.length if alignment == 1 else -(-pieces.length // alignment)

    if window is None:
        row_offsets, order = _rows(sizes, capacity // alignment, strategy, effort, limit, shuffle)
    else:
        row_offsets, order = _windows(
            sizes, capacity // alignment, strategy, effort, limit, shuffle, positive("window", window)
        )
    return PackPlan(
        row_offsets,
        order if pieces.source is None else pieces.source[order],
        np.zeros(len(order), np.int64) if pieces.start is None else pieces.start[order],
        pieces.length[order],
        capacity=capacity,
        n_documents=len(lengths),
        alignment=alignment,
        dropped=pieces.dropped,
        truncated=pieces.truncated,
    )


def _windows(
    sizes: Int64,
    capacity: int,
    strategy: Strategy,
    effort: Effort,
    max_segments: int | None,
    shuffle: np.random.PCG64 | None,
    window: int,
) -> tuple[Int64, Int64]:
    """``_rows`` on ``window`` pieces at a time, in an order shuffled before."""
    if shuffle is not None:
        taken = permutation(len(sizes), shuffle)
    else:
        taken = np.arange(len(sizes))
    offsets, orders = [np.zeros(1, np.int64)], []
    for begin in range(0, len(sizes), window):
        chosen = taken[begin : begin + window]
        row_offsets, order = _rows(sizes[chosen], capacity, strategy, effort, max_segments, shuffle)
        offsets.append(row_offsets[1:] + begin)
        orders.append(chosen[order])
    return np.concatenate(offsets), np.concatenate(orders)


def _rows(
    sizes: Int64,
    capacity: int,
    strategy: Strategy,
    effort: Effort,
    max_segments: int | None,
    shuffle: np.random.PCG64 | None,
) -> tuple[Int64, Int64]:
    """Row offsets [R+1] and the pieces' numbers [P] row by row, rows shuffled."""
    return _STRATEGIES[strategy](sizes, capacity, max_segments, shuffle)


def _decreasing(pack: Callable[[Int64, Int64, int, int], _bins.Layers]) -> _Strategy:
    """A strategy that hands the items' counts per size, by decreasing size, to ``pack``."""

    def rows(
        sizes: Int64, capacity: int, max_segments: int | None, shuffle: np.random.PCG64 | None
    ) -> tuple[Int64, Int64]:
        order = np.argsort(-sizes, kind="stable")
        ordered = sizes[order]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(np.append(first, len(sizes)))
        layers = pack(ordered[first], counts, capacity, min(max_segments or len(sizes), len(sizes)))
        place = np.arange(layers.n_rows) if shuffle is None else permutation(layers.n_rows, shuffle)
        return _bins.scatter(layers, order, place)

    return rows


def _sequential(
    sizes: Int64, capacity: int, max_segments: int | None, shuffle: np.random.PCG64 | None
) -> tuple[Int64, Int64]:
    row_offsets = _bins.next_fit(sizes, capacity, min(max_segments or len(sizes), len(sizes)))
    if shuffle is None:
        return row_offsets, np.arange(len(sizes))
    rows = permutation(len(row_offsets) - 1, shuffle)
    counts = np.diff(row_offsets)[rows]
    shuffled = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return shuffled, np.arange(len(sizes)) + np.repeat(row_offsets[rows] - shuffled[:-1], counts)


_Strategy = Callable[[Int64, int, int | None, np.random.PCG64 | None], tuple[Int64, Int64]]
_STRATEGIES: dict[str, _Strategy] = {
    "best_fit": _decreasing(_bins.best_fit),
    "first_fit": _decreasing(_bins.first_fit),
    "sequential": _sequential,
}


def permutation(n: int, bits: np.random.PCG64) -> Int64:
    """A permutation of 0..n-1 from raw random bits, whose stream NumPy promises to keep from version to version."""
    return np.argsort(bits.random_raw(n), kind="stable")


def check_alignment(capacity: int, alignment: int) -> None:
    """Raises:
    CapacityError: ``alignment`` does not divide ``capacity``.
    """
    if capacity % alignment:
        down = capacity - capacity % alignment
        near = f"{down} or {down + alignment}" if down else f"{alignment}"
        raise CapacityError(f"capacity {capacity} is not a multiple of alignment {alignment}: pass capacity {near}")


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise PackingError(f"seed must be an integer of at least 0, or None for no shuffling; got {seed!r}")
    return int(seed)


def _read_only(name: str, values: ArrayLike) -> Int64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise LayoutError(f"{name} must be a 1-D integer array; got {array.dtype} of shape {list(array.shape)}")
    return _frozen(array.astype(np.int64, copy=False).view())


def _frozen(array: Int64) -> Int64:
    array.flags.writeable = False
    return array


def _first(wrong: NDArray[np.bool_]) -> int | None:
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else None


def _ends(array: Int64) -> str:
    return f" from {array[0]} to {array[-1]}" if len(array) else ""
