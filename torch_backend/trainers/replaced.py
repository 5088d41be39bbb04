"""The collator that packing replaces in a trainer: compared with packing, and its additions to a batch kept.

Examples -> the replaced collator, called as the trainer would call it -> its tokens, labels and other values for each
document -> :meth:`Replaced.carry`, which raises where packing would train anything else, and adds to packed rows what
the collator adds. ``enable_packing`` compares examples from the whole data set, and training compares every document in
its first epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core import PackedBatch
from packing_core.batches.columns import READ
from packing_core.batches.marks import MARKS, first_true, refuse_trained_padding
from packing_core.batches.stored import IGNORE_INDEX
from packing_core.errors import PackingError
from packing_core.planning.pieces import PieceSpan
from torch_backend.collate import Batch, PackedCollator, call_on_copies
from torch_backend.collate.document_labels import LABELS, NAMES
from torch_backend.collate.tokens import every_label

Array = NDArray[Any]
Where = Callable[[int], str]  # the number of an example -> what messages call it
# Keys of a batch that packing makes itself.
_MADE = frozenset(("input_ids", "attention_mask", "position_ids", *NAMES))
_MARKS = frozenset(MARKS) - _MADE


class OwnCollator:
    """A trainer's own collator, which sees of each example what the trainer would show it.

    Args:
        more: columns that it sees beside the model's arguments.

    Attributes:
        columns: all of them; None for whatever the examples have.
        name: of the collator, in messages.
    """

    def __init__(self, trainer: Any, more: Sequence[str] = ()) -> None:
        self.collator = trainer.data_collator
        shown = trainer.args.remove_unused_columns
        self.columns = frozenset((*trainer._signature_columns, *more)) if shown else None
        self.name = name_of(self.collator)

    def __call__(self, examples: Sequence[Any]) -> Any:
        """The collator's batch."""
        return call_on_copies(self.collator, [self.seen(example) for example in examples])

    def seen(self, example: Any) -> Any:
        """The columns of an example that the trainer would give to the collator."""
        if self.columns is None or not isinstance(example, Mapping):
            return example
        return {name: value for name, value in example.items() if name in self.columns}


