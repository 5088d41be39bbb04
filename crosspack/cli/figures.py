"""The pictures of the console commands: records, plans and lengths go in, PNG files come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosspack.cli.progress import LABELS
from crosspack.cli.tables import computed_tokens, loss_difference, padding, rate
from packing_core.extras import require
from packing_core.planning.plan import PackPlan
from packing_core.training.job import TrainResult
from packing_core.training.schedule import Run, Schedule

Int64 = NDArray[np.int64]

COLOURS: dict[Run, str] = {"padded": "#c44e52", "grouped": "#dd8452", "packed": "#2f6db3"}
_SEGMENTS = ("#2f6db3", "#7fb0dd", "#4a90c9", "#a9cbe8")  # neighbouring segments must not look alike
_PADDING = "#e3e3e3"
_COMPARED = ("#2f6db3", "#7a7a7a")  # packed rows, random rows
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
    figure = _figure(12, 8.4)
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
    padded, packed = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _draw_padded(padded, schedule, padding(next(iter(result.records.values()))))
    _draw_rows(packed, schedule.plans[0])
    for axes in (padded, packed):  # one scale: a token has the same size in both
        axes.set(xlim=(0, schedule.plans[0].capacity), ylim=(_SHOWN - 0.5, -0.5))
    _explain_colours(figure)
    _save(figure, path, title)


def report_figure(
    lengths: Int64, plan: PackPlan, random: PackPlan, path: Path, *, batches: tuple[int, ...], seed: int, title: str
) -> None:
    """Write the picture of ``crosspack report``: lengths, computed tokens, how full rows are, what they are made of.

    Args:
        random: rows of the same documents in random order, which those of ``plan`` are compared with.
    """
    figure = _figure(12, 12)
    grid = figure.add_gridspec(3, 2)
    histogram, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 60).astype(np.int64))
    histogram.hist(lengths, bins=edges, color=COLOURS["packed"])
    histogram.axvline(plan.capacity, color="black", ls="--", lw=1)
    histogram.text(plan.capacity, 0.98, " capacity", transform=histogram.get_xaxis_transform(), va="top")
    histogram.set(xscale="log", xlabel="tokens of a document", ylabel="documents", title="Document lengths")
    real = plan.n_tokens
    computed = computed_tokens(plan, batches=batches, seed=seed)
    names, slots = list(computed), list(computed.values())
    colours = [*(COLOURS["padded"], COLOURS["grouped"]) * len(batches), COLOURS["packed"]]
    bars.barh(names, [count / 1e6 for count in slots], color=_PADDING)
    bars.barh(names, [real / 1e6] * len(names), color=colours)
    for at, count in enumerate(slots):
        bars.text(count / 1e6, at, f" {1 - real / count:.0%} padding", va="center", fontsize=9)
    bars.set(xlabel="millions of computed tokens per epoch", title="What the model computes (grey: padding)")
    bars.margins(x=0.2)
    bars.invert_yaxis()
    _draw_fill(figure.add_subplot(grid[1, 0]), plan)
    _draw_rows(figure.add_subplot(grid[1, 1]), plan)
    counts, squares = figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1])
    _draw_shares(counts, [np.diff(made.row_offsets) for made in (plan, random)])
    counts.set(xscale="log", xlabel="documents in a row", ylabel="share of the rows", title="Documents per row")
    _draw_shares(squares, [np.add.reduceat(made.length**2, made.row_offsets[:-1]) for made in (plan, random)])
    squares.set(xscale="log", xlabel="squared tokens of a row", ylabel="share of the rows", title="Attention cost")
    _explain_colours(figure)
    _save(figure, path, title)


def _draw_shares(axes: Any, amounts: list[Int64]) -> None:
    """Histograms of the amounts of packed rows and of random rows."""
    both = np.concatenate(amounts)
    edges = np.unique(np.geomspace(both.min(), both.max() + 1, 40).astype(np.int64))
    for amount, label, colour in zip(amounts, ("these rows", "documents in random order"), _COMPARED, strict=True):
        weights = np.full(len(amount), 1 / len(amount))
        axes.hist(amount, bins=edges, weights=weights, histtype="step", lw=2, color=colour, label=label)
    axes.margins(y=0.3)  # room for the legend
    axes.legend(frameon=False)


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


def _draw_fill(axes: Any, plan: PackPlan) -> None:
    fill = np.sort(plan.row_tokens)[::-1] / plan.capacity
    axes.fill_between(np.arange(len(fill)), 1, color=_PADDING, step="mid")
    axes.fill_between(np.arange(len(fill)), fill, color=COLOURS["packed"], step="mid")
    axes.set(title=f"Fill of all {plan.n_rows:,} rows, fullest first", xlabel="row", ylabel="real tokens / capacity")
    axes.set_xlim(0, max(1, len(fill) - 1))
    axes.set_ylim(0, 1.02)


def _explain_colours(figure: Any) -> None:
    """A legend for the rows and batches below."""
    patch = require("matplotlib.patches", extra="plot").Patch
    keys = [patch(color=colour, label=label) for colour, label in ((_SEGMENTS[0], "documents"), (_PADDING, "padding"))]
    figure.legend(handles=keys, loc="outside lower center", ncols=2, frameon=False)


def _strip(axes: Any, lines: int) -> None:
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_yticks([])
    axes.margins(x=0)


def _figure(width: float, height: float) -> Any:
    return require("matplotlib.figure", extra="plot").Figure(figsize=(width, height), layout="constrained")


def _number_plainly(axis: Any) -> None:
    """Writes the numbers of an axis in full; a logarithmic one of less than two decades has ticks at 1, 2 and 5."""
    ticker = require("matplotlib.ticker", extra="plot")
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        axis.set_major_locator(ticker.LogLocator(subs=(1.0,) if high >= 100 * low else (1.0, 2.0, 5.0)))
        axis.set_minor_formatter("")
    elif not isinstance(axis.get_major_formatter(), ticker.ScalarFormatter):
        return  # names
    axis.set_major_formatter(lambda value, place: f"{value:,.6f}".rstrip("0").rstrip("."))


def _save(figure: Any, path: Path, title: str) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            _number_plainly(axis)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
