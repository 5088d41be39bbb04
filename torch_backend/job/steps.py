"""The steps of a job as batches: one rank's share of a step, as the microbatches that its gradients are summed over.

A Schedule -> a map-style dataset whose items are a rank's shares of the steps -> a collator that makes microbatches. An
item is what a ``Trainer`` takes for a batch, so a step may have as many microbatches as its documents need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from packing_core.training.schedule import Run, Schedule
from torch_backend.collate import Batch, PackedCollator


class StepShares(Dataset[Any]):
    """Item n is a rank's share of step ``first + n``.

    Args:
        schedule: the steps.
        first: the step to begin with.
        share: returns the share of a step.
    """

    def __init__(self, schedule: Schedule, first: int, share: Callable[[int], Any]) -> None:
        self.steps = range(first, len(schedule))
        self.share = share

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, number: int) -> Any:
        return self.share(self.steps[number])  # an IndexError ends a loop over the items


class RowByRow(PackedCollator):
    """Collates an item of packed rows to a list of batches, one for each row."""

    def __call__(self, features: Any) -> Any:
        """Returns the batches of the only item."""
        (rows,) = features
        return [super(RowByRow, self).__call__(row) for row in rows.single_rows()]


def padded_batches(schedule: Schedule, step: int, run: Run) -> Iterator[Batch]:
    """Yields the padded batches of a step.

    Each has ``input_ids``, ``attention_mask`` and ``labels`` int64 [B, S]; labels are unshifted, and -100 where nothing
    is trained.
    """
    for padded in schedule.padded(step, run):
        arrays = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "labels": padded.targets}
        yield {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}
