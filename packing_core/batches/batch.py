"""PackedBatch: rows of packed segments, and what can be done with them.

Data flows fields (:mod:`.stored`) -> arrays per token (:mod:`.derived`) -> rows, documents, kernel views and the
layouts of other ecosystems; each of the latter is a module that this one calls. :mod:`.dataset` makes batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from packing_core.batches import conventions, views
from packing_core.batches import documents as by_document
from packing_core.batches.derived import DerivedBatch
from packing_core.batches.select import select, single_rows, without_padding
from packing_core.errors import LayoutError
from packing_core.storage.arrays import Array, Int32, Int64, read_only
from packing_core.storage.segment_indexing import indexes


class PackedBatch(DerivedBatch):
    """R rows of ``capacity`` tokens that hold S segments; every array is read-only.

    A segment is what one row holds of one document. The segments of a row stand from left to right in the order of
    ``cu_seqlens``, each where the one before ends, so ``cu_seqlens`` and ``rows`` say where each stands. What no
    segment covers is padding, at the ends of rows.

    Args:
        input_ids: integers [R, capacity]; padding holds ``pad_id``.
        cu_seqlens: int64 [S+1], 0 first and strictly increasing: tokens of all segments before each, padding not
            counted.
        rows: int64 [S], the row of each segment, never decreasing.
        sources: int64 [S], the document of each segment.
        starts: int64 [S], the segment's first token within its document (0 unless the document was split).
        labels: signed integers [R, capacity] as the user gave them, unshifted, -100 in padding; None when the input
            ids are the labels.
        loss_mask: bool [R, capacity], False at tokens that are never targets (prompts); None when all may be.
        columns: the user's other per-token arrays, [R, capacity] each, 0 in padding.
        per_document: the user's values per document, [S, ...] each: those of the document of each segment.
        pad_id: the token that fills padding.
        parents: int64 [S], the segment that each one continues, -1 for none: a row is then a forest, and a document
            the path from a root to a leaf. ``sources`` of a leaf is its document, of any other segment one of those
            that share it. A parent stands before its children and in their row. None if no segment continues another.
        context: int64 [S], how many first tokens of each segment are context, which another segment trains.
            ``starts`` counts them as the tokens before the segment's own. None if no segment has context.
        restarts: the context is the beginning of the document, and not the tokens before the segment's own.
        weighting: ``"token"``: every target weighs 1. ``"document"``: the targets of one document in this batch weigh
            1 together.

    Raises:
        LayoutError: the arrays contradict each other.
        CapacityError: the segments of a row do not fit into it.
    """

    def __reduce__(self) -> tuple[Any, ...]:  # pickling arrays would make them writeable
        return partial(PackedBatch, **{entry.name: getattr(self, entry.name) for entry in fields(self)}), ()

    def __repr__(self) -> str:
        return (
            f"PackedBatch({len(self):,} rows of {self.capacity:,}, {self.n_segments:,} segments, "
            f"{self.n_tokens:,} tokens, efficiency {self.efficiency:.4f})"
        )

    def __getitem__(self, rows: int | slice | Int64 | list[int]) -> PackedBatch:
        """The batch of some of the rows, in the order asked for: an int gives one row, a slice copies no tokens."""
        return _unchecked(select(self, rows))

    def single_rows(self, first: int = 0) -> Iterator[PackedBatch]:
        """``batch[r]`` for each row r from ``first`` on, without copying tokens and at a tenth of the cost."""
        return map(_unchecked, single_rows(self, first))

    def unpack(self, name: str = "input_ids") -> dict[int, Array]:
        """The documents that this batch holds, by id in rising order; a split document is put together again.

        The whole pack gives every document exactly as it went in, but under ``overflow="truncate"`` and ``"drop"``,
        which give what was kept of it. Of a batch of some rows: the pieces that stand in them.

        Args:
            name: ``input_ids``, ``labels``, ``loss_mask``, any derived per-token array, or one of ``columns``.

        Raises:
            LayoutError: the batch holds the same tokens of a document twice, or there is no such per-token array.
        """
        array = self.columns.get(name, getattr(self, name, None)) if isinstance(name, str) else None
        if not isinstance(array, np.ndarray) or array.shape != self.input_ids.shape:
            known = ", ".join(["input_ids", "labels", "loss_mask", *self.columns])
            raise LayoutError(f"this batch has no per-token array {name!r}: it has {known} and the derived ones")
        return by_document.unpack(self, array)

    @cached_property
    def documents(self) -> Int64:
        """int64 [D]: ids of the documents of which this batch holds a piece, rising.

        This is source order, in which :meth:`reduce` and :meth:`spread` have one entry per document.

        Raises:
            LayoutError: the batch holds the same tokens of a document twice.
        """
        return read_only(by_document.segments_by_document(self)[0])

    @property
    def document_ids(self) -> Int32:
        """int32 [R, capacity]: the place of each token's document in ``documents``; -1 in padding and shared tokens."""
        return read_only(by_document.document_ids(self))

    @property
    def document_positions(self) -> Int32:
        """int32 [R, capacity]: the place of each token in its document, whether that was split or not; 0 in padding."""
        positions = self.position_ids + self._spread(self.starts - self.offsets, 0)
        if self.restarts and self.context is not None:
            first = indexes(self.flat_starts, self.context)
            positions.reshape(-1)[first] = self.position_ids.reshape(-1)[first]
        return read_only(positions)

    def reduce(self, values: Any, how: by_document.Reduction, *, where: Any = None) -> Array:
        """One value per document of this batch, from one per token.

        Padding never counts. The pieces of a document that was split count as one document, in reading order. A
        document without a token that counts gets 0.

        Args:
            values: numbers [R, capacity, ...], or [R * capacity, ...]; whatever padding holds.
            how: ``"sum"``, ``"mean"`` (over the document's tokens that count), ``"first"`` or ``"last"`` (of the
                tokens that count).
            where: bool [R, capacity], the tokens that count; all real ones if None. ``batch.targets != -100`` are those
                that are trained.

        Returns:
            [documents, ...] in source order, see ``documents``: float64 sums and means, first and last values in their
            own dtype.

        Raises:
            LayoutError: the shapes contradict the batch, or it holds the same tokens of a document twice.

        >>> from packing_core import pack
        >>> batch = pack([[1, 2, 3], [4], [5, 6]], 4, seed=None)
        >>> batch.input_ids.tolist(), batch.reduce(batch.input_ids, "sum").tolist()
        ([[1, 2, 3, 4], [5, 6, 0, 0]], [6.0, 4.0, 11.0])
        """
        return by_document.reduce(self, values, how, where)

    def spread(self, values: Any) -> Array:
        """[R, capacity, ...] in the dtype of ``values`` [documents, ...]: each document's at its tokens, 0 in padding.

        Tokens that several documents share get 0.

        Raises:
            LayoutError: there is not one value per document, or the batch holds the same tokens of a document twice.
        """
        return by_document.spread(self, values)

    def kernel_view(self, *, max_seqlen: int | None = None, bucket: int = 1) -> views.KernelView:
        """This batch flattened to ``rows * capacity`` tokens, as kernels take one step; see ``views.KernelView``.

        Args:
            max_seqlen: what the kernel is told the longest segment is; by default the longest real one.
            bucket: the number of ``cu_seqlens`` entries less one is rounded up to a multiple of it.
        """
        return views.kernel_view(self, max_seqlen=max_seqlen, bucket=bucket)

    def padding_free(self, *, max_seqlen: int | None = None, bucket: int = 1) -> views.KernelView:
        """The same with all rows put together and every padding token left out; it has no capacity."""
        if not self.n_segments:
            raise LayoutError("this batch is nothing but padding: use kernel_view(), or leave the batch out")
        return views.kernel_view(PackedBatch(**without_padding(self)), max_seqlen=max_seqlen, bucket=bucket)

    def to_dict(self, convention: str = "hf") -> dict[str, Any]:
        """This batch under the names, dtypes and shifts that an ecosystem's code reads; see ``conventions``.

        Args:
            convention: ``"hf"``, ``"trl"``, ``"grain"`` or ``"maxtext"``.
        """
        return conventions.to_dict(self, convention)


def _unchecked(values: dict[str, Any]) -> PackedBatch:
    """The batch with these fields, taken from one that was checked."""
    batch = object.__new__(PackedBatch)
    batch.__dict__.update(values)
    return batch
