"""Public names of jax_backend, imported on first use so that ``import jax_backend`` loads no framework."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packing_core.extras import require

if TYPE_CHECKING:  # for type checkers, which read no table
    # isort: off
    from jax_backend.attention import merge_attention as merge_attention, segment_attention as segment_attention
    from jax_backend.auditing import audit as audit
    from jax_backend.batches import to_batch as to_batch
    from jax_backend.context_parallel import (
        balance_tokens as balance_tokens,
        context_attention as context_attention,
        reorder_tokens as reorder_tokens,
    )
    from jax_backend.data import GrainSource as GrainSource, GrainStream as GrainStream
    from jax_backend.explaining import explain as explain
    from jax_backend.losses.cross_entropy import (
        packed_cross_entropy as packed_cross_entropy,
        shift_labels as shift_labels,
    )
    from jax_backend.losses.output_layer import linear_cross_entropy as linear_cross_entropy
    from jax_backend.losses.reduction import reduce as reduce, spread as spread
    from jax_backend.losses.token_logprobs import TokenLogprobs as TokenLogprobs, token_logprobs as token_logprobs
    from jax_backend.model.decoder import Decoder as Decoder, DecoderConfig as DecoderConfig
    from jax_backend.model.rope import apply_rope as apply_rope
    from jax_backend.model.weights import load as load, save as save
    from jax_backend.scan.convolution import causal_conv as causal_conv
    from jax_backend.scan.delta_rule import gated_delta_rule as gated_delta_rule, ssd as ssd
    from jax_backend.scan.selective_scan import selective_scan as selective_scan
    from jax_backend.segments import (
        Segments as Segments,
        find_segments as find_segments,
        segment_positions as segment_positions,
    )
    from jax_backend.training.checkpoint import restore_state as restore_state, save_state as save_state
    from jax_backend.training.train_step import TrainState as TrainState, make_train_step as make_train_step
    # isort: on

# module -> the names that it defines
_NAMES = {
    "attention": "merge_attention segment_attention",
    "auditing": "audit",
    "batches": "to_batch",
    "context_parallel": "balance_tokens context_attention reorder_tokens",
    "data": "GrainSource GrainStream",
    "explaining": "explain",
    "losses.cross_entropy": "packed_cross_entropy shift_labels",
    "losses.output_layer": "linear_cross_entropy",
    "losses.reduction": "reduce spread",
    "losses.token_logprobs": "TokenLogprobs token_logprobs",
    "model.decoder": "Decoder DecoderConfig",
    "model.rope": "apply_rope",
    "model.weights": "load save",
    "scan.convolution": "causal_conv",
    "scan.delta_rule": "gated_delta_rule ssd",
    "scan.selective_scan": "selective_scan",
    "segments": "Segments find_segments segment_positions",
    "training.checkpoint": "restore_state save_state",
    "training.train_step": "TrainState make_train_step",
}
_HOME = {name: f"jax_backend.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        require("jax", extra="jax")
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
