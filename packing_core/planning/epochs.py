"""Rows of a whole data set, packed again in every epoch and dealt to ranks: a function of the seed and the epoch alone.

Lengths in, a ``ShardedPlan`` of one epoch out. Nothing is remembered from one epoch to the next, so every rank, every
worker and every resumed run computes the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappush, heapreplace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from packing_core.errors import PackingError, plural
from packing_core.planning.assignment import RowAssignment
from packing_core.planning.balance import ShardedPlan, balance, balance_in_order
from packing_core.planning.cost import checked_cost
from packing_core.planning.equal_cost import equal_cost_rows
from packing_core.planning.mixed import FULL, most_rows
from packing_core.planning.order import OrderRule, ordered_rows
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import check_lengths, integer, positive
from packing_core.planning.plan import plan, plan_of
from packing_core.planning.rule import RowRule, Strategy
from packing_core.storage.arrays import Int64

EVEN = 1.02  # slowest rank over mean, up to which equal_cost leaves mixed rows as they are
DRAWS = 8  # of the rows of an epoch with an order, until they are as few as those of the first epoch


def plan_epoch(
    lengths: ArrayLike,
    capacity: int | RowRule,
    *,
    seed: int,
    epoch: int = 0,
    ranks: int = 1,
    in_order: bool = False,
    **options: Any,
) -> ShardedPlan[PackPlan]:
    """The rows of one epoch, and which rank takes which row at which step, one row a rank and step.

    Rows are ``mixed`` (``packing_core.plan``) and drawn anew, so a document has other neighbours in every epoch. Every
    epoch has the same number of rows, which follows from the lengths alone: the most that any draw needs, rounded up
    to a multiple of the ranks. Where a draw needs fewer, rows of many documents are cut in two. So rows are at least
    99.9% full or, where those of ``best_fit`` are not, at most 0.5% more of them, before the ranks' share.

    >>> first, second = (plan_epoch([4, 4, 4, 4, 2], capacity=8, seed=0, epoch=epoch, ranks=2) for epoch in (0, 1))
    >>> first.plan.n_rows, second.plan.n_rows, first.steps.shape
    (4, 4, (2, 2, 1))

    Args:
        lengths: [N] tokens of each document.
        capacity: tokens a row can hold, or the rule of the rows.
        seed, epoch: what all randomness comes from.
        ranks: the number of rows becomes a multiple of this. Where every row has one document only, and none can be
            cut in two, the last step has idle places, see ``ShardedPlan``.
        in_order: packs the documents in their order, by next fit, and keeps the rows in theirs, in every epoch.
        options: of the :class:`.rule.RowRule`. The rows of a step cost the same by its ``cost``, see ``balance``. Its
            ``equal_cost`` makes the rows for their steps where the slowest rank of mixed rows would take more than 2%
            longer than the mean, as it does where few steps hold documents of very different lengths: a row that shares
            a step with a long document gets long ones too (:func:`.equal_cost.equal_cost_rows`). There are as many rows
            as before; where the documents cannot be levelled in so many, rows stay mixed. A document then has about
            the same neighbours in every epoch. An ``order`` is drawn anew in every epoch. Ranks share steps of close
            costs among 16 consecutive ones. Every epoch has up to 0.1% more rows than the first one needs; one for
            which 8 draws need more than that has the rows of the first.

    Raises:
        PackingError: what ``plan`` raises, ``seed`` or ``epoch`` is no integer of at least 0, or there are fewer
            documents than ranks.
    """
    ranks, seed, epoch = positive("ranks", ranks), _from_0("seed", seed), _from_0("epoch", epoch)
    rule = RowRule.of(capacity, **options)
    if in_order and (rule.order != "random" or rule.equal_cost):
        other = "equal_cost=True" if rule.equal_cost else f'order="{rule.order}"'
        raise PackingError(f"in_order=True keeps the order of the documents: leave it or {other} out")
    if rule.strategy != "mixed":
        raise PackingError(f"epochs pack mixed rows: leave strategy={rule.strategy!r} out", option="strategy")
    capacity, limit, order, cost = rule.capacity, rule.max_segments, rule.order, checked_cost(rule.cost)
    lengths = check_lengths(lengths)
    pieces = rule.cut(lengths)
    random = np.random.PCG64([seed, epoch])
    ordered = OrderRule.checked(order, rule.keys, rule.weights, len(lengths))
    if order == "random":
        strategy: Strategy = "sequential" if in_order else "mixed"
        draw = None if in_order else _draw(random)
        drawn_plan = plan(pieces.length, capacity, strategy=strategy, max_segments=limit, seed=draw)
        rows = RowAssignment(drawn_plan.row_offsets, drawn_plan.source, drawn_plan.length)
        most = len(pieces.length)
        count = drawn_plan.n_rows if in_order else most_rows(pieces.length, capacity, min(limit or most, most))
    else:
        rule_of_pieces = ordered.of_pieces(pieces.source)
        rows = ordered_rows(rule_of_pieces, pieces.length, capacity, limit, np.random.PCG64([seed, 0]))
        count = int(len(rows.counts) / FULL)
        for _ in range(DRAWS if epoch else 0):
            drawn = ordered_rows(rule_of_pieces, pieces.length, capacity, limit, random)
            if len(drawn.counts) <= count:
                rows = drawn
                break

    cut = _cut_in_two(rows.offsets, -(-count // ranks) * ranks - len(rows.counts))
    made = plan_of(rule, pieces, RowAssignment(cut, rows.order, rows.sizes), len(lengths))
    if ranks == 1 or in_order:
        steps = np.full(-(-made.n_rows // ranks) * ranks, made.n_rows, np.int64)
        steps[: made.n_rows] = np.arange(made.n_rows)
        return ShardedPlan(made, steps.reshape(-1, ranks, 1), cost)
    dealt_by = _draw(random)
    if order != "random":
        return balance_in_order(made, ranks, cost=cost, seed=dealt_by)
    dealt = balance(made, ranks, cost=cost, seed=dealt_by)
    if rule.equal_cost and dealt.imbalance > EVEN and made.n_rows % ranks == 0:
        levelled = equal_cost_rows(pieces.length, capacity, limit, made.n_rows, ranks, cost, random)
        if levelled is not None:
            evener = balance(plan_of(rule, pieces, levelled, len(lengths)), ranks, cost=cost, seed=dealt_by)
            return min(dealt, evener, key=lambda sharded: sharded.imbalance)
    return dealt


def plan_steps(
    lengths: ArrayLike,
    capacity: int | RowRule,
    rows_per_step: int,
    *,
    seed: int,
    epoch: int = 0,
    **options: Any,
) -> PackPlan:
    """The rows of one epoch, one step after the other; the rows of a step cost about the same.

    So the ranks of a step finish together, whatever number of them shares its rows (``plan_epoch(equal_cost=True)``
    with a rank for each row).

    Args:
        lengths, capacity, seed, epoch, options: as in :func:`plan_epoch`.
        rows_per_step: consecutive rows that are trained together.

    Raises:
        PackingError: what ``plan_epoch`` raises, or the documents make fewer pieces than a step has rows.
    """
    rule = RowRule.of(capacity, **options)
    pieces = len(rule.cut(check_lengths(lengths)).length)
    if pieces < positive("rows_per_step", rows_per_step):
        raise PackingError(
            f"equal_cost=True needs a document for each row of a step, and there are {plural(pieces, 'document')} and "
            f"rows_per_step={rows_per_step:,}: lower it, or leave equal_cost out",
            option="equal_cost rows_per_step",
        )
    dealt = plan_epoch(lengths, replace(rule, equal_cost=True), seed=seed, epoch=epoch, ranks=rows_per_step)
    order = dealt.steps.reshape(-1)
    return dealt.plan.select(order[order < dealt.plan.n_rows])


def _from_0(name: str, value: Any) -> int:
    """``value`` as an integer of at least 0, or an error."""
    number = integer(value)
    if number is None or number < 0:
        raise PackingError(f"{name} must be an integer of at least 0, got {value!r}")
    return number


def _draw(random: np.random.PCG64) -> int:
    return int(random.random_raw()) >> 1


def _cut_in_two(row_offsets: Int64, times: int) -> Int64:
    """Row offsets after cutting, so many times, the first of the rows with the most pieces, until all have but one."""
    counts = np.diff(row_offsets)
    most = np.argsort(-counts, kind="stable")[:times]  # no other row can have its turn
    rows = list(
        zip((-counts[most]).tolist(), row_offsets[most].tolist())
    )  # the heap gives the most pieces, then the first
    heapify(rows)
    cuts: list[int] = []
    while len(cuts) < times and rows[0][0] < -1:
        count, begin = -rows[0][0], rows[0][1]
        middle = begin + count // 2
        cuts.append(middle)
        heapreplace(rows, (-(count // 2), begin))
        heappush(rows, (count // 2 - count, middle))
    return np.sort(np.append(row_offsets, np.array(cuts, np.int64)))
