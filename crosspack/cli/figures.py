"""The pictures of the console commands: records, plans and lengths go in, PNG files come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosspack.cli.progress import LABELS
from crosspack.cli.tables import padded_slots, padding, rate
from packing_core.extras import require
from packing_core.plan import PackPlan
from packing_core.training.job import TrainResult
from packing_core.training.schedule import Run, Schedule

Int64 = NDArray[np.int64]

COLOURS: dict[Run, str] = {"padded": "#c44e52", "grouped": "#dd8452", "packed": "#2f6db3"}
_SEGMENTS = ("#2f6db3", "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
_PADDING = "#e3e3e3"
_SHOWN = 24  # rows, or padded documents, that a strip shows


def compare_figure(result: TrainResult, schedule: Schedule, path: Path, *, title: str) -> None:
    """Write the picture of ``--compare``: loss over tokens, loss over seconds, and how full the rows are."""
    figure = _figure(12, 8.4)
    grid = figure.add_gridspec(2, 2, height_ratios=[1.15, 1])
    over_tokens, over_seconds = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    for number, (run, records) in enumerate(result.records.items()):
        losses = [record.loss for record in records]
        label = f"{LABELS[run]}, {rate(records):,.0f} tokens/s"
        # the curves lie on top of each other over tokens: earlier ones are drawn wider so that all stay visible
        wide = 2.0 + 2.5 * (len(result.records) - 1 - number)
        tokens = np.cumsum([record.tokens for record in records]) / 1000
        seconds = np.cumsum([record.seconds for record in records])
        over_tokens.plot(tokens, losses, color=COLOURS[run], lw=wide, alpha=0.9, label=LABELS[run])
        over_seconds.plot(seconds, losses, color=COLOURS[run], lw=2, label=label)
        over_seconds.plot(seconds[-1], losses[-1], "o", color=COLOURS[run], ms=6)
    over_tokens.set(xlabel="real tokens trained on, thousands", ylabel="loss", title="The same losses ...")
    over_seconds.set(xlabel="seconds", ylabel="loss", title="... in less time")
    for axes in (over_tokens, over_seconds):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
    _draw_padded(figure.add_subplot(grid[1, 0]), schedule, padding(next(iter(result.records.values()))))
    _draw_rows(figure.add_subplot(grid[1, 1]), schedule.plans[0])
    _save(figure, path, title)


def report_figure(
    lengths: Int64, plan: PackPlan, path: Path, *, batches: tuple[int, ...], seed: int, title: str
) -> None:
    """Write the picture of ``crosspack report``: the lengths, the computed tokens and how full the rows are."""
    figure = _figure(12, 8.4)
    grid = figure.add_gridspec(2, 2)
    histogram, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 60).astype(np.int64))
    histogram.hist(lengths, bins=edges, color=COLOURS["packed"])
    histogram.axvline(plan.capacity, color="black", ls="--", lw=1)
    histogram.text(plan.capacity, 0.98, " capacity", transform=histogram.get_xaxis_transform(), va="top")
    histogram.set(xscale="log", xlabel="tokens of a document", ylabel="documents", title="Document lengths")
    real = plan.n_tokens
    shuffled = np.random.default_rng(seed).permutation(plan.length)
    names, slots, colours = [], [], []
    for size in batches:
        names += [f"batches of {size},\nrandom", f"batches of {size},\nsorted"]
        slots += [padded_slots(shuffled, size), padded_slots(-np.sort(-plan.length), size)]
        colours += [COLOURS["padded"], COLOURS["grouped"]]
    names.append("packed rows")
    slots.append(plan.n_rows * plan.capacity)
    colours.append(COLOURS["packed"])
    bars.bar(names, [count / 1e6 for count in slots], color=_PADDING)
    bars.bar(names, [real / 1e6] * len(names), color=colours)
    for at, count in enumerate(slots):
        bars.text(at, count / 1e6, f"{1 - real / count:.0%} padding", ha="center", va="bottom", fontsize=9)
    bars.set(ylabel="millions of computed tokens per epoch", title="What the model computes (grey: padding)")
    bars.margins(y=0.12)
    _draw_fill(figure.add_subplot(grid[1, 0]), plan)
    _draw_rows(figure.add_subplot(grid[1, 1]), plan)
    _save(figure, path, title)


def _draw_padded(axes: Any, schedule: Schedule, waste: float) -> None:
    """The first documents of the first step in padded batches, one line each."""
    plan = schedule.steps[0]
    line = 0
    for pieces in schedule.batches(0, "padded"):
        lengths = plan.length[pieces]
        for number, length in enumerate(lengths.tolist()):
            if line == _SHOWN:
                break
            axes.barh(line, lengths.max(), height=1, color=_PADDING)
            axes.barh(line, length, height=0.86, color=_SEGMENTS[number % 2])
            line += 1
        axes.axhline(line - 0.5, color="white", lw=3)
    axes.set(
        title=f"Padded batches of {schedule.padded_batch}: {waste:.0%} padding", xlabel="tokens", ylabel="documents"
    )
    _strip(axes, line)


def _draw_rows(axes: Any, plan: PackPlan) -> None:
    """The first packed rows, one line each, their segments in alternating colours."""
    rows = min(plan.n_rows, _SHOWN)
    for row in range(rows):
        axes.barh(row, plan.capacity, height=0.86, color=_PADDING)
        pieces = slice(int(plan.row_offsets[row]), int(plan.row_offsets[row + 1]))
        lengths, begins = plan.length[pieces], plan.offset[pieces]
        colours = [_SEGMENTS[number % len(_SEGMENTS)] for number in range(len(lengths))]
        axes.barh([row] * len(lengths), lengths, left=begins, height=0.86, color=colours)
    axes.set(title=f"Packed rows: {1 - plan.efficiency:.1%} padding", xlabel="tokens", ylabel="rows")
    _strip(axes, rows)


def _draw_fill(axes: Any, plan: PackPlan) -> None:
    fill = np.sort(plan.row_tokens)[::-1] / plan.capacity
    axes.fill_between(np.arange(len(fill)), 1, color=_PADDING, step="mid")
    axes.fill_between(np.arange(len(fill)), fill, color=COLOURS["packed"], step="mid")
    axes.set(title=f"Fill of all {plan.n_rows:,} rows, fullest first", xlabel="row", ylabel="real tokens / capacity")
    axes.set_xlim(0, max(1, len(fill) - 1))
    axes.set_ylim(0, 1.02)


def _strip(axes: Any, lines: int) -> None:
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks([])
    axes.margins(x=0)


def _figure(width: float, height: float) -> Any:
    return require("matplotlib.figure", extra="plot").Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, title: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
