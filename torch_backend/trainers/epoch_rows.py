"""Training data as packed rows, in the order of each epoch: a whole data set, or a stream of documents.

Examples -> the lengths of all documents -> a plan for each epoch -> rows, which are materialised on access.
:class:`RowBatches` says which of them each rank takes in each batch. A :class:`RowStream` packs documents as they
come. :class:`VisionEpochRows` read documents with images one by one, and their images again with each row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from packing_core import PackedBatch, PackedDataset, stream
from packing_core.batches.columns import Documents, arrow_documents, documents_of, read_examples, stream_documents
from packing_core.batches.dataset import with_empty_row
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import LayoutError, PackingError, plural
from packing_core.planning.balance import ShardedPlan
from packing_core.planning.epochs import plan_epoch
from packing_core.planning.packplan import PackPlan
from packing_core.planning.rule import RowRule
from packing_core.storage.arrays import digest
from torch_backend.collate.document_labels import LABELS, NAMES, as_labels
from torch_backend.collate.vision import VisionDocument, VisionReader, VisionRows, rows_of
from torch_backend.collate.vision_dataset import read_again, read_all
from torch_backend.trainers.replaced import Replaced

READ_AT_ONCE = 256  # examples of a stream
COMPARED = 16  # documents by which a run that goes on knows its stream again
TRIED = 64  # rows of a stream of which one has to train something


class EpochRows(Dataset[PackedBatch]):
    """The rows of every epoch of a data set: row r of epoch e has the number ``e * len(self) + r``, -1 is an empty row.

    Args:
        source: a ``datasets.Dataset``, or a list of examples.
        names: the columns to read.
        rule: how documents become rows, or the tokens of a row; its keys are the name of a column.
        seed, in_order: as in ``packing_core.planning.epochs.plan_epoch``.
        pad_id: the token that fills padding.
        per_document: the columns with one value per document: its label, and other numbers.
        replaced: the collator that packing replaces, which is asked about each document.

    Attributes:
        epoch: which one the next pass over :class:`RowBatches` is.
        ranks: over how many ranks the rows of an epoch are dealt.
    """

    def __init__(
        self,
        source: Any,
        names: Sequence[str],
        rule: int | RowRule,
        *,
        seed: int = 0,
        pad_id: int = 0,
        in_order: bool = False,
        per_document: Sequence[str] = (),
        replaced: Replaced | None = None,
    ) -> None:
        self.source = source
        self.names = list(names)
        self.names_per_document = tuple(per_document)
        self.replaced = replaced
        self.rule = RowRule.of(rule)
        self.pad_id = pad_id
        self.seed = seed
        self.in_order = in_order
        self.epoch = 0
        self.ranks = 1
        self._epochs: dict[tuple[int, int], tuple[ShardedPlan[PackPlan], PackedDataset]] = {}

    @cached_property
    def documents(self) -> Documents:
        """The documents, in the buffers that hold them."""
        if hasattr(self.source, "select_columns"):
            return arrow_documents(self.source, self.names)
        return read_examples([{name: x[name] for name in self.names if name in x} for x in self.source])

    @cached_property
    def per_document(self) -> dict[str, Any]:
        """Returns the values that each document has one of: its label, and other numbers."""
        if not self.names_per_document:
            return {}
        names = self.names_per_document
        return {LABELS if name in NAMES else name: as_labels(self._column(name)) for name in names}

    @cached_property
    def keys(self) -> Any:
        """Returns the key of each document in the order of the training; None if the order has none.

        Raises:
            PackingError: the training data, or an example of them, lack the column, or an example holds several
                documents.
        """
        name = self.rule.keys
        if name is None:
            return None
        if not isinstance(name, str):
            raise PackingError(
                f"keys is a {type(name).__name__}: pass the name of the column that holds each document's key"
            )
        table = getattr(self.source, "column_names", None)
        for number, columns in enumerate(self.source if table is None else [table]):
            if name not in columns:
                where = "the training data have" if table is not None else f"training example {number} has"
                raise PackingError(f'{where} no "{name}", which keys names, only {", ".join(columns)}')
        keys = self._column(name)
        if len(keys) != (documents := len(self.documents.input_ids)):
            raise PackingError(
                f'keys="{name}" gives {plural(len(keys), "training example")} a key, which hold {documents:,} '
                "documents: pass the documents as examples of their own"
            )
        return keys

    def _column(self, name: str) -> Any:
        """The values of a column, one for each training example."""
        if hasattr(self.source, "select_columns"):
            return self.source.select_columns([name]).with_format(None)[name][:]
        return [example[name] for example in self.source]

    def dealt(self, epoch: int) -> ShardedPlan[PackPlan]:
        """The rows of an epoch and which rank takes which."""
        return self._epoch(epoch)[0]

    def _epoch(self, epoch: int) -> tuple[ShardedPlan[PackPlan], PackedDataset]:
        """The rows of an epoch, as plan and as data; those of two epochs are kept."""
        rows = self._epochs.get((epoch, self.ranks))
        if rows is None:
            documents = self.documents
            dealt = plan_epoch(
                documents.input_ids.lengths,
                dataclasses.replace(self.rule, keys=self.keys),
                seed=self.seed,
                epoch=epoch,
                ranks=self.ranks,
                in_order=self.in_order,
            )
            packed = PackedDataset(
                documents,
                dealt.plan,
                per_document=self.per_document,
                pad_id=self.pad_id,
            )
            first = {key: value for key, value in self._epochs.items() if key == (0, self.ranks)}
            self._epochs = {**first, (epoch, self.ranks): (rows := (dealt, packed))}
        return rows

    @property
    def identity(self) -> str:
        """Digest of the rows of the first epoch in the order in which they are trained; other epochs follow from it."""
        dealt = self.dealt(0)
        order = dealt.steps.reshape(-1)
        return dealt.plan.select(order[order < dealt.plan.n_rows]).fingerprint

    @property
    def digest(self) -> str:
        """Identifies the source by documents from all over."""
        return self.documents.digest

    def __len__(self) -> int:
        return self.dealt(0).plan.n_rows

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; accelerate calls it before each one."""
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
        batch = self._with_collator_columns(self._epoch(int(epochs[0]))[1][rows][: len(real)], first=epochs[0] == 0)
        for _ in range(len(numbers) - len(real)):
            batch = with_empty_row(batch)
        return batch

    def _with_collator_columns(self, batch: PackedBatch, *, first: bool) -> PackedBatch:
        """Rows with the replaced collator's additions; the first epoch compares them with the collator's batches."""
        if self.replaced is None or not (first or self.replaced.added):
            return batch
        whole = self.rule.overflow in ("error", "drop")
        return self.replaced.carry(batch, self.source, "training example {}".format, whole=whole)

    def __getstate__(self) -> dict[str, Any]:  # a spawned worker maps the files again and plans for itself
        return {
            **{name: value for name, value in vars(self).items() if name not in ("documents", "per_document", "keys")},
            "_epochs": {},
        }

    def __str__(self) -> str:
        rows = self.dealt(0).plan
        lost = {"dropped": len(rows.dropped), "truncated": len(rows.truncated)}
        notes = "".join(f", {count:,} {what}" for what, count in lost.items() if count)
        return (
            f"{plural(rows.n_documents, 'document')}{notes}, in {plural(rows.n_rows, 'row')} of {rows.capacity:,} "
            f"tokens, {rows.efficiency:.1%} full"
        )


