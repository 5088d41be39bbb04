"""Packing by the textbook, one document and one row at a time: what planners are compared with. Slow and plain.

Rows are lists of document numbers, in the order in which they were opened and filled; documents of equal length are
taken in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rows = list[list[int]]


def best_fit_decreasing(lengths: Sequence[int], capacity: int, max_segments: int | None = None) -> Rows:
    """Longest first, each into the fullest row that takes it: fewest segments, then earliest opened among equals."""
    return _decreasing(lengths, capacity, max_segments, lambda row: (-tokens_of(row, lengths), len(row)))


def first_fit_decreasing(lengths: Sequence[int], capacity: int, max_segments: int | None = None) -> Rows:
    """Longest first, each into the earliest opened row that takes it."""
    return _decreasing(lengths, capacity, max_segments, lambda row: 0)


def sequential(lengths: Sequence[int], capacity: int, max_segments: int | None = None) -> Rows:
    """In the order given; a row is closed as soon as the next document does not fit (next fit)."""
    rows: Rows = []
    for document in range(len(lengths)):
        if not rows or not fits(rows[-1], document, lengths, capacity, max_segments):
            rows.append([])
        rows[-1].append(document)
    return rows


STRATEGIES = {"best_fit": best_fit_decreasing, "first_fit": first_fit_decreasing, "sequential": sequential}


def fits(
    row: Sequence[int], document: int, lengths: Sequence[int], capacity: int, max_segments: int | None = None
) -> bool:
    """Returns whether ``document`` fits in ``row`` after the documents already there."""
    return len(row) != max_segments and tokens_of(row, lengths) + lengths[document] <= capacity


def tokens_of(row: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[document] for document in row)


def _decreasing(
    lengths: Sequence[int], capacity: int, max_segments: int | None, preference: Callable[[list[int]], Any]
) -> Rows:
    rows: Rows = []
    for document in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        takers = [row for row in rows if fits(row, document, lengths, capacity, max_segments)]
        if takers:
            min(takers, key=preference).append(document)
        else:
            rows.append([document])
    return rows
