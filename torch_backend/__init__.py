"""Public names of torch_backend, imported on first use so that ``import torch_backend`` loads no framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packing_core.extras import require

if TYPE_CHECKING:
    from torch_backend.auditing.model import AuditReport, audit
    from torch_backend.auditing.trainer import TrainerReport
    from torch_backend.collate import PackedCollator, with_boundaries
    from torch_backend.collate.loading import PackedRows, StreamedRows
    from torch_backend.collate.vision_dataset import PackedVisionDataset
    from torch_backend.hf.explaining import explain
    from torch_backend.hf.routing.contexts import record_routing, replay_routing
    from torch_backend.hf.routing.record import RoutingRecord
    from torch_backend.losses.cross_entropy import next_token_targets, normalise, packed_cross_entropy
    from torch_backend.losses.next_tokens import next_token_pairs
    from torch_backend.losses.token_logprobs import TokenLogprobs, token_logprobs
    from torch_backend.ops.attention import attention
    from torch_backend.ops.reduction import reduce, spread
    from torch_backend.patching import patch, unpad, unpatch
    from torch_backend.segments import PackedMetadata
    from torch_backend.steps.train_step import TrainStep, make_train_step
    from torch_backend.trainers.enable_packing import disable_packing, enable_packing
    from torch_backend.trainers.hf_dataset import pack_dataset

# name -> module that defines it
_HOME: dict[str, str] = {
    "AuditReport": "torch_backend.auditing.model",
    "PackedCollator": "torch_backend.collate",
    "PackedMetadata": "torch_backend.segments",
    "PackedRows": "torch_backend.collate.loading",
    "PackedVisionDataset": "torch_backend.collate.vision_dataset",
    "RoutingRecord": "torch_backend.hf.routing.record",
    "StreamedRows": "torch_backend.collate.loading",
    "TokenLogprobs": "torch_backend.losses.token_logprobs",
    "TrainStep": "torch_backend.steps.train_step",
    "TrainerReport": "torch_backend.auditing.trainer",
    "attention": "torch_backend.ops.attention",
    "audit": "torch_backend.auditing.model",
    "disable_packing": "torch_backend.trainers.enable_packing",
    "enable_packing": "torch_backend.trainers.enable_packing",
    "explain": "torch_backend.hf.explaining",
    "make_train_step": "torch_backend.steps.train_step",
    "next_token_pairs": "torch_backend.losses.next_tokens",
    "next_token_targets": "torch_backend.losses.cross_entropy",
    "normalise": "torch_backend.losses.cross_entropy",
    "pack_dataset": "torch_backend.trainers.hf_dataset",
    "packed_cross_entropy": "torch_backend.losses.cross_entropy",
    "patch": "torch_backend.patching",
    "record_routing": "torch_backend.hf.routing.contexts",
    "reduce": "torch_backend.ops.reduction",
    "replay_routing": "torch_backend.hf.routing.contexts",
    "spread": "torch_backend.ops.reduction",
    "token_logprobs": "torch_backend.losses.token_logprobs",
    "unpad": "torch_backend.patching",
    "unpatch": "torch_backend.patching",
    "with_boundaries": "torch_backend.collate",
}
__all__ = [
    "AuditReport",
    "PackedCollator",
    "PackedMetadata",
    "PackedRows",
    "PackedVisionDataset",
    "RoutingRecord",
    "StreamedRows",
    "TokenLogprobs",
    "TrainStep",
    "TrainerReport",
    "attention",
    "audit",
    "disable_packing",
    "enable_packing",
    "explain",
    "make_train_step",
    "next_token_pairs",
    "next_token_targets",
    "normalise",
    "pack_dataset",
    "packed_cross_entropy",
    "patch",
    "record_routing",
    "reduce",
    "replay_routing",
    "spread",
    "token_logprobs",
    "unpad",
    "unpatch",
    "with_boundaries",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("torch", extra="torch")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
