"""Public names of torch_backend, imported on first use so that ``import torch_backend`` loads no framework."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packing_core.extras import require

if TYPE_CHECKING:
    from torch_backend.attention import attention
    from torch_backend.audit import AuditReport, audit
    from torch_backend.audit_trainer import TrainerReport
    from torch_backend.data import PackedCollator, with_boundaries
    from torch_backend.explain import explain
    from torch_backend.loss import next_token_targets, normalise, packed_cross_entropy
    from torch_backend.metadata import PackedMetadata
    from torch_backend.patch import patch, unpatch
    from torch_backend.trainer import enable_packing, pack_dataset

# name -> module that defines it
_HOME: dict[str, str] = {
    "AuditReport": "torch_backend.audit",
    "PackedCollator": "torch_backend.data",
    "PackedMetadata": "torch_backend.metadata",
    "TrainerReport": "torch_backend.audit_trainer",
    "attention": "torch_backend.attention",
    "audit": "torch_backend.audit",
    "enable_packing": "torch_backend.trainer",
    "explain": "torch_backend.explain",
    "next_token_targets": "torch_backend.loss",
    "normalise": "torch_backend.loss",
    "pack_dataset": "torch_backend.trainer",
    "packed_cross_entropy": "torch_backend.loss",
    "patch": "torch_backend.patch",
    "unpatch": "torch_backend.patch",
    "with_boundaries": "torch_backend.data",
}
__all__ = [
    "AuditReport",
    "PackedCollator",
    "PackedMetadata",
    "TrainerReport",
    "attention",
    "audit",
    "enable_packing",
    "explain",
    "next_token_targets",
    "normalise",
    "pack_dataset",
    "packed_cross_entropy",
    "patch",
    "unpatch",
    "with_boundaries",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("torch", extra="torch")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Importing ``torch_backend.patch`` would bind the module over the function of that name; here it does not."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
