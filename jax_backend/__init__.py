"""Public names of jax_backend, imported on first use so that ``import jax_backend`` loads no framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packing_core.extras import require

if TYPE_CHECKING:
    from jax_backend.attention import merge_attention, segment_attention
    from jax_backend.auditing import audit
    from jax_backend.batches import to_batch
    from jax_backend.context_parallel import balance_tokens, context_attention, reorder_tokens
    from jax_backend.data import GrainSource, GrainStream
    from jax_backend.explaining import explain
    from jax_backend.losses.cross_entropy import packed_cross_entropy, shift_labels
    from jax_backend.losses.output_layer import linear_cross_entropy
    from jax_backend.losses.reduction import reduce, spread
    from jax_backend.losses.token_logprobs import TokenLogprobs, token_logprobs
    from jax_backend.model.decoder import Decoder, DecoderConfig
    from jax_backend.model.rope import apply_rope
    from jax_backend.model.weights import load, save
    from jax_backend.scan.convolution import causal_conv
    from jax_backend.scan.delta_rule import gated_delta_rule, ssd
    from jax_backend.scan.selective_scan import selective_scan
    from jax_backend.segments import Segments, find_segments, segment_positions
    from jax_backend.training.checkpoint import restore_state, save_state
    from jax_backend.training.train_step import TrainState, make_train_step

# name -> module that defines it
_HOME: dict[str, str] = {
    "apply_rope": "jax_backend.model.rope",
    "audit": "jax_backend.auditing",
    "balance_tokens": "jax_backend.context_parallel",
    "causal_conv": "jax_backend.scan.convolution",
    "context_attention": "jax_backend.context_parallel",
    "explain": "jax_backend.explaining",
    "find_segments": "jax_backend.segments",
    "gated_delta_rule": "jax_backend.scan.delta_rule",
    "linear_cross_entropy": "jax_backend.losses.output_layer",
    "load": "jax_backend.model.weights",
    "make_train_step": "jax_backend.training.train_step",
    "merge_attention": "jax_backend.attention",
    "packed_cross_entropy": "jax_backend.losses.cross_entropy",
    "reduce": "jax_backend.losses.reduction",
    "reorder_tokens": "jax_backend.context_parallel",
    "restore_state": "jax_backend.training.checkpoint",
    "save": "jax_backend.model.weights",
    "save_state": "jax_backend.training.checkpoint",
    "segment_attention": "jax_backend.attention",
    "segment_positions": "jax_backend.segments",
    "selective_scan": "jax_backend.scan.selective_scan",
    "shift_labels": "jax_backend.losses.cross_entropy",
    "spread": "jax_backend.losses.reduction",
    "ssd": "jax_backend.scan.delta_rule",
    "to_batch": "jax_backend.batches",
    "token_logprobs": "jax_backend.losses.token_logprobs",
    "Decoder": "jax_backend.model.decoder",
    "DecoderConfig": "jax_backend.model.decoder",
    "GrainSource": "jax_backend.data",
    "GrainStream": "jax_backend.data",
    "Segments": "jax_backend.segments",
    "TokenLogprobs": "jax_backend.losses.token_logprobs",
    "TrainState": "jax_backend.training.train_step",
}
__all__ = [
    "Decoder",
    "DecoderConfig",
    "GrainSource",
    "GrainStream",
    "Segments",
    "TokenLogprobs",
    "TrainState",
    "apply_rope",
    "audit",
    "balance_tokens",
    "causal_conv",
    "context_attention",
    "explain",
    "find_segments",
    "gated_delta_rule",
    "linear_cross_entropy",
    "load",
    "make_train_step",
    "merge_attention",
    "packed_cross_entropy",
    "reduce",
    "reorder_tokens",
    "restore_state",
    "save",
    "save_state",
    "segment_attention",
    "segment_positions",
    "selective_scan",
    "shift_labels",
    "spread",
    "ssd",
    "to_batch",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("jax", extra="jax")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
