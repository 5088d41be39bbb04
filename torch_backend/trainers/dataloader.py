"""Chooses the packed rows that a ``Trainer`` trains on, and makes its dataloader of them.

A built trainer -> :func:`pack_training_data`, which reads and checks the lengths of all documents -> rows
(:mod:`.epoch_rows`), of which :func:`use_rows` lets the trainer make its training dataloader. The trainer counts rows
where it counted documents. Its ``train_dataset`` and evaluation data are not changed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, IterableDataset

from packing_core import PackedBatch
from packing_core.batches.columns import READ
from packing_core.batches.keys import BatchKey
from packing_core.batches.marks import LENGTHS
from packing_core.errors import PackingError, UnsupportedError, first_line, plural
from packing_core.extras import require
from packing_core.planning.cost import cost_of
from packing_core.storage.arrays import sampled
from packing_core.streaming.sources import share_of
from torch_backend.collate import FULL, BoundaryCollator, PackedCollator
from torch_backend.collate.document_labels import NAMES
from torch_backend.collate.loading import ReadyBatch
from torch_backend.collate.model_traits import configs_of
from torch_backend.collate.vision import VisionRows
from torch_backend.hf.anatomy.structure import causal_lm
from torch_backend.trainers.callbacks import SameRows
from torch_backend.trainers.changes import Changes
from torch_backend.trainers.epoch_rows import EpochRows, RowBatches, RowStream, VisionEpochRows
from torch_backend.trainers.port import LIMITS, PackingRequest
from torch_backend.trainers.replaced import ReplacingCollator, name_of

logger = logging.getLogger(__name__)
STEPS_LOST = 2  # an epoch of so many times fewer steps trains otherwise than its user planned


def pack_training_data(
    trainer: Any, collator: PackedCollator, request: PackingRequest
) -> tuple[PackedCollator, EpochRows | RowStream | None]:
    """The collator of a trainer, and the rows that it shall train on: None if its own batches are packed one by one.

    Rows that are packed already stay as they are, unless a capacity is given. Without one, rows are as long as the
    trainer or the model takes at most.

    Raises:
        CapacityError: a document is longer than the capacity under ``overflow="error"``.
        PackingError: no capacity is given, and neither trainer nor model has a maximum length; an option of the rows is
            given and has no effect, such as an order where the data set is not packed as a whole.
    """
    data, capacity = trainer.train_dataset, request.capacity
    if collator.capacity is not None or data is None:
        request.refuse_order("the documents of each batch are packed by themselves")
        return _with_capacity(collator, request), None
    first = next(iter(data), None)
    _refuse_shares(data, first)
    if isinstance(first, ReadyBatch):
        raise PackingError(
            f"{type(data).__name__} yields batches that are packed already, and enable_packing packs documents itself: "
            "pass the documents as train_dataset (a datasets.Dataset, a list or an IterableDataset) or a "
            "PackedDataset, or train these batches in a loop with make_train_step"
        )
    marked = isinstance(first, Mapping) and any(name in first for name in LENGTHS)
    if isinstance(first, PackedBatch | VisionRows) or (capacity is None and marked):
        way_out = "leave it out, or pass capacity for other rows" if marked else "leave it out"
        request.refuse("the training data are rows already", way_out=way_out)
        return collator, None
    if (reason := _why_batches_only(trainer)) is not None:
        request.refuse_order(f"the documents of each batch are packed by themselves: {reason}")
        logger.warning(
            "enable_packing packs the %d documents of each batch and not the whole data set, because %s",
            trainer.args.per_device_train_batch_size,
            reason,
        )
        return _with_capacity(collator, request), None
    if capacity is None:
        capacity, source = _longest(trainer)
        logger.warning("enable_packing makes rows of %d tokens, after %s: capacity=... changes it", capacity, source)
    return collator, _rows(trainer, collator, capacity, request)


def _refuse_shares(data: Any, first: Any) -> None:
    """Raises on every rank if the ranks hold shares of a data set: their rows are dealt to the ranks, most to none.

    Data that do not say so are compared: their number, and examples of those that are the same whenever they are read.
    """
    seen: list[Any] = [None if is_stream(data) else len(data)]
    if hasattr(data, "select_columns") and not is_stream(data):
        if data.format["type"] != "custom":
            seen += [repr(data.with_format(None)[number]) for number in sampled(len(data))]
    elif isinstance(data, list | tuple) or is_stream(data):
        seen.append(repr(first))
    ranks = _of_ranks((share_of(data), seen))
    shares = [share for share, _ in ranks]
    if len(ranks) > 1 and (any(shares) or any(rank != ranks[0] for rank in ranks)):
        raise PackingError(
            f"the training data differ between ranks{f' (shares {shares})' if any(shares) else ''}, and dealing their "
            "rows to the ranks would lose documents: pass the same, whole data on every rank, without "
            "split_dataset_by_node, shard(...) or part(...)"
        )


def _of_ranks(value: Any) -> list[Any]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def use_rows(changes: Changes, rows: EpochRows | RowStream | None, *, whole_steps: bool) -> None:
    """Let a trainer make its training dataloader of rows, or make its own again (None), of packed batches alone.

    A run that resumes inside an epoch then checks that its rows are those of before (:class:`.callbacks.SameRows`).

    Args:
        whole_steps: as of :class:`.epoch_rows.RowStream`.
    """
    if isinstance(rows, RowStream):
        rows.whole_steps = whole_steps
    # accelerate would let the first rank read for all and concatenate batches, which plain ints cannot be.
    changes.set("dispatch_batches", False, of=changes.trainer.accelerator.dataloader_config)
    if rows is None:
        changes.wrap("get_train_dataloader", _checked_dataloader, changes.trainer)
    else:
        changes.add_callback(SameRows(rows))
        changes.set("get_train_dataloader", partial(_dataloader, changes.trainer, rows))


def rows_of(trainer: Any) -> EpochRows | RowStream | None:
    """Returns the rows that :func:`use_rows` gave to a trainer."""
    method = vars(trainer).get("get_train_dataloader")
    return method.args[1] if isinstance(method, partial) and method.func is _dataloader else None


class PackedOnly:
    """A collator whose batches must be packed."""

    def __init__(self, collator: Any, otherwise: str) -> None:
        self.collator = collator
        self.otherwise = otherwise

    def __call__(self, features: Any) -> Any:
        """
        Raises:
            PackingError: the batch carries no segments.
        """
        if isinstance(self.collator, PackedCollator | BoundaryCollator):
            return self.collator(features)
        try:
            batch = self.collator(features)
        except Exception as error:  # such as that of a collator of documents that was given rows
            raise PackingError(f"{self.otherwise} (it raised {first_line(error)})") from error
        if not (isinstance(batch, Mapping) and BatchKey.LENGTHS in batch):
            raise PackingError(self.otherwise)
        return batch


def _packed_only(trainer: Any) -> PackedOnly:
    return PackedOnly(
        trainer.data_collator,
        f"{name_of(trainer.data_collator)} makes no packed batches, and is the data_collator since "
        "enable_packing(trainer): call enable_packing(trainer) again",
    )


def _checked_dataloader(method: Any, trainer: Any) -> Any:
    """A training dataloader that the trainer makes itself; its batches have to be packed."""
    prepared = method()
    loader = getattr(prepared, "base_dataloader", prepared)  # accelerate's hands calls on to the one inside
    if isinstance(loader, DataLoader):
        if not isinstance(loader.dataset, IterableDataset):
            _refuse_no_batch(prepared, trainer, "the training data")
        own = loader.collate_fn
        otherwise = (
            f"{type(trainer).__name__}.get_train_dataloader collates by {name_of(own)}, whose batches are not packed: "
            "let it pass collate_fn=self.data_collator"
        )
        loader.collate_fn = _packed_only(trainer) if own is trainer.data_collator else PackedOnly(own, otherwise)
    return prepared


def _dataloader(trainer: Any, rows: EpochRows | RowStream) -> DataLoader[PackedBatch]:
    """Makes the loader of ``Trainer.get_train_dataloader``, with the rows of a batch chosen by :class:`RowBatches`."""
    if trainer.train_dataset is not rows.source:
        raise PackingError("train_dataset was exchanged after enable_packing(trainer): call it again")
    args, size = trainer.args, trainer._train_batch_size
    workers = min(args.dataloader_num_workers, 1 if isinstance(rows, RowStream) else args.dataloader_num_workers)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": args.dataloader_pin_memory}
    if workers:  # one that persists would not learn the epoch of a stream
        options["persistent_workers"] = args.dataloader_persistent_workers and not isinstance(rows, RowStream)
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["multiprocessing_context"] = getattr(args, "dataloader_multiprocessing_context", None)
    if isinstance(rows, RowStream):
        options["batch_size"] = size
    else:
        options["batch_sampler"] = RowBatches(rows, size, drop_last=args.dataloader_drop_last)
    loader = DataLoader(rows, collate_fn=_packed_only(trainer), **options)
    prepared: DataLoader[PackedBatch] = trainer.accelerator.prepare(loader)
    # accelerate knows how many ranks read data of their own: all but those of tensor and context parallelism
    if isinstance(rows, RowStream):
        batches = args.gradient_accumulation_steps if rows.whole_steps else 1
        rows.group = size * batches * getattr(prepared.dataset, "num_processes", 1)
    else:
        rows.ranks = getattr(prepared.batch_sampler, "num_processes", 1)
        _refuse_no_batch(prepared, trainer, str(rows))
    return prepared


def _refuse_no_batch(loader: Any, trainer: Any, data: str) -> None:
    """Raises PackingError for a loader whose rows fill no batch and are dropped, so that nothing would be trained."""
    args = trainer.args
    if args.dataloader_drop_last and len(loader) == 0:
        raise PackingError(
            f"{data} fill no batch of {trainer._train_batch_size} rows on each of {args.world_size} ranks, and "
            "dataloader_drop_last=True would leave all of them out: pass a smaller capacity or "
            "per_device_train_batch_size, or leave dataloader_drop_last out",
            option="capacity per_device_train_batch_size dataloader_drop_last",
        )


def _rows(trainer: Any, collator: PackedCollator, capacity: int, request: PackingRequest) -> EpochRows | RowStream:
    args, data, pad_id = trainer.args, trainer.train_dataset, collator.pad_id
    replaced = collator.replaced if isinstance(collator, ReplacingCollator) else None
    read = (*trainer._signature_columns, *READ) if args.remove_unused_columns else None
    seed = args.seed if args.data_seed is None else args.data_seed
    if is_stream(data):
        if collator.vision is not None:
            raise UnsupportedError(
                "a stream of examples with images is not packed: pass a datasets.Dataset or a list of examples"
            )
        if args.max_steps <= 0:
            raise PackingError("a stream has no number of rows: pass max_steps to the trainer's arguments")
        if collator.labels_documents:
            raise PackingError("a stream cannot carry one label per document: pass a datasets.Dataset or a list")
        request.refuse_order("a stream gives its documents as they come")
        return RowStream(data, read, request.rule(capacity), seed=seed, pad_id=pad_id, replaced=replaced)
    rule = request.rule(capacity, cost_of(configs_of(trainer.model)))
    in_order = getattr(args, "train_sampling_strategy", "random") == "sequential"
    if in_order:
        request.refuse_order('train_sampling_strategy="sequential" keeps the documents in theirs')
    if collator.vision is not None:
        return _announced(
            trainer, VisionEpochRows(data, collator.vision, rule, seed=seed, pad_id=pad_id, in_order=in_order)
        )
    names = data.column_names if hasattr(data, "column_names") else list(dict.fromkeys(n for x in data for n in x))
    names = [name for name in names if (read is None or name in read if replaced is None else replaced.reads(name))]
    per_document = set() if replaced is None else replaced.numbers & {*names}
    if collator.labels_documents:
        labels = [name for name in NAMES if name in names]
        names = [name for name in names if name not in labels[1:]]
        per_document |= {*labels[:1]}
    rows = EpochRows(
        data,
        [name for name in names if name not in per_document],
        rule,
        seed=seed,
        pad_id=pad_id,
        in_order=in_order,
        per_document=sorted(per_document),
        replaced=replaced,
    )
    return _announced(trainer, rows)


def _announced(trainer: Any, rows: EpochRows) -> EpochRows:
    """Returns rows, and logs how full they are and what becomes of the trainer's steps."""
    args, plan = trainer.args, rows.dealt(0).plan
    in_row = plan.n_documents / max(plan.n_rows, 1)
    size = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    before, after = (-(-count // size) for count in (plan.n_documents, plan.n_rows))
    steps = (
        f"a step of {plural(size, 'row')} has {plural(round(size * in_row), 'document')} and had {size:,}, "
        f"an epoch has {plural(after, 'step')} and had {before:,}"
    )
    if before < STEPS_LOST * after:
        logger.info("enable_packing: %s; %s", rows, steps)
    else:
        per_rank = max(1, round(size / in_row / args.world_size))
        accumulated = -(-per_rank // args.train_batch_size)
        nearest = (
            f"per_device_train_batch_size={round(per_rank / accumulated)} and "
            f"gradient_accumulation_steps={accumulated}, the nearest to the steps before"
        )
        if per_rank * args.world_size == size:
            nearest = "a smaller capacity"
        logger.warning(
            "enable_packing: %s; %s. The learning rate stays %g: raise it for the larger steps, or take %s",
            *(rows, steps, args.learning_rate, nearest),
        )
    if plan.efficiency < FULL:
        longest = int(rows.documents.input_ids.lengths.max())
        logger.warning("%s: a smaller capacity leaves less padding; the longest document has %d tokens", rows, longest)
    return rows


def _with_capacity(collator: PackedCollator, request: PackingRequest) -> PackedCollator:
    if request.capacity is None:
        request.refuse("the documents of each batch share a row of their length", *LIMITS, way_out="pass a capacity")
        return collator
    collator = copy.copy(collator)
    collator.capacity = request.capacity
    collator.plan_options = collator.plan_options | {name: x for name, x in request.rows.items() if name in LIMITS}
    return collator


def _why_batches_only(trainer: Any) -> str | None:
    """Explains why documents of a trainer can be packed only inside each of its batches; None if all of them can."""
    stock, data = require("transformers", extra="hf").Trainer, trainer.train_dataset
    for method in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(type(trainer), method) is not getattr(stock, method) or method in vars(trainer):
            return f"{type(trainer).__name__} has a {method} of its own"
    if trainer.accelerator.dataloader_config.split_batches:
        return "split_batches=True splits each batch over the ranks"
    if is_stream(data) or isinstance(data, list | tuple):
        return None
    if not hasattr(data, "select_columns"):
        return f"a {type(data).__name__} does not tell its lengths: pass a datasets.Dataset or a list"
    if made_on_access(data):
        return "its examples are made on access (set_transform): store them as they are to be (map)"
    return None


def is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or not hasattr(data, "__len__")


def made_on_access(data: Any) -> bool:
    """Returns whether ``set_transform`` makes each example of a data set when it is read."""
    return hasattr(data, "set_transform") and data.format["type"] == "custom"


def _longest(trainer: Any) -> tuple[int, str]:
    """The longest sequence that a trainer or its model takes, and which of their options says so."""
    config = causal_lm(trainer.model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for owner, name in ((trainer.args, "max_length"), (text, "max_position_embeddings")):
        length = getattr(owner, name, None)
        if isinstance(length, int) and length > 0:
            return length, f"{type(owner).__name__}.{name}"
    raise PackingError(
        f"neither {type(trainer.args).__name__} nor {type(text).__name__} has a length: pass capacity=..."
    )
