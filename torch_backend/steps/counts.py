"""Counts of batches, which ranks compare on the host before a model runs in which they wait for each other.

Every forward of a sharded model gathers weights from all ranks, and DDP sends buffers. A rank that runs a batch more
than the others would wait for them until the time limit. So a rank that has fewer runs its last one again, which counts
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from packing_core.errors import LayoutError
from torch_backend.steps.eligibility import Batch


class Counts:
    """Compares counts over ranks."""

    def __init__(self, group: dist.ProcessGroup | None, world: int) -> None:
        self.group = group
        self.world = world

    @cached_property
    def _hosts(self) -> Any:
        """A group of the same ranks that waits for no GPU."""
        if dist.get_backend(self.group) == "gloo":
            return self.group
        ranks = dist.get_process_group_ranks(self.group)
        return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        found = torch.tensor(values)
        if self.world > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, self._hosts)
        return found.tolist()

    def evened(self, microbatches: Sequence[Batch], emptied: Callable[[Batch], Batch]) -> list[Batch]:
        """Microbatches of a step, followed by as many without targets as other ranks have more.

        Raises:
            LayoutError: a rank has none; on every rank, as whatever ``emptied`` raises.
        """
        most, negative = self.largest(len(microbatches), -len(microbatches))
        if not negative:
            raise LayoutError("a rank has no microbatch with labels, and others wait for it: pass each at least one")
        if most == -negative:
            return [*microbatches]
        return [*microbatches, *[emptied(microbatches[-1])] * (most - len(microbatches))]

    def together(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
        """Yields batches until every rank has had its last one, and whether each counts.

        Raises:
            LayoutError: a rank has none, and others have some; on every rank.
        """
        source, last = iter(batches), None
        while True:
            batch = next(source, None)
            some, idle = self.largest(batch is not None, batch is None and last is None)
            if not some:
                return
            if idle:
                raise LayoutError("a rank has no batch to evaluate, and others have: pass each at least one")
            last = last if batch is None else batch
            assert last is not None
            yield last, batch is not None
