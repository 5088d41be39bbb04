"""Rows onto ranks and steps: a plan or a batch and a cost per row in, which rank takes which row at which step out.

The ranks of a step wait for the slowest, so what its ranks carry should cost the same. Rows are bundled, one bundle per
rank and step: each gets a row from every class of cost, so that bundles cost nearly the same and hold lengths of every
kind. A step holds bundles of costs as close as its ranks must be to finish together, and no closer, so that it is not
chosen by cost more narrowly than it needs to be. Steps are shuffled, so that training order tells nothing of cost. With
one row per rank there is nothing to bundle: a step then holds rows of close costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from packing_core.errors import LayoutError, PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning.composition import Composition, composition
from packing_core.planning.context import context_plan
from packing_core.planning.cost import Cost, WeighedRows, checked_cost
from packing_core.planning.pieces import MOST_TOKENS, check_seed, integer, positive
from packing_core.planning.plan import PackPlan
from packing_core.storage.arrays import Float64, Int64, as_array, read_only

Rows = TypeVar("Rows", bound=PackPlan | WeighedRows)

EVEN = 1.01  # slowest rank over mean, up to which bundles are shuffled
NEAR = 16  # consecutive steps among which rows are dealt by cost where steps keep an order
CLOSE = (0.05, 0.02, 0.01, 0.005, 0.002)  # relative differences of costs within which they are, the widest that is even


def _count(rows: PackPlan | WeighedRows) -> int:
    return rows.n_rows if isinstance(rows, PackPlan) else len(rows)


@dataclass(frozen=True, eq=False)
class ShardedPlan(Generic[Rows]):
    """Rows dealt to ranks and steps.

    Attributes:
        plan: the rows, as a plan or a batch.
        steps: int64 [N, W, K] row numbers: step n, rank w, k-th row of the rank. Every row stands in it at most once.
            Where rows do not divide, the last step has idle places. They hold the number of rows, a row that does
            not exist, so that no data set takes it for one of its rows.
        cost: what the rows were weighed by.
        row_costs: float64 [R]: the cost of each row; None for that of its tokens alone, ``cost.of_rows(plan)``.

    Raises:
        LayoutError: ``steps`` is not [N, W, K], names a row that does not exist, or names a row twice.
    """

    plan: Rows
    steps: Int64
    cost: Cost
    row_costs: Float64 | None = None

    def __post_init__(self) -> None:
        steps = as_array(self.steps, "steps")
        if steps.ndim != 3 or steps.dtype != np.int64 or not steps.size:
            raise LayoutError(f"steps is {steps.dtype} {list(steps.shape)}: pass int64 [steps, ranks, rows]")
        count = self.n_rows
        if steps.min() < 0 or steps.max() > count:
            wrong = steps[(steps < 0) | (steps > count)][0]
            raise LayoutError(
                f"steps names row {wrong}: the plan has {count:,} rows, counted from 0, and "
                f"{count} stands for an idle place"
            )
        times = np.bincount(steps.reshape(-1), minlength=count + 1)[:-1]
        if times.max() > 1:
            raise LayoutError(f"steps names row {times.argmax()} twice: every row is trained once, so name it once")
        object.__setattr__(self, "steps", read_only(steps))

    def __reduce__(self) -> tuple[Any, ...]:  # pickling arrays would make them writeable
        return ShardedPlan, (self.plan, self.steps, self.cost, self.row_costs)

    @property
    def world_size(self) -> int:
        """Ranks W."""
        return int(self.steps.shape[1])

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return _count(self.plan)

    def __len__(self) -> int:
        return len(self.steps)

    def rank(self, rank: int) -> list[Int64]:
        """The rows of one rank, an int64 array per step: what ``DataLoader(dataset, batch_sampler=...)`` takes.

        Where rows do not divide, the array of the last step is shorter, or empty where the rank is idle. A rank that
        must take part in every step leaves the last one out together with all others, or trains on padding in it.

        Raises:
            PackingError: there is no such rank.
        """
        number = integer(rank)
        if number is None or not 0 <= number < self.world_size:
            raise PackingError(
                f"rank is {rank!r} and the plan is for ranks 0 to {self.world_size - 1}: pass one of them"
            )
        return [rows[rows < self.n_rows] for rows in self.steps[:, number]]

    @cached_property
    def loads(self) -> Float64:
        """float64 [N, W]: the cost that each rank carries at each step."""
        rows = self.cost.of_rows(self.plan) if self.row_costs is None else self.row_costs
        costs = np.append(rows, 0.0)  # an idle place costs nothing
        loads: Float64 = costs[self.steps].sum(axis=2)
        return read_only(loads)

    def composition(self) -> Composition:
        """Measures how far the steps are from random draws of the documents; an incomplete last step is left out."""
        steps = self.steps.reshape(len(self), -1)
        taken = np.count_nonzero(steps < self.n_rows, axis=1)
        fullest = steps[taken == taken.max()]
        rows = fullest[fullest < self.n_rows].reshape(len(fullest), -1)
        if isinstance(self.plan, PackPlan):
            return composition(self.plan.row_offsets, self.plan.length, rows)
        bounds = np.searchsorted(self.plan.rows, np.arange(self.n_rows + 1))
        return composition(bounds, self.plan.lengths, rows)

    @property
    def imbalance(self) -> float:
        """Time of all steps over the time that perfect balance would take: slowest rank over mean, 1.0 at best."""
        return float(self.loads.max(axis=1).sum() / self.loads.mean(axis=1).sum())


@hinted()
def balance(
    plan: Rows,
    world_size: int,
    *,
    cost: Cost | None = None,
    rows_per_step: int = 1,
    seed: int | None = 0,
    vision_tokens: ArrayLike | None = None,
    context_parallel: int = 1,
) -> ShardedPlan[Rows]:
    """Deal the rows of a plan to ranks so that the ranks of a step finish together.

    Rows are dealt in K rounds to bundles of K rows, the most expensive rows first, each round to the bundle that costs
    least so far: the longest-processing-time rule (Graham 1969) under an equal number of rows. The bundles, by falling
    cost, are then the ranks of one step after another. ``seed`` shuffles bundles of close costs before, as far as the
    slowest rank stays within 1% of the mean; without a shuffle, no other choice of steps from these bundles is more
    even.

    Args:
        plan: the rows: what ``plan``, ``pack`` or ``pack_tree`` returned.
        world_size: ranks W, 1 or more.
        cost: what a row costs; by default ``Cost()``.
        rows_per_step: rows K that each rank takes at a step.
        seed: shuffles bundles of close costs, the steps, and which rank carries what in each; None keeps them by
            falling cost. A step with idle places is the last one in any case.
        vision_tokens: [N] image tokens of each document, which cost ``cost.vision`` more; None for no images.
        context_parallel: ranks C over which the documents of each row are cut (``context_plan``). ``world_size`` then
            counts groups of C ranks, and a row costs what the slowest rank of its group carries.

    Raises:
        PackingError: ``world_size``, ``rows_per_step`` or ``context_parallel`` is not an integer of at least 1,
            ``seed`` is not one of at least 0, or there are fewer rows than ranks, so that a rank would have nothing to
            do in the whole run.
        LayoutError: there is not one number of image tokens per document.
    """
    if not isinstance(plan, PackPlan) and not hasattr(plan, "parents"):
        raise PackingError(f"plan is a {type(plan).__name__}: pass what crosspack.plan, pack or pack_tree returns")
    cost = checked_cost(cost)
    world_size, rows_per_step = positive("world_size", world_size), positive("rows_per_step", rows_per_step)
    seed = check_seed(seed)
    count = _count(plan)
    if count < world_size:
        raise PackingError(
            f"the plan has {count:,} rows and there are {world_size:,} ranks: "
            "lower the capacity or the number of ranks, or take more documents"
        )
    row_costs = cost.of_rows(plan, vision_tokens=vision_tokens)
    if positive("context_parallel", context_parallel) > 1:
        if not isinstance(plan, PackPlan):
            raise PackingError("context_parallel cuts the documents of a plan: pass what crosspack.plan returns")
        row_costs = row_costs - cost.of_rows(plan) + _slowest_of_groups(plan, context_parallel, cost)
    with within_memory(f"steps of {world_size:,} x {rows_per_step:,} rows", "pass fewer rows_per_step"):
        return ShardedPlan(plan, _deal(row_costs, world_size, rows_per_step, seed), cost, read_only(row_costs))


def _slowest_of_groups(plan: PackPlan, ranks: int, cost: Cost) -> Float64:
    """float64 [R]: the cost of each row on the slowest of the ranks over which its documents are cut."""
    lengths = np.split(plan.length, plan.row_offsets[1:-1])
    return np.array([context_plan(row, ranks, cost=cost).loads.max() for row in lengths])


def balance_in_order(plan: PackPlan, world_size: int, *, cost: Cost, seed: int) -> ShardedPlan[PackPlan]:
    """Deal the rows of a plan, one a rank and step, so that steps keep to their order.

    ``NEAR`` steps of consecutive rows at a time are dealt by falling cost. ``seed`` then shuffles these steps, and the
    ranks of each.
    """
    costs, random = cost.of_rows(plan), np.random.default_rng(seed)
    steps = np.full((-(-plan.n_rows // world_size), world_size), plan.n_rows, np.int64)
    for first in range(0, len(steps), NEAR):
        near = steps[first : first + NEAR]
        rows = np.arange(first * world_size, min(first * world_size + near.size, plan.n_rows))
        near.reshape(-1)[: len(rows)] = rows[np.argsort(-costs[rows], kind="stable")]
        if len(rows) == near.size:  # else the step with idle places stays the last
            near[:] = random.permutation(near)
    steps = random.permuted(steps, axis=1)
    return ShardedPlan(plan, steps[:, :, None], cost)


def _deal(costs: Float64, world_size: int, rows_per_step: int, seed: int | None) -> Int64:
    """``ShardedPlan.steps`` of rows of these costs."""
    per_step = world_size * rows_per_step
    if per_step > MOST_TOKENS // 8:
        raise MemoryError
    n_steps, rest = -(-len(costs) // per_step), len(costs) % per_step
    order = np.full(n_steps * per_step, len(costs), np.int64)
    order[: len(costs)] = np.argsort(-costs, kind="stable")  # what does not divide is the cheapest step
    costs = np.append(costs, 0.0)
    whole = (n_steps - bool(rest)) * per_step
    random = None if seed is None else np.random.default_rng(seed)

    last, of_last = _bundles(order[whole:].reshape(rows_per_step, -1), costs)
    parts = [last]
    if whole:
        bundles, loads = _bundles(order[:whole].reshape(rows_per_step, -1), costs)
        parts.insert(0, bundles[_by_cost(loads, world_size, random, of_last if rest >= world_size else of_last[:0])])
    steps = np.concatenate(parts).reshape(n_steps, world_size, rows_per_step)

    if random is not None:
        ranks = np.argsort(random.random(steps.shape[:2]), axis=1)  # a rank's rows stay together
        shuffled = np.append(random.permutation(whole // per_step), np.arange(whole // per_step, n_steps))
        steps = np.take_along_axis(steps, ranks[:, :, None], axis=1)[shuffled]
    return steps


def _by_cost(loads: Float64, world_size: int, random: np.random.Generator | None, of_last: Float64) -> Int64:
    """The order of bundles for steps of ``world_size``: by falling cost, those of close costs shuffled.

    ``of_last`` are the loads of a last step that does not fill all places, which counts in how even the steps are.
    """
    if random is None:
        return np.argsort(-loads, kind="stable")
    drawn = random.permutation(len(loads))
    loads = loads[drawn]
    waits = EVEN * of_last.sum() / world_size - of_last.max(initial=0)  # what the last step adds to what is even
    for close in CLOSE:
        order = np.argsort(-np.floor(np.log(loads) / close), kind="stable")
        ranks = loads[order].reshape(-1, world_size)
        if ranks.max(axis=1).sum() <= EVEN * ranks.mean(axis=1).sum() + waits:
            return drawn[order]
    return drawn[np.argsort(-loads, kind="stable")]


def _bundles(rounds: Int64, costs: Float64) -> tuple[Int64, Float64]:
    """Rows [K, B] by falling cost into B bundles: the bundles [B, K], and the cost of each."""
    bundles = rounds.T.copy()
    loads = costs[rounds[0]]
    for k in range(1, len(rounds)):
        least_first = np.argsort(loads, kind="stable")
        bundles[least_first, k] = rounds[k]
        loads[least_first] += costs[rounds[k]]
    return bundles, loads
