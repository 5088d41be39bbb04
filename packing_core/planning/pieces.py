"""Lengths as the user gave them in, pieces that fit a row out: the checks, and the overflow policies."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from packing_core.errors import CapacityError, LayoutError, PackingError
from packing_core.storage.arrays import NUMBERS, Int64, as_array

Overflow = Literal["error", "truncate", "split", "overlap", "restart", "drop"]
# the policies that make several pieces of a document and lose none of it
CUTS: tuple[Overflow, ...] = ("split", "overlap", "restart")

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
    """Tokens ``begin`` to ``end`` of a document, the first ``context`` of which are trained in an earlier part.

    If the part ``restarts``, it holds the document's first tokens in place of these.
    """

    begin: int
    end: int
    context: int
    restarts: bool = False

    @property
    def places(self) -> slice | Int64:
        """The tokens of the document that the part holds."""
        if not (self.restarts and self.context):
            return slice(self.begin, self.end)
        return np.append(np.arange(self.context), np.arange(self.begin + self.context, self.end))

    @property
    def untrained(self) -> int:
        """Counts the first tokens that are no targets: the context, and a token after it that does not follow it."""
        return self.context + bool(self.restarts and self.context)


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
        'pass overflow="split", "truncate" or "drop", or raise capacity',
        option="overflow capacity",
    )
