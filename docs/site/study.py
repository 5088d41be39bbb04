"""The pictures of docs/does-it-matter.md, from the runs in docs/results/does_it_matter.jsonl and, of trained weights,
does_it_matter_trained.jsonl.

These are the lines that ``python -m benchmarks.does_it_matter`` writes; to draw other runs, put theirs in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks._matter_figures import Runs, common_seeds, interval, reached_by_all, runs_of, tokens_to
from docs.site.drawing import BOLD, CHARACTER, LINE, OTHER, OWN, WIDTH, Drawing

RESULTS = Path(__file__).parents[1] / "results"
RUNS, TRAINED = RESULTS / "does_it_matter.jsonl", RESULTS / "does_it_matter_trained.jsonl"
COLOURS = {"exact": OWN, "contaminated": OTHER, "wrapped": "#dd8452", "padded": "#444444"}
TASKS = {"retrieval": "values of keys", "text": "text of GSM8K"}
LEFT, PLOT = 70, 300  # pixels left of the axis, and height of a plot
WHISKER = 6

Floats = NDArray[np.float64]


@cache
def runs(task: str, file: Path = RUNS) -> Runs:
    """The runs of a task that are drawn."""
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return runs_of(records, task)


def curves(
    title: str, drawn: Runs, low: float, high: float, ticks: Sequence[float], step: int, *, logarithmic: bool = False
) -> str:
    """Draws the held-out loss over trained tokens of each way, with the 95% interval over seeds.

    Args:
        title: what is trained. drawn: its runs.
        low, high, ticks: of the axis of the loss; evaluations above ``high`` are not drawn.
        step: tokens between ticks of the other axis.
    """
    ways, seeds = common_seeds(drawn)
    scale: Callable[[Floats], Floats] = np.log if logarithmic else np.asarray
    bottom, top = (float(scale(np.array(x))) for x in (low, high))
    most = max(drawn[way, seed]["curve"][-1]["tokens"] for way in ways for seed in seeds)
    right = WIDTH - LEFT - 30
    above = 2 * LINE + 18

    def place(tokens: float, value: float) -> tuple[float, float]:
        height = (top - min(max(value, bottom), top)) / (top - bottom)
        return LEFT + right * tokens / most, above + PLOT * height

    title = f"Held-out loss over trained tokens, {title}"
    drawing = Drawing(WIDTH, above + PLOT + LINE + 8, title)
    drawing.text(0, 16, title, bold=True)
    x = float(LEFT)
    for way in ways:
        drawing.line([(x, LINE + 16), (x + 24, LINE + 16)], COLOURS[way], width=3, dashed=way == "padded")
        drawing.text(x + 32, LINE + 21, way)
        x += 32 + CHARACTER * len(way) + 24
    for tick in ticks:
        y = place(0, float(scale(np.array(tick))))[1]
        drawing.line([(LEFT, y), (LEFT + right, y)], "#dddddd", width=1)
        drawing.text(LEFT - 8, y + 5, f"{tick:g}", anchor="end")
    for tokens in range(0, int(most) + 1, step):
        drawing.text(place(tokens, bottom)[0], above + PLOT + LINE, f"{tokens // 1000}k", anchor="middle")
    for way in ways:
        points = [drawn[way, seed]["curve"] for seed in seeds]
        tokens = np.array([[point["tokens"] for point in curve] for curve in points]).mean(axis=0)
        losses = scale(np.array([[point["loss"] for point in curve] for curve in points]))
        means, halves = np.array([interval(column) for column in losses.T.tolist()]).T
        shown = means <= top
        tokens, means, halves = tokens[shown], means[shown], halves[shown]
        upper, lower = ([place(t, y) for t, y in zip(tokens, means + k * halves)] for k in (1, -1))
        drawing.area([*upper, *reversed(lower)], COLOURS[way] + "33")
        middle = [place(t, y) for t, y in zip(tokens, means)]
        drawing.line(middle, COLOURS[way], width=2, dashed=way == "padded")
    mean = "geometric mean" if logarithmic else "mean"
    return drawing.svg(
        f"Each document alone, as a user gives it. Lines are the {mean} of {len(seeds)} seeds, bands its 95% interval. "
        "Padded lies on exact."
    )


def tokens_to_a_loss() -> str:
    """Draws how many trained tokens each way takes to the loss that all runs of its task reach."""
    groups = {}
    for task in TASKS:
        found = runs(task)
        ways, seeds = common_seeds(found)
        loss = reached_by_all(found)
        measured = {way: [tokens_to(found[way, seed]["curve"], loss) for seed in seeds] for way in ways}
        groups[f"{TASKS[task]}, to a loss of {loss:.3g}"] = measured
    return _grouped_bars(
        "Trained tokens to the same held-out loss",
        groups,
        "{:,.0f}",
        "Means of five seeds and their 95% intervals. The loss is the lowest that every run of the task reaches.",
    )


def gradients() -> str:
    """Draws how far each way's gradient is from the exact one early in training, and how noisy it is."""
    groups: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        found = runs(task)
        _, seeds = common_seeds(found)
        of_seeds = [found["exact", seed]["gradients"] for seed in seeds]
        for name, said in (("error", "distance to exact / its length"), ("noise", "variance / squared mean")):
            ways = [way for way in of_seeds[0] if not (name == "error" and way == "exact")]
            groups[f"{TASKS[task]}: {said}"] = {way: [of[way][name] for of in of_seeds] for way in ways}
    return _grouped_bars(
        "Gradients of steps after a twentieth of the training",
        groups,
        "{:.2f}",
        "At the weights of exact, the same documents each: means of five seeds and their 95% intervals.",
    )


