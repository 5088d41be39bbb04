"""The data that the suite exchanges with a backend: documents, batches, and the suite's own decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Gradients = dict[str, Array]
Place = tuple[int, int, int]  # of a segment: its row, its first token in it, and the one after its last


@dataclass(frozen=True)
class Document:
    """One sequence as the user gave it.

    Attributes:
        input_ids: int64 ``[n]``.
        labels: int64 ``[n]``; ``labels[t]`` is the target that the logits at t-1 are trained on, -100 where token t is
            not trained on (a prompt). Equal to ``input_ids`` elsewhere.
    """

    input_ids: Array
    labels: Array


@dataclass(frozen=True)
class Batch:
    """A collator's batch under neutral names; all arrays int64 ``[B, S]``.

    Attributes:
        input_ids: tokens; anything at padding.
        segment_ids: 1.. per row, contiguous runs, 0 = padding.
        position_ids: restart at 0 at each segment; anything at padding.
        labels: Hugging Face's alignment (``labels[t]`` trains the logits at t-1): -100 at every segment's first token,
            at padding and where a document's own labels say so.
        native: what the backend's own model takes, as its own collator made it; None in a batch that the suite drew.
    """

    input_ids: Array
    segment_ids: Array
    position_ids: Array
    labels: Array
    native: Any = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of the suite's decoder, under the names of a Hugging Face Llama config.

    A pre-norm decoder: RMSNorm, rotary (rotate-half) causal attention, SwiGLU, no biases, tied embeddings.

    Attributes:
        sliding_window: keys visible to a query, its own included (Mistral's meaning); None for no limit.
        dynamic_rope_factor: None, or f of Hugging Face's ``{"rope_type": "dynamic", "factor": f}``: dynamic NTK, whose
            frequencies depend on the length of the document once it passes ``max_position_embeddings``.
    """

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32  # a width that every kernel has
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    sliding_window: int | None = None
    dynamic_rope_factor: float | None = None
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class Decoder:
    """The suite's decoder: its config and its float32 weights under Hugging Face Llama's safetensors names.

    ``model.embed_tokens.weight [V, C]``, ``model.norm.weight [C]`` and per layer ``model.layers.{i}.`` +
    ``input_layernorm``, ``self_attn.{q,k,v,o}_proj``, ``post_attention_layernorm``, ``mlp.{gate,up,down}_proj``, each
    ``.weight`` with matrices stored ``[out, in]``.
    """

    config: DecoderConfig
    weights: Mapping[str, Array]
