"""Sums up the runs of ``benchmarks.does_it_matter``: records in, means with intervals out. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WAYS = ("exact", "contaminated", "wrapped", "padded")
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t by degrees of freedom, from 1

Runs = Mapping[tuple[str, int], Mapping[str, Any]]  # (way, seed) -> record


def runs_of(records: Sequence[Mapping[str, Any]], task: str) -> Runs:
    """The records of one task by way and seed."""
    return {(record["way"], record["seed"]): record for record in records if record["task"] == task}


def common_seeds(runs: Runs) -> tuple[list[str], list[int]]:
    """The ways that were run, and the seeds that all of them have."""
    ways = [way for way in WAYS if any(way == other for other, _ in runs)]
    return ways, sorted({seed for _, seed in runs if all((way, seed) in runs for way in ways)})


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95% confidence interval; NaN for one value."""
    if len(values) < 2:
        return float(np.mean(values)), float("nan")
    return float(np.mean(values)), T95[min(len(values) - 2, len(T95) - 1)] * float(np.std(values, ddof=1)) / len(
        values
    ) ** 0.5


def tokens_to(curve: Sequence[dict[str, float]], loss: float) -> float:
    """Trained tokens until the held-out loss is at most ``loss``, linear between evaluations; NaN if it never is."""
    before: dict[str, float] | None = None
    for point in curve:
        if point["loss"] <= loss:
            if before is None or before["loss"] == point["loss"]:
                return point["tokens"]
            part = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return before["tokens"] + part * (point["tokens"] - before["tokens"])
        before = point
    return float("nan")


def reached_by_all(runs: Runs) -> float:
    """The lowest held-out loss that every run of the common seeds has at its end."""
    ways, seeds = common_seeds(runs)
    return max(float(runs[way, seed]["curve"][-1]["loss"]) for seed in seeds for way in ways)