def _grouped_bars(title: str, groups: dict[str, dict[str, list[float]]], form: str, caption: str) -> str:
    """Bars from 0 with whiskers, a group under each heading on a scale of its own."""
    left = CHARACTER * max(len(way) for measured in groups.values() for way in measured) + 8
    right, tall, between = WIDTH - left - 190, 30, 16
    lines = sum(len(measured) for measured in groups.values())
    drawing = Drawing(WIDTH, LINE + 10 + tall * lines + (LINE + between) * len(groups), title)
    drawing.text(0, 16, title, bold=True)
    y = float(LINE + 10)
    for heading, measured in groups.items():
        assert BOLD * len(heading) < WIDTH
        drawing.text(0, y + 16, heading)
        y += LINE
        means = {way: interval(values) for way, values in measured.items()}
        largest = max(mean + half for mean, half in means.values())
        for way, (mean, half) in means.items():
            drawing.text(left - 8, y + 17, way, anchor="end")
            drawing.box(left, y, right * mean / largest, tall - 7, COLOURS[way])
            begin, end = (left + right * max(0.0, mean + k * half) / largest for k in (-1, 1))
            middle = y + (tall - 7) / 2
            drawing.line([(begin, middle), (end, middle)], "#1f2328", width=1.5)
            for x in (begin, end):
                drawing.line([(x, middle - WHISKER), (x, middle + WHISKER)], "#1f2328", width=1.5)
            drawing.text(end + 8, y + 17, f"{form.format(mean)} ± {form.format(half)}")
            y += tall
        y += between
    return drawing.svg(caption)


PICTURES: dict[str, Callable[[], str]] = {
    "retrieval": lambda: curves(
        TASKS["retrieval"], runs("retrieval"), 5e-4, 6, [0.001, 0.01, 0.1, 1], 50_000, logarithmic=True
    ),
    "text": lambda: curves(TASKS["text"], runs("text"), 2.4, 4, [2.5, 3, 3.5, 4], 250_000),
    "trained": lambda: curves(
        "SmolLM2-135M-Instruct", runs("text", TRAINED), 1.0, 1.55, [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 100_000
    ),
    "matter": tokens_to_a_loss,
    "gradients": gradients,
}
