"""The stored part of a PackedBatch: its fields, their checks, and where each segment stands.

Everything else is derived: per token in :mod:`.derived`, per document and in other layouts in :mod:`.batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from packing_core.batches.keys import BatchKey
from packing_core.errors import CapacityError, LayoutError
from packing_core.planning.pieces import MOST_TOKENS, check_pad_id, choice
from packing_core.storage.arrays import NUMBERS, Array, Bool, Int64, as_array, as_int64, check_names, read_only
from packing_core.storage.forest import check_parents, offsets

Weighting = Literal["token", "document"]
WEIGHTINGS = get_args(Weighting)

IGNORE_INDEX = -100  # the label that no loss counts, as torch.nn.functional.cross_entropy defines it

# What a batch stores or derives itself: no column may have its name.
RESERVED = frozenset(
    ["input_ids", "labels", "loss_mask", "targets", "loss_weights", "segment_ids", "position_ids", BatchKey.NUMBERS]
    + ["attention_mask", "boundaries"]
)


@dataclass(frozen=True, eq=False, repr=False)
class StoredBatch:
    """The fields of a :class:`PackedBatch`, which documents them, and the geometry of its segments."""

    input_ids: Array
    cu_seqlens: Int64
    rows: Int64
    sources: Int64
    starts: Int64
    labels: Array | None = None
    loss_mask: Bool | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    pad_id: int = 0
    weighting: Weighting = "token"
    per_document: Mapping[str, Array] = field(default_factory=dict)
    parents: Int64 | None = None
    context: Int64 | None = None
    restarts: bool = False

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
            self._set(name, read_only(as_int64(getattr(self, name), name)))
        if self.context is not None:
            self._set("context", read_only(as_int64(self.context, "context")))
        self._set("per_document", {name: read_only(np.asarray(x)) for name, x in self.per_document.items()})
        self._set("pad_id", check_pad_id(self.pad_id, self.input_ids.dtype))
        choice("weighting", self.weighting, WEIGHTINGS)
        check_segments(self)
        if self.parents is not None:
            self._set("parents", read_only(check_parents(self.parents, self.n_segments)))
            check_continuation(self)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

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

    @cached_property
    def lengths(self) -> Int64:
        """int64 [S]: tokens of each segment."""
        return read_only(np.diff(self.cu_seqlens))

    @cached_property
    def offsets(self) -> Int64:
        """int64 [S]: the position of each segment's first token: 0, or where its parent ends."""
        if self.parents is None:
            return read_only(np.zeros(self.n_segments, np.int64))
        return read_only(offsets(self.parents, self.lengths))

    @cached_property
    def own(self) -> tuple[Int64, Int64, Int64]:
        """int64 [S] each: where the tokens of a segment that are not context begin in the flattened batch, where they
        begin in its document, and how many they are."""
        context = np.zeros(self.n_segments, np.int64) if self.context is None else self.context
        return self.flat_starts + context, self.starts + context, self.lengths - context

    @cached_property
    def segment_starts(self) -> Int64:
        """int64 [S]: the column of its row at which each segment starts."""
        return read_only(segment_starts(self.rows, self.lengths))

    @cached_property
    def flat_starts(self) -> Int64:
        """int64 [S]: the same in the flattened batch, ``rows * capacity + segment_starts``."""
        return read_only(self.rows * self.capacity + self.segment_starts)


def check_continuation(batch: StoredBatch) -> None:
    """Check that each segment with a parent goes on, in the parent's row, where the parent ends.

    Raises:
        LayoutError: one does not.
    """
    assert batch.parents is not None
    children = np.flatnonzero(batch.parents >= 0)
    above = batch.parents[children]
    other_row = batch.rows[children] != batch.rows[above]
    if other_row.any():
        s, p = int(children[other_row][0]), int(above[other_row][0])
        raise LayoutError(
            f"segment {s} stands in row {batch.rows[s]} and its parent {p} in row {batch.rows[p]}: a tree stands in "
            "one row, so repeat the parent's tokens there"
        )
    ends = batch.starts[above] + batch.lengths[above]
    apart = batch.starts[children] != ends
    if apart.any():
        s, end = int(children[apart][0]), int(ends[apart][0])
        raise LayoutError(
            f"segment {s} starts at token {batch.starts[s]:,} of its document and its parent ends at {end:,}: a "
            f"segment goes on where its parent ends, so pass starts[{s}] = {end}"
        )


