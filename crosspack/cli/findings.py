"""Computes the findings of ``crosspack report``: lengths in, plain numbers out, shared by its page and ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosspack.cli.speed import GPUS, Speed
from crosspack.cli.tables import packed_name, padded_batches
from packing_core.errors import PackingError
from packing_core.planning.balance import balance
from packing_core.planning.cost import Cost
from packing_core.planning.packplan import PackPlan
from packing_core.planning.pieces import CUTS, Overflow
from packing_core.planning.plan import Strategy, plan
from packing_core.planning.rule import RowRule
from packing_core.storage.arrays import Int64
from packing_core.training.memory_model import GIB, LEVELS, MemoryModel

STRATEGIES: tuple[Strategy, ...] = ("mixed", "best_fit", "first_fit", "sequential")


def gpu_of(name: str) -> tuple[str, float]:
    """Returns the card whose speed is estimated, and GiB of its memory: the name of a card, or a number of GiB.

    Raises:
        PackingError: it is neither.
    """
    if name in GPUS:
        return name, GPUS[name].gib
    try:
        gib = float(name)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise PackingError(f"--gpu {name}: name one of {', '.join(GPUS)}, or its memory in GiB")
    return "h100", gib


def longest_rows(config: Any, gib: float, rank: int | None) -> dict[str, int]:
    """Computes the longest row that trains in a memory of ``gib`` at each level, in bfloat16 with AdamW."""
    memory = MemoryModel.from_config(config, rank=rank)
    return {level: memory.longest(level, int(gib * GIB)) for level in LEVELS}


def by_strategy(lengths: Int64, capacity: int, overflow: Any, seed: int, speed: Speed) -> list[dict[str, Any]]:
    """Rows, efficiency and hours of an epoch of every strategy at half, one, two and four times the capacity."""
    policy: Any = "split" if overflow == "error" else overflow
    found: list[dict[str, Any]] = []
    for size in sorted({max(1, capacity // 2), capacity, 2 * capacity, 4 * capacity}):
        for strategy in STRATEGIES:
            try:
                made = plan(lengths, size, strategy=strategy, overflow=policy, seed=seed)
            except PackingError:  # every document is dropped
                continue
            figures = {"rows": made.n_rows, "efficiency": made.efficiency, "hours": speed.of_rows(made)}
            found.append({"capacity": size, "strategy": strategy, "overflow": policy, **figures})
    return found


def by_policy(lengths: Int64, capacity: int, *, context: int | None = None, min_piece: int = 1) -> list[dict[str, Any]]:
    """Computes the effect of each overflow policy on documents longer than a row.

    Args:
        context, min_piece: as of ``plan``, for the policies on which they have an effect.
    """
    long = lengths[lengths > capacity]
    lost = {"truncate": int((long - capacity).sum()), "drop": int(long.sum())}
    found = []
    policies: tuple[Overflow, ...] = ("truncate", *CUTS, "drop")
    for policy in policies:
        pieces, shown_again = len(long) * (policy == "truncate"), 0
        if policy in CUTS and len(long):
            rule = RowRule(capacity, policy, None if policy == "split" else context, min_piece)
            pieces = len(rule.cut(long).length)
            shown_again = (pieces - len(long)) * rule.context_tokens
        left_out = lost.get(policy, 0)
        found.append(
            {
                "overflow": policy,
                "documents": len(long),
                "tokens_left_out": left_out,
                "share_left_out": left_out / int(lengths.sum()),
                "pieces": pieces,
                "context_tokens": shown_again,
            }
        )
    return found


def by_cap(lengths: Int64, rule: RowRule, seed: int) -> list[dict[str, Any]]:
    """Rows and efficiency without a cap on the documents of a row, and under caps around their mean number."""
    found: list[dict[str, Any]] = []
    free = plan(lengths, replace(rule, max_segments=None), seed=seed)
    mean = free.n_pieces / free.n_rows
    caps = {max(1, round(mean * times)) for times in (0.5, 1, 2, 4)}
    if rule.max_segments is not None:
        caps.add(rule.max_segments)
    for cap in [*sorted(caps), None]:
        rows = free if cap is None else plan(lengths, replace(rule, max_segments=cap), seed=seed)
        found.append({"max_segments": cap, "rows": rows.n_rows, "efficiency": rows.efficiency})
    return found


def by_rank(rows: PackPlan, ranks: int, cost: Cost, seed: int) -> dict[str, Any] | None:
    """Measures the balance of cost over ranks, for rows in order and after ``balance``; None with too few rows."""
    if rows.n_rows < ranks:
        return None
    costs = cost.of_rows(rows)
    steps = costs[: len(costs) // ranks * ranks].reshape(-1, ranks)
    dealt = balance(rows, ranks, cost=cost, seed=seed)
    whole = dealt.loads[(dealt.steps < rows.n_rows).all(axis=(1, 2))]
    return {
        "ranks": ranks,
        "steps": len(steps),
        "slowest_over_mean_before": _imbalance(steps),
        "slowest_over_mean_after": _imbalance(whole),
        "row_cost_deviation": float(costs.std() / costs.mean()),
    }


def _imbalance(steps: NDArray[np.float64]) -> float:
    return float(steps.max(axis=1).sum() / steps.mean(axis=1).sum())


def hours(rows: PackPlan, speed: Speed, batches: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """Estimated hours of one epoch, in padded batches and packed.

    Padding costs what real tokens cost, in attention too.
    """
    padded = [
        {"arrangement": name, "hours": speed.hours(float((counts * speed.cost.of_segments(longest)).sum()))}
        for name, counts, longest in padded_batches(rows, batches, seed)
    ]
    return [*padded, {"arrangement": packed_name(rows), "hours": speed.of_rows(rows)}]


def histogram(values: NDArray[Any], bins: int = 32) -> dict[str, list[Any]]:
    """Counts in bins of equal width on a logarithmic scale, and the edges of the bins."""
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, max(high, low * 2) * 1.0001, bins + 1)
    counts, _ = np.histogram(values, edges)
    return {"counts": counts.tolist(), "edges": edges.tolist()}
