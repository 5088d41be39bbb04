"""Public names of torch_backend, imported on first use so that ``import torch_backend`` loads no framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packing_core.extras import require

if TYPE_CHECKING:  # for type checkers, which read no table
    # isort: off
    from torch_backend.auditing.model import AuditReport as AuditReport, audit as audit
    from torch_backend.auditing.trainer import TrainerReport as TrainerReport
    from torch_backend.collate import PackedCollator as PackedCollator, with_boundaries as with_boundaries
    from torch_backend.collate.loading import PackedRows as PackedRows, StreamedRows as StreamedRows
    from torch_backend.collate.vision_dataset import PackedMediaDataset as PackedMediaDataset
    from torch_backend.collate.vision_dataset import PackedVisionDataset as PackedVisionDataset
    from torch_backend.hf.explaining import explain as explain
    from torch_backend.hf.mxfp4 import load_mxfp4 as load_mxfp4
    from torch_backend.hf.routing.contexts import record_routing as record_routing, replay_routing as replay_routing
    from torch_backend.hf.routing.record import RoutingRecord as RoutingRecord
    from torch_backend.losses.cross_entropy import (
        next_token_targets as next_token_targets,
        normalise as normalise,
        packed_cross_entropy as packed_cross_entropy,
    )
    from torch_backend.losses.next_tokens import next_token_pairs as next_token_pairs
    from torch_backend.losses.token_logprobs import TokenLogprobs as TokenLogprobs, token_logprobs as token_logprobs
    from torch_backend.ops.attention import attention as attention
    from torch_backend.ops.reduction import reduce as reduce, spread as spread
    from torch_backend.patching import patch as patch, unpad as unpad, unpatch as unpatch
    from torch_backend.segments import PackedMetadata as PackedMetadata
    from torch_backend.steps.train_step import TrainStep as TrainStep, make_train_step as make_train_step
    from torch_backend.trainers.enable_packing import (
        disable_packing as disable_packing,
        enable_packing as enable_packing,
    )
    from torch_backend.trainers.hf_dataset import pack_dataset as pack_dataset
    # isort: on

# module -> the names that it defines
_NAMES = {
    "auditing.model": "AuditReport audit",
    "auditing.trainer": "TrainerReport",
    "collate": "PackedCollator with_boundaries",
    "collate.loading": "PackedRows StreamedRows",
    "collate.vision_dataset": "PackedMediaDataset PackedVisionDataset",
    "hf.explaining": "explain",
    "hf.mxfp4": "load_mxfp4",
    "hf.routing.contexts": "record_routing replay_routing",
    "hf.routing.record": "RoutingRecord",
    "losses.cross_entropy": "next_token_targets normalise packed_cross_entropy",
    "losses.next_tokens": "next_token_pairs",
    "losses.token_logprobs": "TokenLogprobs token_logprobs",
    "ops.attention": "attention",
    "ops.reduction": "reduce spread",
    "patching": "patch unpad unpatch",
    "segments": "PackedMetadata",
    "steps.train_step": "TrainStep make_train_step",
    "trainers.enable_packing": "disable_packing enable_packing",
    "trainers.hf_dataset": "pack_dataset",
}
_HOME = {name: f"torch_backend.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("torch", extra="torch")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
