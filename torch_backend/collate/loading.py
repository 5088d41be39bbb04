"""Packed rows for a torch ``DataLoader`` as it is: a data set and a stream whose items are whole batches.

A ``PackedDataset`` or a source of documents goes in; what comes out of the loader is what ``PackedCollator`` emits,
without a ``collate_fn``. Rows are made in the loader's workers. :class:`PackedRows` is map-style, :class:`StreamedRows`
iterable and resumable.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import PackedDataset
from packing_core.errors import LayoutError, PackingError
from packing_core.hints import hinted
from packing_core.planning.pieces import integer, positive
from packing_core.streaming.sources import share_of
from packing_core.streaming.state import join_states, read_state
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

    Each epoch packs the documents anew. Iterating the loader again starts the next epoch, even if the last one was not
    read to its end. ``set_epoch`` chooses the epoch; with several ranks call it before each, as for
    ``DistributedSampler``.

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
        self._resume: Mapping[str, Any] | None = None  # the state that was loaded last, for all workers
        self._of_worker: Mapping[str, Any] | None = None  # that which a StatefulDataLoader loaded into this worker
        self._stream: PackStream | None = None
        self._open(0, 1)  # checks the options

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration, from 0; also seen by workers that persist.

        That of a state that was loaded keeps its position.

        Raises:
            PackingError: accelerate deals the rows again; the epoch is no number from 0 on, or another than that of a
                state that no iteration has resumed yet.
        """
        number = integer(epoch)
        if number is None or number < 0:
            raise PackingError(f"epoch is {epoch!r}: epochs count from 0")
        self._refuse_dealing_again()
        present = self._epochs.present
        if present.resumes and not present.began:
            if number != present.epoch:
                raise PackingError(
                    f"set_epoch({number}) would leave out the position of the state that was loaded, which is of epoch "
                    f"{present.epoch}: call set_epoch({present.epoch}) first, also on a loader that accelerate prepared"
                )
            return
        self._epochs.set(number)

    def __iter__(self) -> Iterator[ReadyBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > 1 and isinstance(self.source, IterableDataset):
            raise PackingError(
                f"the source is a {type(self.source).__name__}, which gives each of {workers} workers documents of its "
                "own: pass num_workers=1 to the DataLoader, or a function open(start) as the source"
            )
        packed = self._open(worker, workers)
        if self._of_worker is not None:
            packed.load_state_dict(self._of_worker)
            self._epochs.begin(packed.epoch)
            self._of_worker = None
        else:
            try:
                self._begin(packed)
            except PackingError as error:
                if info is None:
                    raise
                return _raising(error)  # workers that persist would die of it here
        self._stream = packed
        return self._batches(packed)

    def _refuse_dealing_again(self) -> None:
        """Raises on every rank if accelerate reads the data set to deal its batches to the ranks.

        ``Accelerator.prepare`` leaves no sign of it, but its loader sets the epoch when it begins an iteration.
        """
        accelerate = sys.modules.get("accelerate")
        if accelerate is None or not accelerate.state.GradientState._shared_state:
            return
        loader = accelerate.state.GradientState().active_dataloader
        data = getattr(loader, "dataset", None)
        again = getattr(data, "dataset", None) is self and share_of(data) is not None
        if data is self and isinstance(loader, accelerate.data_loader.DataLoaderDispatcher):
            again = max(self.shard[1], loader.state.num_processes) > 1
        if again:
            raise PackingError(
                "StreamedRows deals its rows to the ranks, and accelerate would deal them again and lose the rest: "
                "leave its DataLoader out of Accelerator.prepare, whatever dispatch_batches is; make_train_step moves "
                "batches to the device"
            )

    def _begin(self, packed: PackStream) -> None:
        """Goes to the start of the epoch, or to the loaded position in the first iteration after it was loaded."""
        now = self._epochs.begin()
        if not now.resumes:
            packed.start_epoch(now.epoch)
            return
        try:
            if self._resume is None or _number_of(self._resume) != now.resumes:
                raise PackingError(
                    "a state was loaded after the workers had started, which do not see it: load it before the "
                    "DataLoader is made, or make a new one"
                )
            packed.load_state_dict(self._resume)
        except BaseException:
            self._epochs.set(now.epoch, now.resumes)  # a refused state is not taken
            raise

    def _batches(self, packed: PackStream) -> Iterator[ReadyBatch]:
        return packed.batches(self.batch_size, lambda rows: ReadyBatch(self.collator(rows)))

    def _open(self, worker: int, workers: int) -> PackStream:
        packed = stream(self.source, self.capacity, shard=self.shard, **self.options)
        return packed.of_worker(worker, workers, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns this process's position; in a worker, that worker's part. See :func:`packing_core.join_states`.

        Raises:
            PackingError: workers make the rows, which alone know their positions.
        """
        present = self._epochs.present
        if get_worker_info() is None:
            if present.began and present.seed:
                raise PackingError(
                    "the rows are made in workers, which alone know their positions: take state_dict() of a "
                    "StatefulDataLoader, or make them with num_workers=0"
                )
            if not present.began:
                packed = self._open(0, 1)
                packed.start_epoch(present.epoch)
                return dict(self._resume) if present.resumes and self._resume else packed.state_dict()
        return dict(self._of_worker) if self._of_worker else (self._stream or self._open(0, 1)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this data set, or of a ``StatefulDataLoader`` over it, in the next iteration.

        The iterations after it begin the epochs after it.

        Raises:
            PackingError: it is neither, or of other options, or the loader keeps states of some steps only.
        """
        if state.get("_steps_since_snapshot"):
            raise PackingError(
                f"the loader's state is {state['_steps_since_snapshot']} steps old: make the loader with "
                "snapshot_every_n_steps=1"
            )
        state = dict(state) if "fingerprint" in state else join_states(_states_in(state))
        epoch = read_state(state, self._open(0, 1).options.state())["epoch"]
        if get_worker_info() is not None:
            self._of_worker = state
            return
        self._resume = state
        self._epochs.set(epoch, _number_of(state))


def _raising(error: PackingError) -> Iterator[ReadyBatch]:
    raise error
    yield


def _number_of(state: Mapping[str, Any]) -> int:
    """Returns a number above 0 by which workers know a state again."""
    return 1 + crc32(repr(state["fingerprint"]).encode())


def _states_in(state: Any) -> list[Mapping[str, Any]]:
    """The states of streams somewhere in the state of a loader."""
    if not isinstance(state, Mapping):
        return []
    if "fingerprint" in state:
        return [state]
    return [found for value in state.values() for found in _states_in(value)]


class _Epoch(NamedTuple):
    """The next iteration, or the present one if it ``began``; ``resumes`` is the number of its state, 0 for none."""

    epoch: int = 0
    began: int = 0
    seed: int = 0  # of the workers that began it; 0 for the process itself
    iteration: int = 0  # of these workers
    resumes: int = 0


class _Epochs:
    """The epoch and the state to resume, which all workers of a loader share, also those of a later iteration.

    The first worker to begin an iteration of the loader counts, the others of the same iteration do not.
    """

    def __init__(self) -> None:
        self._make_shared()
        self._iterations = 0  # of this process

    def _make_shared(self) -> None:
        self._shared = torch.tensor(_Epoch()).share_memory_()
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

    @property
    def present(self) -> _Epoch:
        return _Epoch(*self._shared.tolist())

    def set(self, epoch: int, resumes: int = 0) -> None:
        self._shared.copy_(torch.tensor(_Epoch(epoch, resumes=resumes)))

    def begin(self, resumed: int | None = None) -> _Epoch:
        """Returns the iteration that begins, of the epoch ``resumed`` where its workers were given states of their own.

        A state is that of the first iteration after it was loaded.
        """
        info = get_worker_info()
        self._iterations += 1
        seed = 0 if info is None else info.seed - info.id
        with self._lock:
            now = self.present
            if not now.began or (now.seed, now.iteration) != (seed, self._iterations):
                epoch = resumed if resumed is not None else now.epoch + now.began
                now = _Epoch(epoch, 1, seed, self._iterations, 0 if now.began else now.resumes)
                self._shared.copy_(torch.tensor(now))
            return now


def _ranks() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
