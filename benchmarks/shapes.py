"""Shapes of models, whose weights are random: ``config(NAME)`` is a transformers config, tiny without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.clock import TOY

TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 199,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {"first_k_dense_replace": 1, "n_shared_experts": 1, "tie_word_embeddings": True}
DEEPSEEK_GROUPS = DEEPSEEK | {"n_group": 8, "topk_group": 4}
TINY_DEEPSEEK = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "head_dim": 8} | LATENT


@dataclass(frozen=True)
class Decoder:
    """A decoder.

    Attributes:
        family: transformers' model type.
        layers: all of them.
        sizes: what differs from the family's defaults.
        tiny: what differs from ``sizes`` and ``TINY`` as a toy.
        few: layers, of which one of each kind, of a model whose gradients are checked.
        count: the config's name for the number of experts.
    """

    family: str
    layers: int
    sizes: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=dict)
    few: int = 2
    count: str = ""
    experts: int = 0


def dense(
    family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> Decoder:
    """A shape without experts."""
    sizes = {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return Decoder(family, layers, sizes | more)


def routed(family: str, layers: int, count: str, experts: int, sizes: dict[str, Any], **more: Any) -> Decoder:
    """A shape with experts, of which a toy token visits two."""
    tiny = {"moe_intermediate_size": 32, "num_experts_per_tok": 2} | more.pop("tiny", {})
    return Decoder(family, layers, sizes, tiny, count=count, experts=experts, **more)


TIED = {"tie_word_embeddings": True}
SHAPES = {
    "Qwen2-0.5B": dense("qwen2", 24, 896, 4_864, 14, 2, 151_936, **TIED),
    "Qwen2.5-7B": dense("qwen2", 28, 3_584, 18_944, 28, 4, 152_064),
    "Qwen3-0.6B": dense("qwen3", 28, 1_024, 3_072, 16, 8, 151_936, head_dim=128, **TIED),
    "Qwen3-4B": dense("qwen3", 36, 2_560, 9_728, 32, 8, 151_936, head_dim=128, **TIED),
    "Qwen3-14B": dense("qwen3", 40, 5_120, 17_408, 40, 8, 151_936),
    "Llama-3.2-1B": dense("llama", 16, 2_048, 8_192, 32, 8, 128_256, **TIED),
    "Llama-3-8B": dense("llama", 32, 4_096, 14_336, 32, 8, 128_256),
    "Mistral-Nemo-12B": dense("mistral", 40, 5_120, 14_336, 32, 8, 131_072, head_dim=128, sliding_window=None),
    "Bamba-9B": Decoder(
        "bamba", 11,
        dense("", 0, 4_096, 14_336, 32, 8, 128_000).sizes | {"attn_layer_indices": [9], "mamba_n_heads": 128},
        {"attn_layer_indices": [1], "mamba_n_heads": 2},
    ),
    "Falcon-Mamba": Decoder(
        "falcon_mamba", 64, {"hidden_size": 4_096, "intermediate_size": 8_192, "vocab_size": 65_024, "state_size": 16},
        {"intermediate_size": 128},
    ),
    "Qwen3.5": Decoder(
        "qwen3_5_text", 8,
        dense("", 0, 1_024, 3_584, 8, 2, 248_320, head_dim=256, **TIED).sizes
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 16},
        LINEAR, few=4,
    ),
    "Qwen3-30B-A3B": routed(
        "qwen3_moe", 48, "num_experts", 128,
        {"vocab_size": 151_936, "head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"tie_word_embeddings": False},
        tiny={"intermediate_size": 32},
    ),
    "gpt-oss-20b": routed(
        "gpt_oss", 24, "num_local_experts", 32, {"num_experts_per_tok": 4},
        tiny={"intermediate_size": 32},
    ),
    "Qwen3.5-35B-A3B": routed(
        "qwen3_5_moe_text", 4, "num_experts", 256, {"num_experts_per_tok": 8},
        tiny=LINEAR | {"shared_expert_intermediate_size": 32}, few=4,
    ),
    "DeepSeek-V3": routed(
        "deepseek_v3", 2, "n_routed_experts", 64, DEEPSEEK_GROUPS | {"num_experts_per_tok": 8}, tiny=TINY_DEEPSEEK
    ),
    "DeepSeek-V3.2": routed(
        "deepseek_v32", 2, "n_routed_experts", 64, DEEPSEEK_GROUPS | {"num_experts_per_tok": 8, "index_topk": 2_048}
        | {"index_n_heads": 64, "index_head_dim": 128},
        tiny=TINY_DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16},
    ),
}  # fmt: skip


def config(name: str, few: bool = False, *, layers: int | None = None, experts: int | None = None) -> Any:
    """The config of a shape; a toy has few layers.

    Args:
        few: a model of few layers and at most 16 experts, or 32 in groups, of which a token sees half.
        layers, experts: how many; those of ``SHAPES`` if None.
    """
    from transformers import AutoConfig

    shape = SHAPES[name]
    sizes, count = dict(shape.sizes), layers or shape.layers
    if TOY:
        sizes |= {name: size for name, size in TINY.items() if name in sizes or shape.count} | shape.tiny
    if TOY or few:
        count = shape.few
    if shape.count:
        wanted = experts or shape.experts
        sizes[shape.count] = 8 if TOY else min(wanted, 32 if "n_group" in sizes else 16) if few else wanted
    if shape.few == 4:
        sizes["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (count // 4)
    return AutoConfig.for_model(shape.family, **sizes, num_hidden_layers=count)
