"""Rows onto ranks and steps: a plan or a batch and a cost per row in, which rank takes which row at which step out.

The ranks of a step wait for the slowest, so what its ranks carry should cost the same. Rows are bundled, one bundle per
rank and step: each gets a row from every class of cost, so that bundles cost nearly the same and hold lengths of every
kind. A step holds bundles of costs as close as its ranks must be to finish together, and no closer, so that it is not
chosen by cost more narrowly than it needs to be. Steps are shuffled, so that training order tells nothing of cost. With
one row per rank there is nothing to bundle: a step then holds rows of close costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from packing_core.errors import LayoutError, PackingError, within_memory
from packing_core.hints import hinted
from packing_core.planning.composition import Composition, composition
from packing_core.planning.pieces import MOST_TOKENS, check_seed, integer, positive
from packing_core.planning.plan import PackPlan
from packing_core.storage.arrays import as_array, read_only

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

EVEN = 1.01  # slowest rank over mean, up to which bundles are shuffled
NEAR = 16  # consecutive steps among which rows are dealt by cost where steps keep an order
CLOSE = (0.05, 0.02, 0.01, 0.005, 0.002)  # relative differences of costs within which they are, the widest that is even


@dataclass(frozen=True)
class Cost:
    """The cost of a row: ``tokens * (its tokens) + squares * (sum of its squared segment lengths)``.

    The unit is free, only the ratio matters. The default ratio is that of a Llama of 8 billion parameters.

    Attributes:
        tokens: cost of a token: projections, feed-forward blocks, the output head.
        squares: cost of a squared segment length: causal attention.

    Raises:
        PackingError: a factor is negative, or both are 0.
    """

    tokens: float = 1.0
    squares: float = 1.75e-5

    def __post_init__(self) -> None:
        factors = (self.tokens, self.squares)
        if not all(isinstance(x, Real) and isfinite(x) and x >= 0 for x in factors) or not any(factors):
            raise PackingError(
                f"cost has tokens={self.tokens} and squares={self.squares}: pass factors of 0 or more, not both 0"
            )

    @classmethod
    def from_config(cls, config: Any) -> Cost:
        """The ratio of :meth:`operations` of a model, with tokens at 1.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.

        Raises:
            PackingError: as :meth:`operations`.
        """
        cost = cls.operations(config)
        return cls(tokens=1.0, squares=cost.squares / cost.tokens)

    @classmethod
    def operations(cls, config: Any) -> Cost:
        """Forward floating-point operations of a decoder, after Kaplan et al. 2020 (arXiv:2001.08361), table 1.

        Per token and layer the projections take ``2 h d (2 n + 2 k)`` and a gated feed-forward block ``6 h f`` per
        expert that a token visits; the head takes ``2 h v``. Causal attention takes ``2 n d`` per layer and squared
        length: half of all pairs, a multiplication and an addition for the score and for the value. (h hidden size,
        d head width, n and k query and key heads, f feed-forward width, v vocabulary.) The backward is a multiple of
        both.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
        """
        hidden, layers = _size(config, "hidden_size", "n_embd"), _size(config, "num_hidden_layers", "n_layer")
        by_layer = [_size(layer, "num_attention_heads", "n_head") for layer in _layers(config, layers or 0)]
        if not (hidden and by_layer and all(by_layer)):
            raise PackingError(
                "the config names no hidden_size, num_hidden_layers and num_attention_heads: "
                "pass Cost(tokens=..., squares=...)"
            )
        tokens, squares = 2 * hidden * _size(config, "vocab_size", default=0), 0
        for layer, heads in zip(_layers(config, layers), by_layer, strict=True):
            width = _size(layer, "head_dim", default=hidden // heads)
            kv_heads = _size(layer, "num_key_value_heads", default=heads)
            visited = _size(layer, "num_experts_per_tok")
            inner = _size(layer, "moe_intermediate_size") if visited else None
            inner = inner or _size(layer, "intermediate_size", "n_inner", default=4 * hidden)
            tokens += 2 * hidden * width * (2 * heads + 2 * kv_heads) + 6 * hidden * inner * (visited or 1)
            squares += 2 * heads * width
        return cls(tokens=float(tokens), squares=float(squares))

    def of_segments(self, lengths: ArrayLike, before: ArrayLike = 0) -> Float64:
        """float64 [S]: the cost of each segment, where its queries see ``before`` earlier tokens beside itself.

        A segment of n tokens after b of its ancestors has n (n + 2 b) = (b + n)^2 - b^2 squares, so the segments on a
        path cost together what the whole path does.

        >>> Cost(tokens=0, squares=1).of_segments([4, 2], before=[0, 4]).tolist()
        [16.0, 20.0]
        """
        length = np.asarray(lengths, np.float64)
        costs: Float64 = length * (self.tokens + self.squares * (length + 2 * np.asarray(before)))
        return costs

    def of_rows(self, rows: PackPlan | PackedRows) -> Float64:
        """float64 [R]: the cost of each row; that of a segment that continues others as :meth:`of_segments` has it."""
        if isinstance(rows, PackPlan):  # which has no empty row
            row_costs: Float64 = np.add.reduceat(self.of_segments(rows.length), rows.row_offsets[:-1])
            return row_costs
        return np.bincount(rows.rows, self.of_segments(rows.lengths, rows.offsets), minlength=len(rows))


class PackedRows(Protocol):
    """The parts of a ``PackedBatch`` that its rows are weighed by: ``rows``, ``lengths`` and ``offsets``, [S] each."""

    @property
    def rows(self) -> Int64: ...
    @property
    def lengths(self) -> Int64: ...
    @property
    def offsets(self) -> Int64: ...
    def __len__(self) -> int: ...


def _count(rows: PackPlan | PackedRows) -> int:
    return rows.n_rows if isinstance(rows, PackPlan) else len(rows)


def _size(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these sizes that a config has."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return positive(f"the config's {name}", value)
    return default


def _layers(config: Any, count: int) -> list[Any]:
    """The config of each layer, where some have sizes of their own (``per_layer_config``), as in Gemma 4."""
    if isinstance(config, Mapping):
        own = config.get("per_layer_config") or {}
        return [{**config, **own.get(str(layer), {})} for layer in range(count)] if own else [config] * count
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[layer] for layer in range(count)]
    return [config] * count


def cost_of(configs: Sequence[Any]) -> Cost:
    """The cost of a row by the last of a model's configurations that says how large it is; ``Cost()`` if none does."""
    for config in reversed(configs):
        with suppress(PackingError):
            return Cost.from_config(config)
    return Cost()


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """Rows dealt to ranks and steps.

    Attributes:
        plan: the rows, as a plan or a batch.
        steps: int64 [N, W, K] row numbers: step n, rank w, k-th row of the rank. Every row stands in it at most once.
            Where rows do not divide, the last step has idle places. They hold the number of rows, a row that does
            not exist, so that no data set takes it for one of its rows.
        cost: what the rows were weighed by.

    Raises:
        LayoutError: ``steps`` is not [N, W, K], names a row that does not exist, or names a row twice.
    """

    plan: PackPlan | PackedRows
    steps: Int64
    cost: Cost

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
            raise LayoutError(f"steps names row {times.argmax()} twice: every row is trained once")
        object.__setattr__(self, "steps", read_only(steps))

    def __reduce__(self) -> tuple[Any, ...]:  # pickling arrays would make them writeable
        return ShardedPlan, (self.plan, self.steps, self.cost)

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
        costs = np.append(self.cost.of_rows(self.plan), 0.0)  # an idle place costs nothing
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
    plan: PackPlan | PackedRows,
    world_size: int,
    *,
    cost: Cost | None = None,
    rows_per_step: int = 1,
    seed: int | None = 0,
) -> ShardedPlan:
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

    Raises:
        PackingError: ``world_size`` or ``rows_per_step`` is not an integer of at least 1, ``seed`` is not one of at
            least 0, or there are fewer rows than ranks, so that a rank would have nothing to do in the whole run.
    """
    if not isinstance(plan, PackPlan) and not hasattr(plan, "parents"):
        raise PackingError(f"plan is a {type(plan).__name__}: pass what crosspack.plan, pack or pack_tree returns")
    cost = Cost() if cost is None else cost
    if not isinstance(cost, Cost):
        raise PackingError(f"cost is {cost!r}: pass Cost(tokens=..., squares=...) or Cost.from_config(config)")
    world_size, rows_per_step = positive("world_size", world_size), positive("rows_per_step", rows_per_step)
    seed = check_seed(seed)
    count = _count(plan)
    if count < world_size:
        raise PackingError(
            f"the plan has {count:,} rows and there are {world_size:,} ranks: "
            "lower the capacity or the number of ranks, or take more documents"
        )
    with within_memory(f"steps of {world_size:,} x {rows_per_step:,} rows", "pass fewer rows_per_step"):
        return ShardedPlan(plan, _deal(cost.of_rows(plan), world_size, rows_per_step, seed), cost)


def balance_in_order(plan: PackPlan, world_size: int, *, cost: Cost, seed: int) -> ShardedPlan:
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

    parts = []
    if whole:
        bundles, loads = _bundles(order[:whole].reshape(rows_per_step, -1), costs)
        parts.append(bundles[_by_cost(loads, world_size, random)])
    if rest:
        parts.append(_bundles(order[whole:].reshape(rows_per_step, -1), costs)[0])
    steps = np.concatenate(parts).reshape(n_steps, world_size, rows_per_step)

    if random is not None:
        ranks = np.argsort(random.random(steps.shape[:2]), axis=1)  # a rank's rows stay together
        shuffled = np.append(random.permutation(whole // per_step), np.arange(whole // per_step, n_steps))
        steps = np.take_along_axis(steps, ranks[:, :, None], axis=1)[shuffled]
    return steps


def _by_cost(loads: Float64, world_size: int, random: np.random.Generator | None) -> Int64:
    """The order of bundles for steps of ``world_size``: by falling cost, those of close costs shuffled."""
    if random is None:
        return np.argsort(-loads, kind="stable")
    drawn = random.permutation(len(loads))
    loads = loads[drawn]
    for close in CLOSE:
        order = np.argsort(-np.floor(np.log(loads) / close), kind="stable")
        ranks = loads[order].reshape(-1, world_size)
        if ranks.max(axis=1).sum() <= EVEN * ranks.mean(axis=1).sum():
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
