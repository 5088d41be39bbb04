"""The picture of ``crosspack train --compare``: records and a schedule in, a PNG file out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from crosspack.cli.progress import LABELS
from crosspack.cli.tables import loss_difference, padding, rate
from packing_core.extras import require
from packing_core.planning.plan import PackPlan
from packing_core.training.job import TrainResult
from packing_core.training.schedule import Run, Schedule

COLOURS: dict[Run, str] = {"padded": "#c44e52", "grouped": "#dd8452", "packed": "#2f6db3"}
_SEGMENTS = ("#2f6db3", "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
_PADDING = "#e3e3e3"
_SHOWN = 24  # rows, or padded documents, that a strip shows


def compare_titles(result: TrainResult) -> tuple[str, str]:
    """Returns the titles of the ``--compare`` figures: difference of the losses, and speed of packed rows."""
    packed = result.records["packed"]
    others = {run: records for run, records in result.records.items() if run != "packed"}
    apart = max(loss_difference(records, packed) for records in others.values())
    speeds = ", ".join(f"{rate(packed) / rate(records):.2f}x {LABELS[run]}" for run, records in others.items())
    return f"Losses differ by {apart:.0e} at most", f"Packed, real tokens/s: {speeds}"


def compare_figure(result: TrainResult, schedule: Schedule, path: Path, *, title: str) -> None:
    """Write the picture of ``--compare``: loss over tokens, loss over seconds, and how full the rows are."""
    figure = require("matplotlib.figure", extra="plot").Figure(figsize=(12, 8.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.15, 1])
    over_tokens, over_seconds = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    for number, (run, records) in enumerate(result.records.items()):
        losses = [record.loss for record in records]
        label = f"{LABELS[run]}, {rate(records):,.0f} tokens/s (median step)"
        # the curves lie on top of each other over tokens: earlier ones are drawn wider so that all stay visible
        wide = 2.0 + 2.5 * (len(result.records) - 1 - number)
        tokens = np.cumsum([record.tokens for record in records]) / 1000
        seconds = np.cumsum([record.seconds for record in records])
        over_tokens.plot(tokens, losses, color=COLOURS[run], lw=wide, alpha=0.9, label=LABELS[run])
        over_seconds.plot(seconds, losses, color=COLOURS[run], lw=2, label=label)
        over_seconds.plot(seconds[-1], losses[-1], "o", color=COLOURS[run], ms=6)
    same, faster = compare_titles(result)
    over_tokens.set(xlabel="real tokens trained on, thousands", ylabel="loss", title=same)
    over_seconds.set(xlabel="seconds in steps", ylabel="loss", title=faster)
    for axes in (over_tokens, over_seconds):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.ticklabel_format(style="plain", useOffset=False)
    padded, packed = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _draw_padded(padded, schedule, padding(next(iter(result.records.values()))))
    _draw_rows(packed, schedule.plans[0])
    for axes in (padded, packed):  # one scale: a token has the same size in both
        axes.set(xlim=(0, schedule.plans[0].capacity), ylim=(_SHOWN - 0.5, -0.5))
    _explain_colours(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_padded(axes: Any, schedule: Schedule, waste: float) -> None:
    """The first padded batches, one document a line, side by side as far as a packed row reaches."""
    size, width = schedule.padded_batch, schedule.plans[0].capacity
    left, top = 0, 0
    batches = ((step, pieces) for step in range(len(schedule)) for pieces in schedule.batches(step, "padded"))
    for step, pieces in batches:
        lengths = schedule.steps[step].length[pieces]
        longest = int(lengths.max())
        if left + longest > width:
            left, top = 0, top + size
        if top >= _SHOWN:
            break
        lines = top + np.arange(len(lengths))
        colours = [_SEGMENTS[number % len(_SEGMENTS)] for number in range(len(lengths))]
        axes.barh(lines, longest, left=left, height=1, color=_PADDING)
        axes.barh(lines, lengths, left=left, height=0.86, color=colours)
        axes.vlines(left, top - 0.5, top + len(lengths) - 0.5, color="white", lw=2)
        left += longest
        axes.hlines(top + size - 0.5, 0, width, color="white", lw=2)
    axes.set(title=f"Padded batches of {size}: {waste:.0%} padding", xlabel="tokens", ylabel="documents")
    _strip(axes, _SHOWN)


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


def _explain_colours(figure: Any) -> None:
    """A legend for the rows and batches below."""
    patch = require("matplotlib.patches", extra="plot").Patch
    keys = [patch(color=colour, label=label) for colour, label in ((_SEGMENTS[0], "documents"), (_PADDING, "padding"))]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)


def _strip(axes: Any, lines: int) -> None:
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks([])
    axes.margins(x=0)
