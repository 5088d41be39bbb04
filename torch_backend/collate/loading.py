"""Packed rows for a torch ``DataLoader`` as it is: a data set and a stream whose items are whole batches.

A ``PackedDataset`` or a source of documents goes in; what comes out of the loader is what ``PackedCollator`` emits,
without a ``collate_fn``. Rows are made in the loader's workers. :class:`PackedRows` is map-style, :class:`StreamedRows`
iterable and resumable.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import PackedDataset
from packing_core.errors import LayoutError, PackingError
from packing_core.hints import hinted
from packing_core.planning.pieces import integer, positive
from packing_core.streaming.state import join_states
from packing_core.streaming.stream import PackStream, stream
from torch_backend.collate import PackedCollator

Collator = Callable[[PackedBatch], dict[str, Any]]


class ReadyBatch(dict[str, Any]):
    """A batch that was collated where its rows were made; a loader that collates it again gets it as it is."""


def _collate_ready(batches: list[ReadyBatch], *, collate_fn_map: Any = None) -> ReadyBatch:
    if len(batches) > 1:
        raise LayoutError(
            f"the data set makes whole batches and the DataLoader joins {len(batches)} of them: pass batch_size to "
            "StreamedRows, and batch_size=None to the DataLoader"
        )
    return batches[0]


def _collate_rows(rows: Any, *, collate_fn_map: Any = None) -> dict[str, Any]:
    return PackedCollator()(rows)


# How torch's default_collate is told of a type. Workers that are spawned import this module with the data set.
default_collate_fn_map.update({ReadyBatch: _collate_ready, PackedBatch: _collate_rows})


class PackedRows(Dataset[ReadyBatch]):
    """The rows of a :class:`packing_core.PackedDataset` for ``DataLoader(rows, batch_size=4, num_workers=2)``.

    Args:
        dataset: documents and their plan.
        collator: makes a batch of rows; by default ``PackedCollator()``. Pass ``PackedCollator(model)`` for a model
            that needs more.
    """

    def __init__(self, dataset: PackedDataset, collator: Collator | None = None) -> None:
        self.dataset = dataset
        self.collator = PackedCollator() if collator is None else collator

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> ReadyBatch:
        """The batch of one row."""
        return ReadyBatch(self.collator(self.dataset[row]))

    def __getitems__(self, rows: list[int]) -> list[ReadyBatch]:
        """The batch of these rows, in a list, as a loader asks for it."""
        return [ReadyBatch(self.collator(self.dataset[rows]))]


class StreamedRows(IterableDataset[ReadyBatch]):
    """Documents packed as they come, for ``DataLoader(rows, batch_size=None, num_workers=2)``.

    Every rank gets the same number of batches, every document is in one batch of one rank, and the workers of a rank
    take turns with its batches, so the order does not depend on their number.

    An epoch packs the documents anew. It is the next one whenever the loader is iterated again, also if the last one
    was not read to its end; ``set_epoch`` chooses one, and should be called where there are several ranks, as
    ``DistributedSampler`` wants it.

    Args:
        source, capacity: as in :func:`packing_core.stream`.
        batch_size: rows of a batch.
        collator: makes a batch of rows; by default ``PackedCollator()``.
        shard: (rank, ranks); by default those of ``torch.distributed``, or of ``RANK`` and ``WORLD_SIZE``.
        options: those of :func:`packing_core.stream`.

    To stop and continue, use ``torchdata.stateful_dataloader.StatefulDataLoader``. Its state, loaded into the loader,
    continues with as many workers and ranks; loaded into this data set, with any number:
    ``rows.load_state_dict(loader.state_dict())`` before a new loader is made. The state of any rank will do.

    Raises:
        PackingError: what ``stream`` raises.
    """

    @hinted(stream)
    def __init__(
        self,
        source: Any,
        capacity: int,
        *,
        batch_size: int = 1,
        collator: Collator | None = None,
        shard: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = positive("batch_size", batch_size)
        self.collator = PackedCollator() if collator is None else collator
        self.source, self.capacity, self.options = source, capacity, options
        self.shard = _ranks() if shard is None else shard
        self._epochs = _Epochs()
        self._resume: Mapping[str, Any] | None = None
        self._stream: PackStream | None = None
        self._open(0, 1)  # checks the options

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration, from 0; also seen by workers that persist."""
        number = integer(epoch)
        if number is None or number < 0:
            raise PackingError(f"epoch is {epoch!r}: epochs count from 0")
        self._epochs.set(number)
        self._resume = None

    def __iter__(self) -> Iterator[ReadyBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > 1 and isinstance(self.source, IterableDataset):
            raise PackingError(
                f"the source is a {type(self.source).__name__}, which gives each of {workers} workers documents of its "
                "own: pass num_workers=1 to the DataLoader, or a function open(start) as the source"
            )
        packed = self._open(worker, workers)
        resume, self._resume = self._resume, None
        if resume is not None:
            packed.load_state_dict(resume)
            self._epochs.begin(packed.epoch)
        else:
            packed.start_epoch(self._epochs.begin())
        self._stream = packed
        return self._batches(packed)

    def _batches(self, packed: PackStream) -> Iterator[ReadyBatch]:
        return (ReadyBatch(self.collator(rows)) for rows in packed.batches(self.batch_size))

    def _open(self, worker: int, workers: int) -> PackStream:
        packed = stream(self.source, self.capacity, shard=self.shard, **self.options)
        return packed.of_worker(worker, workers, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns this process's position; in a worker, that worker's part. See :func:`packing_core.join_states`."""
        if self._resume is not None:
            return dict(self._resume)
        return (self._stream or self._open(0, 1)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this data set, or of a ``StatefulDataLoader`` over it, in the next iteration.

        Raises:
            PackingError: it is neither, or the loader keeps states of some steps only.
        """
        if "fingerprint" in state:
            self._resume = dict(state)
            return
        if state.get("_steps_since_snapshot"):
            raise PackingError(
                f"the loader's state is {state['_steps_since_snapshot']} steps old: make the loader with "
                "snapshot_every_n_steps=1"
            )
        self._resume = join_states(_states_in(state))


def _states_in(state: Any) -> list[Mapping[str, Any]]:
    """The states of streams somewhere in the state of a loader."""
    if not isinstance(state, Mapping):
        return []
    if "fingerprint" in state:
        return [state]
    return [found for value in state.values() for found in _states_in(value)]


class _Epochs:
    """The number of the epoch, which all workers of a loader share, also those of a later iteration.

    The first worker to begin an iteration of the loader counts, the others of the same iteration do not.
    """

    def __init__(self) -> None:
        self._make_shared()
        self._iterations = 0  # of this process

    def _make_shared(self) -> None:
        # epoch of the next or the present iteration; whether it began; by which workers, as the loader's seed and count
        self._shared = torch.zeros(4, dtype=torch.int64).share_memory_()
        self._lock = multiprocessing.get_context("spawn").Lock()  # works under fork too

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if get_spawning_popen() is None:  # a copy that is no worker's: nothing to share
            state["_lock"] = None
            state["_shared"] = self._shared.tolist()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._lock is None:
            values = state["_shared"]
            self._make_shared()
            self._shared.copy_(torch.tensor(values))

    def set(self, epoch: int) -> None:
        self._shared.copy_(torch.tensor([epoch, 0, 0, 0]))

    def begin(self, resumed: int | None = None) -> int:
        """The epoch of the iteration that begins; of one that is resumed, the given one."""
        info = get_worker_info()
        self._iterations += 1
        key = [0 if info is None else info.seed - info.id, self._iterations]
        with self._lock:
            epoch, began, *known = self._shared.tolist()
            if not began or known != key:
                epoch = resumed if resumed is not None else epoch + began
                self._shared.copy_(torch.tensor([epoch, 1, *key]))
            return epoch


def _ranks() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
