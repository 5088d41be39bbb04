"""The order in which documents are trained: lengths and keys in, the documents in that order and its stages out.

A plan packs each stage by itself and keeps the stages in their order (:func:`ordered_rows`), so rows are full and
follow the order up to the length of a stage. A stream reads its documents in this order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError
from packing_core.planning.assignment import RowAssignment, Shuffle, permutation
from packing_core.planning.mixed import FULL, mixed
from packing_core.storage.arrays import Float64, Int64
from packing_core.storage.segment_indexing import offsets_of

Order = Literal["random", "curriculum", "sorted", "grouped", "weighted"]

# Rows of a stage, where the order has no stages of its own: a sixteenth of all rows, but from 4 to 64.
FEWEST_ROWS, STAGE_ROWS, STAGES = 4, 64, 16
SHOWN = 5  # keys that a message lists


class Stages(NamedTuple):
    """Pieces in the order in which they are trained; stage s holds ``order[offsets[s]:offsets[s+1]]``."""

    order: Int64
    offsets: Int64


@dataclass(frozen=True, eq=False)
class OrderRule:
    """A checked order; ``plan`` documents its options.

    Attributes:
        order: its name.
        codes: int64 [N] number of each document's key among all keys, sorted; None where no keys are read.
        weights: float64 [K] weight of each key under ``weighted``.
    """

    order: Order = "random"
    codes: Int64 | None = None
    weights: Float64 | None = None

    @staticmethod
    def checked(order: Any, keys: Any, weights: Any, documents: int) -> OrderRule:
        """Reads the keys and weights of a :class:`.rule.RowRule`.

        Raises:
            PackingError: a document has no key, or a key no weight, that can be used.
        """
        if order in ("random", "curriculum"):
            return OrderRule(order)
        found, codes = _coded(keys, documents)
        if order != "weighted":
            return OrderRule(order, codes)
        return OrderRule(order, codes, _weights_of(found, codes, weights))

    @property
    def digest(self) -> str | None:
        """Identifies the keys and weights; None if there are none."""
        if self.codes is None:
            return None
        hashed = blake2b(self.codes.tobytes(), digest_size=16)
        hashed.update(b"" if self.weights is None else self.weights.tobytes())
        return hashed.hexdigest()

    def of_pieces(self, document: Int64 | None) -> OrderRule:
        """The same order for pieces of the given documents; None: piece p is document p."""
        if document is None or self.codes is None:
            return self
        return OrderRule(self.order, self.codes[document], self.weights)

    def arrange(self, lengths: Int64, shuffle: Shuffle) -> Int64:
        """Returns int64 [N], the documents in the order in which they are trained.

        What the order leaves open, such as the order inside a group and of the groups, is drawn by ``shuffle``; without
        it documents keep their own order, and groups follow their keys.
        """
        drawn = np.arange(len(lengths)) if shuffle is None else permutation(len(lengths), shuffle)
        if self.order == "random":
            return drawn
        if self.order == "curriculum":
            return drawn[np.argsort(octaves(lengths)[drawn], kind="stable")]
        assert self.codes is not None
        codes = self.codes[drawn]
        if self.order == "grouped" and shuffle is not None:
            codes = permutation(int(self.codes.max()) + 1, shuffle)[codes]
        by_key = np.argsort(codes, kind="stable")
        if self.weights is None:
            return drawn[by_key]
        # document j of source s is due when the mixture has (its tokens before the middle of j) / (weight of s) tokens
        codes, drawn = codes[by_key], drawn[by_key]
        size = lengths[drawn]
        upto = np.cumsum(size) - size / 2
        first = np.flatnonzero(np.diff(codes, prepend=-1))
        before = np.zeros(len(self.weights))
        before[codes[first]] = upto[first] - size[first] / 2
        due = (upto - before[codes]) / self.weights[codes]
        return drawn[np.argsort(due, kind="stable")]

    def stages(self, lengths: Int64, capacity: int, shuffle: Shuffle) -> Stages:
        """The documents in their order, and its stages: octaves of length, else up to ``STAGE_ROWS`` rows."""
        order = self.arrange(lengths, shuffle)
        if self.order == "curriculum":
            stage = octaves(lengths)[order]
        else:
            before = np.cumsum(lengths[order]) - 1
            rows = min(STAGE_ROWS, max(FEWEST_ROWS, int(before[-1]) // capacity // STAGES))
            stage = before // (rows * capacity)
        return Stages(order, np.append(np.flatnonzero(np.diff(stage, prepend=-1)), len(order)))


def octaves(lengths: Int64) -> Int64:
    """The octave of each length, from 0: octave k holds lengths above ``2**(k-1)`` and up to ``2**k``.

    >>> octaves(np.array([1, 2, 3, 4, 5, 8, 9])).tolist()
    [0, 1, 2, 2, 3, 3, 4]
    """
    return np.searchsorted(2 ** np.arange(62), lengths, side="left")


def ordered_rows(
    rule: OrderRule, lengths: Int64, capacity: int, max_segments: int | None, shuffle: Shuffle
) -> RowAssignment:
    """``mixed`` rows of pieces in the order of ``rule``, one stage after the other.

    The emptiest row of a stage, unless it is full, is not made: its pieces move on to the next stage. So a stage that
    does not fill a row joins the next one. A stage of the curriculum is drawn and its rows are shuffled by ``shuffle``;
    other stages keep the order inside them too.
    """
    stages = rule.stages(lengths, capacity, shuffle)
    drawn_by = shuffle if rule.order == "curriculum" else None
    limit = max_segments or len(lengths)
    packed: list[tuple[Int64, Int64, Int64]] = []
    moved = stages.order[:0]
    for begin, end in pairwise(stages.offsets.tolist()):
        taken = np.concatenate([moved, stages.order[begin:end]])
        rows = mixed(lengths[taken], capacity, min(limit, len(taken)), drawn_by)
        order, counts = taken[rows.order], np.diff(rows.offsets)
        moved = moved[:0]
        if end < len(lengths):
            filled = np.add.reduceat(rows.sizes, rows.offsets[:-1])
            emptiest = int(filled.argmin())
            if filled[emptiest] < FULL * capacity:
                stays = np.repeat(np.arange(len(counts)) != emptiest, counts)
                order, moved, counts = order[stays], order[~stays], np.delete(counts, emptiest)
        packed.append((counts, order, lengths[order]))
    counts, order, row_lengths = map(np.concatenate, zip(*packed))
    return RowAssignment(offsets_of(counts), order, row_lengths)


def _coded(keys: Any, documents: int) -> tuple[NDArray[Any], Int64]:
    """The different keys, sorted, and the number of each document's key among them."""
    try:
        array = np.asarray(keys)
    except (TypeError, ValueError):  # lists of several lengths
        array = np.zeros(())
    if array.ndim != 1 or array.dtype.kind not in "biufUSMO":
        raise PackingError(f"keys is a {type(keys).__name__} of other things: pass one number or text per document")
    if len(array) != documents:
        raise PackingError(f"there are {len(array):,} keys and {documents:,} documents: pass one per document")
    if isinstance(keys, list | tuple) and array.dtype.kind in "fUSO":
        # Python compares exactly; NumPy would round integers beside floats and drop the NULs that end a text
        array = np.empty(len(keys), object)
        array[:] = keys
    if array.dtype.kind == "O":
        _refuse_unlike(array.tolist())
    elif array.dtype.kind in "fM" and (wrong := np.flatnonzero(array != array)).size:
        raise PackingError(f"the key of document {wrong[0]} is {array[wrong[0]]}: pass one that can be sorted")
    try:
        found, codes = np.unique(array, return_inverse=True)
    except TypeError as error:
        raise PackingError(f"keys cannot be sorted ({error}): pass one number or text per document") from None
    return found, codes.reshape(-1).astype(np.int64)


