"""PackedDataset and PackStream as grain pipelines read them.

``GrainSource`` gives grain random access to the rows of a PackedDataset; ``GrainStream`` gives it the rows of a
PackStream, whose cursor grain checkpoints. Both yield dictionaries under grain's or MaxText's names, one row
[capacity] a record, so that grain's own shuffling, sharding and batching apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import PackedDataset
from packing_core.errors import PackingError

if TYPE_CHECKING:
    from packing_core.streaming.stream import PackStream

_CONVENTIONS = ("grain", "maxtext")


class GrainSource:
    """A :class:`~packing_core.PackedDataset` as ``grain.sources.RandomAccessDataSource``: record r is row r.

    >>> grain.MapDataset.source(GrainSource(dataset)).shuffle(seed=0)[host::hosts].batch(8)  # doctest: +SKIP

    Args:
        dataset: its rows are materialised when grain asks for them, in grain's worker if there are any.
        convention: ``"grain"`` or ``"maxtext"``, see :meth:`packing_core.PackedBatch.to_dict`.
    """

    def __init__(self, dataset: PackedDataset, convention: str = "grain") -> None:
        self.dataset = dataset
        self.convention = _known(convention)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return _row(self.dataset[index], self.convention)

    def __repr__(self) -> str:
        """grain's DataLoader compares this to tell whether a checkpoint belongs to the source it is restored onto."""
        plan = self.dataset.plan
        return (
            f"GrainSource(rows={plan.n_rows}, capacity={plan.capacity}, convention={self.convention!r}, "
            f"plan={plan.fingerprint!r})"
        )


class GrainStream(grain.IterDataset):
    """A :class:`~packing_core.PackStream` as ``grain.IterDataset``: one packed row a record, resumable.

    Args:
        open_stream: makes the stream from its start, with this host's ``shard=(index, count)``; called once per
            iterator. The stream gives every shard equally many rows, so no host of a job waits for another.
        convention: ``"grain"`` or ``"maxtext"``.
    """

    def __init__(self, open_stream: Callable[[], PackStream], convention: str = "grain") -> None:
        super().__init__()
        self.open_stream = open_stream
        self.convention = _known(convention)
        self._worker = (0, 1)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called by ``mp_prefetch`` in each worker process: the stream's rows are dealt to the workers in turn.

        Raises:
            PackingError: grain wants consecutive rows, whose number a stream does not know.
        """
        if sequential_slice:
            raise PackingError("a stream does not know how many rows it has: leave sequential_slice out")
        self._worker = (sl.start or 0, sl.step or 1)

    def __iter__(self) -> grain.DatasetIterator:
        return _StreamIterator(self.open_stream().of_worker(*self._worker), self.convention)


class _StreamIterator(grain.DatasetIterator):
    def __init__(self, stream: PackStream, convention: str) -> None:
        super().__init__()
        self._stream = stream
        self._rows = iter(stream)
        self._convention = convention

    def __next__(self) -> dict[str, np.ndarray]:
        return _row(next(self._rows), self._convention)

    def get_state(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)
        self._rows = iter(self._stream)


def _known(convention: str) -> str:
    if convention not in _CONVENTIONS:
        raise PackingError(f"convention is {convention!r}: grain pipelines carry {' or '.join(_CONVENTIONS)}")
    return convention


def _row(packed: PackedBatch, convention: str) -> dict[str, np.ndarray]:
    return {name: array[0] for name, array in packed.to_dict(convention).items()}
