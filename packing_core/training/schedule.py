"""Schedules the documents of each optimizer step, packed and padded: documents and plans in, batches of a step out.

The packed rows decide the steps. A padded run trains on the same documents in the same steps, so the two losses must
agree; only the arrangement differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from packing_core.batches.batch import PackedBatch
from packing_core.batches.dataset import PackedDataset, with_empty_row
from packing_core.errors import PackingError
from packing_core.planning.balance import balance
from packing_core.planning.cost import Cost
from packing_core.planning.plan import PackPlan
from packing_core.storage.arrays import Int64
from packing_core.storage.ragged import Ragged
from packing_core.storage.segment_indexing import offsets_of

# packed rows; documents padded to the longest of a batch, in random order or sorted by length within the step
Run = Literal["packed", "padded", "grouped"]


class EncodedDocument(NamedTuple):
    """One document: int32 token ids [n] and bool [n], False at tokens that are never targets (prompts).

    ``key`` is what an order of training reads of its record: a number or a text.
    """

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    key: Any = None

    @property
    def has_target(self) -> bool:
        """Returns whether any of its tokens is trained; the first token of a segment is never a target."""
        return bool(self.trained[1:].any())


@dataclass(frozen=True)
class Corpus:
    """All documents in memory: token ids (int32), which of them are trained (bool), and their keys, None without."""

    documents: Ragged
    trained: Ragged
    keys: list[Any] | None = None

    @cached_property
    def n_trained(self) -> int:
        """Targets of all documents: trained tokens that are not the first of their document."""
        return int(
            np.count_nonzero(self.trained.values) - np.count_nonzero(self.trained.values[self.trained.offsets[:-1]])
        )

    @staticmethod
    def collect(documents: Iterator[EncodedDocument], *, option: str = "--data") -> Corpus:
        """Read all documents; the error names the ``option`` that they came by.

        Raises:
            PackingError: there are none.
        """
        kept = list(documents)
        if not kept:
            raise PackingError(f"no document has a token to train on: check {option}, its columns and --loss")
        offsets = offsets_of([len(document.ids) for document in kept])
        return Corpus(
            Ragged(np.concatenate([document.ids for document in kept]), offsets),
            Ragged(np.concatenate([document.trained for document in kept]), offsets, name="loss_mask"),
            None if kept[0].key is None else [document.key for document in kept],
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of a training run.

    Attributes:
        corpus: the documents.
        plans: one plan per epoch.
        rows_per_step: packed rows in an optimizer step; the last step of an epoch may have fewer.
        padded_batch: documents in a batch of a padded run; a step has as many batches as it takes.
        seed: shuffles the documents of a step in ``padded`` runs.
        limit: stop after this many steps; None runs all epochs.
        pad_id: the token that fills padding.
    """

    corpus: Corpus
    plans: tuple[PackPlan, ...]
    rows_per_step: int = 4
    padded_batch: int = 8
    seed: int = 0
    limit: int | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        for name in ("rows_per_step", "padded_batch"):
            if getattr(self, name) < 1:
                raise PackingError(f"--{name.replace('_', '-')} is {getattr(self, name)}: pass 1 or more")

    @cached_property
    def steps(self) -> list[PackPlan]:
        """The rows of each optimizer step; rows without anything to train on (of a split prompt) make no step.

        Raises:
            PackingError: no row has anything to train on.
        """
        steps = (
            plan.select(slice(first, first + self.rows_per_step))
            for plan in self.plans
            for first in range(0, plan.n_rows, self.rows_per_step)
        )
        trained = list(islice((step for step in steps if self._trained_tokens(step)), self.limit))
        if not trained:
            raise PackingError(
                f"no row of {self.plans[0].capacity:,} tokens has one to train on, because prompts fill them: raise "
                'capacity, or pass overflow="split"',
                option="capacity overflow",
            )
        return trained

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def trained_tokens(self) -> list[int]:
        """Targets of each step: trained tokens that are not the first of their segment."""
        return [self._trained_tokens(step) for step in self.steps]

    def _trained_tokens(self, step: PackPlan) -> int:
        trained = self.corpus.trained
        begin = trained.offsets[step.source] + step.start
        spans = zip((begin + np.maximum(step.untrained, 1)).tolist(), (begin + step.length).tolist(), strict=True)
        return sum(int(np.count_nonzero(trained.values[first:end])) for first, end in spans)

    def slots(self, step: int, run: Run) -> int:
        """Tokens that the model computes in the step, padding included."""
        plan = self.steps[step]
        if run == "packed":
            return plan.n_rows * plan.capacity
        return sum(len(pieces) * int(plan.length[pieces].max()) for pieces in self.batches(step, run))

    def rows(self, step: int, *, rank: int = 0, ranks: int = 1, cost: Cost | None = None) -> PackedBatch:
        """Returns the step's rows; of several ranks, those of one.

        The rows of a step are dealt to ranks at equal cost (:func:`packing_core.balance`), so a step holds the same
        documents however many ranks there are. Every rank has equally many rows: where they do not divide, some are
        padding alone.

        Args:
            cost: of a row, by which they are dealt.
        """
        plan = self.steps[step]
        dataset = self._dataset(plan)
        if ranks == 1:
            return dataset[:]
        own, each = [rank] if rank < plan.n_rows else [], -(-plan.n_rows // ranks)
        if plan.n_rows > ranks:
            own = balance(plan, ranks, cost=cost, rows_per_step=each, seed=None).rank(rank)[0].tolist()
        rows = dataset[own] if own else with_empty_row(dataset[0])[1:]
        while len(rows) < each:
            rows = with_empty_row(rows)
        return rows

    def packed(self, step: int, *, rank: int = 0, ranks: int = 1) -> Iterator[PackedBatch]:
        """Yields the step's :meth:`rows`, one at a time."""
        return self.rows(step, rank=rank, ranks=ranks).single_rows()

    def _dataset(self, plan: PackPlan) -> PackedDataset:
        return PackedDataset(self.corpus.documents, plan, loss_mask=self.corpus.trained, pad_id=self.pad_id)

    def padded(self, step: int, run: Run) -> Iterator[PackedBatch]:
        """The same documents in padded batches, ``padded`` or ``grouped``."""
        return (self.alone(step, pieces) for pieces in self.batches(step, run))

    def alone(self, step: int, pieces: slice | Int64 = slice(None)) -> PackedBatch:
        """Pieces of the step's plan, each in a row of its own, padded at its end to the longest of them."""
        return self._dataset(self.steps[step].one_a_row(pieces))[:]

    def batches(self, step: int, run: Run) -> list[Int64]:
        """The pieces of the step's plan in each padded batch."""
        lengths = self.steps[step].length
        if run == "grouped":
            order = np.argsort(-lengths, kind="stable")  # longest first, as transformers' group_by_length
        else:
            order = np.random.default_rng([self.seed, step]).permutation(len(lengths))
        return [order[i : i + self.padded_batch] for i in range(0, len(order), self.padded_batch)]
