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
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MIXED = _TINY | {"num_hidden_layers": 2}  # of families whose layers are of two kinds
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_THETA = {"rope_theta": 10000.0}
_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_TINY),
    "llama3-rope-biases": lambda: transformers.LlamaConfig(
        **_TINY, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3
    ),
    "qwen2-window-tied": lambda: transformers.Qwen2Config(
        **_MIXED, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1
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
        **_MIXED,
        head_dim=8,
        sliding_window=7,
        layer_types=_ALTERNATING,
        rope_parameters={"rope_type": "default", **_THETA},
    ),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_TINY,
        pad_token_id=0,
        sliding_window=9,
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
    "olmo3": lambda: transformers.Olmo3Config(**_MIXED, sliding_window=7, layer_types=_ALTERNATING),
    "gemma2": lambda: transformers.Gemma2Config(
        **_MIXED,
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_MIXED, head_dim=8, sliding_window=7, query_pre_attn_scalar=16, layer_types=_ALTERNATING
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_TINY, num_local_experts=4, sliding_window=7),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_TINY, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_MIXED,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **_MIXED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7, swiglu_limit=1.5
    ),
    # The output of a delta rule may be tiny. A usual epsilon would blow its rounding errors up to the size of the norm:
    # torch itself, from weights changed by one part in ten million, is then 2e-4 away after fifty steps.
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**_MIXED, **_DELTA_NET, rms_norm_eps=1e-2),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **_MIXED,
        **_DELTA_NET,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[1],
    ),
}


def torch_model(family: str) -> torch.nn.Module:
    """A float32 transformers model with weights large enough that every part of it shows in the logits."""
    generator = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (0.0, 0.2) if parameter.ndim > 1 else (1.0, 0.1)
            mean = -2.0 if name.endswith("A_log") else mean  # a memory of several tokens
            parameter.normal_(mean, std, generator=generator)
    return model.eval()


def saved(name: str, folder: Path) -> torch.nn.Module:
    """Like :func:`torch_model`, written to ``folder`` as transformers writes it."""
    model = torch_model(name)
    model.save_pretrained(folder)
    return model


def on_disk(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors named as the model's parameters (its gradients, say), as transformers names and cuts them in files."""
    kept = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    family = model.config.model_type
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in kept.items():
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        stem, _, last = name.rpartition(".")
        if family != "gpt_oss" and stem.endswith(".experts"):
            for i, expert in enumerate(tensor):
                halves = {gate: expert[: len(expert) // 2], up: expert[len(expert) // 2 :]}
                own = halves if last == "gate_up_proj" else {down: expert}
                found |= {f"{stem}.{i}.{part}.weight": value for part, value in own.items()}
        else:
            found[name] = tensor
    return found


def documents(count: int, longest: int = 30, seed: int = 0) -> list[np.ndarray]:
    """Random token ids, 2 to ``longest`` a document."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 64, length).astype(np.int32) for length in rng.integers(2, longest + 1, count)]


def packed(count: int = 9, capacity: int = 48, seed: int = 0) -> packing_core.PackedBatch:
    """Random documents with labels, packed so that rows hold several and end in padding."""
    sequences = documents(count, seed=seed)
    return packing_core.pack(sequences, capacity, labels=sequences)
