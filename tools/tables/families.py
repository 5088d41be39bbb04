"""Every family of the installed transformers, built tiny and audited: the tables of decoders and of encoders.

A model type -> a tiny model of it (:mod:`torch_backend.auditing.tiny`) -> ``audit`` -> a row of ``docs/models.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_backend.auditing.model import AuditReport, audit
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model
from torch_backend.hf.anatomy.families import REFUSED, refusal

HEAD_DIM = 16
# What encoders are trained for, each a mapping of transformers by family.
ENCODER_HEADS = {
    "masked tokens": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "documents": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


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


def audit_family(family: str, encoder: str | None = None) -> FamilyReport:
    """Audits a tiny model of a family on the CPU in float32, unless the family is refused before.

    Args:
        encoder: the class of an encoder with a head; None for a causal decoder.
    """
    import transformers

    try:
        config = None if family in REFUSED else family_config(family)
        reason = refusal(family, config, next_token=encoder is None)
        if reason is not None:
            return FamilyReport(family, AuditReport(encoder or family, "auto", "cpu", "float32", refused=reason))
        kind = None if encoder is None else getattr(transformers, encoder)
        return FamilyReport(family, audit(tiny_model(tiny_config(config, head_dim=HEAD_DIM), kind), patched=True))
    except Exception as error:  # whatever a modeling file raises for a tiny config is the row's text, not a failure
        text = (str(error).strip() or "no message").splitlines()[-1]
        return FamilyReport(family, None, f"{type(error).__name__}: {text}")


def audit_encoder(family: str) -> dict[str, FamilyReport]:
    """Audits a family of encoders with each head of ``ENCODER_HEADS`` that it has."""
    from transformers.models.auto import modeling_auto

    kinds = {head: getattr(modeling_auto, mapping).get(family) for head, mapping in ENCODER_HEADS.items()}
    return {head: audit_family(family, kind) for head, kind in kinds.items() if kind is not None}
