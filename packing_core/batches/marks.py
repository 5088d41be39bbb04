"""Finds document starts and padding: the one rule for batches of collators and columns of datasets.

Marks of the documents in some rows (lengths, boundaries, a number per token, an attention mask, positions) ->
:func:`read_segments` -> :class:`FlatSegments`. All marks are read and must agree. Everything is numpy on the host, over
flat tokens: row r is ``row_offsets[r]:row_offsets[r + 1]``, a row of a batch or one example of a dataset.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packing_core.batches.keys import BatchKey
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError
from packing_core.storage.arrays import Array, Bool, Int64
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import indexes, offsets_of, ranges

LENGTHS = (BatchKey.LENGTHS, "seq_lengths", "packed_seq_lengths")  # of the documents in order
# Equal within a document; padding is 0 or -1 in segment_ids and below 0 in seq_idx.
NUMBERS = ("segment_ids", BatchKey.NUMBERS)
PER_TOKEN = (*NUMBERS, "attention_mask", "position_ids")
MARKS = (*LENGTHS, *BatchKey.CUMULATIVE, *PER_TOKEN)
# What other packers call them (flash-attention and Megatron, torchtune, OLMo, MosaicML, MaxText), and the name here.
OTHER_NAMES = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv"), BatchKey.BOUNDARIES),
    **dict.fromkeys(("cu_seq_lens", "cu_doc_lens", "cumulative_seqlens"), BatchKey.BOUNDARIES),
    **dict.fromkeys(("seq_lens", "seqlens", "doc_lens", "document_lens", "document_lengths"), "seq_lengths"),
    **dict.fromkeys(("document_ids", "doc_ids", "sequence_id", "sequence_ids"), "segment_ids"),
    **dict.fromkeys(("inputs_segmentation", "segmentation"), "segment_ids"),
}


@dataclass(frozen=True)
class FlatSegments:
    """The division of T flat tokens into segments.

    Attributes:
        starts: bool [T], True where a segment begins. Padding is in segments of its own.
        padding: bool [T], True at padding.
    """

    starts: Bool
    padding: Bool

    @property
    def lengths(self) -> Int64:
        """int64 [N]: tokens of each segment."""
        return np.diff(np.append(np.flatnonzero(self.starts), self.starts.size))

    @property
    def documents(self) -> Int64:
        """int64 [D]: tokens of each segment that is not padding."""
        return self.lengths[~self.padding[self.starts]]


def read_segments(
    marks: Mapping[str, Any],
    row_offsets: Int64,
    *,
    tokens: Array | None = None,
    needed: Bool | None = None,
    row_name: str = "row",
) -> FlatSegments:
    """The segments that ``marks`` describe.

    The first explicit mark decides (in the order of ``MARKS``; a mask that only says what is padding is not explicit),
    and the others must agree with it between real tokens. ``position_ids`` decide where they are alone: a document
    begins where they do not go up by one, which is transformers' own rule, and with several axes (M-RoPE) where they
    restart. ``attention_mask`` and position_ids that do not restart may always stand beside another mark.

    Args:
        marks: any of ``MARKS``. Values per token are flat, [T]; position_ids may be [3, T], or [4, T] with the text
            positions first. Lengths are a list per row, or one list over all rows.
        row_offsets: int64 [R+1], the first token of each row, then T.
        tokens: [T], the token ids, by which documents are told from padding: where ``segment_ids`` count from 0, and
            after the last document that lengths or boundaries mark if no token is ``needed``.
        needed: bool [T], tokens that must not be padding merely because they stand after the last document of their
            row; None for none.
        row_name: what messages call a row.

    Raises:
        LayoutError: no mark is there, or marks contradict each other or the rows.
    """
    rows = _Rows(row_offsets, row_name)
    padding = np.zeros(rows.tokens, np.bool_)
    if "attention_mask" in marks:
        padding |= _checked(marks["attention_mask"]) == 0
    numbers = {name: marks[name] for name in NUMBERS if name in marks}
    if tokens is not None and len(tokens) and "segment_ids" in numbers:
        rows.check_counts_from_one(numbers["segment_ids"], tokens)
    for name, values in numbers.items():
        padding |= values < 0 if name == BatchKey.NUMBERS else (values == 0) | (values == -1)
    if is_numbered(marks.get("attention_mask")):
        numbers["attention_mask"] = marks["attention_mask"]

    found: dict[str, Bool] = {}
    for name in (*LENGTHS, *BatchKey.CUMULATIVE):
        if name in marks:
            found[name], uncovered = rows.divided(name, marks[name], None if needed is None else needed & ~padding)
            if tokens is not None and (needed is None or not needed.any()):
                rows.check_one_token(name, uncovered, uncovered & ~padding, tokens)
            padding = padding | uncovered
    found |= {name: rows.numbered(values, padding) for name, values in numbers.items()}

    positions = None if "position_ids" not in marks else _Positions(rows, marks["position_ids"], padding)
    if found:
        name, starts = next(iter(found.items()))
        rows.check_padding(starts, padding)
        for other in found:
            rows.check_same(name, starts, other, found[other], padding)
        if positions is not None:
            positions.check(name, starts)
    elif positions is not None:
        starts = positions.starts()
    else:
        raise LayoutError(f"nothing marks documents: pass one of {', '.join(MARKS)}")
    return _with_short_padding(FlatSegments(starts, padding))


def is_numbered(mask: Any) -> bool:
    """Returns whether an attention mask numbers the documents of its rows 1, 2, 3 (0 is padding)."""
    return hasattr(mask, "shape") and bool((np.asarray(mask) > 1).any())


def refuse_trained_padding(labels: Array, masked: Bool, place: Callable[[int], str]) -> None:
    """Check that no token of a document is trained where the attention mask is 0: packing leaves these tokens out.

    Labels that are all one number there are ids that were copied with their padding: training without packing learns
    to predict it, and packing does not, so a warning says that.

    Args:
        labels: [T], -100 where nothing is trained.
        masked: bool [T], where the mask is 0.
        place: what messages call a token, by its number.

    Raises:
        LayoutError: labels differ there.
    """
    lost = (labels != IGNORE_INDEX) & masked
    values = np.unique(labels[lost])
    if len(values) == 1:
        warnings.warn(
            f"labels are {values[0]} where attention_mask is 0, so training without packing learns to predict padding, "
            "and packing leaves it out: label padding -100 if both are to train the same",
            stacklevel=2,
        )
    elif (token := first_true(lost)) is not None:
        raise LayoutError(
            f"{place(token)} has attention_mask 0 and the label {labels[token]}, which is trained without packing, and "
            "packing leaves padding out: give it the label -100, or attention_mask 1 if it belongs to the document"
        )


def first_true(values: Bool) -> int | None:
    """The first index at which a [T] array is True, None if there is none."""
    return int(np.argmax(values)) if values.any() else None


def counts_through(positions: Array, segments: FlatSegments, row_offsets: Int64) -> bool:
    """Returns whether positions [T] count through the documents of a row, as if the row were one document."""
    before, here = _Rows(row_offsets, "row").pairs(segments.padding)
    return bool((segments.starts[here] & (positions[here] - positions[before] == here - before)).any())


class _Rows:
    """R rows of T flat tokens, and how marks divide them."""

    def __init__(self, offsets: Int64, name: str) -> None:
        self.offsets = offsets
        self.name = name
        self.tokens = int(offsets[-1])
        self.sizes = np.diff(offsets)
        self.row = np.repeat(np.arange(len(self.sizes)), self.sizes)  # [T]

    def at(self, token: Any) -> str:
        row = int(self.row[token])
        return f"token {int(token) - int(self.offsets[row])} of {self.name} {row}"

    def changes(self, numbers: Array) -> Bool:
        """bool [T]: where a row begins, or a number differs from the one before."""
        starts = np.ones(self.tokens, np.bool_)
        starts[1:] = (numbers[1:] != numbers[:-1]) | (self.row[1:] != self.row[:-1])
        return starts

    def check_counts_from_one(self, ids: Array, tokens: Array) -> None:
        """Check that no row begins with a document of segment 0, padding whose tokens are not all the same.

        Raises:
            LayoutError: it does.
        """
        real = offsets_of(ids != 0)
        before = np.repeat(real[self.offsets[:-1]], self.sizes)
        leading = (real[1:] == before) & np.repeat(real[self.offsets[1:]] > real[self.offsets[:-1]], self.sizes)
        first = np.repeat(tokens[np.minimum(self.offsets[:-1], self.tokens - 1)], self.sizes)
        if (token := first_true(leading & (tokens != first))) is not None:
            raise LayoutError(
                f"segment_ids are 0, which is padding, up to {self.at(token)}, and the tokens there differ as those of "
                "a document do: count documents from 1, or pass the numbers as seq_idx, which counts from 0"
            )

    def numbered(self, numbers: Array, padding: Bool) -> Bool:
        """Marks the starts of numbered documents, bool [T].

        Raises:
            LayoutError: a number stands on both sides of padding.
        """
        before, here = self.pairs(padding)
        if (pair := first_true((here - before > 1) & (numbers[here] == numbers[before]))) is not None:
            raise self.hole(before[pair] + 1)
        return self.changes(numbers)

    def pairs(self, padding: Bool) -> tuple[Int64, Int64]:
        """Each real token but the first of its row, after the real token before it: flat indexes of the two."""
        real = np.flatnonzero(~padding)
        same = self.row[real[:-1]] == self.row[real[1:]]
        return real[:-1][same], real[1:][same]

    def divided(self, name: str, given: Any, needed: Bool | None) -> tuple[Bool, Bool]:
        """Marks the starts of segments of these lengths, bool [T], and the tokens after each row's last one, bool [T].

        Raises:
            LayoutError: the lengths do not fit the rows, or leave out tokens that are needed.
        """
        lengths, pieces = self._lengths_of_rows(name, given)
        ends = offsets_of(lengths)
        held = ends[pieces[1:]] - ends[pieces[:-1]]
        if (row := first_true(held > self.sizes)) is not None:
            raise self._misfit(name, held[row], row, "no segment may cross from one row into the next")
        begins = ends[:-1] + np.repeat(self.offsets[:-1] - ends[pieces[:-1]], np.diff(pieces))
        starts, uncovered = np.zeros(self.tokens, np.bool_), np.zeros(self.tokens, np.bool_)
        starts[begins[lengths > 0]] = True
        uncovered[indexes(self.offsets[:-1] + held, self.sizes - held)] = True
        starts |= self.changes(uncovered)
        if needed is not None and (token := first_true(needed & uncovered)) is not None:
            why = "mark what follows the last document as padding, 0 in attention_mask and -100 in labels"
            raise self._misfit(name, held[self.row[token]], self.row[token], why)
        return starts, uncovered

    def check_one_token(self, name: str, uncovered: Bool, unmarked: Bool, tokens: Array) -> None:
        """Check that what stands after each row's last document repeats one token, where nothing else says padding.

        Args:
            name: of the lengths or boundaries; uncovered: bool [T], the tokens after their last ones.
            unmarked: bool [T], those of them that no other mark calls padding.

        Raises:
            LayoutError: other tokens are there, as where lengths of one row stand beside a longer one.
        """
        last = np.repeat(tokens[np.maximum(self.offsets[1:] - 1, 0)], self.sizes) if len(tokens) else tokens
        if (token := first_true(unmarked & (tokens != last))) is not None:
            row = self.row[token]
            why = (
                "the tokens after the last document differ, as those of documents do. Give the lengths of all "
                "documents, or mark what follows the last one as padding, 0 in attention_mask"
            )
            raise self._misfit(name, np.count_nonzero(~uncovered & (self.row == row)), row, why)

    def _lengths_of_rows(self, name: str, given: Any) -> tuple[Int64, Int64]:
        """All lengths [N], and which of them belong to each row, as offsets [R+1]."""
        listed = _lists(name, given)
        if len(listed) == len(self.sizes):  # one list per row
            return listed.values.astype(np.int64), listed.offsets.astype(np.int64)
        if len(listed) > 1:
            raise LayoutError(
                f"{name} has lengths of {len(listed)} rows and input_ids has {len(self.sizes)}: give each row a list"
            )
        lengths = listed.values.astype(np.int64)
        ends = offsets_of(lengths)
        if len(lengths) == len(self.sizes) and ends[-1] != self.tokens and name in LENGTHS:  # one document per row
            return lengths, np.arange(len(lengths) + 1)
        if ends[-1] > self.tokens:
            raise LayoutError(
                f"{name} {_verb(name)} {ends[-1]:,} and input_ids has {self.tokens:,} tokens: mark no more than these"
            )
        reached = np.minimum(self.offsets, ends[-1])
        pieces = np.searchsorted(ends, reached)
        if (row := first_true(ends[pieces] != reached)) is not None:
            raise LayoutError(f"a segment of {name} crosses from row {row - 1} into the next: end it with the row")
        return lengths, pieces

    def _misfit(self, name: str, held: Any, row: Any, why: str) -> LayoutError:
        size = int(self.sizes[row])
        return LayoutError(
            f"{name} {_verb(name)} {int(held):,} and input_ids has {size:,} tokens in {self.name} {row}: {why}"
        )

    def check_padding(self, starts: Bool, padding: Bool) -> None:
        """Padding must cover whole segments."""
        changed = np.zeros(self.tokens, np.bool_)
        changed[1:] = padding[1:] != padding[:-1]
        if (token := first_true(changed & ~starts)) is not None:
            raise self.hole(token if padding[token] else token - 1)

    def hole(self, token: Any) -> LayoutError:
        return LayoutError(
            f"{self.at(token)} is padding inside a document: attention_mask and other marks of padding may be 0 only "
            "before, between and after documents"
        )

    def check_same(self, name: str, starts: Bool, other_name: str, other: Bool, padding: Bool) -> None:
        """Between two real tokens, either both marks or neither begin a document."""
        differs = (starts != other) & ~padding
        differs[1:] &= ~padding[:-1]
        if (token := first_true(differs)) is not None:
            raise LayoutError(
                f"{name} and {other_name} disagree at {self.at(token)}: only one begins a document there, so leave out "
                "the wrong one"
            )


class _Positions:
    """Positions of flat tokens, looked at from each real token to the next of its row.

    Positions of one axis go up by one within a document. Those of three (time, height, width) stay or go up in time,
    and no two tokens of a document have the same three.
    """

    def __init__(self, rows: _Rows, positions: Array, padding: Bool) -> None:
        self.rows = rows
        self.padding = padding
        self.before, self.here = rows.pairs(padding)
        axes = positions.reshape(-1, rows.tokens)
        self.axes = axes[: 3 if len(axes) == 3 else 1].astype(np.int64)
        step = self.axes[:, self.here] - self.axes[:, self.before]
        if len(self.axes) == 1:
            self.restarts, self.continues = step[0] <= 0, step[0] == 1
        else:
            self.restarts = (step[0] < 0) | (step == 0).all(axis=0)
            self.continues = ~self.restarts

    def starts(self) -> Bool:
        """Marks the starts of documents if nothing else gives them, bool [T].

        Raises:
            LayoutError: padding divides a document, or positions of several axes go back to another number than the
                first of their row's.
        """
        apart = self.here - self.before > 1
        if (pair := first_true(apart & ~self.restarts)) is not None:
            raise self.rows.hole(self.before[pair] + 1)
        starts = self.rows.changes(self.padding)
        starts[self.here] |= ~self.continues
        if len(self.axes) > 1:
            begins = np.flatnonzero(starts & ~self.padding)
            odd = first_true((self.axes[:, begins] != self.axes[:, begins[:1]]).any(axis=0))
            if odd is not None:
                raise LayoutError(
                    f"position_ids go back at {self.rows.at(begins[odd])} without restarting as the first document "
                    "does: let cu_seq_lens_q or seq_lengths mark the documents"
                )
        return starts

    def check(self, name: str, starts: Bool) -> None:
        """Raise LayoutError where positions restart inside a segment."""
        if (pair := first_true(self.restarts & ~starts[self.here])) is not None:
            where = self.rows.at(self.here[pair])
            raise LayoutError(
                f"position_ids restart at {where}, inside a document of {name}: leave out the one that is wrong"
            )


def _lists(name: str, given: Any) -> Ragged:
    """Lengths as one list per row, or as a single list over all rows."""
    if name in BatchKey.CUMULATIVE:
        marks = np.asarray(given)
        if marks.ndim != 1:
            raise LayoutError(f"{name} has shape {list(marks.shape)}: pass one dimension, over all rows")
        if not len(marks) or marks[0] != 0 or (np.diff(marks) < 0).any():
            raise LayoutError(f"{name} must start at 0 and never decrease, not {marks[:8].tolist()}")
        given = np.diff(marks)
    if not isinstance(given, Ragged):
        given = Ragged.of([np.asarray(x) for x in (given if np.ndim(given[0]) else [given])], name=name)
    lists: Ragged = given.flat()
    if lists.values.size and lists.values.min() < 0:
        raise LayoutError(f"{name} holds {lists.values.min()}: lengths count tokens, from 0 on")
    return lists


def _verb(name: str) -> str:
    return "end at" if name in BatchKey.CUMULATIVE else "add up to"


def _checked(mask: Array) -> Array:
    if (mask < 0).any() or (mask != np.floor(mask)).any():
        raise LayoutError("the attention_mask must hold 1 at tokens and 0 at padding, or number the documents 1, 2, 3")
    return mask


def _with_short_padding(segments: FlatSegments) -> FlatSegments:
    """Padding cut into pieces no longer than the longest document, so that it does not set ``max_length_q``."""
    lengths = segments.lengths
    longest = int(segments.documents.max(initial=0)) or segments.starts.size
    return FlatSegments(segments.starts | (segments.padding & (ranges(lengths) % longest == 0)), segments.padding)
