"""Measures how evenly `context_plan` cuts rows over the ranks of a context-parallel group, and how much it cuts.

    python -m benchmarks.context_plan

Documents are source files in random order, as many as fill a row; the last one is cut off at its end. Each line is over
20 rows: the largest cost of a rank over the mean, the share of tokens in documents that straddle ranks, the largest
number of tokens of a rank over the mean, and the time of a plan. The other tables are of a single document, also where
three of four layers have a window, and of a row of 50,000 documents.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from benchmarks._report import best, machine, table, versions
from benchmarks.plan import REAL
from packing_core import ContextPlan, Cost, context_plan

ROWS = 20
RANKS = (2, 4, 8, 64)


def main() -> None:
    print(machine())
    print(versions("numpy"), end="\n\n")
    lengths = np.load(REAL)["python_source"].astype(np.int64)
    header = ("tokens a row", "ranks", "cut", "cost, max / mean", "straddling", "tokens, max / mean", "ms")
    lines = [
        _line(lengths, tokens, ranks, contiguous)
        for tokens, ranks, contiguous in product((65_536, 262_144, 1_048_576), RANKS, (False, True))
    ]
    print(table(header, lines), end="\n\n")
    alone = [
        [f"{ranks}", *(f"{context_plan([262_144], ranks, contiguous=cut).imbalance:.4f}" for cut in (False, True))]
        for ranks in RANKS
    ]
    print(table(("one document of 262,144 over", "zigzag, cost", "contiguous, cost"), alone), end="\n\n")
    windows = {"a model's cost": Cost(1, 1e-6, ((4096, 3e-6),)), "windows alone": Cost(0, 0, ((4096, 1.0),))}
    windowed = [
        [f"{n}", *(f"{context_plan([20_000], n, cost=c).imbalance:.4f}" for c in windows.values())] for n in RANKS
    ]
    print(table(("one document of 20,000, windows of 4,096, over", *windows), windowed), end="\n\n")
    tail = np.random.default_rng(0).pareto(1.2, 50_000) + 0.01
    many = np.maximum(1, (tail / tail.sum() * 1e6).astype(np.int64))
    times = [[f"{n}", f"{best(3, lambda n=n: context_plan(many, n)) * 1e3:.0f}"] for n in RANKS]
    print(table(("50,000 documents over", "ms"), times))


def _line(lengths: np.ndarray, tokens: int, ranks: int, contiguous: bool) -> list[str]:
    rows = [_row(lengths, tokens, seed) for seed in range(ROWS)]
    plans = [context_plan(row, ranks, contiguous=contiguous) for row in rows]
    return [
        f"{tokens:,}",
        f"{ranks}",
        "contiguous" if contiguous else "zigzag",
        f"{max(plan.imbalance for plan in plans):.4f}",
        f"{np.mean([plan.lengths[plan.straddling].sum() / tokens for plan in plans]):.0%}",
        f"{max(map(_tokens, plans)):.2f}",
        f"{best(3, lambda: context_plan(rows[0], ranks, contiguous=contiguous)) * 1e3:.1f}",
    ]


def _row(lengths: np.ndarray, tokens: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).permutation(lengths[lengths > 0])
    ends = np.cumsum(drawn)
    count = int(np.searchsorted(ends, tokens))
    return np.diff([0, *ends[:count], tokens])


def _tokens(plan: ContextPlan) -> float:
    held = np.bincount(plan.rank, plan.length)
    return float(held.max() / held.mean())


if __name__ == "__main__":
    main()
