"""Every causal decoder of the installed transformers, built tiny and audited: the families table.

``AutoModelForCausalLM``'s families -> a tiny model of each (:mod:`.tiny`) -> ``audit`` -> the rows of
``docs/models.md`` and of ``crosspack audit --all-families``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch_backend.auditing.model import AuditReport, audit
from torch_backend.auditing.tiny import all_families, family_config, tiny_config, tiny_model
from torch_backend.hf.anatomy.families import REFUSED, refusal

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
    return FamilyReport(family, audit(model, patched=True))


# What encoders are trained for, each a mapping of transformers by family.
ENCODER_HEADS = {
    "masked tokens": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "documents": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def encoder_families() -> list[str]:
    """The model types that ``AutoModelForMaskedLM`` knows, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def audit_encoder(family: str) -> dict[str, FamilyReport]:
    """Audit a family of encoders on the CPU in float32 with each head of ``ENCODER_HEADS`` that it has."""
    import transformers
    from transformers.models.auto import modeling_auto

    found = {}
    for head, mapping in ENCODER_HEADS.items():
        name = getattr(modeling_auto, mapping).get(family)
        if name is None:
            continue
        try:
            config = family_config(family)
            reason = refusal(family, config, next_token=False)
            if reason is not None:
                report = AuditReport(name, "auto", "cpu", "float32", refused=reason)
            else:
                report = audit(
                    tiny_model(tiny_config(config, head_dim=HEAD_DIM), getattr(transformers, name)), patched=True
                )
            found[head] = FamilyReport(family, report)
        except Exception as error:  # as in audit_family
            text = (str(error).strip() or "no message").splitlines()[-1]
            found[head] = FamilyReport(family, None, f"{type(error).__name__}: {text}")
    return found
