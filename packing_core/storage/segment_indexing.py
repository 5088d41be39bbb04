"""Vectorised work on runs: contiguous stretches of a flat array, given by their first index and their length.

Rows of a batch are looked at as one flat array of ``rows * capacity`` tokens. A segment is a run of it, and so is every
gap between segments (padding). Data flows from a few numbers per run to one number per token, and never back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.errors import RowIndexError
from packing_core.storage.arrays import Array, Int64

BLOCK_TOKENS = 1 << 18  # tokens handled at a time: the indexes and temporaries of a block stay in the L2 cache
WINDOWS = (64, 8, 1)  # elements copied per index, the widest that fits a run first


def chosen(index: int | slice | ArrayLike, count: int) -> Int64:
    """int64: which of ``count`` things an index chooses, in its order; an int chooses one.

    >>> chosen(-1, 5), chosen(slice(1, 4), 5), chosen([3, -5], 5)
    (array([4]), array([1, 2, 3]), array([3, 0]))

    Raises:
        RowIndexError: the index is out of range, or is not of integers (or of ``count`` bools).
    """
    if isinstance(index, slice):
        return sliced(index, count)
    try:
        numbers = np.atleast_1d(np.asarray(index, None if np.size(index) else np.int64))
    except Exception:  # a ragged list, or another library's __array__
        numbers = np.zeros(0, object)
    if numbers.dtype == np.bool_ and numbers.shape == (count,) and np.ndim(index):
        return np.flatnonzero(numbers)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise RowIndexError(
            f"rows are chosen by integers, a slice, or {count:,} bools; got {numbers.dtype} {numbers.shape}"
        )
    outside = (numbers < -count) | (numbers >= count)
    if outside.any():
        raise RowIndexError(f"row {numbers[outside][0]} of {count:,}: rows are numbered 0 to {count - 1:,}")
    numbers = numbers.astype(np.int64, copy=False)
    return np.where(numbers < 0, numbers + count, numbers)


def sliced(part: slice, count: int) -> Int64:
    """int64: which of ``count`` things a slice chooses.

    Raises:
        RowIndexError: it is not of integers.
    """
    try:
        picked = range(count)[part]
    except (TypeError, ValueError):
        raise RowIndexError(f"rows are chosen by slices of integers, got {part}: pass one such as batch[2:5]") from None
    return np.arange(len(picked)) * (picked.step if len(picked) > 1 else 1) + picked.start


def offsets_of(lengths: ArrayLike) -> Int64:
    """int64 [N+1]: 0, then the sums of the first 1, 2, .., N lengths; run n is ``offsets[n]:offsets[n + 1]``.

    >>> offsets_of([3, 1, 2])
    array([0, 3, 4, 6])
    """
    offsets = np.zeros(np.size(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(lengths: Int64) -> Int64:
    """[sum(lengths)] int64: 0, 1, .., lengths[0]-1, 0, 1, .., lengths[1]-1, and so on.

    >>> ranges(np.array([3, 1, 2]))
    array([0, 1, 2, 0, 0, 1])
    """
    return indexes(np.zeros(1, np.int64), lengths)


def gaps(at: Int64, lengths: Int64, size: int) -> tuple[Int64, Int64]:
    """First index and length, each [S+1], of what S ordered runs leave free of ``size``: before each, then last."""
    begin = np.concatenate([np.zeros(1, np.int64), at + lengths])
    end = np.append(at, size)
    return begin, end - begin


def spread(values: Array, at: Int64, lengths: Int64, size: int, fill: Array | int) -> Array:
    """[size] with ``values[s]`` at every token of run s and ``fill`` (one number, or one per gap [S+1]) in the gaps."""
    _, free = gaps(at, lengths, size)
    both = np.empty(2 * len(at) + 1, values.dtype)
    counts = np.empty(len(both), np.int64)
    both[0::2], both[1::2] = fill, values
    counts[0::2], counts[1::2] = free, lengths
    return np.repeat(both, counts)


def indexes(begin: Int64, lengths: Int64) -> Int64:
    """[sum(lengths)] int64: the flat index of every token of the runs, in order."""
    away = begin - np.cumsum(lengths)
    away += lengths
    flat: Int64 = np.repeat(away, lengths)
    flat += np.arange(len(flat))
    return flat


def ramps(at: Int64, lengths: Int64, size: int) -> NDArray[np.int32]:
    """[size] int32: 0, 1, 2, .. from the first token of each of S ordered runs, and 0 in the gaps."""
    if not len(at):
        return np.zeros(size, np.int32)
    reach = np.diff(at, append=size)  # up to the next run: what that says of the gap between is overwritten below
    reach[0] += at[0]
    out = np.repeat(at.astype(np.int32), reach)  # past 2**31 tokens both sides of the difference wrap alike
    count = np.arange(min(size, BLOCK_TOKENS), dtype=np.int32)
    for first in range(0, size, BLOCK_TOKENS):
        part = out[first : first + BLOCK_TOKENS]
        np.subtract(count[: len(part)], part, out=part)
        count += np.int32(BLOCK_TOKENS)
    out[indexes(*gaps(at, lengths, size))] = 0
    return out


def copy_runs(out: Array, at: Int64, values: Array, begin: Int64, lengths: Int64) -> None:
    """Copy ``values[begin[p] : begin[p] + lengths[p]]`` to ``out[at[p] :]`` for every run p.

    Indexing token by token costs more than the copy, and slicing run by run costs more in Python. So both arrays are
    seen as overlapping windows of a few dozen elements, and a run is copied as the windows that cover it, the last one
    flush with its end: two windows may write the same tokens twice, with the same values.

    Args:
        out: contiguous 1-D array, written in place.
        at: [P] first index in ``out``.
        values: contiguous 1-D array of the same dtype as ``out``.
        begin: [P] first index in ``values``.
        lengths: [P] elements to copy.
    """
    wider: int | None = None
    for width in WINDOWS:
        chosen = np.flatnonzero((lengths >= width) & (lengths < wider) if wider else lengths >= width)
        if len(chosen):
            _copy_windows(out, at[chosen], values, begin[chosen], lengths[chosen], width)
        wider = width


def blocks(lengths: Int64) -> Iterator[slice]:
    """Consecutive slices over runs, each of about BLOCK_TOKENS tokens and at least one run."""
    ends = np.cumsum(lengths)
    last = len(ends)
    total = int(ends[-1]) if last else 0
    cuts = np.searchsorted(ends, np.arange(BLOCK_TOKENS, total, BLOCK_TOKENS)).tolist()
    for begin, end in pairwise([0, *cuts, last]):
        if begin < end:
            yield slice(begin, end)


def _copy_windows(out: Array, at: Int64, values: Array, begin: Int64, lengths: Int64, width: int) -> None:
    """Copy runs of at least ``width`` elements, ``width`` at a time."""
    target, source = _windows(out, width), _windows(values, width)
    count = -(-lengths // width)
    ends = np.cumsum(count)
    first = at - (ends - count) * width  # so that window k of all, counted over the runs, begins at first + k * width
    flush = at + lengths - width
    away = begin - at
    for block in blocks(count * width):
        done, here = int(ends[block.start] - count[block.start]), count[block]
        to = np.repeat(first[block], here)
        to += np.arange(done * width, (done + len(to)) * width, width)
        to[ends[block] - done - 1] = flush[block]
        target[to] = source[np.repeat(away[block], here) + to]


def _windows(array: Array, width: int) -> Array:
    """[len(array) - width + 1] overlapping windows of ``width`` elements, each one opaque item."""
    item = np.dtype((np.void, width * array.itemsize))
    return np.ndarray((len(array) - width + 1,), item, buffer=array, strides=(array.itemsize,))
