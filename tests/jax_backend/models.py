"""Tiny models of each family, the same weights on both sides, and packed rows for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

import packing_core

_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_THETA = {"rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_TINY),
    "llama3-rope-biases": lambda: transformers.LlamaConfig(
        **_TINY, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3
    ),
    "qwen2-window-tied": lambda: transformers.Qwen2Config(
        **_TINY, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3-head-dim": lambda: transformers.Qwen3Config(**_TINY, head_dim=16),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **_TINY, rope_parameters={"rope_type": "yarn", **_THETA, "factor": 4.0, "original_max_position_embeddings": 16}
    ),
    "llama-dynamic-ntk": lambda: transformers.LlamaConfig(
        **_TINY | {"max_position_embeddings": 20}, rope_parameters={"rope_type": "dynamic", **_THETA, "factor": 4.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**_TINY, sliding_window=7),
    "ministral": lambda: transformers.MinistralConfig(
        **_TINY,
        head_dim=8,
        sliding_window=7,
        layer_types=_ALTERNATING,
        rope_parameters={"rope_type": "default", **_THETA},
    ),
    "phi3": lambda: transformers.Phi3Config(**_TINY, sliding_window=9, pad_token_id=0),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_TINY,
        pad_token_id=0,
        original_max_position_embeddings=20,
        rope_parameters={
            "rope_type": "longrope",
            **_THETA,
            "short_factor": [1.0, 1.1],
            "long_factor": [2.0, 3.0],
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 20,
        },
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_TINY),
    "olmo3": lambda: transformers.Olmo3Config(**_TINY, sliding_window=7, layer_types=_ALTERNATING),
    "gemma2": lambda: transformers.Gemma2Config(
        **_TINY,
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_TINY, head_dim=8, sliding_window=7, query_pre_attn_scalar=16, layer_types=_ALTERNATING
    ),
}


def torch_model(name: str) -> torch.nn.Module:
    """A float32 transformers model with weights large enough that every part of it shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            mean, std = (0.0, 0.2) if parameter.ndim > 1 else (1.0, 0.1)
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def saved(name: str, folder: Path) -> torch.nn.Module:
    """Like :func:`torch_model`, written to ``folder`` as transformers writes it."""
    model = torch_model(name)
    model.save_pretrained(folder)
    return model


def documents(count: int, longest: int = 30, seed: int = 0) -> list[np.ndarray]:
    """Random token ids, 2 to ``longest`` a document."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, length).astype(np.int32) for length in rng.integers(2, longest + 1, count)]


def packed(count: int = 9, capacity: int = 48, seed: int = 0) -> packing_core.PackedBatch:
    """Random documents with labels, packed so that rows hold several and end in padding."""
    sequences = documents(count, seed=seed)
    return packing_core.pack(sequences, capacity, labels=sequences)
