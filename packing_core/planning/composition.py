"""Describes the composition of rows and steps: lengths of segments in rows in, a few figures out.

A model that trains on full rows still sees steps of short documents and steps of long ones if rows were filled by
length. These figures say how far the rows and steps of a plan are from random draws of its documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packing_core.storage.arrays import Float64, Int64
from packing_core.storage.segment_indexing import offsets_of, ranges


@dataclass(frozen=True)
class Composition:
    """Figures over rows, and over steps of ``rows_per_step`` rows.

    A deviation is a standard deviation divided by the mean. A spread is a standard deviation of log length.

    Attributes:
        rows_per_step: rows of a step, of all ranks together.
        documents_per_row, documents_per_row_deviation: segments of a row.
        documents_per_step, documents_per_step_deviation: segments of a step.
        length_spread: spread inside a row, mean over the rows.
        data_length_spread: spread of all segments.
        row_distance: Kolmogorov-Smirnov distance between the lengths in a row and all lengths, mean over the rows.
        step_distance: the same for steps.
        attention_per_row, attention_per_row_deviation: sum of the squared lengths of a row, which is proportional to
            its attention cost.
        attention_per_step_deviation: the same for steps.
    """

    rows_per_step: int
    documents_per_row: float
    documents_per_row_deviation: float
    documents_per_step: float
    documents_per_step_deviation: float
    length_spread: float
    data_length_spread: float
    row_distance: float
    step_distance: float
    attention_per_row: float
    attention_per_row_deviation: float
    attention_per_step_deviation: float

    def __str__(self) -> str:
        return (
            f"documents per row {self.documents_per_row:,.1f} (deviation {self.documents_per_row_deviation:.2f}), "
            f"per step of {self.rows_per_step} rows {self.documents_per_step:,.1f} "
            f"({self.documents_per_step_deviation:.2f})\n"
            f"spread of log length inside a row {self.length_spread:.2f}, of all documents "
            f"{self.data_length_spread:.2f}\n"
            f"Kolmogorov-Smirnov distance to all lengths: row {self.row_distance:.2f}, step {self.step_distance:.2f}\n"
            f"attention cost per row, squared tokens {self.attention_per_row:,.0f} "
            f"(deviation {self.attention_per_row_deviation:.2f}), per step "
            f"({self.attention_per_step_deviation:.2f})"
        )


def composition(row_offsets: Int64, length: Int64, steps: Int64) -> Composition:
    """The figures of rows of segments.

    Args:
        row_offsets: [R+1]; row r holds the segments ``row_offsets[r]:row_offsets[r+1]``.
        length: [P] tokens of each segment.
        steps: [N, M] row numbers of each step, each row at most once.
    """
    counts = np.diff(row_offsets)
    step_of_row = np.full(len(counts), -1)
    step_of_row[steps] = np.arange(len(steps))[:, None]
    row = np.repeat(np.arange(len(counts)), counts)
    step = step_of_row[row]
    rank = _Ranks(length)
    in_step = step >= 0
    log = np.log(length)
    mean = np.add.reduceat(log, row_offsets[:-1]) / counts
    variance = np.add.reduceat((log - mean[row]) ** 2, row_offsets[:-1]) / counts
    squares = np.add.reduceat(length.astype(np.float64) ** 2, row_offsets[:-1])
    step_counts = counts[steps].sum(axis=1)
    return Composition(
        rows_per_step=steps.shape[1],
        documents_per_row=float(counts.mean()),
        documents_per_row_deviation=_deviation(counts),
        documents_per_step=float(step_counts.mean()),
        documents_per_step_deviation=_deviation(step_counts),
        length_spread=float(np.sqrt(variance).mean()),
        data_length_spread=float(log.std()),
        row_distance=float(rank.distances(row, np.ones_like(in_step), counts).mean()),
        step_distance=float(rank.distances(step, in_step, step_counts).mean()),
        attention_per_row=float(squares.mean()),
        attention_per_row_deviation=_deviation(squares),
        attention_per_step_deviation=_deviation(squares[steps].sum(axis=1)),
    )


class _Ranks:
    """Ranks of each segment by length: how many segments are shorter, and how many are not longer."""

    def __init__(self, length: Int64) -> None:
        _, inverse, counts = np.unique(length, return_inverse=True, return_counts=True)
        upto = np.cumsum(counts)
        self._size = inverse
        self._upto = upto / len(length)
        self._below = (upto - counts) / len(length)

    def distances(self, group: Int64, chosen: NDArray[np.bool_], counts: Int64) -> Float64:
        """[G] largest distance between the distribution of lengths in each group and in all.

        Between two lengths of a group its distribution is constant and that of all rises, so the largest distances are
        at a length of the group and just below it.

        Args:
            group: [P] group of each segment, 0 to G-1.
            chosen: [P] segments that are in a group.
            counts: [G] segments of each group, at least 1.
        """
        values = len(self._upto)
        keys = np.sort(group[chosen] * values + self._size[chosen])
        size = keys % values
        number, total = ranges(counts), np.repeat(counts, counts)
        above = (number + 1) / total - self._upto[size]
        below = self._below[size] - number / total
        largest: Float64 = np.maximum.reduceat(np.maximum(above, below), offsets_of(counts)[:-1])
        return largest


def _deviation(values: NDArray[np.int64] | Float64) -> float:
    return float(values.std() / values.mean())
