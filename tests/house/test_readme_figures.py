"""Figures of the README are those that benchmarks/RESULTS.md records, and errors those that an audit measures."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
import transformers

from crosspack.cli.models import SMALL_LLAMA
from docs.site.charts import cells, tables
from torch_backend import audit
from torch_backend.stacks.paths import config_of, survey

ROOT = Path(__file__).parents[2]
PAGES = " ".join(
    " ".join((ROOT / page).read_text() for page in ("README.md", "docs/performance.md", "docs/how.md")).split()
)
STEP, LINE, SPEED = "The training step", "Training by one line", "real tokens/s"

# What the pages say -> for each {}, the section of RESULTS.md, the column, and words of the row that has the figure.
RECORDED: dict[str, tuple[tuple[str, ...], ...]] = {
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
}
FIGURE = r"\d[\d,]*(?:\.\d+)?(?:e-\d+)?"


def stated(sentence: str) -> tuple[str, ...]:
    """The figures that stand in the pages where ``sentence`` has ``{}``."""
    found = re.findall(re.escape(sentence).replace(r"\{\}", f"({FIGURE})"), PAGES)
    assert len(found) == 1, f"the pages say this {len(found)} times: {sentence}"
    return (found[0],) if isinstance(found[0], str) else found[0]


def recorded(section: str, column: str, *words: str) -> list[str]:
    """Returns the cells under a column in the rows of a section that have all ``words``."""
    found = []
    for heading, _, *lines in tables(section):
        columns, first = cells(heading), ""
        for line in lines:
            first = cells(line)[0] or first  # an empty first cell stands for the one above it
            if all(word in f"{first} {line}" for word in words):
                found += [cells(line)[columns.index(column)]] if column in columns else []
    return found


@pytest.mark.parametrize("sentence", RECORDED)
def test_measured_figures_are_those_of_the_record(sentence: str) -> None:
    for figure, place in zip(stated(sentence), RECORDED[sentence], strict=True):
        decimals = len(figure.partition(".")[2])
        cells_there = [
            f"{float(cell.split()[0].strip('x').replace(',', '')):,.{decimals}f}" for cell in recorded(*place)
        ]
        assert figure in cells_there, place


def test_the_readme_states_no_speed_beside_its_chart() -> None:
    assert not re.findall(r"\b\d{2,3},\d{3}\b", (ROOT / "README.md").read_text())


def test_classes_of_models_have_the_ratios_of_their_sections() -> None:
    for heading, _, *lines in tables("Speed by class of model"):
        assert cells(heading)[1] == "times"
        for _, times, _, section in map(cells, lines):
            (name,) = re.findall(r"\[(.*)\]", section)
            text = (ROOT / "benchmarks/RESULTS.md").read_text().partition(f"# {name}\n")[2].partition("\n#")[0]
            assert re.search(rf"\b{float(times):g}(?:0?x| (?:and [\d.]+ )?times\b)", text), (name, times)


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
