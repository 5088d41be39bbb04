"""A sequence of documents in, a source that gives them in an order out: by length, by a key, in groups, by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.errors import PackingError
from packing_core.planning.order import OrderRule
from packing_core.streaming.pending import length_of
from packing_core.streaming.sources import Source

Int64 = NDArray[np.int64]


class OrderedSource(Source):
    """Documents of a sequence in an order, which is drawn anew in every epoch.

    Args:
        given: the sequence.
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
