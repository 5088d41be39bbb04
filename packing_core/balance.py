"""Rows onto ranks and steps: a PackPlan and a cost per row in, which rank takes which row at which step out.

The ranks of a step wait for the slowest, so what its ranks carry should cost the same. Rows are bundled, one bundle per
rank and step: each gets a row from every class of cost, so that bundles cost nearly the same and hold lengths of every
kind. Bundles of close costs form a step, and the steps are shuffled, so that training order tells nothing of cost. With
one row per rank there is nothing to bundle: a step then holds rows of close costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packing_core._pieces import check_seed, positive
from packing_core.composition import Composition, composition
from packing_core.errors import LayoutError, PackingError
from packing_core.plan import PackPlan

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

CLOSE = 0.005  # difference in cost, relative, that a step may have between its ranks


@dataclass(frozen=True)
class Cost:
    """What a row costs: ``tokens * (its tokens) + squares * (sum of its squared segment lengths)``.

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
        if not (self.tokens >= 0 and self.squares >= 0 and self.tokens + self.squares > 0):
            raise PackingError(
                f"cost has tokens={self.tokens} and squares={self.squares}: pass factors of 0 or more, not both 0"
            )

    @classmethod
    def from_config(cls, config: Any) -> Cost:
        """Forward floating-point operations of a decoder, after Kaplan et al. 2020 (arXiv:2001.08361), table 1.

        Per token and layer the projections take ``2 h d (2 n + 2 k)`` and a gated feed-forward block ``6 h f`` per
        expert that a token visits; the head takes ``2 h v``. Causal attention takes ``2 n d`` per layer and squared
        length: half of all pairs, a multiplication and an addition for the score and for the value. (h hidden size,
        d head width, n and k query and key heads, f feed-forward width, v vocabulary.) The backward is a multiple of
        both.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.

        Raises:
            PackingError: the config does not say how large the model is.
        """

        def read(*names: str, default: Any = None) -> Any:
            for name in names:
                value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                if value is not None:
                    return value
            return default

        hidden, layers = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
        heads = read("num_attention_heads", "n_head")
        if not (hidden and layers and heads):
            raise PackingError(
                "the config names no hidden_size, num_hidden_layers and num_attention_heads: "
                "pass Cost(tokens=..., squares=...)"
            )
        width = read("head_dim", default=hidden // heads)
        kv_heads = read("num_key_value_heads", default=heads)
        visited = read("num_experts_per_tok", default=1)
        inner = read("moe_intermediate_size") if read("num_experts_per_tok") else None
        inner = inner or read("intermediate_size", "n_inner", default=4 * hidden)
        per_layer = 2 * hidden * width * (2 * heads + 2 * kv_heads) + 6 * hidden * inner * visited
        tokens = layers * per_layer + 2 * hidden * read("vocab_size", default=0)
        return cls(tokens=1.0, squares=layers * 2 * heads * width / tokens)

    def of_rows(self, plan: PackPlan) -> Float64:
        """float64 [R]: the cost of each row of the plan."""
        length = plan.length.astype(np.float64)
        length *= self.tokens + self.squares * length
        row_costs: Float64 = np.add.reduceat(length, plan.row_offsets[:-1])  # a plan has no empty row
        return row_costs


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """Which rank takes which row at which step.

    Attributes:
        plan: the rows.
        steps: int64 [N, W, K] row numbers: step n, rank w, k-th row of the rank. Every row stands in it once. -1, in
            one step only, is an empty row: where rows do not divide, each rank still takes part in every step.
        cost: what the rows were weighed by.
    """

    plan: PackPlan
    steps: Int64
    cost: Cost

    def __post_init__(self) -> None:
        if self.steps.ndim != 3 or self.steps.dtype != np.int64:
            raise LayoutError(f"steps is {self.steps.dtype} {list(self.steps.shape)}: pass int64 [steps, ranks, rows]")
        self.steps.flags.writeable = False

    @property
    def world_size(self) -> int:
        """Ranks W."""
        return int(self.steps.shape[1])

    def __len__(self) -> int:
        return len(self.steps)

    def rank(self, rank: int) -> Int64:
        """int64 [N, K]: the rows of one rank, step by step.

        Raises:
            PackingError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise PackingError(f"rank is {rank} and the plan is for ranks 0 to {self.world_size - 1}")
        return self.steps[:, rank]

    @cached_property
    def loads(self) -> Float64:
        """float64 [N, W]: the cost that each rank carries at each step."""
        costs = np.append(self.cost.of_rows(self.plan), 0.0)  # row -1 costs nothing
        loads: Float64 = costs[self.steps].sum(axis=2)
        return loads

    def composition(self) -> Composition:
        """How far the steps are from random draws of the documents; the step that is not whole is left out."""
        steps = self.steps.reshape(len(self), -1)
        whole = steps[(steps >= 0).all(axis=1)]
        return composition(self.plan.row_offsets, self.plan.length, whole if len(whole) else steps[:, steps[0] >= 0])

    @property
    def imbalance(self) -> float:
        """Time of all steps over the time that perfect balance would take: slowest rank over mean, 1.0 at best."""
        return float(self.loads.max(axis=1).sum() / self.loads.mean(axis=1).sum())


def balance(
    plan: PackPlan, world_size: int, *, cost: Cost | None = None, rows_per_step: int = 1, seed: int | None = 0
) -> ShardedPlan:
    """Deal the rows of a plan to ranks so that the ranks of a step finish together.

    Rows are dealt in K rounds to bundles of K rows, the most expensive rows first, each round to the bundle that costs
    least so far: the longest-processing-time rule (Graham 1969) under an equal number of rows. The bundles, by falling
    cost, are then the ranks of one step after another; ``seed`` shuffles those whose costs differ by less than
    ``CLOSE``, so that a step is not chosen by cost more narrowly than it needs to be.

    Args:
        plan: the rows.
        world_size: ranks W, 1 or more.
        cost: what a row costs; by default ``Cost()``.
        rows_per_step: rows K that each rank takes at a step.
        seed: shuffles bundles of close costs, the steps, and which rank carries what in each; None keeps them by
            falling cost.

    Raises:
        PackingError: ``world_size`` or ``rows_per_step`` is not an integer of at least 1, ``seed`` is not one of at
            least 0, or there are fewer rows than ranks, so that a rank would have nothing to do in the whole run.
    """
    cost = Cost() if cost is None else cost
    world_size, rows_per_step = positive("world_size", world_size), positive("rows_per_step", rows_per_step)
    seed = check_seed(seed)
    if plan.n_rows < world_size:
        raise PackingError(
            f"the plan has {plan.n_rows:,} rows and there are {world_size:,} ranks: "
            "lower the capacity or the number of ranks, or take more documents"
        )
    costs = cost.of_rows(plan)
    per_step = world_size * rows_per_step
    n_steps = -(-plan.n_rows // per_step)
    order = np.argsort(-costs, kind="stable")
    whole = plan.n_rows // per_step * per_step
    bundles, loads = _bundles(order[:whole].reshape(rows_per_step, -1), costs)
    random = None if seed is None else np.random.default_rng(seed)
    if random is not None:
        mixed = random.permutation(len(bundles))
        bundles, loads = bundles[mixed], np.floor(np.log(loads[mixed]) / CLOSE)
    parts = [bundles[np.argsort(-loads, kind="stable")]]
    if whole < plan.n_rows:  # what does not divide is the cheapest step
        rest = np.full(per_step, -1)
        rest[: plan.n_rows - whole] = order[whole:]
        parts.append(_bundles(rest.reshape(rows_per_step, -1), np.append(costs, 0.0))[0])
    steps = np.concatenate(parts).reshape(n_steps, world_size, rows_per_step)
    if random is not None:
        ranks = np.argsort(random.random(steps.shape[:2]), axis=1)  # a rank's rows stay together
        steps = np.take_along_axis(steps, ranks[:, :, None], axis=1)[random.permutation(n_steps)]
    return ShardedPlan(plan, steps, cost)


def _bundles(rounds: Int64, costs: Float64) -> tuple[Int64, Float64]:
    """Rows [K, B] by falling cost into B bundles: the bundles [B, K], and the cost of each."""
    bundles = rounds.T.copy()
    loads = costs[rounds[0]]
    for k in range(1, len(rounds)):
        least_first = np.argsort(loads, kind="stable")
        bundles[least_first, k] = rounds[k]
        loads[least_first] += costs[rounds[k]]
    return bundles, loads
