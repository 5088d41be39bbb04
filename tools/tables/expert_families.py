"""Every causal decoder with routed experts, built tiny: what runs its experts, and whether its routing can be replayed.

A tiny model of each family (:mod:`torch_backend.auditing.tiny`) -> ``audit``, a packed call, a recorded and a replayed
one -> the table of ``docs/models.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packing_core.errors import PackingError
from tools.tables.families import HEAD_DIM
from torch_backend.auditing.model import AuditReport, audit
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model
from torch_backend.collate import PackedCollator
from torch_backend.hf.anatomy.families import REFUSED
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.edits.packed_experts import reasons_against
from torch_backend.hf.patch import install
from torch_backend.hf.routing.contexts import record_routing, replay_routing

# Without them a family's default config is dense, or has one expert.
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
}
_EXPERTS = re.compile(r"[eE]xperts?$")
_LENGTHS = (5, 19, 7)


@dataclass(frozen=True)
class ExpertsReport:
    """One family with experts.

    Attributes:
        family: its ``model_type``.
        report: of the audit.
        kept: why its experts run on transformers' own code in packed calls, None where they run on our kernels.
        replay: why its routing cannot be recorded or replayed in packed calls, None where it can.
    """

    family: str
    report: AuditReport
    kept: str | None
    replay: str | None


def audit_family_experts(family: str) -> ExpertsReport | None:
    """The report of a family; None if it has no experts, or is refused or cannot be built for another reason."""
    try:
        if family in REFUSED:
            return None
        config = tiny_config(family_config(family), head_dim=HEAD_DIM, changes=_CHANGES.get(family))
        model = tiny_model(config)
    except Exception:  # whatever a modeling file raises for a tiny config: docs/models.md lists these families
        return None
    if not any(_EXPERTS.search(name) or _EXPERTS.search(type(m).__name__) for name, m in model.named_modules()):
        return None
    report = audit(model, patched=True)
    return ExpertsReport(family, report, _why_kept(model), _why_not_replayed(model))


def _why_kept(model: nn.Module) -> str | None:
    anatomy = anatomy_of(model)
    if anatomy.route == "documents":
        return "the decoder runs per document"
    found, kept = find_experts(anatomy.decoder), reasons_against(anatomy.decoder)
    if not found:
        return "its experts have code of their own"
    return next(iter(kept.values()), None)


def _why_not_replayed(model: Any) -> str | None:
    """Record a packed call and replay it in other rows."""
    install(model.eval(), "auto")
    generator = torch.Generator().manual_seed(0)
    documents = [{"input_ids": torch.randint(4, 90, (length,), generator=generator)} for length in _LENGTHS]
    rows, row = (PackedCollator(capacity=capacity)(documents) for capacity in (20, 32))
    try:
        with torch.no_grad():
            with record_routing(model) as record:
                model(**rows)
            with replay_routing(model, record):
                model(**row)
    except PackingError as error:
        return str(error).partition(",")[0].partition(":")[0].replace(type(model).__name__, "the model")
    return None
