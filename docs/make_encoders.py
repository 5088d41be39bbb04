"""Audits every family of encoders and writes docs/encoders.md: ``python docs/make_encoders.py``."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path

from torch_backend.auditing.families import ENCODER_HEADS, FamilyReport, audit_encoder, encoder_families

PAGE = Path(__file__).with_name("encoders.md")
INTRODUCTION = """# Encoders

What `crosspack.patch` does with every family that `AutoModelForMaskedLM` of transformers {transformers} knows, with
two heads: masked language models and classes of documents. Measured as on
[the page of decoders](models.md), in float32 on the CPU with torch {torch}. A cell holds the error of the outputs and
that of the worst gradient, relative to the largest value; everything below 1e-4 is exact. Refusals stand below with
their reasons.

- Route `attention`: attention goes through transformers' interface. It receives the segment boundaries and is not
  causal inside them. Windows, two rotary frequencies (ModernBERT) and RoBERTa's position offset are those of each
  document.
- Route `documents`: attention of its own. The encoder runs on batches of documents of exactly one length: exact, and
  slower the more lengths there are.

| family | route | {heads} |
|---|---|{lines}
"""


def cell(report: FamilyReport | None) -> str:
    """One head of one family."""
    if report is None:
        return "-"
    if report.report is None or report.verdict != "exact":
        return report.verdict
    return f"{report.report.logits:.0e} / {report.report.gradients:.0e}"


def page(found: dict[str, dict[str, FamilyReport]]) -> str:
    """The page's text."""
    text = INTRODUCTION.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        heads=" | ".join(ENCODER_HEADS),
        lines="---|" * len(ENCODER_HEADS),
    )
    served = {f: heads for f, heads in found.items() if any(r.verdict == "exact" for r in heads.values())}
    for family, heads in served.items():
        route = next(r.report.route for r in heads.values() if r.report is not None and r.verdict == "exact")
        text += f"| {family} | {route} | " + " | ".join(cell(heads.get(head)) for head in ENCODER_HEADS) + " |\n"
    text += "\n## Refused, or not built tiny\n\n| family | head | reason |\n|---|---|---|\n"
    for family, heads in found.items():
        for head, report in heads.items():
            if report.verdict != "exact":
                text += f"| {family} | {head} | {why(report)} |\n"
    return text


def why(report: FamilyReport) -> str:
    """Explains why a head of a family is not supported."""
    if report.report is None:
        return "not built: " + " ".join(report.not_built.split())[:120]
    return report.report.refused or f"{report.verdict}: {report.report.logits:.0e} / {report.report.gradients:.0e}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page({family: audit_encoder(family) for family in encoder_families()}))
