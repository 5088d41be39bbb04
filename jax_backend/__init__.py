"""Public names of jax_backend, imported on first use so that ``import jax_backend`` loads no framework."""

from importlib import import_module
from typing import Any

from packing_core.extras import require

# name -> module that defines it
_HOME: dict[str, str] = {
    "apply_rope": "jax_backend.rope",
    "audit": "jax_backend.audit",
    "find_segments": "jax_backend.segments",
    "load": "jax_backend.weights",
    "make_train_step": "jax_backend.train_step",
    "merge_attention": "jax_backend.attention",
    "packed_cross_entropy": "jax_backend.loss",
    "restore_state": "jax_backend.checkpoint",
    "save": "jax_backend.weights",
    "save_state": "jax_backend.checkpoint",
    "segment_attention": "jax_backend.attention",
    "segment_positions": "jax_backend.segments",
    "selective_scan": "jax_backend.scan",
    "shift_labels": "jax_backend.loss",
    "to_batch": "jax_backend.data",
    "Decoder": "jax_backend.model",
    "DecoderConfig": "jax_backend.model",
    "GrainSource": "jax_backend.data",
    "GrainStream": "jax_backend.data",
    "Segments": "jax_backend.segments",
    "TrainState": "jax_backend.train_step",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("jax", extra="jax")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
