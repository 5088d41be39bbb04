"""The steps of a job as batches: one rank's share of a step, as the microbatches that its gradients are summed over.

A Schedule -> a map-style dataset whose items are a rank's shares of the steps -> a collator that makes microbatches. An
item is what a ``Trainer`` takes for a batch, so a step may have as many microbatches as its documents need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from packing_core.batches.batch import PackedBatch
from packing_core.planning.cost import Cost
from packing_core.training.schedule import Run, Schedule
from torch_backend.collate import Batch, PackedCollator
from torch_backend.job.ranks import Ranks


class PackedSteps(Dataset[PackedBatch]):
    """Item n holds the rows of this rank in step ``first + n``.

    Args:
        schedule: the steps.
        first: the step to begin with.
        ranks: which of the ranks this is.
        cost: of a row, by which the rows of a step are dealt.
    """

    def __init__(self, schedule: Schedule, first: int, ranks: Ranks, cost: Cost | None = None) -> None:
        self.schedule = schedule
        self.first = first
        self.ranks = ranks
        self.cost = cost

    def __len__(self) -> int:
        return len(self.schedule) - self.first

    def __getitem__(self, number: int) -> PackedBatch:
        step = range(self.first, len(self.schedule))[number]  # an IndexError ends a loop over the items
        return self.schedule.rows(step, rank=self.ranks.rank, ranks=self.ranks.world, cost=self.cost)


class RowByRow(PackedCollator):
    """Collates an item of :class:`PackedSteps` to a list of batches, one for each row."""

    def __call__(self, features: Any) -> Any:
        """Returns the batches of the only item."""
        (rows,) = features
        return [super(RowByRow, self).__call__(row) for row in rows.single_rows()]


class PaddedSteps(Dataset[list[Batch]]):
    """Item n holds the padded batches of step n.

    Args:
        schedule: the steps.
        run: ``padded`` or ``grouped``.
    """

    def __init__(self, schedule: Schedule, run: Run) -> None:
        self.schedule = schedule
        self.run = run

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, number: int) -> list[Batch]:
        return list(padded_batches(self.schedule, number, self.run))


def only_item(items: Sequence[list[Batch]]) -> list[Batch]:
    """Collates an item of :class:`PaddedSteps`, which is collated already."""
    (item,) = items
    return item


def padded_batches(schedule: Schedule, step: int, run: Run) -> Iterator[Batch]:
    """Yields the padded batches of a step.

    Each has ``input_ids``, ``attention_mask`` and ``labels`` int64 [B, S]; labels are unshifted, and -100 where nothing
    is trained.
    """
    for padded in schedule.padded(step, run):
        arrays = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "labels": padded.targets}
        yield {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