class VisionEpochRows(EpochRows):
    """The rows of every epoch, each with the images of its documents."""

    def __init__(self, source: Any, reader: VisionReader, rule: RowRule, **options: Any) -> None:
        super().__init__(source, (), rule, **options)
        self.reader = reader

    @cached_property
    def documents(self) -> Documents:
        """The documents' tokens and positions; their images are not kept."""
        return read_all(self.reader, self.source, self.rule.capacity, self.rule.overflow)[0]

    def __getitems__(self, numbers: Sequence[int]) -> VisionRows:  # type: ignore[override]
        return rows_of(super().__getitems__(numbers), self._document)

    def _document(self, number: int) -> VisionDocument:
        return read_again(self.reader, self.source, number, self.documents.input_ids[number])

    def __getstate__(self) -> dict[str, Any]:  # reading all images again would be dear for a spawned worker
        return {**vars(self), "_epochs": {}}


class RowBatches(Sampler[list[int]]):
    """Numbers of the rows of each batch of an epoch, for all ranks in turn: batch b belongs to rank b modulo ranks.

    Every rank gets as many batches, and as many rows in each, as the others.
    """

    def __init__(self, rows: EpochRows, size: int, *, drop_last: bool = False) -> None:
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


class RowStream(IterableDataset[PackedBatch]):
    """Rows of a source that is read once an epoch, packed as its documents come.

    A trainer does not know how many rows that gives: it takes an optimizer step after every so many batches, wherever
    an epoch ends, and resumes by skipping batches of the first epoch, however many epochs it had trained.

    Args:
        source: yields examples; the same ones in the same order on every rank.
        names: the columns to read, None for all.
        rule: how documents become rows.
        seed, pad_id: as in ``packing_core.stream``.
        replaced: as of :class:`EpochRows`; it names the columns itself.

    Attributes:
        epoch: which one the next pass is.
        resumed_in: the epoch in which a resumed run was saved. After a resume, epoch 0 replays all epochs up to this
            one, because transformers skips batches of epoch 0 only.
        whole_steps: whether the last step of an epoch is filled up with batches of padding, so that none begins in one
            epoch and ends in another. It takes a loss that is divided by the targets of the step.
        group: an epoch is filled up with empty rows to a multiple of this, the rows of a batch on all ranks, so that
            accelerate repeats no row for a rank, or those of a whole step.
    """

    def __init__(
        self,
        source: Any,
        names: Sequence[str] | None,
        rule: RowRule,
        *,
        seed: int = 0,
        pad_id: int = 0,
        replaced: Replaced | None = None,
    ) -> None:
        self.source = source
        self.names = names
        self.replaced = replaced
        self.rule = rule
        self.pad_id = pad_id
        self.seed = seed
        self.epoch = self.resumed_in = 0
        self.whole_steps = True
        self.group = 1

    @property
    def number(self) -> int:
        """Number of the epoch, counted from the beginning of a run that was resumed."""
        return self.resumed_in + self.epoch

    @property
    def identity(self) -> str:
        """Identifies the settings that decide the rows, beside the documents themselves."""
        rule = self.rule
        limits = {"overflow": rule.overflow, "context": rule.context, "min_piece": rule.min_piece}
        options = limits | {"max_segments": rule.max_segments, "pad_id": self.pad_id}
        return repr((rule.capacity, self.seed, sorted(options.items())))

    @cached_property
    def digest(self) -> str:
        """Identifies the source by its first documents: other data, or the same in another order, differ there."""
        return digest((i, 0, document["input_ids"]) for i, document in enumerate(islice(self._open(0), COMPARED)))

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch; accelerate calls it before each one."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[PackedBatch]:
        worker = get_worker_info()
        assert worker is None or worker.num_workers == 1, "one stream has one reader"
        for number in range(self.number if self.epoch else 0, self.number + 1):
            yield from self._rows(number)

    def _rows(self, number: int) -> Iterator[PackedBatch]:
        """The rows of one epoch of the run."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        rows = 0
        last = None
        trained = False
        for last in stream(self._open, self.rule, seed=self.seed + number, pad_id=self.pad_id):
            rows += 1
            trained = trained or bool((last.targets != IGNORE_INDEX).any())
            if not trained and rows == TRIED:
                break
            yield last
        if rows and not trained:
            raise LayoutError(
                f"no token of the first {plural(rows, 'row')} is trained, by their labels and masks, so every step "
                "would have the loss 0: give -100 to the labels of prompts alone"
            )
        for _ in range(-rows % self.group):
            assert last is not None
            yield with_empty_row(last[:0])

    def _open(self, start: int) -> Iterator[dict[str, Any]]:
        if self.replaced is not None:
            return islice(self._compared(self.replaced), start, None)
        examples = iter(self.source)
        if self.names is not None:
            examples = ({name: x[name] for name in self.names if name in x} for x in examples)
        return islice(stream_documents(examples, READ_AT_ONCE), start, None)

    def _compared(self, replaced: Replaced) -> Iterator[dict[str, Any]]:
        """Documents with the replaced collator's additions, each compared with the collator's own result."""
        for number, example in enumerate(self.source):
            added = replaced.additions(example, f"training example {number}")
            for document in documents_of(replaced.example(example)):
                yield {**document, **added}

    def __str__(self) -> str:
        return f"documents as they come, in rows of {self.rule.capacity:,} tokens"
