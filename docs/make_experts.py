"""Audits every family with routed experts and writes the table of docs/experts.md: ``python docs/make_experts.py``."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path

from torch_backend.auditing.experts import ExpertsReport, audit_experts

PAGE = Path(__file__).with_name("experts.md")
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


def table(reports: list[ExpertsReport]) -> str:
    """The table's text, with a line that counts."""
    exact = sum(r.report.verdict == "exact" for r in reports)
    ours, replayed = (sum(why is None for why in whys) for whys in zip(*((r.kept, r.replay) for r in reports)))
    text = (
        f"Of the {len(reports)} families with experts that `AutoModelForCausalLM` of transformers "
        f"{version('transformers')} knows, {exact} are exact, {ours} run on our kernels and {replayed} can be replayed."
        "\n\n| family | logits | gradients | experts of packed calls | routing replay |\n|---|---|---|---|---|\n"
    )
    for r in reports:
        figures = f"{r.report.logits:.0e} | {r.report.gradients:.0e}"
        errors = figures if r.report.verdict == "exact" else f"{r.report.verdict} | "
        kept = "ours" if r.kept is None else f"transformers': {r.kept}"
        text += f"| {r.family} | {errors} | {kept} | {'yes' if r.replay is None else f'refused: {r.replay}'} |\n"
    return text


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    page = PAGE.read_text()
    PAGE.write_text(page.partition(BEGIN)[0] + BEGIN + table(list(audit_experts())) + END + page.partition(END)[2])
