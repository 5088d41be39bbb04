"""Packing by the textbook, one document and one row at a time: what golden plans come from. Slow and plain.

Rows are lists of document numbers, in the order in which they were opened and filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Rows = list[list[int]]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Rows:
    """Longest first, each into the fullest row that still takes it."""
    return _place(_longest_first(lengths), lengths, capacity, lambda rows, free: min(rows, key=free))


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Rows:
    """Longest first, each into the earliest row that still takes it."""
    return _place(_longest_first(lengths), lengths, capacity, lambda rows, free: rows[0])


def sequential(lengths: Sequence[int], capacity: int) -> Rows:
    """In the order given; a row is closed as soon as the next document does not fit (next fit)."""
    rows: Rows = []
    for document, length in enumerate(lengths):
        if not rows or sum(lengths[d] for d in rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(document)
    return rows


STRATEGIES = {"best_fit": best_fit_decreasing, "first_fit": first_fit_decreasing, "sequential": sequential}


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda document: -lengths[document])


def _place(
    order: Iterable[int],
    lengths: Sequence[int],
    capacity: int,
    choose: Callable[[Rows, Callable[[list[int]], int]], list[int]],
) -> Rows:
    def free(row: list[int]) -> int:
        return capacity - sum(lengths[document] for document in row)

    rows: Rows = []
    for document in order:
        takers = [row for row in rows if free(row) >= lengths[document]]
        if takers:
            choose(takers, free).append(document)
        else:
            rows.append([document])
    return rows
