"""Every causal decoder of the installed transformers, built tiny and audited: the families table.

``AutoModelForCausalLM``'s families -> a tiny model of each (:mod:`.tiny`) -> ``audit`` -> the rows of
``docs/models.md`` and of ``crosspack audit --all-families``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_backend.auditing.model import AuditReport, audit
from torch_backend.auditing.tiny import all_families, family_config, tiny_config, tiny_model
from torch_backend.hf.knowledge import REFUSED, refusal

HEAD_DIM = 16


@dataclass(frozen=True)
class FamilyReport:
    """One family.

    Attributes:
        family: its ``model_type``.
        report: of the audit, None where no tiny model could be built.
        not_built: why not.
    """

    family: str
    report: AuditReport | None
    not_built: str = ""

    @property
    def verdict(self) -> str:
        """``exact``, ``contaminated``, ``refused`` or ``not built``."""
        return self.report.verdict if self.report is not None else "not built"


def audit_families(families: Iterable[str] | None = None) -> Iterator[FamilyReport]:
    """Audit each family (all of them by default) on the CPU in float32, one after the other."""
    for family in families or all_families():
        yield audit_family(family)


def audit_family(family: str) -> FamilyReport:
    """Build a tiny model of the family and audit it, unless the family is refused before."""
    try:
        config = None if family in REFUSED else family_config(family)
        reason = refusal(family, config)
        if reason is not None:
            return FamilyReport(family, AuditReport(family, "auto", "cpu", "float32", refused=reason))
        model = tiny_model(tiny_config(config, head_dim=HEAD_DIM))
    except Exception as error:  # whatever a modeling file raises for a tiny config is the row's text, not a failure
        return FamilyReport(family, None, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    return FamilyReport(family, audit(model))
