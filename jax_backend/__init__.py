"""Public names of jax_backend, imported on first use so that ``import jax_backend`` loads no framework."""

from importlib import import_module
from typing import Any

from packing_core.extras import require

# name -> module that defines it
_HOME: dict[str, str] = {
    "Segments": "jax_backend.segments",
    "apply_rope": "jax_backend.rope",
    "find_segments": "jax_backend.segments",
    "packed_cross_entropy": "jax_backend.loss",
    "segment_attention": "jax_backend.attention",
    "segment_positions": "jax_backend.segments",
    "selective_scan": "jax_backend.scan",
    "shift_labels": "jax_backend.loss",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("jax", extra="jax")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
