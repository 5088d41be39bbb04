"""Audits every model family and writes docs/models.md: ``python docs/make_models.py``."""

from __future__ import annotations

import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

from torch_backend.auditing.families import FamilyReport, audit_families
from torch_backend.hf.anatomy.families import REFUSED

PAGE = Path(__file__).with_name("models.md")
INTRODUCTION = """# Model families

What `crosspack.patch` does with every family that `AutoModelForCausalLM` of transformers {transformers} knows.
Measured by `crosspack.audit` on a tiny random model of each: float32, CPU, torch {torch}, train mode, default
`use_cache`, two packed rows with padding. **Exact** means two things. Logits, loss and every gradient agree with those
of each document alone, to 1e-4 of the largest value. And replacing every token of one document changes no other
document. `python docs/make_models.py` writes this page.

**{exact} of {built} causal decoders are exact ({share:.1%}), {refused} are refused with a reason, {wrong} are wrong.**
{not_built} more could not be built as a tiny model. The other {halves} families are encoders or halves of
encoder-decoders, and are refused as language models. With their own heads [encoders](encoders.md) are served.

- Route `attention`: every attention layer receives the segment boundaries, and so do the convolution and scan of
  layers that carry state along the row (state-space, linear attention, convolutions). Where a convolution or scan
  cannot take them, that layer runs on batches of documents of similar length.
- Route `documents`: attention cannot receive the boundaries from outside, so the whole decoder runs on such batches.

| family | route | logits | gradients |
|---|---|---|---|
"""


def page(reports: list[FamilyReport]) -> str:
    """The page's text."""
    exact = [r for r in reports if r.verdict == "exact"]
    refused = [r for r in reports if r.verdict == "refused" and r.family in REFUSED]
    halves = [r for r in reports if r.verdict == "refused" and r.family not in REFUSED]
    wrong = [r for r in reports if r.verdict == "contaminated"]
    not_built = [r for r in reports if r.verdict == "not built"]
    built = len(exact) + len(refused) + len(wrong)
    text = INTRODUCTION.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        exact=len(exact),
        built=built,
        share=len(exact) / built,
        refused=len(refused),
        wrong=len(wrong) or "none",
        halves=len(halves),
        not_built=len(not_built),
    )
    for r in exact + wrong:
        assert r.report is not None
        text += f"| {r.family} | {r.report.route} | {r.report.logits:.0e} | {r.report.gradients:.0e} |\n"
    text += "\n## Refused\n\n| family | reason |\n|---|---|\n"
    text += "".join(f"| {r.family} | {REFUSED[r.family]} |\n" for r in refused)
    names = fill(", ".join(r.family for r in halves), 120, break_on_hyphens=False)
    text += f"\n## Encoders and halves of encoder-decoders\n\n{names}.\n"
    text += "\n## Not built tiny\n\nThese are not counted above. `patch` does not refuse them.\n\n"
    text += "| family | what transformers says |\n|---|---|\n"
    text += "".join(f"| {r.family} | {' '.join(r.not_built.split())} |\n" for r in not_built)
    return text


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page(list(audit_families())))