def segment_starts(rows: Int64, lengths: Int64) -> Int64:
    """int64 [S]: the column of each segment; ``rows`` [S] never decreases, ``lengths`` [S] are tokens."""
    before = np.cumsum(lengths) - lengths
    return before - of_row(rows, before)


def of_row(rows: Int64, rising: Int64) -> Int64:
    """[S]: for each segment the value, of S rising ones from 0 on, at the first segment of its row."""
    return np.maximum.accumulate(np.where(np.diff(rows, prepend=-1) > 0, rising, 0))


def per_token(name: str, given: Any, kinds: str, shape: tuple[int, ...] | None) -> Array:
    """A read-only view of an array of ``input_ids``' shape (None: this is them) and of one of the dtype kinds.

    Raises:
        LayoutError: it has another shape, or holds what is no number of these kinds.
    """
    array = np.ascontiguousarray(as_array(given, name, NUMBERS))
    if shape is None and (array.ndim != 2 or array.shape[1] < 1):
        raise LayoutError(f"{name} has shape {list(array.shape)}: pass [rows, capacity]")
    if shape is not None and array.shape != shape:
        raise LayoutError(f"{name} has shape {list(array.shape)} and input_ids {list(shape)}: they must agree")
    array = as_array(array, name, kinds)
    if array.dtype == np.uint64 and kinds == "iu" and array.size and array.max() > np.iinfo(np.int64).max:
        raise LayoutError(f"{name} holds {array.max():,}, which does not fit int64: pass token ids")
    return read_only(array)


def check_segments(batch: StoredBatch) -> None:
    """Check that the segments of a batch agree with each other, with its values per document and with its rows.

    Raises:
        LayoutError: they contradict each other.
        CapacityError: the segments of a row do not fit into it.
    """
    count = len(batch.cu_seqlens) - 1
    _check_entries(batch, count)
    if count < 0 or batch.cu_seqlens[0] != 0 or (batch.cu_seqlens[1:] <= batch.cu_seqlens[:-1]).any():
        raise LayoutError("cu_seqlens must start at 0 and strictly increase: padding is no segment, leave it out")
    if count == 0:
        return
    if batch.cu_seqlens[-1] > batch.input_ids.size:
        raise CapacityError(
            f"cu_seqlens marks {batch.cu_seqlens[-1]:,} tokens and input_ids has {batch.input_ids.size:,}: they must "
            f"agree"
        )
    if batch.rows[0] < 0 or batch.rows[-1] >= len(batch) or (batch.rows[1:] < batch.rows[:-1]).any():
        raise LayoutError(f"rows must never decrease and stay in 0..{len(batch) - 1}: sort the segments by row")
    for name in ("sources", "starts"):
        if (lowest := getattr(batch, name)).min() < 0:
            raise LayoutError(f"{name}[{lowest.argmin()}] is {lowest.min()}: documents and tokens count from 0")
    _check_context(batch, count)
    if batch.starts.max() > MOST_TOKENS:
        raise LayoutError(
            f"starts[{batch.starts.argmax()}] is {batch.starts.max():,}: no document is that long, "
            "so pass the place of each segment's first token in its document"
        )
    over = batch.segment_starts + batch.lengths > batch.capacity
    if over.any():
        s = int(np.argmax(over))
        raise CapacityError(
            f"segment {s} (document {batch.sources[s]}) ends at token {batch.segment_starts[s] + batch.lengths[s]:,} "
            f"of row {batch.rows[s]} and capacity is {batch.capacity:,}: move it to another row"
        )


def _check_entries(batch: StoredBatch, count: int) -> None:
    """Raises if something that has an entry per segment has more or fewer of them."""
    for name in ("rows", "sources", "starts"):
        if len(getattr(batch, name)) != count:
            raise LayoutError(
                f"{name} has {len(getattr(batch, name))} entries and cu_seqlens marks {count} segments: they must agree"
            )
    for name, values in batch.per_document.items():
        if values.ndim < 1 or len(values) != count:
            raise LayoutError(
                f"per_document[{name!r}] has shape {list(values.shape)} and cu_seqlens marks {count} segments: "
                "give one entry per segment, that of its document"
            )


def _check_context(batch: StoredBatch, count: int) -> None:
    """Raises if segments have more context than tokens, or parents beside it."""
    if batch.context is None:
        return
    if batch.parents is not None:
        raise LayoutError("segments have parents and context: pass one of them, a parent is seen without context")
    lengths = np.diff(batch.cu_seqlens)
    if len(batch.context) != count or batch.context.min() < 0 or (batch.context >= lengths).any():
        raise LayoutError("context must say, for each segment, how many of its tokens are context: 0 to its length - 1")
