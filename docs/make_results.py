"""Draws docs/results/gsm8k.png from runs of ``benchmarks.real_runs``: ``python docs/make_results.py FOLDER``.

    FOLDER/*.json, one run each  -> docs/results/gsm8k.json, all runs and what they come to
                                 -> docs/results/gsm8k.png: loss over tokens, loss over seconds, memory

Lines are means over the seeds and bands reach from the lowest seed to the highest. All runs of a seed must have trained
the same documents in every step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

FOLDER = Path(__file__).with_name("results")
COLOURS = {"padded": "#c44e52", "grouped": "#dd8452", "packed": "#2f6db3"}
LABELS = {"padded": "padded", "grouped": "padded, sorted by length", "packed": "packed"}
SMOOTHED = 5  # steps, of the loss curves

Run = dict[str, Any]
Floats = NDArray[np.float64]


def collect(folder: Path) -> list[Run]:
    """The runs of a folder, by contender and seed.

    Raises:
        ValueError: there are none, or two of a seed differ in the documents of a step or in a setting.
    """
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise ValueError(f"{folder} holds no run of benchmarks.real_runs")
    first: dict[int, Run] = {}
    for run in runs:
        other = first.setdefault(run["seed"], run)
        for field in ("documents", "settings"):
            if run[field] != other[field]:
                raise ValueError(f"seed {run['seed']}: {run['contender']} and {other['contender']} differ in {field}")
    order = list(COLOURS)
    return sorted(runs, key=lambda run: (order.index(run["contender"]), run["seed"]))


def summary(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Returns for each contender the means over its seeds, and the standard deviation of what a seed moves."""
    found = {}
    for contender in dict.fromkeys(run["contender"] for run in runs):
        own = [run for run in runs if run["contender"] == contender]
        held_out = np.array([run["held_out"][-1]["loss"] for run in own])
        tokens, slots = (sum(sum(run[name]) for run in own) for name in ("tokens", "slots"))
        found[contender] = {
            "seeds": [run["seed"] for run in own],
            "held-out loss": float(held_out.mean()),
            "held-out loss, deviation over seeds": float(held_out.std(ddof=1)) if len(own) > 1 else None,
            "wall seconds": _mean(own, "wall_seconds"),
            "first step, seconds": _mean(own, "first_step_seconds"),
            "real tokens/s": _mean(own, "tokens_per_second"),
            "real tokens/s, second half": _mean(own, "tokens_per_second_second_half"),
            "peak GiB": max(run["peak_bytes"] for run in own) / 2**30,
            "padding": 1 - tokens / slots,
        }
    return found


def same_seed_difference(runs: list[Run]) -> float:
    """The largest difference of the held-out loss at the end between two contenders of one seed."""
    ends: dict[int, list[float]] = {}
    for run in runs:
        ends.setdefault(run["seed"], []).append(run["held_out"][-1]["loss"])
    return max(max(losses) - min(losses) for losses in ends.values())


def _mean(runs: list[Run], field: str) -> float:
    return float(np.mean([run[field] for run in runs]))


def draw(path: Path, runs: list[Run], found: dict[str, dict[str, Any]]) -> None:
    """Write the picture."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    over_tokens, over_seconds, memory = figure.subplots(1, 3, width_ratios=[1.3, 1.3, 0.7])
    for contender, figures in found.items():
        own = [run for run in runs if run["contender"] == contender]
        steps = min(len(run["loss"]) for run in own)
        losses = np.array([_smooth(run["loss"][:steps]) for run in own])
        tokens = np.mean([np.cumsum(run["tokens"][:steps]) for run in own], axis=0) / 1e6
        seconds = np.mean([np.cumsum(run["seconds"][:steps]) for run in own], axis=0)
        colour, label = COLOURS[contender], LABELS[contender]
        # over tokens the curves lie on top of each other: earlier ones are wider, so that all stay visible
        _curve(over_tokens, tokens, losses, colour, label, width=1.5 if contender == "packed" else 4.5)
        speed = f"{figures['real tokens/s, second half']:,.0f} tokens/s"
        _curve(over_seconds, seconds, losses, colour, f"{label}, {speed}", width=2)
        over_seconds.plot(seconds[-1], losses.mean(0)[-1], "o", color=colour, ms=6)
    over_tokens.set(xlabel="real tokens trained on, millions", ylabel="training loss")
    ends = ", ".join(f"{LABELS[name]} {each['held-out loss']:.3f}" for name, each in found.items())
    over_tokens.set_title(f"Held-out loss: {ends}", fontsize=10)
    over_seconds.set(xlabel="seconds, compiling included", ylabel="training loss")
    if {"padded", "packed"} <= found.keys():
        whole, later = (
            found["packed"][rate] / found["padded"][rate] for rate in ("real tokens/s", "real tokens/s, second half")
        )
        over_seconds.set_title(f"Packed: {whole:.1f} times as fast, {later:.1f} in the second half", fontsize=10)
    bars = memory.bar(
        [LABELS[name].replace(", ", ",\n") for name in found], [each["peak GiB"] for each in found.values()],
        color=[COLOURS[name] for name in found], width=0.6,
    )  # fmt: skip
    memory.bar_label(bars, fmt="%.1f", fontsize=9)
    memory.set_title("Peak memory, GiB", fontsize=10)
    for axes in (over_tokens, over_seconds):
        axes.legend(frameon=False, fontsize=9)
        axes.grid(alpha=0.25)
    for axes in (over_tokens, over_seconds, memory):
        axes.spines[["top", "right"]].set_visible(False)
    settings, seeds = runs[0]["settings"], len({run["seed"] for run in runs})
    figure.supxlabel(
        f"{settings['model']}; GSM8K, {settings['documents']:,} documents, rows of {settings['capacity']:,} tokens,\n"
        f"padded batches of {settings['padded batch']}; {seeds} seeds: mean and range; {runs[0]['device']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _curve(axes: Any, x: Floats, losses: Floats, colour: str, label: str, *, width: float) -> None:
    axes.plot(x, losses.mean(0), color=colour, lw=width, alpha=0.9, label=label)
    axes.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.2, lw=0)


def _smooth(losses: list[float]) -> Floats:
    """Means over the last steps."""
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    begins = np.maximum(ends - SMOOTHED, 0)
    smoothed: Floats = (sums[ends] - sums[begins]) / (ends - begins)
    return smoothed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="of the JSON files of runs")
    options.add_argument("--output", type=Path, default=FOLDER, help="of gsm8k.json and gsm8k.png")
    chosen = options.parse_args()
    runs = collect(chosen.folder)
    found = summary(runs)
    draw(chosen.output / "gsm8k.png", runs, found)
    rounded = [
        run | {"loss": [round(x, 5) for x in run["loss"]], "seconds": [round(x, 5) for x in run["seconds"]]}
        for run in runs
    ]
    content = {"summary": found, "difference at the end of a seed": same_seed_difference(runs), "runs": rounded}
    (chosen.output / "gsm8k.json").write_text(json.dumps(content) + "\n")
    for name, figures in found.items():
        print(f"{name}: {figures}")
    print(f"held-out losses of one seed differ by {content['difference at the end of a seed']:.1e} at most")


if __name__ == "__main__":
    main()
