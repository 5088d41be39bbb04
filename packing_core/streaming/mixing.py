"""Several sources of documents and their weights in, one source out, the same for the same seed.

Documents are dealt in blocks. How many of a block each source gives follows from the weights, which may change on the
way, and the number of the block alone; the order in the block follows from the seed. So document n of a mixture is
known to be document k of source s without reading what is before it: nothing needs to be remembered to go on from
anywhere. Files that many processes pack from the middle are mixed by bytes (``crosspack.packing.mixture``), since
nobody has counted their documents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import PackingError
from packing_core.hints import hinted
from packing_core.planning.assignment import permutation
from packing_core.planning.pieces import check_seed, choice, integer
from packing_core.streaming.sources import Source

Stop = Literal["first", "all", "once", "never"]
Weights = Sequence[float] | Sequence[tuple[int, Sequence[float]]]
Shares = tuple[tuple[int, tuple[int, ...]], ...]  # document, and the cumulative weights there in units of ``_UNIT``

BLOCK = 1024  # documents that are dealt at a time; more where a weight is so small that it would get none of them
SMALLEST = 1e-6  # of the sum of the weights
_UNIT = 1 << 48  # what the weights add up to, as integers


@hinted()
def mix(sources: Sequence[Any], weights: Weights, *, seed: int | None = 0, stop: Stop = "first") -> Mixture:
    """Documents of several sources, in random order and by their weights.

    A mixture is a source for :func:`packing_core.stream`, which goes on in it exactly; it can be iterated, and
    ``mixture(start)`` iterates from document ``start`` on.

    >>> mixture = mix([["a0", "a1", "a2", "a3"], ["b0", "b1", "b2"]], [0.5, 0.5], stop="once")
    >>> documents = list(mixture)
    >>> sorted(documents), list(mixture(5)) == documents[5:]
    (['a0', 'a1', 'a2', 'a3', 'b0', 'b1', 'b2'], True)

    Args:
        sources: each a sequence, a function ``open(start)``, an iterable or an iterator; its items may be anything.
        weights: shares of the documents, in any unit. After any number n of documents, source i has given
            ``n * weights[i] / sum(weights)`` of them, give or take one block (1,024 documents, or more where a weight
            is below a thousandth of the sum). To mix by tokens, divide each weight by the mean length of its source.
            A list of pairs (document, weights), ``[(0, [9, 1]), (100_000, [1, 1])]``, changes the weights on the way:
            linearly from each of these documents of the mixture to the next, and no more after the last. They begin
            anew in every epoch.
        seed: decides the order inside the blocks; None deals the sources of a block in turn, as evenly as can be.
        stop: what happens when a document of a source that is at its end is due. ``"first"``: the mixture ends, what is
            left of the others is not read. ``"all"``: that source starts again, and the mixture ends when each source
            has come to its end. ``"once"``: the source is left out and the others go on, so every document comes
            exactly once. ``"never"``: it starts again, without end.

    Raises:
        PackingError: there are no sources, not one weight per source, a weight that is no number above 0 or less than a
            millionth of the sum; pairs that do not begin at document 0 or do not ascend; a source that can be read
            once and would have to start again.
    """
    return Mixture(sources, weights, seed=seed, stop=stop)


class Mixture:
    """Documents of several sources by weight; see :func:`mix`."""

    def __init__(self, sources: Sequence[Any], weights: Weights, *, seed: int | None, stop: Stop) -> None:
        if not len(sources):
            raise PackingError("sources is empty: pass at least one source")
        self.sources = [Source(source, f"sources[{i}]") for i, source in enumerate(sources)]
        self._shares = _schedule(weights, len(sources))
        self.seed = check_seed(seed)
        choice("stop", stop, get_args(Stop))
        self.stop = stop
        if stop in ("all", "never"):
            for source in self.sources:
                if source.once:
                    raise PackingError(
                        f"{source.name} is a {type(source.given).__name__}, which can be read once, and stop={stop!r} "
                        'reads sources again: pass stop="first" or "once", or something that can be read again'
                    )
        least = min(b - a for _, bounds in self._shares for a, b in pairwise(bounds))
        self.block = max(BLOCK, -(-_UNIT // least))  # so that every source gives at least one document of a block

    def __iter__(self) -> Iterator[Any]:
        return self(0)

    def __call__(self, start: int) -> Iterator[Any]:
        """Documents ``start``, ``start + 1``, ... of the mixture.

        A source that does not say how many documents it has is counted, by reading it, where that has to be known
        to find the place: if ``start`` is not 0 and ``stop`` is not ``"first"``.
        """
        return (document for _, document in self.numbered(start))

    def numbered(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The same, each document with the number of its source."""
        if not start or self.stop == "first":
            turn, counted = start, False
        else:
            turn, counted = self._turn(start) if self.stop == "once" else start, True
        given = self._given(turn)
        readers = [_Reader(source, n, counted=counted) for source, n in zip(self.sources, given, strict=True)]
        while True:
            block, first = divmod(turn, self.block)
            for s in self._dealt(block)[first:].tolist():
                turn += 1
                reader = readers[s]
                if reader.ended and self.stop == "once":
                    continue
                document = next(reader.documents, _NONE)
                if document is _NONE:
                    reader.ended = True
                    if self.stop == "first" or (self.stop != "never" and all(reader.ended for reader in readers)):
                        return
                    if self.stop == "once":
                        continue
                    document = reader.start_again()
                yield s, document

    def _given(self, place: int) -> list[int]:
        """Counts each source's turns among the first ``place``."""
        block, rest = divmod(place, self.block)
        before = _turns_before(self._shares, block * self.block)
        given = [b - a for a, b in pairwise(before)]
        if rest:
            inside = np.bincount(self._dealt(block)[:rest], minlength=len(given))
            given = [total + more for total, more in zip(given, inside.tolist(), strict=True)]
        return given

    def _turn(self, start: int) -> int:
        """The turn of document ``start`` where sources at their end are passed over."""
        sizes = [source.size() for source in self.sources]

        def documents(block: int) -> int:  # before this block
            turns = self._given(block * self.block)
            return sum(min(turn, size) for turn, size in zip(turns, sizes, strict=True))

        start = min(start, sum(sizes))
        high = 1
        while documents(high) < start:
            high *= 2
        block = max(0, bisect_left(range(high + 1), start, key=documents) - 1)
        given, left = self._given(block * self.block), start - documents(block)
        for turn, s in enumerate(self._dealt(block).tolist(), block * self.block):
            if not left:
                return turn
            left -= given[s] < sizes[s]
            given[s] += 1
        return (block + 1) * self.block

    def _dealt(self, block: int) -> NDArray[np.int64]:
        """The source of each turn of a block."""
        return _deal(self._shares, self.seed, self.block, block)


