"""Lengths as the user gave them in, pieces that fit a row out: the checks, and the overflow policies."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import CapacityError, LayoutError, PackingError
from packing_core.storage.arrays import NUMBERS, as_array

Int64 = NDArray[np.int64]
Overflow = Literal["error", "truncate", "split", "overlap", "restart", "drop"]
CUTS = ("split", "overlap", "restart")  # the policies that make several pieces of a document and lose none of it

MOST_TOKENS = 2**60  # so that sums stay inside int64, and a size and an index together too
MOST_PIECES = 2**36  # a plan of so many is half a terabyte an array


@dataclass(frozen=True)
class Pieces:
    """The pieces to pack.

    ``source`` None means that piece p is of document p, ``start`` and ``context`` None that they are all 0.
    """

    length: Int64
    dropped: Int64
    truncated: Int64
    source: Int64 | None = None
    start: Int64 | None = None
    context: Int64 | None = None


class PieceSpan(NamedTuple):
    """Tokens ``begin`` to ``end`` of a document, the first ``context`` of which are trained in an earlier part."""

    begin: int
    end: int
    context: int


def integer(value: Any) -> int | None:
    """``value`` as an int, None where it is no integer."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except Exception:  # another library's scalar may raise anything
        return None


def positive(name: str, value: Any) -> int:
    """``value`` as an int from 1 to 2**60.

    Raises:
        PackingError: it is not one (CapacityError for the capacity).
    """
    number = integer(value)
    if number is not None and 1 <= number <= MOST_TOKENS:
        return number
    kind = CapacityError if name == "capacity" else PackingError
    limit = "at most 2**60" if number is not None and number > MOST_TOKENS else "at least 1"
    raise kind(f"{name} must be an integer of {limit}, got {value!r}")


def check_pad_id(pad_id: Any, dtype: np.dtype[Any]) -> int:
    """``pad_id`` as an int.

    Raises:
        PackingError: it is no integer, or ``dtype`` does not hold it.
    """
    number = integer(pad_id)
    if number is None:
        raise PackingError(f"pad_id is {pad_id!r}: pass an integer")
    if not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        raise PackingError(f"pad_id {pad_id} does not fit into the documents' dtype {dtype}: pass one that does")
    return number


def check_seed(seed: Any) -> int | None:
    """``seed`` as an int, or None.

    Raises:
        PackingError: it is neither None nor an integer of at least 0.
    """
    if seed is None:
        return None
    number = integer(seed)
    if number is None or number < 0:
        raise PackingError(f"seed must be an integer of at least 0, or None for no shuffling; got {seed!r}")
    return number


def choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raises:
    PackingError: ``value`` is none of ``allowed``.
    """
    if not isinstance(value, str) or value not in allowed:
        raise PackingError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_alignment(capacity: int, alignment: int) -> None:
    """Raises:
    CapacityError: ``alignment`` does not divide ``capacity``.
    """
    if capacity % alignment:
        down = capacity - capacity % alignment
        near = f"{down} or {down + alignment}" if down else f"{alignment}"
        raise CapacityError(f"capacity {capacity} is not a multiple of alignment {alignment}: pass capacity {near}")


def check_lengths(lengths: Any) -> Int64:
    """``lengths`` as int64 [N].

    Raises:
        PackingError: not one-dimensional, not integers, empty, or a length below 1.
    """
    try:
        array = as_array(lengths, "lengths", NUMBERS + "O")
    except LayoutError as error:
        raise LayoutError(f"{error}; pass one integer per document, [len(d) for d in documents]") from None
    if array.ndim != 1:
        raise PackingError(f"lengths must be one-dimensional, one integer per document; got shape {list(array.shape)}")
    if not array.size:
        raise PackingError("lengths is empty: there is no document to pack")
    if array.dtype.kind not in "iu":
        raise PackingError(
            f"lengths must be integers, got {array.dtype}: convert with numpy.asarray(lengths, dtype=int)"
        )
    if array.min() < 1:
        document = int((array < 1).argmax())
        what = "is empty" if array[document] == 0 else f"has length {array[document]}"
        raise PackingError(f"document {document} {what}: lengths must be at least 1, leave empty documents out")
    if array.max() > MOST_TOKENS // len(array):
        raise PackingError(
            f"lengths up to {array.max():,} over {len(array):,} documents pass 2**60 tokens: plan them in parts"
        )
    return array.astype(np.int64, copy=False)


def too_long(document: object, length: int, capacity: int, others: int = 0) -> CapacityError:
    """Returns the error for a document longer than ``capacity`` under ``overflow="error"``."""
    more = f" ({others:,} more are too long)" if others else ""
    return CapacityError(
        f"document {document} has {length:,} tokens and capacity is {capacity:,}{more}: "
        'pass overflow="split", "truncate" or "drop", or raise capacity'
    )


@dataclass(frozen=True)
class OverflowRule:
    """The rule for documents longer than a row; ``checked`` makes one. ``plan`` documents its attributes."""

    capacity: int
    overflow: Overflow = "error"
    context: int = 0
    min_piece: int = 1

    @staticmethod
    def checked(capacity: int, overflow: Any, context: Any = None, min_piece: Any = 1) -> OverflowRule:
        """Checks the options, and fills in the context that was left out.

        Raises:
            PackingError: one of them is out of range or has no effect under this ``overflow``.
        """
        choice("overflow", overflow, get_args(Overflow))
        least = positive("min_piece", min_piece)
        if context is None:
            context = capacity // 8 if overflow in ("overlap", "restart") else 0
        number = integer(context)
        if number is None or not 0 <= number < capacity:
            raise PackingError(
                f"context must be an integer from 0 to {capacity - 1:,}, less than the capacity; got {context!r}"
            )
        if number and overflow not in ("overlap", "restart"):
            raise PackingError(
                f'context={number:,} has no effect under overflow="{overflow}": pass overflow="overlap" or "restart", '
                "or leave context out"
            )
        if least > 1 and overflow not in CUTS:
            raise PackingError(
                f'min_piece={least:,} has no effect under overflow="{overflow}", which makes one piece at most: pass '
                'overflow="split", "overlap" or "restart", or leave min_piece out'
            )
        if least > max(1, most := (capacity - number) // 2):
            raise PackingError(
                f"min_piece is {least:,}, and a row of {capacity:,} tokens, {number:,} of them context, can be shared "
                f"out to pieces of at most {most:,}: lower min_piece or context, or raise capacity"
            )
        return OverflowRule(capacity, overflow, number, least)

    def parts_of(self, length: int) -> list[PieceSpan]:
        """The parts of a document that reach the rows.

        >>> [part[:2] for part in OverflowRule(8, "split").parts_of(20)]
        [(0, 8), (8, 16), (16, 20)]
        >>> [tuple(part) for part in OverflowRule(8, "overlap", context=2).parts_of(20)]
        [(0, 8, 0), (6, 14, 2), (12, 20, 2)]
        >>> [part[:2] for part in OverflowRule(8, "split", min_piece=3).parts_of(17)]
        [(0, 8), (8, 14), (14, 17)]
        """
        if length > self.capacity and self.overflow in CUTS:
            _, start, size, context = self._cut(np.array([length]))
            return [
                PieceSpan(*part) for part in zip(start.tolist(), (start + size).tolist(), context.tolist(), strict=True)
            ]
        kept = {"truncate": self.capacity, "drop": 0}.get(self.overflow, length) if length > self.capacity else length
        return [PieceSpan(0, kept, 0)] if kept else []

    def cut(self, lengths: Int64) -> Pieces:
        """Apply the rule to every document, as :meth:`parts_of` does to one.

        Raises:
            CapacityError: one is too long under ``error``, or ``drop`` leaves nothing.
        """
        none, capacity = np.zeros(0, np.int64), self.capacity
        if lengths.max() <= capacity:
            return Pieces(lengths, none, none)
        long = np.flatnonzero(lengths > capacity)
        if self.overflow == "error":
            raise too_long(long[0], lengths[long[0]], capacity, len(long) - 1)
        if self.overflow == "truncate":
            return Pieces(np.minimum(lengths, capacity), none, long)
        if self.overflow == "drop":
            kept = np.flatnonzero(lengths <= capacity)
            if not len(kept):
                raise CapacityError(
                    f"nothing is left to pack: all {len(lengths):,} documents have more than {capacity:,} tokens and "
                    'are dropped; pass overflow="split" or "truncate", or raise capacity'
                )
            return Pieces(lengths[kept], long, none, source=kept)
        source, start, size, context = self._cut(lengths)
        return Pieces(size, none, none, source, start, context if self.context else None)

    def _cut(self, lengths: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """Document, first token, length and context of each piece, under a policy of ``CUTS``."""
        stride = self.capacity - self.context
        counts = 1 + np.maximum(0, -((self.capacity - lengths) // stride))
        if counts.sum() > MOST_PIECES:
            raise CapacityError(
                f"the documents split into {counts.sum():,} pieces of {self.capacity:,} tokens, more than 2**36: raise "
                "capacity"
            )
        source = np.repeat(np.arange(len(lengths)), counts)
        last = np.cumsum(counts) - 1
        number = np.arange(len(source)) - np.repeat(last + 1 - counts, counts)
        context = np.where(number > 0, self.context, 0)
        own = context + number * stride  # the first token that no earlier piece trains
        cut = last[counts > 1]
        own[cut] -= np.maximum(0, self.min_piece - (lengths[source[cut]] - own[cut]))
        end = np.append(own[1:], 0)
        end[last] = lengths
        start = own - context
        return source, start, end - start, context
