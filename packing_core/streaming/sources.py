"""Sources of documents: wraps any iterable in a function that iterates from any document on.

Some sources can be read from any document on, some only from their start, and some only once. What a source cannot do
is an error when it is asked for, which says what to pass instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from packing_core.errors import PackingError
from packing_core.planning.order import OrderRule
from packing_core.storage.arrays import Int64, as_int64, digest, sampled
from packing_core.storage.arrow import is_arrow
from packing_core.storage.ragged import Ragged
from packing_core.streaming.pending import Later, length_of

Open = Callable[[int], Iterable[Any]]


class Source:
    """Documents that are numbered from 0.

    Args:
        given: a sequence, or an Arrow list array; a function ``open(start)`` that iterates from document ``start``;
            something that can be iterated again and again, which is read from its start whatever is asked for; or an
            iterator, which can be read once.
        name: what errors call it.
        lengths: [N] tokens of each document of a sequence: documents are then read when their tokens are asked for.

    Raises:
        PackingError: it is none of these.
    """

    def __init__(self, given: Any, name: str = "source", *, lengths: ArrayLike | None = None) -> None:
        self.name = name
        self.given: Any = Ragged.of(given, name=name) if is_arrow(given) else given
        self._handed_out = 0  # documents of an iterator that were read
        self._kind = _kind_of(self.given, name)
        self._size: int | None = None
        self._sample: list[Any] | None = None
        self._lengths: list[int] | None = None
        if lengths is not None:
            if self._kind != "sequence":
                raise PackingError(
                    f"{name} is a {type(given).__name__} and lengths are given: pass a sequence, whose documents can "
                    "be read in any order, or leave lengths out"
                )
            self._lengths = as_int64(lengths, "lengths").tolist()
            if len(self._lengths) != len(self.given):
                raise PackingError(
                    f"there are {len(self._lengths):,} lengths and {len(self.given):,} documents: pass one per document"
                )

    @property
    def once(self) -> bool:
        """Returns whether the documents can be read only once."""
        return self._kind == "iterator"

    @property
    def is_sequence(self) -> bool:
        """Returns whether any document can be read at any time."""
        return self._kind == "sequence"

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch of the passes to come, which a source with an order of its own reads."""

    def numbers(self, places: Int64) -> Int64:
        """Returns the numbers of the documents at these places among all that :meth:`open` gives."""
        return places

    def document(self, number: int) -> Any:
        """Returns a document of a sequence; one whose length is known is read later."""
        if self._lengths is None:
            return self.given[number]
        length = self._lengths[number]
        return Later(self.given, number, length, 0, length)

    def check_resumable(self) -> None:
        """Raise PackingError if the documents can be read only once."""
        if self.once:
            raise PackingError(
                f"{self.name} is a {type(self.given).__name__}, which can be read once: to go on in it or to read it "
                "again, pass a sequence, or a function open(start) that iterates from document number start"
            )

    def open(self, start: int) -> Iterator[Any]:
        """Documents ``start``, ``start + 1``, ...

        Raises:
            PackingError: they were read already and cannot be read again.
        """
        given: Any = self.given
        if self._kind == "function":
            opened = given(start)
            if not hasattr(opened, "__iter__") and not hasattr(opened, "__getitem__"):
                raise PackingError(f"open({start}) returned a {type(opened).__name__}: return an iterable of documents")
            return iter(opened)
        if self._lengths is None and self._kind == "sequence":
            return (given[i] for i in range(start, len(given)))  # read faster than by ``document``
        if self._lengths is not None:
            return (self.document(i) for i in range(start, len(given)))
        if self._kind == "iterable":
            return islice(iter(given), start, None)
        if start != self._handed_out:
            self.check_resumable()
        return self._read_once()

    def _read_once(self) -> Iterator[Any]:
        for document in self.given:
            self._handed_out += 1
            yield document

    def size(self) -> int:
        """Returns the number of documents; a source without a length is counted by reading it once."""
        if self._size is None:
            self.check_resumable()
            sequence = self._kind == "sequence"
            self._size = len(self.given) if sequence else sum(1 for _ in self.open(0))
        return self._size

    def state(self) -> dict[str, Any]:
        """Returns what a saved state holds of a sequence, beside the position."""
        if not self.is_sequence:
            return {}
        try:
            return {"source": self.sample(len(self.given))}
        except Exception:  # a document that cannot be read now must not keep a position from being saved
            return {}

    def sample(self, size: int) -> list[Any]:
        """Returns ``size`` and a digest of documents from all over the first ``size`` of a sequence."""
        if self._sample is None or self._sample[0] != size:
            numbers = sampled(min(size, len(self.given)))
            self._sample = [size, digest((number, 0, self.given[number]) for number in numbers)]
        return self._sample


