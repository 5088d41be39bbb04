"""The training data of a ``Trainer`` as packed rows: the whole data set, or a stream of documents.

A built trainer -> :func:`pack_training_data`, which reads and checks the lengths of all documents -> rows, of which
:func:`use_rows` lets the trainer make its training dataloader. Rows are planned for each epoch and materialised on
access; the trainer counts rows where it counted documents. Its ``train_dataset`` and evaluation data are not changed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from packing_core import PackedBatch, PackedDataset, stream
from packing_core.balance import Cost, ShardedPlan
from packing_core.columns import READ, Documents, read_examples, stream_documents
from packing_core.dataset import with_empty_row
from packing_core.epochs import plan_epoch
from packing_core.errors import PackingError
from packing_core.extras import require
from packing_core.marks import LENGTHS
from packing_core.plan import Overflow
from torch_backend.collate import FULL, PackedCollator
from torch_backend.collate.documents import LABELS, NAMES, as_labels
from torch_backend.training.dataset import arrow_documents

logger = logging.getLogger(__name__)

READ_AT_ONCE = 256  # examples of a stream


class PackedRows(Dataset[PackedBatch]):
    """The rows of every epoch of a data set: row r of epoch e has the number ``e * len(self) + r``, -1 is an empty row.

    Args:
        source: a ``datasets.Dataset``, or a list of examples.
        names: the columns to read.
        capacity, overflow: as in ``packing_core.plan``.
        seed, cost, in_order: as in ``packing_core.epochs.plan_epoch``.
        pad_id: the token that fills padding.
        label: the column of labels per document, None if there is none.

    Attributes:
        epoch: which one the next pass over :class:`RowBatches` is.
        ranks: over how many ranks the rows of an epoch are dealt.
    """

    def __init__(
        self,
        source: Any,
        names: Sequence[str],
        capacity: int,
        *,
        overflow: Overflow = "error",
        seed: int = 0,
        pad_id: int = 0,
        cost: Cost | None = None,
        in_order: bool = False,
        label: str | None = None,
    ) -> None:
        self.source = source
        self.names = list(names)
        self.label = label
        self.capacity = capacity
        self.pad_id = pad_id
        self.options: dict[str, Any] = {"overflow": overflow, "seed": seed, "cost": cost, "in_order": in_order}
        self.epoch = 0
        self.ranks = 1
        self._made: dict[tuple[int, int], tuple[ShardedPlan, PackedDataset]] = {}

    @cached_property
    def documents(self) -> Documents:
        """The documents, in the buffers that hold them."""
        if hasattr(self.source, "select_columns"):
            return arrow_documents(self.source, self.names)
        return read_examples([{name: x[name] for name in self.names if name in x} for x in self.source])

    @cached_property
    def per_document(self) -> dict[str, Any]:
        """What every document has one of: its label."""
        if self.label is None:
            return {}
        if hasattr(self.source, "select_columns"):
            given = self.source.select_columns([self.label]).with_format(None)[:][self.label]
        else:
            given = [example[self.label] for example in self.source]
        return {LABELS: as_labels(given)}

    def dealt(self, epoch: int) -> ShardedPlan:
        """The rows of an epoch and which rank takes which."""
        return self._epoch(epoch)[0]

    def _epoch(self, epoch: int) -> tuple[ShardedPlan, PackedDataset]:
        """The rows of an epoch, as plan and as data; those of two epochs are kept."""
        made = self._made.get((epoch, self.ranks))
        if made is None:
            documents = self.documents
            dealt = plan_epoch(
                documents.input_ids.lengths, self.capacity, epoch=epoch, ranks=self.ranks, **self.options
            )
            packed = PackedDataset(
                documents.input_ids,
                dealt.plan,
                labels=documents.labels,
                loss_mask=documents.loss_mask,
                prompt_lengths=documents.prompt_lengths,
                columns=documents.columns,
                per_document=self.per_document,
                pad_id=self.pad_id,
            )
            kept = {key: value for key, value in self._made.items() if key == (0, self.ranks)}
            self._made = {**kept, (epoch, self.ranks): (made := (dealt, packed))}
        return made

    def __len__(self) -> int:
        return self.dealt(0).plan.n_rows

    def set_epoch(self, epoch: int) -> None:
        """What accelerate calls before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[PackedBatch]:  # or iter() would go on through all epochs
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> PackedBatch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: Sequence[int]) -> PackedBatch:
        real = [number for number in numbers if number >= 0]
        epochs, rows = np.divmod(real or [0], len(self))
        if (epochs != epochs[0]).any():
            raise PackingError(f"rows {list(numbers)} are of epochs {epochs.tolist()}: take those of one at a time")
        batch = self._epoch(int(epochs[0]))[1][rows][: len(real)]
        for _ in range(len(numbers) - len(real)):
            batch = with_empty_row(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:  # a spawned worker maps the files again and plans for itself
        return {
            **{name: value for name, value in vars(self).items() if name not in ("documents", "per_document")},
            "_made": {},
        }

    def __str__(self) -> str:
        rows = self.dealt(0).plan
        lost = {"dropped": len(rows.dropped), "truncated": len(rows.truncated)}
        notes = "".join(f", {count:,} {what}" for what, count in lost.items() if count)
        return (
            f"{rows.n_documents:,} documents{notes}, in {rows.n_rows:,} rows of {rows.capacity:,} tokens, "
            f"{rows.efficiency:.1%} full"
        )


class RowBatches(Sampler[list[int]]):
    """Numbers of the rows of each batch of an epoch, for all ranks in turn: batch b belongs to rank b modulo ranks.

    Every rank gets as many batches, and as many rows in each, as the others.

    Args:
        rows: the rows, which say the epoch.
        size: rows of a batch.
        drop_last: leaves out the rows that do not fill a batch.
    """

    def __init__(self, rows: PackedRows, size: int, *, drop_last: bool = False) -> None:
        self.rows = rows
        self.size = size
        self.drop_last = drop_last

    def __len__(self) -> int:
        per_rank = len(self.rows.dealt(0))
        return self.rows.ranks * (per_rank // self.size if self.drop_last else -(-per_rank // self.size))

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.rows.epoch
        steps = self.rows.dealt(epoch).steps[:, :, 0]
        numbers = np.where(steps == len(self.rows), -1, steps + epoch * len(self.rows))
        for first in range(0, len(self) // self.rows.ranks * self.size, self.size):
            yield from numbers[first : first + self.size].T.tolist()


class PackedStream(IterableDataset[PackedBatch]):
    """Rows of a source that is read once an epoch, packed as its documents come.

    Args:
        source: yields examples; the same ones in the same order on every rank.
        names: the columns to read, None for all.
        capacity, overflow, seed, pad_id: as in ``packing_core.stream``.

    Attributes:
        epoch: which one the next pass is.
        group: an epoch is filled up with empty rows to a multiple of this, so that accelerate repeats none for a rank.
    """

    def __init__(
        self,
        source: Any,
        names: Sequence[str] | None,
        capacity: int,
        *,
        overflow: Overflow = "error",
        seed: int = 0,
        pad_id: int = 0,
    ) -> None:
        self.source = source
        self.names = names
        self.capacity = capacity
        self.options: dict[str, Any] = {"overflow": overflow, "pad_id": pad_id}
        self.seed = seed
        self.epoch = 0
        self.group = 1

    def set_epoch(self, epoch: int) -> None:
        """What accelerate calls before each epoch."""
        self.epoch = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1, "one stream has one reader"
        rows = 0
        last = None
        for last in stream(self._open, self.capacity, seed=self.seed + self.epoch, **self.options):
            rows += 1
            yield last
        for _ in range(-rows % self.group):
            assert last is not None
            yield with_empty_row(last[:0])

    def _open(self, start: int) -> Iterator[dict[str, Any]]:
        examples = iter(self.source)
        if self.names is not None:
            examples = ({name: x[name] for name in self.names if name in x} for x in examples)
        return islice(stream_documents(examples, READ_AT_ONCE), start, None)

    def __str__(self) -> str:
        return f"documents as they come, in rows of {self.capacity:,} tokens"


def pack_training_data(
    trainer: Any, collator: PackedCollator, capacity: int | None, overflow: Overflow
) -> tuple[PackedCollator, PackedRows | PackedStream | None]:
    """The collator of a trainer, and the rows that it shall train on: None if its own batches are packed one by one.

    Rows that are packed already stay as they are, unless a capacity is given. Without one, rows are as long as the
    trainer or the model takes at most.

    Raises:
        CapacityError: a document is longer than the capacity under ``overflow="error"``.
        PackingError: no capacity is given, and neither trainer nor model has a maximum length.
    """
    data = trainer.train_dataset
    if collator.capacity is not None or data is None:
        return _with_capacity(collator, capacity, overflow), None
    first = next(iter(data), None)
    if isinstance(first, PackedBatch):
        if capacity is not None:
            raise PackingError(f"the training data are rows of {first.capacity:,} tokens already: leave capacity out")
        return collator, None
    if capacity is None and isinstance(first, Mapping) and any(name in first for name in LENGTHS):
        return collator, None
    if (reason := _why_batches_only(trainer)) is not None:
        logger.warning(
            "enable_packing packs the %d documents of each batch and not the whole data set, because %s",
            trainer.args.per_device_train_batch_size,
            reason,
        )
        return _with_capacity(collator, capacity, overflow), None
    if capacity is None:
        capacity, source = _longest(trainer)
        logger.warning("enable_packing makes rows of %d tokens, after %s: capacity=... changes it", capacity, source)
    return collator, _rows(trainer, collator, capacity, overflow)


def use_rows(trainer: Any, rows: PackedRows | PackedStream | None) -> None:
    """Let a trainer make its training dataloader of rows; None lets it make its own again."""
    if rows is not None:
        trainer.get_train_dataloader = partial(_dataloader, trainer, rows)
    elif _makes_rows(vars(trainer).get("get_train_dataloader")):
        del trainer.get_train_dataloader


def rows_of(trainer: Any) -> PackedRows | PackedStream | None:
    """What :func:`use_rows` gave to a trainer."""
    method = vars(trainer).get("get_train_dataloader")
    return method.args[1] if _makes_rows(method) else None


def _makes_rows(method: Any) -> bool:
    return isinstance(method, partial) and method.func is _dataloader


def _dataloader(trainer: Any, rows: PackedRows | PackedStream) -> DataLoader[PackedBatch]:
    """What ``Trainer.get_train_dataloader`` returns, with the rows of a batch chosen by :class:`RowBatches`."""
    if trainer.train_dataset is not rows.source:
        raise PackingError("train_dataset was exchanged after enable_packing(trainer): call it again")
    args, size = trainer.args, trainer._train_batch_size
    workers = min(args.dataloader_num_workers, 1 if isinstance(rows, PackedStream) else args.dataloader_num_workers)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": args.dataloader_pin_memory}
    if workers:
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = getattr(args, "dataloader_multiprocessing_context", None)
    if isinstance(rows, PackedStream):
        options |= {"batch_size": size, "drop_last": args.dataloader_drop_last}
    else:
        options["batch_sampler"] = RowBatches(rows, size, drop_last=args.dataloader_drop_last)
    loader = DataLoader(rows, collate_fn=trainer.data_collator, **options)
    prepared: DataLoader[PackedBatch] = trainer.accelerator.prepare(loader)
    # accelerate knows how many ranks read data of their own: all but those of tensor and context parallelism
    if isinstance(rows, PackedStream):
        rows.group = size * getattr(prepared.dataset, "num_processes", 0) or 1
    else:
        rows.ranks = getattr(prepared.batch_sampler, "num_processes", 1)
    return prepared


def _rows(trainer: Any, collator: PackedCollator, capacity: int, overflow: Overflow) -> PackedRows | PackedStream:
    args, data, pad_id = trainer.args, trainer.train_dataset, collator.pad_id
    read = (*trainer._signature_columns, *READ) if args.remove_unused_columns else None
    seed = args.seed if args.data_seed is None else args.data_seed
    if _is_stream(data):
        if args.max_steps <= 0:
            raise PackingError("a stream has no number of rows: pass max_steps to the trainer's arguments")
        if collator.labels_documents:
            raise PackingError("a stream cannot carry one label per document: pass a datasets.Dataset or a list")
        return PackedStream(data, read, capacity, overflow=overflow, seed=seed, pad_id=pad_id)
    names = data.column_names if hasattr(data, "column_names") else list(dict.fromkeys(n for x in data for n in x))
    names = [name for name in names if read is None or name in read]
    label = next((name for name in NAMES if name in names), None) if collator.labels_documents else None
    rows = PackedRows(
        data,
        [name for name in names if label is None or name not in NAMES],
        capacity,
        overflow=overflow,
        seed=seed,
        pad_id=pad_id,
        cost=_cost(trainer.model),
        in_order=getattr(args, "train_sampling_strategy", "random") == "sequential",
        label=label,
    )
    logger.info("enable_packing: %s", rows)
    if rows.dealt(0).plan.efficiency < FULL:
        longest = int(rows.documents.input_ids.lengths.max())
        logger.warning("%s: a smaller capacity leaves less padding; the longest document has %d tokens", rows, longest)
    return rows


def _with_capacity(collator: PackedCollator, capacity: int | None, overflow: Overflow) -> PackedCollator:
    if capacity is None:
        return collator
    collator = copy.copy(collator)
    collator.capacity = capacity
    collator.plan_options = {**collator.plan_options, "overflow": overflow}
    return collator


def _why_batches_only(trainer: Any) -> str | None:
    """Why the documents of a trainer can be packed only inside each of its batches, None if all of them can."""
    stock, data = require("transformers", extra="hf").Trainer, trainer.train_dataset
    for method in ("get_train_dataloader", "_get_train_sampler"):
        own = vars(trainer).get(method)
        if getattr(type(trainer), method) is not getattr(stock, method) or not (own is None or _makes_rows(own)):
            return f"{type(trainer).__name__} has a {method} of its own"
    if trainer.accelerator.dataloader_config.split_batches:
        return "split_batches=True splits each batch over the ranks"
    if _is_stream(data) or isinstance(data, list | tuple):
        return None
    if not hasattr(data, "select_columns"):
        return f"a {type(data).__name__} does not tell its lengths: pass a datasets.Dataset or a list"
    if data.format["type"] == "custom":
        return "its examples are made on access (set_transform): store them as they are to be (map)"
    return None


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__len__")


def _longest(trainer: Any) -> tuple[int, str]:
    """The longest sequence that a trainer or its model takes, and which of their options says so."""
    config = trainer.model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for owner, name in ((trainer.args, "max_length"), (text, "max_position_embeddings")):
        length = getattr(owner, name, None)
        if isinstance(length, int) and length > 0:
            return length, f"{type(owner).__name__}.{name}"
    raise PackingError(
        f"neither {type(trainer.args).__name__} nor {type(text).__name__} has a length: pass capacity=..."
    )


def _cost(model: Any) -> Cost:
    """What a row costs in a model; that of a Llama if its config does not say how large it is."""
    config = model.config
    try:
        return Cost.from_config(config.get_text_config() if hasattr(config, "get_text_config") else config)
    except PackingError:
        return Cost()
