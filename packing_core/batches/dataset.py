"""PackedDataset: rows of packed documents, made when they are asked for; ``pack`` makes all of them at once.

Documents stay where they are (``packing_core.storage.ragged``), a plan (``packing_core.planning``) says which piece
goes where, and asking for rows copies their tokens once, into a ``PackedBatch``. Every input is checked before anything
is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.batches.batch import PackedBatch
from packing_core.batches.columns import documents_in
from packing_core.batches.stored import IGNORE_INDEX, RESERVED, WEIGHTINGS, Weighting, segment_starts
from packing_core.errors import CapacityError, LayoutError, PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning.pieces import check_pad_id, choice
from packing_core.planning.plan import PackPlan, plan
from packing_core.storage.arrays import Array, Int64, as_array, check_names
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import chosen, gaps, indexes, offsets_of, spread


@hinted(plan)
def pack(
    sequences: Any,
    capacity_or_plan: int | PackPlan,
    *,
    labels: Any = None,
    loss_mask: Any = None,
    prompt_lengths: ArrayLike | None = None,
    columns: Mapping[str, Any] | None = None,
    per_document: Mapping[str, ArrayLike] | None = None,
    pad_id: int = 0,
    weighting: Weighting = "token",
    **plan_options: Any,
) -> PackedBatch:
    """Pack documents into rows of ``capacity`` tokens, all at once. For more than fits in memory, see PackedDataset.

    >>> batch = pack([[5, 6, 7], [8, 9], [3, 4, 2, 1]], 5, seed=None)
    >>> batch.input_ids.shape, batch.n_segments
    ((2, 5), 3)
    >>> batch.segment_ids
    array([[1, 1, 1, 2, 2],
           [1, 1, 1, 1, 0]], dtype=int32)
    >>> batch.position_ids
    array([[0, 1, 2, 0, 1],
           [0, 1, 2, 3, 0]], dtype=int32)

    Args:
        sequences: N documents of token ids, in any form that ``Ragged.of`` takes; or a ``datasets.Dataset`` or list of
            mappings, whose ``labels``, masks and prompt lengths then say what is trained, as in
            :func:`packing_core.batches.columns.read_columns`.
        capacity_or_plan: tokens a row can hold, or a plan made before.
        labels: N sequences of signed integers as long as the documents, unshifted, -100 where nothing is trained; by
            default the documents themselves.
        loss_mask: N sequences of bool (or 0 and 1) as long as the documents: False tokens are never targets.
        prompt_lengths: [N] integers: that many first tokens of each document are never targets. May stand beside
            ``loss_mask``; then both hold.
        columns: other per-token sequences by name, as long as the documents; numbers of any kind.
        per_document: [N, ...] values by name, one entry for each document, such as the label of its class.
        pad_id: the token that fills padding.
        weighting: see ``PackedBatch``.
        plan_options: ``strategy``, ``overflow``, ``seed`` and the other options of ``plan``.

    Raises:
        PackingError: bad input, with what, where and the way out.
    """
    return PackedDataset(
        sequences,
        capacity_or_plan,
        labels=labels,
        loss_mask=loss_mask,
        prompt_lengths=prompt_lengths,
        columns=columns,
        per_document=per_document,
        pad_id=pad_id,
        weighting=weighting,
        **plan_options,
    )[:]


class PackedDataset:
    """Rows of packed documents, materialised on access: a map-style dataset over storage that is never copied.

    ``dataset[i]`` is row i as a PackedBatch of one row; a slice or a list of rows gives a PackedBatch of those. Of
    memory-mapped documents (``Ragged.open``) only paths and the plan are pickled, so workers start at once.

    The arguments are those of ``pack``.

    Attributes:
        plan: the PackPlan.
        sequences: the documents, a Ragged.
    """

    @hinted(plan)
    def __init__(
        self,
        sequences: Any,
        capacity_or_plan: int | PackPlan,
        *,
        labels: Any = None,
        loss_mask: Any = None,
        prompt_lengths: ArrayLike | None = None,
        columns: Mapping[str, Any] | None = None,
        per_document: Mapping[str, ArrayLike] | None = None,
        pad_id: int = 0,
        weighting: Weighting = "token",
        **plan_options: Any,
    ) -> None:
        if (documents := documents_in(sequences)) is not None:
            sequences = documents.input_ids
            labels = _once("labels", documents.labels, labels)
            loss_mask = _once("loss_mask", documents.loss_mask, loss_mask)
            prompt_lengths = _once("prompt_lengths", documents.prompt_lengths, prompt_lengths)
            columns = documents.columns if columns is None else columns
        self.sequences = _of_kind(Ragged.of(sequences), "sequences", "iu", "integer token ids")
        lengths = self.sequences.lengths
        if isinstance(capacity_or_plan, PackPlan):
            if plan_options:
                raise PackingError(
                    f"{', '.join(plan_options)} cannot change a plan that is made: pass a capacity instead"
                )
            self.plan = capacity_or_plan
            _check_plan(self.plan, lengths)
        else:
            self.plan = plan(lengths, capacity_or_plan, **plan_options)
        self.pad_id = check_pad_id(pad_id, self.sequences.dtype)
        choice("weighting", weighting, WEIGHTINGS)
        self.weighting = weighting
        self.labels = None
        if labels is not None:
            self.labels = _of_kind(_beside(labels, "labels", lengths), "labels", "i", "signed integers (-100 is none)")
        self.loss_mask = None
        if loss_mask is not None:
            self.loss_mask = _of_kind(_beside(loss_mask, "loss_mask", lengths), "loss_mask", "biu", "bool, or 0 and 1")
        self.prompt_lengths = None if prompt_lengths is None else _prompts(prompt_lengths, lengths)
        self.columns: dict[str, Ragged] = {}
        columns = {} if columns is None else columns
        check_names(columns, RESERVED)
        for name, column in columns.items():
            self.columns[name] = _beside(column, f"columns[{name!r}]", lengths)
        self.per_document = {name: _each(name, values, lengths) for name, values in (per_document or {}).items()}

    def __len__(self) -> int:
        return self.plan.n_rows

    def __repr__(self) -> str:
        return f"PackedDataset({self.sequences}, {self.plan})"

    def __getitem__(self, rows: int | slice | list[int] | Int64) -> PackedBatch:
        """PackedBatch of one row (int) or of several, in the order asked for.

        Raises:
            RowIndexError: a row is out of range.
            LayoutError: a document has a negative token id, or a loss mask holds something else than 0 and 1. Values
                are checked when their rows are made, so that nothing is read before.
            CapacityError: the rows do not fit into memory.
        """
        numbers = chosen(rows, len(self))
        what, way = f"{len(numbers):,} rows of {self.plan.capacity:,} tokens", "take fewer rows, or lower the capacity"
        if len(numbers) * self.plan.capacity > MOST_SLOTS:
            raise CapacityError(f"{what} do not fit into memory: {way}")
        with within_memory(what, way):
            return self._made(numbers)

    def __getitems__(self, rows: list[int] | Int64) -> PackedBatch:
        """PackedBatch of the rows listed; what torch's DataLoader calls when it is there."""
        return self[rows]

    def _made(self, rows: Int64) -> PackedBatch:
        first = self.plan.row_offsets[rows]
        counts = self.plan.row_offsets[rows + 1] - first
        pieces = indexes(first, counts)
        row = np.repeat(np.arange(len(rows)), counts)
        source, start, length = self.plan.source[pieces], self.plan.start[pieces], self.plan.length[pieces]
        shape = (len(rows), self.plan.capacity)
        at = row * self.plan.capacity + segment_starts(row, length)
        padding = indexes(*gaps(at, length, shape[0] * shape[1]))

        context = self.plan.context[pieces] if len(self.plan.context) else np.zeros_like(pieces)
        later = np.flatnonzero(context)  # the pieces with context

        def filled(column: Ragged, fill: int, name: str = "", wrong: Wrong | None = None, way: str = "") -> Array:
            tokens = np.empty(shape, column.dtype)
            column.copy_to(tokens.reshape(-1), at, source, start, length)
            if self.plan.restarts:
                column.copy_to(tokens.reshape(-1), at[later], source[later], np.zeros_like(later), context[later])
            tokens.reshape(-1)[padding] = fill if wrong is None else 0
            if wrong is not None:
                if len(bad := np.flatnonzero(wrong(tokens))):
                    piece = int(np.searchsorted(at, bad[0], side="right")) - 1
                    place = f"{name}[{source[piece]}][{start[piece] + bad[0] - at[piece]}]"
                    raise LayoutError(f"{place} is {tokens.reshape(-1)[bad[0]]}: {way}")
                if fill:
                    tokens.reshape(-1)[padding] = fill
            return tokens

        loss_mask = None
        if self.loss_mask is not None:
            way = "pass 1 (or True) at tokens that may be trained and 0 at others"
            loss_mask = filled(self.loss_mask, 0, "loss_mask", _no_bool, way).astype(np.bool_)
        if self.prompt_lengths is not None or len(self.plan.context):
            prompts = np.zeros(len(at), np.int64)
            if self.prompt_lengths is not None:
                prompts = np.clip(self.prompt_lengths[source] - start, 0, length)
            if len(self.plan.context):
                prompts = np.maximum(prompts, self.plan.untrained[pieces])
            answer = spread(np.ones(len(at), np.bool_), at + prompts, length - prompts, shape[0] * shape[1], 0)
            loss_mask = answer.reshape(shape) if loss_mask is None else loss_mask & answer.reshape(shape)
        labels = None
        if self.labels is not None:
            labels = filled(self.labels, IGNORE_INDEX, "labels", _no_label, "labels are token ids, and -100 for none")
        return PackedBatch(
            input_ids=filled(self.sequences, self.pad_id, "sequences", _no_id, "token ids run from 0 to 2**63 - 1"),
            cu_seqlens=offsets_of(length),
            rows=row,
            sources=source,
            starts=start,
            labels=labels,
            loss_mask=loss_mask,
            columns={name: filled(column, 0) for name, column in self.columns.items()},
            pad_id=self.pad_id,
            weighting=self.weighting,
            per_document={name: values[source] for name, values in self.per_document.items()},
            context=context if len(self.plan.context) else None,
            restarts=self.plan.restarts,
        )