class Replaced:
    """The collator that a trainer had, which made padded batches.

    Args:
        read: the columns that packing reads beside tokens and labels.

    Attributes:
        columns: the columns of the data set that the collator hands on unchanged.
        added: other keys of its batches, with their dtypes.
        numbers: those of both that have one value per document; the others have one per token.
        gives_mask: whether its batches have an ``attention_mask``.
        shortest: a few of the shortest examples that were compared, of unequal lengths.
    """

    def __init__(self, collator: OwnCollator, model: Any, read: Sequence[str] = READ) -> None:
        self.padded = collator
        self.name = collator.name
        self.read = frozenset(read)
        self.packs = PackedCollator(model)
        self.columns: set[str] = set()
        self.added: dict[str, np.dtype[Any]] = {}
        self.numbers: set[str] = set()
        self.gives_mask = False
        self.shortest: list[Mapping[str, Any]] = []
        self._rows_of_documents = False  # examples are rows that hold several documents
        self._together = False  # the collator gives an example the same in a batch of several

    def inspect(self, examples: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Find the keys of the collator's batches, and compare examples, each with what messages call it.

        Raises:
            PackingError: as :meth:`carry`.
        """
        theirs = [self._alone(example, where) for where, example in examples]
        for (_, example), collated in zip(examples, theirs, strict=True):
            self.gives_mask |= "attention_mask" in collated
            if created := {name for name in collated.keys() & self.read - _MADE if example.get(name) is None}:
                raise PackingError(
                    f"{self.name} makes {_listed(created)}, which packing reads from the data set: make it a column"
                )
            for name in collated.keys() - _MADE - self.read:
                self.numbers |= {name} if collated[name].ndim == 0 else set()
                if self._hands_on(name, example, collated):
                    self.columns.add(name)
                else:
                    self.added[name] = collated[name].dtype
        self.columns -= self.added.keys()
        lengths = {len(collated["input_ids"]): example for (_, example), collated in zip(examples, theirs, strict=True)}
        self.shortest = [lengths[length] for length in sorted(lengths)[:4] if length > 1]
        for (where, example), collated in zip(examples, theirs, strict=True):
            batch = self.packs.pack([self.example(example)])
            self._rows_of_documents |= len(batch.sources) > 1
            self._carry(batch, {0: collated}, {0: where}.__getitem__, whole=True)
        if self._rows_of_documents and self.added:
            raise PackingError(
                f"{self.name} adds {_listed(self.added)} to rows that are packed already: put it into the data set, a "
                "column with one value per token"
            )
        self._together = self._same_together([example for _, example in examples[:8]], theirs[:8])

    def reads(self, name: str) -> bool:
        """Returns whether packing reads a column of the data set."""
        if name in self.added:
            return False
        visible = self.padded.columns
        readable = visible is None or name in visible or name in self.read
        labels = NAMES if self.packs.labels_documents else (LABELS,)
        return readable and name in {"input_ids", *labels, *self.read, *self.columns}

    def example(self, example: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of an example that packing reads."""
        return {name: value for name, value in example.items() if self.reads(name)}

    def carry(self, batch: PackedBatch, source: Any, where: Where, *, whole: bool = True) -> PackedBatch:
        """Compare packed documents with the collator's result for them, and add its additions.

        Args:
            batch: rows of documents.
            source: the examples, one for each document, by the numbers in ``batch.sources``.
            where: what messages call an example, by its number.
            whole: no document is split or truncated.

        Raises:
            PackingError: the collator gives other tokens, labels or values than packing, or adds something that is
                neither per token nor one number per document.
        """
        if self._rows_of_documents:
            return batch
        numbers = np.unique(batch.sources).tolist()
        fetch = getattr(source, "__getitems__", None)
        examples = fetch(numbers) if fetch and numbers else [source[number] for number in numbers]
        places = [where(i) for i in numbers]
        collated = self._in_one_batch(examples, places) if self._together and numbers else None
        collated = collated or [self._alone(example, place) for example, place in zip(examples, places, strict=True)]
        return self._carry(batch, dict(zip(numbers, collated, strict=True)), where, whole=whole)

    def additions(self, example: Mapping[str, Any], where: str) -> dict[str, Array]:
        """Returns the collator's additions to one example, [tokens] each, once its tokens and labels are compared."""
        batch = self.carry(self.packs.pack([self.example(example)]), [example], lambda _: where)
        return {name: batch.columns[name][0] for name in self.added}

    def _carry(self, batch: PackedBatch, theirs: Mapping[int, Batch], where: Where, *, whole: bool) -> PackedBatch:
        for number, collated in theirs.items():
            self._check_keys(collated, where(number))
        ids, labels = batch.input_ids.reshape(-1), self._labels(batch)
        columns = {name: column.reshape(-1) for name, column in batch.columns.items()}
        per_document = dict(batch.per_document)
        for name, dtype in self.added.items():
            owner, count = (per_document, len(batch.sources)) if name in self.numbers else (columns, len(ids))
            owner[name] = np.zeros(count, dtype)
        context = np.zeros(len(batch.sources), np.int64) if batch.context is None else batch.context
        segments = (batch.sources, batch.starts, batch.flat_starts, batch.lengths, context)
        for segment, (document, start, at, length, skipped) in enumerate(zip(*(x.tolist() for x in segments))):
            ours = slice(at, at + length)
            # the documents of one example stand in a row as they do in the example
            number = 0 if self._rows_of_documents else document
            span = PieceSpan(start, start + length, skipped, batch.restarts)
            piece = ours if self._rows_of_documents else span.places
            collated, place = theirs[number], where(number)
            self._check_tokens(collated, piece, ids[ours], place)
            if self.packs.labels_documents:
                label = batch.per_document[LABELS][segment] if LABELS in batch.per_document else None
                self._check_label(collated.get(LABELS), label, place)
            elif labels is not None and LABELS in collated:
                self._check_labels(collated[LABELS], piece, labels[ours], place, span.untrained, whole=whole)
            for name in collated.keys() & (self.columns | self.added.keys()):
                if name in self.numbers:
                    self._carry_value(name, collated[name], per_document[name], segment, place)
                else:
                    self._carry_value(name, collated[name][piece], columns[name], ours, place)
        rows = {name: column.reshape(batch.input_ids.shape) for name, column in columns.items()}
        return replace(batch, columns=rows, per_document=per_document) if self.added else batch

    def _carry_value(self, name: str, value: Any, packed: Array, at: int | slice, place: str) -> None:
        """Writes what the collator adds into its place in the batch; what the data have must be there already."""
        if name in self.added:
            packed[at] = value
        elif not np.array_equal(packed[at], value):
            raise PackingError(
                f"{self.name} changes {name} of {place}, and packing would not: change that column instead"
            )

    def _labels(self, batch: PackedBatch) -> Array | None:
        """The labels that are trained, -100 at all others; None if tokens have classes and the data no labels."""
        if not self.packs.labels_every_token:
            return batch.targets.reshape(-1)
        return None if batch.labels is None else every_label(batch).reshape(-1)

    def _check_tokens(self, collated: Batch, piece: slice | Array, ours: Array, where: str) -> None:
        theirs = collated["input_ids"][piece]
        if not np.array_equal(theirs, ours):
            raise PackingError(
                f"{self.name} changes the tokens of {where}, and packing would train them as they are in the dataset: "
                + self._ways_out()
            )
        positions = None if self._rows_of_documents else collated.get("position_ids")
        if positions is not None and first_true(positions != np.arange(len(positions))) is not None:
            raise PackingError(
                f"{self.name} gives the tokens of {where} other position_ids than 0, 1, 2, ..., which those of packed "
                f"documents are: leave them out, or let {self.name} pack and wrap it in crosspack.with_boundaries"
            )

    def _check_labels(
        self, theirs: Array, piece: slice | Array, ours: Array, where: str, untrained: int, *, whole: bool
    ) -> None:
        """Raise if another label is trained. What the attention mask calls padding is no part of ``theirs``.

        Args:
            piece: the tokens of the document.
            untrained: how many first ones are no targets because of their context.
        """
        trained = theirs[piece].copy()
        if not self.packs.labels_every_token:
            trained[: max(untrained, 1)] = IGNORE_INDEX
        if whole and not self._rows_of_documents:  # what is behind the tokens is padding that no mask marks
            assert isinstance(piece, slice), "a whole document is one slice"
            trained = np.append(trained, theirs[piece.stop :])
            ours = np.append(ours, np.full(len(trained) - len(ours), IGNORE_INDEX))
        if (token := first_true(trained != ours)) is not None:
            number = piece.start + token if isinstance(piece, slice) else piece[token]
            raise PackingError(
                f"{self.name} trains other tokens than packing would: token {number} of {where} has the "
                f"label {trained[token]} there and {ours[token]} when packed. " + self._ways_out()
            )

    def _check_label(self, theirs: Array | None, ours: Any, where: str) -> None:
        """Raise if the label of a document is another one when it is packed."""
        labels = [None if x is None else np.asarray(x).reshape(-1).tolist() for x in (theirs, ours)]
        if labels[0] != labels[1]:
            raise PackingError(
                f"{self.name} trains other labels than packing would: {where} has the label {labels[0]} there and "
                f"{labels[1]} when packed. Put what shall be trained into a column labels of the dataset, one entry "
                "per document"
            )

    def _check_keys(self, collated: Batch, where: str) -> None:
        """Raise if an example lacks a value that others have, or has one that none of the examples before had."""
        keys = collated.keys() - _MADE - self.read
        if odd := keys ^ (self.columns | self.added.keys()):
            verb = "adds" if odd <= keys else "does not add"
            raise PackingError(
                f"{self.name} {verb} {_listed(odd)} to {where}, unlike to other examples: let it add the same to all"
            )

    def _hands_on(self, name: str, example: Mapping[str, Any], collated: Batch) -> bool:
        """Returns whether the collator's value of an example is that of the column, as packing reads it."""
        if name not in collated or example.get(name) is None or collated[name].ndim != np.ndim(example[name]):
            return False
        if collated[name].ndim == 0:
            return bool(collated[name] == np.asarray(example[name]))
        kept = {key: x for key, x in example.items() if key in ("input_ids", name) or key in self.read}
        column = self.packs.pack([kept]).columns[name].reshape(-1)
        return np.array_equal(column, collated[name][: len(column)])

    def _alone(self, example: Any, where: str) -> Batch:
        return self._split(self.padded([example]), [where])[0]

    def _in_one_batch(self, examples: Sequence[Any], places: Sequence[str]) -> list[Batch] | None:
        """Collates examples in one batch; None if the collator takes examples of one length alone."""
        try:
            batch = self.padded(examples)
        except Exception:  # each is then collated alone, where an error is the collator's own and is raised
            return None
        return self._split(batch, places) if "attention_mask" in batch else None

    def _same_together(self, examples: Sequence[Any], alone: Sequence[Batch]) -> bool:
        """Returns whether the collator gives the same values for examples in one batch as for each alone."""
        collated = self._in_one_batch(examples, ["a batch"] * len(examples))
        return collated is not None and all(
            one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)
            for one, two in zip(collated, alone, strict=True)
        )

    def _split(self, batch: Mapping[str, Any], where: Sequence[str]) -> list[Batch]:
        """A padded batch as values of its examples: [tokens] each, padding left out, or a number."""
        arrays = {key: np.asarray(x) for key, x in batch.items() if x is not None and key not in _MARKS}
        ids, mask = arrays["input_ids"], arrays.get("attention_mask")
        of_documents = self.packs.labels_documents
        for key, array in arrays.items():
            number = of_documents and (array.shape == (len(where),) or key == LABELS)
            if array.dtype.kind in "biuf" and (array.shape == ids.shape or number):
                continue
            shape = f"{key} of shape {list(array.shape)} beside input_ids {list(ids.shape)}"
            if key == LABELS:
                raise PackingError(f"{self.name} gives {shape}, and packing needs one label for each token")
            per = "per token or one number per document" if of_documents else "per token"
            raise PackingError(
                f"{self.name} gives {where[0]} {shape}, and packing can carry what has one value {per}: give it so, or "
                "leave it out"
            )
        real = np.ones(ids.shape, np.bool_) if mask is None else mask != 0
        if LABELS in arrays and not of_documents:
            for labels, kept, place in zip(arrays[LABELS], real, where, strict=True):
                refuse_trained_padding(labels, ~kept, f"{self.name}: token {{}} of {place}".format)
        per_token = {key for key, x in arrays.items() if x.shape == ids.shape and not (of_documents and key == LABELS)}
        return [
            {key: x[i][real[i]] if key in per_token else x[i] for key, x in arrays.items()} for i in range(len(ids))
        ]

    def _ways_out(self) -> str:
        return (
            f"To train what {self.name} trains, add a labels column that holds it, -100 where nothing is trained. To "
            "train what the columns say, set trainer.data_collator = crosspack.PackedCollator(model) before this call. "
            f"To keep {self.name}, let it pack documents, and wrap it in crosspack.with_boundaries(collator)"
        )


class ReplacingCollator(PackedCollator):
    """Packs the documents of a batch, with what the collator before it would have added."""

    def __init__(self, model: Any, replaced: Replaced) -> None:
        super().__init__(model)
        self.replaced = replaced

    def pack(self, features: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """The documents of ``features``, which are numbered in their order."""
        batch = super().pack([self.replaced.example(feature) for feature in features])
        whole = self.plan_options.get("overflow", "error") in ("error", "drop")
        return self.replaced.carry(batch, features, "example {} of a batch".format, whole=whole)


def name_of(collator: Any) -> str:
    """The name of a collator's function or class."""
    return getattr(collator, "__name__", type(collator).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
