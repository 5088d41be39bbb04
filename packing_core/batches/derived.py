"""Derives one number per token from a batch: segment numbers, positions, masks, targets and weights.

They are derived on access and never stored, so they cannot contradict each other.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from packing_core.batches.stored import IGNORE_INDEX, StoredBatch, of_row
from packing_core.errors import LayoutError
from packing_core.storage.arrays import Array, Bool, Float32, Int32, Int64, read_only
from packing_core.storage.segment_indexing import gaps, indexes, ramps, spread


class DerivedBatch(StoredBatch):
    """The arrays [R, capacity] that follow from the fields of a :class:`PackedBatch`."""

    @property
    def segment_ids(self) -> Int32:
        """int32 [R, capacity]: 1, 2, .. per row, 0 = padding."""
        return self._spread(self._number_in_row + 1, 0)

    @property
    def position_ids(self) -> Int32:
        """int32 [R, capacity]: 0, 1, .. from the start of each segment; 0 in padding.

        They restart at every segment, also where a segment is a later piece of a split document: the attention of a
        segment does not see the pieces before it, so nothing but its own start is there to count from. The position
        within the document is ``starts`` of the segment more. A segment with a parent counts on from the parent's end.
        """
        positions = ramps(self.flat_starts, self.lengths, self.input_ids.size).reshape(self.input_ids.shape)
        return read_only(positions if self.parents is None else positions + self._spread(self.offsets, 0))

    @property
    def seq_idx(self) -> Int32:
        """int32 [R, capacity]: 0-based segment number per row, as Mamba kernels take it.

        With n segments in the row, its padding has number n, which it shares with no segment.
        """
        number = self._number_in_row
        return self._spread(number, np.concatenate([np.zeros(1, np.int64), number + 1]))

    @property
    def attention_mask(self) -> Bool:
        """bool [R, capacity]: True at real tokens. It says nothing of segments; the document mask needs segment_ids."""
        mask = np.ones(self.input_ids.shape, np.bool_)
        mask.reshape(-1)[self._padding] = False
        return read_only(mask)

    @property
    def boundaries(self) -> Bool:
        """bool [R, capacity]: True at the first token of each segment."""
        marks = np.zeros(self.input_ids.shape, np.bool_)
        marks.reshape(-1)[self.flat_starts] = True
        return read_only(marks)

    @property
    def targets(self) -> Array:
        """[R, capacity] signed: the labels, -100 at segment starts, in padding and where ``loss_mask`` is False.

        They are unshifted: the target at token t is token t, which the model predicts from token t - 1. No token
        predicts the first one of a segment, so a loss that shifts over the whole row (as Hugging Face models do) never
        crosses a boundary. The dtype is that of the labels, or the signed one that holds every input id.

        The first token of a segment with a parent keeps its target: ``predictors`` says which token predicts it, and a
        loss that shifts over the row would be wrong.
        """
        given = self.input_ids if self.labels is None else self.labels
        targets = given.astype(_signed(given.dtype))
        flat = targets.reshape(-1)
        flat[self.flat_starts if self.parents is None else self.flat_starts[self.parents < 0]] = IGNORE_INDEX
        flat[self._padding] = IGNORE_INDEX
        if self.loss_mask is not None:
            np.copyto(targets, IGNORE_INDEX, where=~self.loss_mask)
        return read_only(targets)

    @property
    def predictors(self) -> Int64:
        """int64 [R, capacity]: the flat place of the token that predicts each one; -1 where none does.

        It is the token before, and at the first token of a segment the last one of its parent, so one place may predict
        several tokens.
        """
        before = np.arange(-1, self.input_ids.size - 1)
        before[self._padding] = -1
        before[self.flat_starts] = -1
        if self.parents is not None:
            child = np.flatnonzero(self.parents >= 0)
            above = self.parents[child]
            before[self.flat_starts[child]] = self.flat_starts[above] + self.lengths[above] - 1
        return read_only(before.reshape(self.input_ids.shape))

    @property
    def parent_ids(self) -> Int32:
        """int32 [R, capacity]: the segment id of what each token's segment continues, per row; 0 for none."""
        if self.parents is None:
            return read_only(np.zeros(self.input_ids.shape, np.int32))
        return self._spread(np.where(self.parents < 0, 0, self._number_in_row[self.parents] + 1), 0)

    @property
    def loss_weights(self) -> Float32:
        """float32 [R, capacity]: the weight of each target, 0 where ``targets`` is -100; see ``weighting``.

        Raises:
            LayoutError: targets are weighed by document, and two documents, of different tokens, have one number.
        """
        trained = self.targets != IGNORE_INDEX
        weights = trained.astype(np.float32)
        if self.weighting == "document":
            flat = indexes(self.flat_starts, self.lengths)
            self._refuse_two_of_one_number()
            _, document = np.unique(self.sources, return_inverse=True)
            of_token = np.repeat(document, self.lengths)
            counts = np.bincount(of_token, weights=trained.reshape(-1)[flat])
            weights.reshape(-1)[flat] /= np.maximum(counts, 1).astype(np.float32)[of_token]
        return read_only(weights)

    def _refuse_two_of_one_number(self) -> None:
        """Raises where two documents have one number, as those of two data sets may; a row may come twice."""
        flat, begins, counts = self.own
        order = np.lexsort((begins, self.sources))
        sources, begins, ends = self.sources[order], begins[order], (begins + counts)[order]
        tokens = self.input_ids.reshape(-1)
        for n in np.flatnonzero((np.diff(sources) == 0) & (begins[1:] < ends[:-1])):
            first, second = flat[order[n]] + begins[n + 1] - begins[n], flat[order[n + 1]]
            common = min(ends[n], ends[n + 1]) - begins[n + 1]
            if not np.array_equal(tokens[first : first + common], tokens[second : second + common]):
                raise LayoutError(
                    f"two documents of this batch have the number {sources[n]}, and would share one weight: pack the "
                    "data sets that they come from as one"
                )

    @cached_property
    def _number_in_row(self) -> Int64:
        """int64 [S]: 0-based number of each segment in its row."""
        number = np.arange(self.n_segments)
        return number - of_row(self.rows, number)

    @property
    def _padding(self) -> Int64:
        """int64: flat indexes of all padding."""
        return indexes(*gaps(self.flat_starts, self.lengths, self.input_ids.size))

    def _spread(self, values: Int64, fill: Int64 | int) -> Int32:
        fill = fill.astype(np.int32) if isinstance(fill, np.ndarray) else fill
        spread_out = spread(values.astype(np.int32), self.flat_starts, self.lengths, self.input_ids.size, fill)
        return read_only(spread_out.reshape(self.input_ids.shape))


def _signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The smallest signed dtype of 16 bits or more that holds an integer dtype (of uint64, what ids use of it)."""
    return np.dtype(np.int64) if dtype == np.uint64 else np.result_type(dtype, np.int16)