class OrderedSource(Source):
    """Documents of a sequence in an order, which is drawn anew in every epoch.

    Args:
        order, keys, weights: as in ``packing_core.plan``.
        seed: draws what the order leaves open; None leaves documents in their own order there.
        lengths: as of :class:`Source`; without them, every document is read once for its length where it is needed.

    Raises:
        PackingError: the documents cannot be read in any order, or the order cannot be made of the keys.
    """

    def __init__(
        self,
        given: Any,
        order: str,
        keys: Any,
        weights: Mapping[Any, float] | None,
        *,
        seed: int | None,
        lengths: ArrayLike | None = None,
    ) -> None:
        super().__init__(given, lengths=lengths)
        if not self.is_sequence:
            raise PackingError(
                f'{self.name} is a {type(given).__name__} and order="{order}": pass a sequence, whose documents can be '
                "read in any order, or documents that are in this order already, without order"
            )
        self.rule = OrderRule.checked(order, keys, weights, len(self.given))
        self._seed = seed
        self._arranged: tuple[int, Int64] | None = None  # an epoch and its order
        self.start_epoch(0)

    @cached_property
    def _sizes(self) -> Int64:
        if self._lengths is not None:
            return np.array(self._lengths, np.int64)
        if self.rule.order in ("sorted", "grouped"):  # by keys alone
            return np.ones(len(self.given), np.int64)
        return np.array([length_of(self.given[i], i) for i in range(len(self.given))], np.int64)

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch, by which the order is drawn."""
        self._epoch = epoch

    @property
    def _order(self) -> Int64:
        if self._arranged is None or self._arranged[0] != self._epoch:
            shuffle = None if self._seed is None else np.random.PCG64([self._seed, self._epoch])
            self._arranged = self._epoch, self.rule.arrange(self._sizes, shuffle)
        return self._arranged[1]

    def numbers(self, places: Int64) -> Int64:
        """Returns the numbers of the documents at these places of the order."""
        return self._order[places]

    def open(self, start: int) -> Iterator[Any]:
        """The documents at place ``start`` of the order, ``start + 1``, ..."""
        order = self._order
        return (self.document(number) for number in order[start:].tolist())


def share_of(data: Any) -> tuple[int, int] | None:
    """Returns (index, count) of data that say that they are one reader's share of others; None if they do not.

    These are parts of ``crosspack.read``, streams of ``split_dataset_by_node``, accelerate's shards of a data set, and
    mixtures of them. Whoever deals such data to ranks again loses the rest.
    """
    node = getattr(data, "_distributed", None)
    for owner, index, count in ((node, "rank", "world_size"), (data, "process_index", "num_processes")):
        if isinstance(number := getattr(owner, count, None), int) and number > 1:
            return int(getattr(owner, index)), number
    share = getattr(data, "share", None)
    if isinstance(share, tuple) and len(share) == 2 and share[1] > 1:
        return share
    parts = getattr(data, "sources", None)
    inside = parts if isinstance(parts, list) else [getattr(data, "given", None)] if isinstance(data, Source) else []
    return next((found for part in inside if (found := share_of(part))), None)


def _kind_of(given: Any, name: str) -> str:
    if callable(given) and not hasattr(given, "__getitem__") and not hasattr(given, "__next__"):
        try:
            inspect.signature(given).bind(0)
        except TypeError:
            if not hasattr(given, "__iter__"):
                raise PackingError(
                    f"{name} is a function that does not take one number: pass open(start), which iterates from "
                    "document number start"
                ) from None
        except ValueError:  # a builtin without a signature
            return "function"
        else:
            return "function"
    if not isinstance(given, (str, bytes, Mapping)):
        if hasattr(given, "__len__") and hasattr(given, "__getitem__"):
            return "sequence"
        if hasattr(given, "__next__"):
            return "iterator"
        if hasattr(given, "__iter__"):
            return "iterable"
    raise PackingError(
        f"{name} is a {type(given).__name__}: pass a sequence of documents, a function open(start) that iterates from "
        "document number start, or an iterable"
    )