def _refuse_unlike(keys: Sequence[Any]) -> None:
    """Raise at the first key that is neither a text nor a number as the first one is."""

    def kind(key: Any) -> str:
        if isinstance(key, str | bytes | np.str_):
            return "text"
        return "number" if isinstance(key, int | float | np.number) and key == key else "neither"

    for number, key in enumerate(keys):
        if kind(key) == "neither" or kind(key) != kind(keys[0]):
            other = "" if number == 0 or kind(key) == "neither" else f" and that of document 0 is {keys[0]!r}"
            raise PackingError(
                f"the key of document {number} is {key!r}{other}: pass numbers for all documents, or texts for all"
            )


def _weights_of(found: NDArray[Any], codes: Int64, weights: Any) -> Float64:
    """The weight of each key."""
    if not isinstance(weights, Mapping):
        raise PackingError(f'order="weighted" needs weights, a mapping of each key to its share; got {weights!r}')
    names = found.tolist()
    if absent := [name for name in weights if name not in names]:
        raise PackingError(f"weights names {absent[0]!r}, the key of no document: leave it out")
    values = []
    for number, name in enumerate(names):
        if name not in weights:
            document = int((codes == number).argmax())
            known = ", ".join(map(repr, list(weights)[:SHOWN])) + ", ..." * (len(weights) > SHOWN)
            raise PackingError(f"the key of document {document} is {name!r}, and weights has {known}: add its weight")
        value = weights[name]
        number_ok = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number_ok or not 0 < value <= sys.float_info.max:
            raise PackingError(f"the weight of {name!r} is {value!r}: pass a number above 0")
        values.append(float(value))
    return np.array(values)
