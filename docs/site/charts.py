"""The charts of the documentation, from the tables of benchmarks/RESULTS.md: ``CHARTS`` maps a name to its chart.

A table or a row that is no longer there is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from docs.site.drawing import bars

RESULTS = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"


@dataclass(frozen=True)
class Chart:
    """One chart of bars.

    Attributes:
        title: with the unit.
        section: heading of RESULTS.md under which its tables are.
        column: heading of the column with the values.
        rows: label of each bar -> words that its row's cells contain, in order, up to the value.
        highlight: what the labels of this project's bars contain.
        caption: the conditions.
    """

    title: str
    section: str
    column: str
    rows: dict[str, tuple[str, ...]]
    highlight: str
    caption: str


CHARTS = {
    "speed": Chart(
        "Times the speed of the best other way, by class of model",
        "Speed by class of model",
        "times",
        {
            "dense, training step": ("dense, 0.5B, a training step",),
            "dense, SFTTrainer": ("dense, 0.5B, `SFTTrainer`",),
            "8B with LoRA, Trainer": ("dense, 8B, LoRA",),
            "mixture of experts": ("experts, 30B-A3B",),
            "images": ("images, 3B",),
            "preference pairs": ("preference pairs",),
            "encoder, masked tokens": ("masked tokens",),
        },
        "",
        "One H200, experts one H100, bfloat16. Dense: beside flash-attn-4 and Liger; images, encoder: beside padding.",
    ),
    "step": Chart(
        "Real tokens per second, Qwen2-0.5B shape, rows of 16,384, one H200",
        "The training step",
        "real tokens/s",
        {
            "padded, batches of 8, SDPA": ("padded, batches of 8", "padded, SDPA"),
            "stock packed rows, SDPA": ("rows of 16,384", "stock packed, SDPA"),
            "best stock: flash-attn-4, Liger": ("rows of 16,384", "best stock"),
            "Crosspack, torch alone": ("rows of 16,384", "ours, torch alone"),
            "Crosspack, compiled and captured": ("rows of 16,384", "ours, compiled and captured"),
        },
        "Crosspack",
        "bfloat16, fused AdamW, the same 480 documents. Compiled and best stock: one run; the others: an earlier one.",
    ),
    "trainers": Chart(
        "Real tokens per second, Qwen2-0.5B shape, rows of 16,384, one H200",
        "Training by one line",
        "real tokens/s",
        {
            "stock packed rows, SDPA, Liger": ("0.5B, rows of 16,384", "stock packed"),
            "best stock: flash-attn-4, Liger": ("0.5B, rows of 16,384", "best stock"),
            "SFTTrainer, Crosspack": ("0.5B, rows of 16,384", "`SFTTrainer`, `enable_packing`"),
        },
        "Crosspack",
        "One run: TRL's SFTTrainer(packing=True) after enable_packing beside steps by hand on the same documents.",
    ),
    "lora": Chart(
        "Real tokens per second, LoRA on the Llama-3-8B shape, rows of 8,192, one H200",
        "Training by one line",
        "real tokens/s",
        {
            "stock packed rows, SDPA, Liger": ("8B, LoRA, rows of 8,192", "stock packed"),
            "best stock: flash-attn-4, Liger": ("8B, LoRA, rows of 8,192", "best stock"),
            "Trainer, Crosspack": ("8B, LoRA, rows of 8,192", "`Trainer`, `enable_packing`"),
        },
        "Crosspack",
        "One run: Trainer after enable_packing beside steps by hand on the same documents.",
    ),
    "classes": Chart(
        "Tokens per second, ModernBERT-base shape, documents of mean 128 in 512, one H200",
        "Encoders",
        "tokens/s",
        {
            "padded, classes of documents": ("classes of documents", "padded"),
            "Crosspack, classes of documents": ("classes of documents", "compiled layers"),
            "padded, masked tokens": ("masked tokens", "padded"),
            "Crosspack, masked tokens": ("masked tokens", "`make_train_step`"),
        },
        "Crosspack",
        "make_train_step beside padded batches. Crosspack with classes: a later run than the padded one.",
    ),
    "preference": Chart(
        "Pairs per second, DPO with a reference model, Qwen2-0.5B shape, micro-batches of 16, one H200",
        "Preference trainers",
        "pairs/s",
        {
            "DPOTrainer, SDPA, group_by_length": ("stock, SDPA, `group_by_length`, of the run before",),
            "Crosspack, layers not compiled": ("`enable_packing(fast=False)`",),
            "Crosspack": ("after `enable_packing` |",),
        },
        "Crosspack",
        "The same day on the same kind of card; the stock trainer in an earlier run, at 101.1 GiB against 37.8.",
    ),
    "planner": Chart(
        "Milliseconds to plan 100,000 short documents, one core",
        "Planner",
        "ms",
        {
            "crosspack best_fit": ("short lognormal, 100,000", "crosspack best_fit"),
            "lightbinpack obfd (C++)": ("short lognormal, 100,000", "lightbinpack"),
            "LLaMA-Factory knapsack": ("short lognormal, 100,000", "LLaMA-Factory"),
            "axolotl (numba)": ("short lognormal, 100,000", "axolotl"),
            "TRL bfd, tokens moved too": ("short lognormal, 100,000", "TRL bfd"),
        },
        "crosspack",
        "Rows of 2,048. TRL moves the tokens as well.",
    ),
}


def tables(section: str) -> list[list[str]]:
    """The tables under a heading, down to the next heading, each as its lines."""
    text = RESULTS.read_text()
    found = re.search(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if not found:
        raise LookupError(f"benchmarks/RESULTS.md has no section {section!r}, which a chart is drawn from")
    return [part.strip().splitlines() for part in re.findall(r"(?:^\|.*\n?)+", found[1], flags=re.MULTILINE)]


def value_of(section: str, column: str, words: tuple[str, ...]) -> str:
    """The cell under ``column`` in the first row of a section that contains all ``words``.

    Raises:
        LookupError: there is none.
    """
    for heading, _, *lines in tables(section):
        columns, first = cells(heading), ""
        for line in lines:
            row = cells(line)
            first = row[0] or first  # an empty first cell stands for the one above it
            if column in columns and all(word in f"{first} {line}" for word in words):
                return row[columns.index(column)]
    raise LookupError(f"benchmarks/RESULTS.md, {section!r}: no row of {' and '.join(words)} under {column!r}")


def cells(line: str) -> list[str]:
    """The cells of a line of a table, which begins and ends with a bar."""
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def draw(name: str) -> str:
    chart = CHARTS[name]
    found = {label: value_of(chart.section, chart.column, words) for label, words in chart.rows.items()}
    measured = [(label, float(cell.replace(",", "")), cell) for label, cell in found.items()]
    return bars(chart.title, measured, highlight=chart.highlight, caption=chart.caption)
