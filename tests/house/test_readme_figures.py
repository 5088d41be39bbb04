"""Figures of the README and its pages are those that their commands print and that benchmarks/RESULTS.md records."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import transformers

from crosspack.cli.models import SMALL_LLAMA
from docs.site.charts import RESULTS, cells, tables
from torch_backend import audit
from torch_backend.stacks.paths import config_of, survey

ROOT = Path(__file__).parents[2]
# Figures stand in the README's tables, and in the sentences of two pages.
PAGES = " ".join(
    " ".join((ROOT / page).read_text() for page in ("README.md", "docs/performance.md", "docs/how.md")).split()
)
STEP, LINE, RANKS = "The training step", "Training by one line", "Several GPUs by one line"
SPEED, MEMORY = "real tokens/s", ("GiB", "GiB allocated", "GiB, whole run")

# What the pages say -> for each {}, the section of RESULTS.md, the column, and words of the row that has the figure.
RECORDED: dict[str, tuple[tuple[Any, ...], ...]] = {
    "| training step, Qwen2-0.5B shape, rows of 16,384 | {} | {} | {}x |": (
        (STEP, SPEED, "rows of 16,384", "best stock", "35.4%"),
        (STEP, SPEED, "rows of 16,384", "ours, compiled and captured", "1.70x"),
        (STEP, "to best stock", "rows of 16,384", "ours, compiled and captured", "1.70x"),
    ),
    "| `SFTTrainer`, Qwen2-0.5B shape, rows of 16,384 | {} | {} | {}x |": (
        (LINE, SPEED, "0.5B, rows of 16,384", "best stock"),
        (LINE, SPEED, "0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
        (LINE, "to best stock", "0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
    ),
    "| `Trainer`, LoRA, Llama-3-8B shape, rows of 8,192 | {} | {} | {}x |": (
        (LINE, SPEED, "8B, LoRA", "best stock"),
        (LINE, SPEED, "8B, LoRA", "`enable_packing`"),
        (LINE, "to best stock", "8B, LoRA", "`enable_packing`"),
    ),
    "best stock: SDPA, grouped by length | {} | {} |": (
        ("Preference trainers", "16 pairs", "`group_by_length`, pairs/s"),
        ("Preference trainers", "16 pairs", "after `enable_packing`, pairs/s"),
    ),
    "| each alone | {} |": (("What stock packing does to a trained model", "loss", "each document alone"),),
    "in a plain loop | {} |": (("What stock packing does to a trained model", "loss", "plain loop"),),
    "| packed, `crosspack.patch(model)` | {} |": (
        ("What stock packing does to a trained model", "loss", "`crosspack.patch(model)`"),
    ),
    "| best stock: flash-attn-4 with its metadata, Liger | {} ({}) | {} ({}) |": (
        (STEP, SPEED, "rows of 16,384", "best stock", "35.4%"),
        (STEP, MEMORY, "rows of 16,384", "best stock", "35.4%"),
        (STEP, SPEED, "rows of 65,536", "best stock", "55.0%"),
        (STEP, MEMORY, "rows of 65,536", "best stock", "55.0%"),
    ),
    "(speed.md) | {} ({}) | {} ({}) |": (
        (STEP, SPEED, "rows of 16,384", "ours, compiled and captured", "1.70x"),
        (STEP, MEMORY, "rows of 16,384", "ours, compiled and captured", "1.70x"),
        (STEP, SPEED, "rows of 65,536", "ours, compiled and captured", "1.13x"),
        (STEP, MEMORY, "rows of 65,536", "ours, compiled and captured", "1.13x"),
    ),
    "in later runs: {} ({}) with `Trainer` and {} ({}) with TRL's `SFTTrainer` at rows of 16,384;": (
        (LINE, SPEED, "| `Trainer` after `enable_packing`", "| 105 |"),
        (LINE, MEMORY, "| `Trainer` after `enable_packing`", "| 105 |"),
        (LINE, SPEED, "`SFTTrainer(packing=True)` after `enable_packing`", "| 105 |"),
        (LINE, MEMORY, "`SFTTrainer(packing=True)` after `enable_packing`", "| 105 |"),
    ),
    "with the best stock step beside it: {} ({}), {} times the {} ({}) of that step;": (
        (LINE, SPEED, "0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
        (LINE, MEMORY, "0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
        (LINE, "to best stock", "0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
        (LINE, SPEED, "0.5B, rows of 16,384", "best stock"),
        (LINE, MEMORY, "0.5B, rows of 16,384", "best stock"),
    ),
    "`Trainer` with LoRA on the Llama-3-8B shape at rows of 8,192: {} ({}), beside {} ({}) of the best stock step.": (
        (LINE, SPEED, "8B, LoRA", "`enable_packing`"),
        (LINE, MEMORY, "8B, LoRA", "`enable_packing`"),
        (LINE, SPEED, "8B, LoRA", "best stock"),
        (LINE, MEMORY, "8B, LoRA", "best stock"),
    ),
    "on the 0.5B shape: {} pairs per second ({}), where stock at its best made {} ({}).": (
        ("Preference trainers", "pairs/s", "after `enable_packing` |"),
        ("Preference trainers", MEMORY, "after `enable_packing` |"),
        ("Preference trainers", "pairs/s", "stock, SDPA, `group_by_length`"),
        ("Preference trainers", MEMORY, "stock, SDPA, `group_by_length`"),
    ),
    "rows dealt by `balance`: {} ({}), {} times the {} ({}) of one GPU in the same run;": (
        (RANKS, SPEED, "two, DDP, `balance`", "| 127 |"),
        (RANKS, MEMORY, "two, DDP, `balance`", "| 127 |"),
        (RANKS, "to one", "two, DDP, `balance`", "| 127 |"),
        (RANKS, SPEED, "one GPU"),
        (RANKS, MEMORY, "one GPU"),
    ),
    "in runs without one GPU beside them, {} and {} ({}).": (
        (RANKS, SPEED, "two, DDP, `balance`", "| 125 |"),
        (RANKS, SPEED, "the same in a run before"),
        (RANKS, MEMORY, "two, DDP, `balance`", "| 125 |"),
    ),
    "An earlier run of the step had {} for the best stock at 16,384, {} ({}) for": (
        (STEP, SPEED, "rows of 16,384", "best stock", "36.7%"),
        (STEP, SPEED, "rows of 16,384", "ours, torch alone"),
        (STEP, MEMORY, "rows of 16,384", "ours, torch alone"),
    ),
    "{} ({}) for stock packed rows with SDPA, and {} ({}) for padded batches of 8 with SDPA.": (
        (STEP, SPEED, "rows of 16,384", "stock packed, SDPA"),
        (STEP, MEMORY, "rows of 16,384", "stock packed, SDPA"),
        (STEP, SPEED, "padded, batches of 8", "padded, SDPA"),
        (STEP, MEMORY, "padded, batches of 8", "padded, SDPA"),
    ),
}
FIGURE = r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?"
IN_WORDS = ("168,722", "167,757")  # figures that RESULTS.md states in a sentence


def stated(sentence: str) -> tuple[str, ...]:
    """The figures that stand in the pages where ``sentence`` has ``{}``."""
    found = re.findall(re.escape(sentence).replace(r"\{\}", f"({FIGURE})"), PAGES)
    assert len(found) == 1, f"the pages say this {len(found)} times: {sentence}"
    return (found[0],) if isinstance(found[0], str) else found[0]


def recorded(section: str, column: str | tuple[str, ...], *words: str) -> list[str]:
    """The cells under a column, which has one of some names, in the rows of a section that have all ``words``."""
    found, names = [], (column,) if isinstance(column, str) else column
    for heading, _, *lines in tables(section):
        columns, first = cells(heading), ""
        for line in lines:
            first = cells(line)[0] or first  # an empty first cell stands for the one above it
            if all(word in f"{first} {line}" for word in words):
                found += [cells(line)[columns.index(name)] for name in names if name in columns]
    return found


@pytest.mark.parametrize("sentence", RECORDED)
def test_measured_figures_are_those_of_the_record(sentence: str) -> None:
    for figure, place in zip(stated(sentence), RECORDED[sentence], strict=True):
        decimals = len(figure.partition(".")[2])
        cells_there = [
            f"{float(cell.split()[0].strip('x').replace(',', '')):,.{decimals}f}" for cell in recorded(*place)
        ]
        assert figure in cells_there, place


def test_every_speed_of_the_pages_is_held_to_the_record() -> None:
    held = {figure for sentence in RECORDED for figure in stated(sentence)}
    assert set(re.findall(r"\b\d{2,3},\d{3}\b", PAGES)) - held == {*IN_WORDS, "16,384", "65,536", "100,000"}
    assert all(f" {figure}" in RESULTS.read_text().replace("**", " ") for figure in IN_WORDS)


def test_the_figures_of_the_real_runs_are_those_of_their_file() -> None:
    runs = json.loads((ROOT / "docs/results/gsm8k.json").read_text())["summary"]
    faster, packed, padded = stated("losses, {} times as many tokens per second, {} GiB in place of {}.")
    speeds = [runs[run]["real tokens/s, second half"] for run in ("packed", "padded")]
    assert faster == f"{speeds[0] / speeds[1]:.1f}"
    assert [packed, padded] == [f"{runs[run]['peak GiB']:.1f}" for run in ("packed", "padded")]


def test_the_figures_of_the_demo_are_those_of_the_record() -> None:
    demo, gsm8k = ({cells(line)[0]: cells(line)[1:] for line in lines} for lines in tables("Demo"))
    padded, grouped, packed = (float(cell.replace(",", "")) for cell in demo["real tokens/s"])
    to_padded, to_grouped = stated("trains {} times as many real tokens per second packed as padded, and {} times as")
    assert (to_padded, to_grouped) == (f"{packed / padded:.1f}", f"{packed / grouped:.1f}")
    (losses,) = stated("The losses of the three runs differ by {} at most")
    assert losses == max(demo["largest loss difference from packed"][:2], key=float)
    assert stated("leaves less to save: {} times padded.") == (gsm8k["speed"][2].strip("x"),)


def test_the_errors_of_the_demo_are_those_that_its_audit_prints() -> None:
    (limit,) = stated("packed logits and gradients are within {} of those of each document alone")
    report = audit(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SMALL_LLAMA)), patched=True
    )
    assert float(limit) / 100 < max(report.logits, report.gradients) < float(limit)


def test_the_errors_of_gpt_oss_are_those_that_the_audit_prints() -> None:
    logits, gradients, limit = stated(
        "every stock path has logits off by {} and gradients by {} of the largest value. Patched, both are within {}."
    )
    *stock, patched = survey(config_of("gpt_oss"))
    for found in stock:
        assert (f"{found.logits:.1f}", f"{found.gradients:.1f}") == (logits, gradients), found.path
    assert float(limit) / 100 < max(patched.logits, patched.gradients) < float(limit)


def test_the_versions_of_the_audit_are_those_that_are_installed() -> None:
    found = re.findall(r"transformers ([\d.]+), torch ([\d.]+), TRL ([\d.]+), SDPA on the CPU", PAGES)
    assert found == [tuple(version(name).partition("+")[0] for name in ("transformers", "torch", "trl"))]


def test_the_counts_of_families_add_up() -> None:
    exact, every, refused = re.findall(r"\[(\d+) of (\d+) are exact\][^|]*, (\d+) are refused with a reason", PAGES)[0]
    assert int(exact) + int(refused) == int(every)