MOST_SLOTS = 2**56  # beyond it NumPy cannot even address a row of int64
Wrong = Callable[[Array], NDArray[np.bool_]]
_RIGHT = np.zeros(0, np.bool_)


def _no_id(ids: Array) -> NDArray[np.bool_]:
    """Returns the flat indexes of tokens that are no ids; finding none takes one pass."""
    signed = ids.view(np.int64) if ids.dtype == np.uint64 else ids
    return (signed < 0).reshape(-1) if signed.dtype.kind == "i" and signed.size and signed.min() < 0 else _RIGHT


def _no_label(labels: Array) -> NDArray[np.bool_]:
    return ((labels < 0) & (labels != IGNORE_INDEX)).reshape(-1) if labels.size and labels.min() < 0 else _RIGHT


def _no_bool(mask: Array) -> NDArray[np.bool_]:
    if mask.dtype == np.bool_ or not mask.size or (mask.min() >= 0 and mask.max() <= 1):
        return _RIGHT
    return ((mask < 0) | (mask > 1)).reshape(-1)


def _of_kind(column: Ragged, name: str, kinds: str, wanted: str) -> Ragged:
    if column.dtype.kind not in kinds:
        raise LayoutError(f"{name} has dtype {column.dtype}: pass {wanted}")
    return column


