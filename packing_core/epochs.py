"""Rows of a whole data set, packed again in every epoch and dealt to ranks: a function of the seed and the epoch alone.

Lengths in, a ``ShardedPlan`` of one epoch out. Nothing is remembered from one epoch to the next, so every rank, every
worker and every resumed run computes the same rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core._pieces import Overflow, check_lengths, cut, positive
from packing_core._rows import permutation
from packing_core.balance import Cost, ShardedPlan, balance
from packing_core.packplan import PackPlan
from packing_core.plan import plan

Int64 = NDArray[np.int64]


def plan_epoch(
    lengths: ArrayLike,
    capacity: int,
    *,
    seed: int,
    epoch: int = 0,
    overflow: Overflow = "error",
    ranks: int = 1,
    cost: Cost | None = None,
    in_order: bool = False,
) -> ShardedPlan:
    """The rows of one epoch, and which rank takes which row at which step, one row a rank and step.

    The documents are shuffled before they are packed by best fit, so a document has other neighbours in every epoch.
    How full rows get depends on the lengths alone, so every epoch has the same number of rows.

    >>> first, second = (plan_epoch([4, 4, 4, 4, 2], capacity=8, seed=0, epoch=epoch, ranks=2) for epoch in (0, 1))
    >>> first.plan.n_rows, second.plan.n_rows, first.steps.shape
    (4, 4, (2, 2, 1))

    Args:
        lengths: [N] tokens of each document.
        capacity: tokens a row can hold.
        seed, epoch: what all randomness comes from.
        overflow: as in ``plan``.
        ranks: the number of rows becomes a multiple of this: rows of many documents are cut in two. Where every row
            has one document only, the last step has idle places, see ``ShardedPlan``.
        cost: what a row costs; the rows of a step cost the same, see ``balance``.
        in_order: packs the documents in their order, by next fit, and keeps the rows in theirs, in every epoch.

    Raises:
        PackingError: what ``plan`` raises, or there are fewer documents than ranks.
    """
    ranks = positive("ranks", ranks)
    lengths = check_lengths(lengths)
    pieces = cut(lengths, positive("capacity", capacity), overflow)
    random = np.random.PCG64([seed, epoch])
    if in_order:
        order = np.arange(len(pieces.length))
        rows = plan(pieces.length, capacity, strategy="sequential", seed=None)
    else:
        order = permutation(len(pieces.length), random)
        rows = plan(pieces.length[order], capacity, seed=_draw(random))
    piece = order[rows.source]
    made = PackPlan(
        _multiple(rows.row_offsets, ranks),
        piece if pieces.source is None else pieces.source[piece],
        np.zeros(len(piece), np.int64) if pieces.start is None else pieces.start[piece],
        rows.length,
        capacity=capacity,
        n_documents=len(lengths),
        dropped=pieces.dropped,
        truncated=pieces.truncated,
        check=False,
    )
    if ranks > 1 and not in_order:
        return balance(made, ranks, cost=cost, seed=_draw(random))
    steps = np.full(-(-made.n_rows // ranks) * ranks, made.n_rows, np.int64)
    steps[: made.n_rows] = np.arange(made.n_rows)
    return ShardedPlan(made, steps.reshape(-1, ranks, 1), cost or Cost())


def _draw(random: np.random.PCG64) -> int:
    return int(random.random_raw()) >> 1


def _multiple(row_offsets: Int64, ranks: int) -> Int64:
    """Row offsets with rows of the most pieces cut in two, until their number is a multiple of ``ranks``."""
    for _ in range(-(len(row_offsets) - 1) % ranks):
        counts = np.diff(row_offsets)
        longest = int(counts.argmax())
        if counts[longest] == 1:
            break
        row_offsets = np.insert(row_offsets, longest + 1, row_offsets[longest] + counts[longest] // 2)
    return row_offsets
