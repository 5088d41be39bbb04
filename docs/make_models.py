"""Audits every model family and writes the tables of docs/models.md.

python -m docs.make_models [decoders encoders experts]
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tools.tables.expert_families import ExpertsReport, audit_family_experts
from tools.tables.families import ENCODER_HEADS, FamilyReport, audit_encoder, audit_family
from torch_backend.auditing.tiny import all_families
from torch_backend.hf.anatomy.families import REFUSED

PAGE = Path(__file__).with_name("models.md")
_EXACT = "exact"


def grouped(families: Iterable[tuple[tuple[str, ...], str]]) -> str:
    """Rows of a table: the cells that families have in common, then the families."""
    names = defaultdict(list)
    for cells, family in families:
        names[cells].append(family)
    return "".join(f"| {' | '.join((*cells, ', '.join(found)))} |\n" for cells, found in sorted(names.items()))


def reasons(families: Iterable[tuple[str, str]]) -> str:
    return "".join(f"| {family} | {' '.join(reason.split())[:120]} |\n" for family, reason in families)


def decoders(reports: list[FamilyReport]) -> str:
    exact = [r for r in reports if r.verdict == _EXACT]
    refused = [r for r in reports if r.verdict == "refused" and r.family in REFUSED]
    halves = [r.family for r in reports if r.verdict == "refused" and r.family not in REFUSED]
    wrong = [r.family for r in reports if r.verdict == "contaminated"]
    built = len(exact) + len(refused) + len(wrong)
    return (
        f"**{len(exact)} of {built} causal decoders are exact ({len(exact) / built:.1%}), {len(refused)} are refused "
        f"with a reason, {len(wrong) or 'none'} are wrong.**\n"
        f"transformers {version('transformers')}; the largest error is {largest(exact):.0e}.\n\n"
        "| route | families |\n|---|---|\n"
        + grouped(((r.report.route or "",), r.family) for r in exact if r.report)
        + "\n| refused | reason |\n|---|---|\n"
        + reasons((r.family, REFUSED[r.family]) for r in refused)
        + "\n| not built tiny, not refused | what transformers says |\n|---|---|\n"
        + reasons((r.family, r.not_built) for r in reports if r.verdict == "not built")
        + f"\n{len(halves)} more families are encoders or halves of encoder-decoders, and refused as language models.\n"
    )


def largest(reports: list[FamilyReport]) -> float:
    return max(max(r.report.logits, r.report.gradients) for r in reports if r.report)


def encoders(found: dict[str, dict[str, FamilyReport]]) -> str:
    exact = {f: heads for f, heads in found.items() if any(r.verdict == _EXACT for r in heads.values())}
    reports = [r for heads in exact.values() for r in heads.values() if r.verdict == _EXACT]
    routes = {r.family: (r.report.route or "") for r in reports if r.report}
    cells = (
        ((routes[family], *(heads[head].verdict if head in heads else "-" for head in ENCODER_HEADS)), family)
        for family, heads in exact.items()
    )
    refused = {f: next(iter(heads.values())) for f, heads in found.items() if f not in exact}
    return (
        f"transformers {version('transformers')}; the largest error is {largest(reports):.0e}.\n\n"
        f"| route | {' | '.join(ENCODER_HEADS)} | families |\n|---|{'---|' * len(ENCODER_HEADS)}---|\n"
        + grouped(cells)
        + "\n| refused, or not built tiny | reason |\n|---|---|\n"
        + reasons((family, why(report)) for family, report in refused.items())
    )


def why(report: FamilyReport) -> str:
    """Explains why a head of a family is not supported."""
    if report.report is None:
        return f"not built: {report.not_built}"
    return (report.report.refused or report.verdict).partition(" cannot be trained packed: ")[2] or report.verdict


def experts(reports: list[ExpertsReport]) -> str:
    exact = sum(r.report.verdict == _EXACT for r in reports)
    ours, replayed = (sum(why is None for why in whys) for whys in zip(*((r.kept, r.replay) for r in reports)))
    return (
        f"Of the {len(reports)} families with experts that `AutoModelForCausalLM` of transformers "
        f"{version('transformers')} knows, {exact} are exact, {ours} run on our kernels and {replayed} can be replayed."
        "\n\n| experts of packed calls | routing replay | families |\n|---|---|---|\n"
        + grouped(
            (
                (
                    "ours" if r.kept is None else f"transformers': {r.kept}",
                    "yes" if r.replay is None else f"refused: {r.replay}",
                ),
                r.family,
            )
            for r in reports
        )
    )


PARTS: dict[str, Callable[[], str]] = {
    "decoders": lambda: decoders([audit_family(family) for family in all_families()]),
    "encoders": lambda: encoders(
        {family: audit_encoder(family) for family in sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)}
    ),
    "experts": lambda: experts(
        [report for family in all_families() if (report := audit_family_experts(family)) is not None]
    ),
}


def replaced(page: str, part: str, table: str) -> str:
    """The page with the table between the marks of a part."""
    return re.sub(
        rf"(<!-- {part} -->\n).*?(?=<!-- end of {part} -->)", lambda mark: mark[1] + table, page, flags=re.DOTALL
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for part in sys.argv[1:] or PARTS:
        PAGE.write_text(replaced(PAGE.read_text(), part, PARTS[part]()))
