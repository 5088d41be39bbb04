"""PackedBatch: rows of packed segments, what is stored about them and everything that follows from it.

A batch stores tokens and, per segment, where it came from. Masks, positions, segment numbers, targets and weights are
derived on access, so they cannot contradict each other. :mod:`.dataset` makes batches, :mod:`.views`
turns them into what kernels take, :mod:`.conventions` into what other ecosystems read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing_core.batches import documents as by_document
from packing_core.batches.checks import check_segments, per_token
from packing_core.batches.select import select, single_rows, slice_rows, without_padding
from packing_core.errors import LayoutError
from packing_core.planning.pieces import check_pad_id, choice, positive
from packing_core.storage.arrays import NUMBERS, as_int64, check_names
from packing_core.storage.arrays import read_only as _read_only
from packing_core.storage.segment_indexing import Array, Int64, chosen, gaps, indexes, ramps, spread

if TYPE_CHECKING:
    from packing_core.batches.views import KernelView

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Weighting = Literal["token", "document"]
WEIGHTINGS = get_args(Weighting)

IGNORE_INDEX = -100  # the label that no loss counts, as torch.nn.functional.cross_entropy defines it

# What a batch stores or derives itself: no column may have its name.
RESERVED = frozenset(
    ["input_ids", "labels", "loss_mask", "targets", "loss_weights", "segment_ids", "position_ids", "seq_idx"]
    + ["attention_mask", "boundaries"]
)


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """R rows of ``capacity`` tokens that hold S segments; every array is read-only.

    A segment is what one row holds of one document. The segments of a row stand from left to right in the order of
    ``cu_seqlens``, each at the first multiple of ``alignment`` that the one before leaves free, so ``cu_seqlens`` and
    ``rows`` say where each stands. What no segment covers is padding; only rows end with it unless ``alignment > 1``.

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
        alignment: every segment starts at a multiple of it within its row.
        pad_id: the token that fills padding.
        weighting: ``"token"``: every target weighs 1. ``"document"``: the targets of one document in this batch weigh
            1 together.

    Raises:
        LayoutError: the arrays contradict each other.
        CapacityError: the segments of a row do not fit into it.
    """

    input_ids: Array
    cu_seqlens: Int64
    rows: Int64
    sources: Int64
    starts: Int64
    labels: Array | None = None
    loss_mask: Bool | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    alignment: int = 1
    pad_id: int = 0
    weighting: Weighting = "token"
    per_document: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds in (("input_ids", "iu"), ("labels", "i"), ("loss_mask", "b")):
            if getattr(self, name) is not None or name == "input_ids":
                shape = None if name == "input_ids" else self.input_ids.shape
                self._set(name, per_token(name, getattr(self, name), kinds, shape))
        shape = self.input_ids.shape
        check_names(self.columns, RESERVED)
        columns = {name: per_token(f"columns[{name!r}]", x, NUMBERS, shape) for name, x in self.columns.items()}
        self._set("columns", columns)
        for name in ("cu_seqlens", "rows", "sources", "starts"):
            self._set(name, _read_only(as_int64(getattr(self, name), name)))
        self._set("per_document", {name: _read_only(np.asarray(x)) for name, x in self.per_document.items()})
        self._set("alignment", positive("alignment", self.alignment))
        self._set("pad_id", check_pad_id(self.pad_id, self.input_ids.dtype))
        choice("weighting", self.weighting, WEIGHTINGS)
        check_segments(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    # What is stored, seen from other sides.

    @property
    def capacity(self) -> int:
        """Tokens a row can hold."""
        return int(self.input_ids.shape[1])

    @property
    def n_segments(self) -> int:
        """Segments in all rows."""
        return len(self.rows)

    @property
    def n_tokens(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.cu_seqlens[-1])

    @property
    def efficiency(self) -> float:
        """Packing efficiency: real tokens / (rows * capacity)."""
        return self.n_tokens / max(1, self.input_ids.size)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __reduce__(self) -> tuple[Any, ...]:  # pickling arrays would make them writeable
        return partial(PackedBatch, **{entry.name: getattr(self, entry.name) for entry in fields(self)}), ()

    def __repr__(self) -> str:
        return (
            f"PackedBatch({len(self):,} rows of {self.capacity:,}, {self.n_segments:,} segments, "
            f"{self.n_tokens:,} tokens, efficiency {self.efficiency:.4f})"
        )

    @cached_property
    def lengths(self) -> Int64:
        """int64 [S]: tokens of each segment."""
        return _read_only(np.diff(self.cu_seqlens))

    @cached_property
    def segment_starts(self) -> Int64:
        """int64 [S]: the column of its row at which each segment starts, always a multiple of ``alignment``."""
        return _read_only(segment_starts(self.rows, self.lengths, self.alignment))

    @cached_property
    def flat_starts(self) -> Int64:
        """int64 [S]: the same in the flattened batch, ``rows * capacity + segment_starts``."""
        return _read_only(self.rows * self.capacity + self.segment_starts)

    # One number per token, derived on access and never stored.

    @property
    def segment_ids(self) -> Int32:
        """int32 [R, capacity]: 1, 2, .. per row, 0 = padding."""
        return self._spread(self._number_in_row + 1, 0)

    @property
    def position_ids(self) -> Int32:
        """int32 [R, capacity]: 0, 1, .. from the start of each segment; 0 in padding.

        They restart at every segment, also where a segment is a later piece of a split document: the attention of a
        segment does not see the pieces before it, so nothing but its own start is there to count from. The position
        within the document is ``starts`` of the segment more.
        """
        positions = ramps(self.flat_starts, self.lengths, self.input_ids.size)
        return _read_only(positions.reshape(self.input_ids.shape))

    @property
    def seq_idx(self) -> Int32:
        """int32 [R, capacity]: 0-based segment number per row, as Mamba kernels take it.

        With n segments in the row, the padding at its end has number n, and gaps that ``alignment`` leaves before it
        have n + 1, n + 2, .. from right to left: no padding ever shares a number with a segment.
        """
        in_row = np.bincount(self.rows, minlength=len(self))[self.rows]
        after = 2 * in_row - 1 - self._number_in_row
        return self._spread(self._number_in_row, np.concatenate([np.zeros(1, np.int64), after]))

    @property
    def attention_mask(self) -> Bool:
        """bool [R, capacity]: True at real tokens. It says nothing of segments; the document mask needs segment_ids."""
        mask = np.ones(self.input_ids.shape, np.bool_)
        mask.reshape(-1)[self._padding] = False
        return _read_only(mask)

    @property
    def boundaries(self) -> Bool:
        """bool [R, capacity]: True at the first token of each segment."""
        marks = np.zeros(self.input_ids.shape, np.bool_)
        marks.reshape(-1)[self.flat_starts] = True
        return _read_only(marks)

    @property
    def targets(self) -> Array:
        """[R, capacity] signed: the labels, -100 at segment starts, in padding and where ``loss_mask`` is False.

        They are unshifted: the target at token t is token t, which the model predicts from token t - 1. No token
        predicts the first one of a segment, so a loss that shifts over the whole row (as Hugging Face models do) never
        crosses a boundary. The dtype is that of the labels, or the signed one that holds every input id.
        """
        given = self.input_ids if self.labels is None else self.labels
        targets = given.astype(_signed(given.dtype))
        flat = targets.reshape(-1)
        flat[self.flat_starts] = IGNORE_INDEX
        flat[self._padding] = IGNORE_INDEX
        if self.loss_mask is not None:
            np.copyto(targets, IGNORE_INDEX, where=~self.loss_mask)
        return _read_only(targets)

    @property
    def loss_weights(self) -> Float32:
        """float32 [R, capacity]: the weight of each target, 0 where ``targets`` is -100; see ``weighting``."""
        trained = self.targets != IGNORE_INDEX
        weights = trained.astype(np.float32)
        if self.weighting == "document":
            flat = indexes(self.flat_starts, self.lengths)
            _, document = np.unique(self.sources, return_inverse=True)
            of_token = np.repeat(document, self.lengths)
            counts = np.bincount(of_token, weights=trained.reshape(-1)[flat])
            weights.reshape(-1)[flat] /= np.maximum(counts, 1).astype(np.float32)[of_token]
        return _read_only(weights)

    # Out of the batch.

    def __getitem__(self, rows: int | slice | Int64 | list[int]) -> PackedBatch:
        """The batch of some of the rows, in the order asked for: an int gives one row, a slice copies no tokens."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            numbers = chosen(rows, len(self))
            begin = int(numbers[0]) if len(numbers) else 0
            return _unchecked(slice_rows(self, begin, begin + len(numbers)))
        return PackedBatch(**select(self, rows))

    def single_rows(self, first: int = 0) -> Iterator[PackedBatch]:
        """``batch[r]`` for each row r from ``first`` on, without copying tokens and at a tenth of the cost."""
        return map(_unchecked, single_rows(self, first))

    def unpack(self, name: str = "input_ids") -> dict[int, Array]:
        """The documents that this batch holds, by id in rising order; a split document is put together again.

        Under ``overflow="error"`` and ``"split"`` the whole pack gives every document exactly as it went in; under
        ``"truncate"`` and ``"drop"`` what was kept of it. Of a batch of some rows: the pieces that stand in them.

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
        return _read_only(by_document.segments_by_document(self)[0])

    @property
    def document_ids(self) -> Int32:
        """int32 [R, capacity]: the place of each token's document in ``documents``; -1 in padding."""
        return _read_only(by_document.document_ids(self))

    @property
    def document_positions(self) -> Int32:
        """int32 [R, capacity]: the place of each token in its document, whether that was split or not; 0 in padding."""
        return _read_only(self.position_ids + self._spread(self.starts, 0))

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

        Raises:
            LayoutError: there is not one value per document, or the batch holds the same tokens of a document twice.
        """
        return by_document.spread(self, values)

    def kernel_view(self, *, max_seqlen: int | None = None, bucket: int = 1) -> KernelView:
        """This batch flattened to ``rows * capacity`` tokens, as kernels take one step; see ``views.KernelView``.

        Args:
            max_seqlen: what the kernel is told the longest segment is; by default the longest real one.
            bucket: the number of ``cu_seqlens`` entries less one is rounded up to a multiple of it.
        """
        from packing_core.batches.views import kernel_view

        return kernel_view(self, max_seqlen=max_seqlen, bucket=bucket)

    def padding_free(self, *, max_seqlen: int | None = None, bucket: int = 1) -> KernelView:
        """The same with all rows put together and every padding token left out; it has no capacity."""
        from packing_core.batches.views import kernel_view

        if not self.n_segments:
            raise LayoutError("this batch is nothing but padding: use kernel_view(), or leave the batch out")
        return kernel_view(PackedBatch(**without_padding(self)), max_seqlen=max_seqlen, bucket=bucket)

    def to_dict(self, convention: str = "hf") -> dict[str, Any]:
        """This batch under the names, dtypes and shifts that an ecosystem's code reads; see ``conventions``.

        Args:
            convention: ``"hf"``, ``"trl"``, ``"grain"`` or ``"maxtext"``.
        """
        from packing_core.batches.conventions import to_dict

        return to_dict(self, convention)

    @cached_property
    def _number_in_row(self) -> Int64:
        """int64 [S]: 0-based number of each segment in its row."""
        number = np.arange(self.n_segments)
        return number - _of_row(self.rows, number)

    @property
    def _padding(self) -> Int64:
        """int64: flat indexes of all padding."""
        return indexes(*gaps(self.flat_starts, self.lengths, self.input_ids.size))

    def _spread(self, values: Int64, fill: Int64 | int) -> Int32:
        fill = fill.astype(np.int32) if isinstance(fill, np.ndarray) else fill
        spread_out = spread(values.astype(np.int32), self.flat_starts, self.lengths, self.input_ids.size, fill)
        return _read_only(spread_out.reshape(self.input_ids.shape))


def _unchecked(values: dict[str, Any]) -> PackedBatch:
    """The batch with these fields, taken from one that was checked."""
    batch = object.__new__(PackedBatch)
    batch.__dict__.update(values)
    return batch


def segment_starts(rows: Int64, lengths: Int64, alignment: int) -> Int64:
    """int64 [S]: the column of each segment; ``rows`` [S] never decreases, ``lengths`` [S] are tokens."""
    taken = lengths if alignment == 1 else -(-lengths // alignment) * alignment
    before = np.cumsum(taken) - taken
    return before - _of_row(rows, before)


def _of_row(rows: Int64, rising: Int64) -> Int64:
    """[S]: for each segment the value, of S rising ones from 0 on, at the first segment of its row."""
    return np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) > 0, rising, 0))


def _signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The smallest signed dtype of 16 bits or more that holds an integer dtype (of uint64, what ids use of it)."""
    return np.dtype(np.int64) if dtype == np.uint64 else np.result_type(dtype, np.int16)