def _once(name: str, of_examples: Any, passed: Any) -> Any:
    if of_examples is not None and passed is not None:
        raise LayoutError(f"the examples say {name}, and {name}= was passed: leave one of them out")
    return of_examples if passed is None else passed


def _beside(column: Any, name: str, lengths: Int64) -> Ragged:
    """The column as a Ragged, checked to hold as many tokens per document as the documents."""
    ragged = Ragged.of(column, name=name)
    if len(ragged) != len(lengths):
        raise LayoutError(
            f"{name} has {len(ragged):,} sequences and there are {len(lengths):,} documents: they must agree"
        )
    unequal = ragged.lengths != lengths
    if unequal.any():
        i = int(np.argmax(unequal))
        raise LayoutError(
            f"{name}[{i}] has {ragged.lengths[i]:,} entries and document {i} has {lengths[i]:,} tokens: give one entry "
            f"per token ({int(unequal.sum()):,} documents differ)"
        )
    return ragged


def _each(name: str, values: ArrayLike, lengths: Int64) -> Array:
    """Values per document as an array [N, ...]."""
    array = as_array(values, f"per_document[{name!r}]")
    if array.ndim < 1 or len(array) != len(lengths):
        raise LayoutError(
            f"per_document[{name!r}] has shape {list(array.shape)} and there are {len(lengths):,} documents: give one "
            "entry per document"
        )
    return array


def _prompts(prompt_lengths: ArrayLike, lengths: Int64) -> Int64:
    prompts = as_array(prompt_lengths, "prompt_lengths")
    if prompts.shape != lengths.shape or prompts.dtype.kind not in "iu":
        raise LayoutError(
            f"prompt_lengths is {prompts.dtype} {list(prompts.shape)} and there are {len(lengths):,} documents: pass "
            f"one integer per document"
        )
    outside = (prompts < 0) | (prompts > lengths)
    if outside.any():
        i = int(np.argmax(outside))
        raise LayoutError(
            f"prompt_lengths[{i}] is {prompts[i]:,} and document {i} has {lengths[i]:,} tokens: pass 0 to "
            f"{lengths[i]:,}"
        )
    return prompts.astype(np.int64)


def _check_plan(made: PackPlan, lengths: Int64) -> None:
    if made.n_documents != len(lengths):
        raise LayoutError(
            f"the plan was made for {made.n_documents:,} documents and there are {len(lengths):,}: plan these documents"
        )
    beyond = made.start + made.length > lengths[made.source]
    if beyond.any():
        p = int(np.argmax(beyond))
        i = int(made.source[p])
        raise LayoutError(
            f"the plan takes tokens up to {made.start[p] + made.length[p]:,} of document {i}, which has "
            f"{lengths[i]:,}: plan these documents"
        )


def with_empty_row(batch: PackedBatch) -> PackedBatch:
    """The batch and, after its rows, one that is nothing but padding."""

    def grown(array: NDArray[Any], fill: int) -> NDArray[Any]:
        return np.concatenate([array, np.full((1, batch.capacity), fill, array.dtype)])

    return replace(
        batch,
        input_ids=grown(batch.input_ids, batch.pad_id),
        labels=None if batch.labels is None else grown(batch.labels, IGNORE_INDEX),
        loss_mask=None if batch.loss_mask is None else grown(batch.loss_mask, 0),
        columns={name: grown(array, 0) for name, array in batch.columns.items()},
    )