_NONE = object()


class _Reader:
    """One source of a mixture, from its turn ``turn`` on.

    Attributes:
        documents: those that are left until its end.
        ended: whether a document was due after its last one.
    """

    def __init__(self, source: Source, turn: int, *, counted: bool) -> None:
        self._source = source
        self.ended = counted and turn > source.size()
        self.documents = source.open(turn % source.size() if self.ended else turn)

    def start_again(self) -> Any:
        """The first document of the next pass."""
        self.documents = self._source.open(0)
        document = next(self.documents, _NONE)
        if document is _NONE:
            raise PackingError(f"{self._source.name} is empty: leave it out of the mixture")
        return document


@lru_cache(maxsize=8)
def _deal(shares: Shares, seed: int | None, size: int, block: int) -> NDArray[np.int64]:
    before, after = (_turns_before(shares, n * size) for n in (block, block + 1))
    counts = np.diff(np.array(after, object) - np.array(before, object)).astype(np.int64)
    dealt = np.repeat(np.arange(len(counts)), counts)
    if seed is not None:
        return dealt[permutation(size, np.random.PCG64([seed, block]))]
    turn = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.tolist()])
    return dealt[np.argsort(turn, kind="stable")]


def _turns_before(shares: Shares, place: int) -> list[int]:
    """Counts the first ``place`` turns that fall to the sources before each, from 0 on: the integral of the shares."""
    doubled = [0] * len(shares[0][1])  # twice the integral
    for (begin, low), (end, high) in pairwise((*shares, (max(place, shares[-1][0] + 1), shares[-1][1]))):
        if (width := min(place, end) - begin) <= 0:
            break
        doubled = [
            total + 2 * a * width + (b - a) * width * width // (end - begin)
            for total, a, b in zip(doubled, low, high, strict=True)
        ]
    return [total // (2 * _UNIT) for total in doubled]


def _schedule(weights: Any, count: int) -> Shares:
    """Returns the cumulative shares of the sources from each document on at which they are given."""
    pairs = [pair for pair in weights if isinstance(pair, list | tuple)] if isinstance(weights, list | tuple) else []
    if not pairs:
        return ((0, _shares(weights, count)),)
    if len(pairs) < len(weights) or any(len(pair) != 2 for pair in pairs):
        raise PackingError(f"weights is {weights!r}: pass one number per source, or pairs (document, weights)")
    places = [integer(place) for place, _ in pairs]
    if places[0] != 0 or any(a is None or b is None or a >= b for a, b in pairwise(places)):
        raise PackingError(
            f"weights has pairs for the documents {[place for place, _ in pairs]}: begin at 0, with ascending integers"
        )
    return tuple((int(place), _shares(at, count)) for place, at in pairs)


def _shares(weights: Any, count: int) -> tuple[int, ...]:
    """Returns the cumulative weights of the sources in units of ``_UNIT``, from 0 on."""
    try:
        array = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        array = np.zeros(0)
    if array.shape != (count,):
        raise PackingError(f"weights is {weights!r} and there are {count} sources: pass one number per source")
    if not (np.isfinite(array).all() and array.min() > 0 and array.min() >= SMALLEST * array.sum()):
        raise PackingError(
            f"weights is {weights!r}: pass numbers above 0, none below a millionth of their sum; leave out a source "
            "that is to give nothing"
        )
    bounds = [round(bound * _UNIT) for bound in accumulate(array / array.sum())]
    return (0, *bounds[:-1], _UNIT)
