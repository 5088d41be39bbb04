"""A tiny model of the same kind: every layer kind, head width and window kind of a config, at a thousandth of it.

A config -> :func:`tiny_config` -> a config whose model is built and run in milliseconds, and in which documents of a
few dozen tokens cross every limit that the large model has (windows, chunks, original positions, scan chunks).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

# Lengths that the documents of an audit cross, whatever they are in the large model.
WINDOW = 12
CHUNK = 16
POSITIONS = 24
N_HEADS = 4

_NAMES = {
    "layers": "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "encoder_layers num_encoder_layers num_layers_per_stack",
    "hidden": "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim",
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads",
    "kv_heads": "num_key_value_heads num_kv_heads swa_num_key_value_heads",
}
LAYERS, HIDDEN, HEADS, KV_HEADS = (names.split() for names in _NAMES.values())

_AT_MOST = (
    (96, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size n_tokens"),
    (32, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner dim_ff dff ffn_hidden_size n_inner"),
    (32, "intermediate_size_mlp shared_intermediate_size dense_intermediate_size feed_forward_size block_multiple_of"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (32, "moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank hc_lowrank laurel_rank hidden_size_per_layer_input"),
    (16, "state_size mamba_d_state ssm_state_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"),
    (WINDOW, "sliding_window sliding_window_size window_size local_attention attention_window_size"),
    (CHUNK, "attention_chunk_size chunk_size mamba_chunk_size floor_scale log_scaling_n_floor"),
    (8, "index_topk keep_window_size rel_extent index_block_size"),
    (POSITIONS, "original_max_position_embeddings"),
)
AT_MOST = {name: most for most, names in _AT_MOST for name in names.split()}


def tiny_config(config: Any, *, head_dim: int | None = None, changes: Mapping[str, Any] | None = None) -> Any:
    """A config of the same class that keeps one layer of every kind.

    Args:
        config: of a transformers model; not modified.
        head_dim: replaces the config's head width, which is kept if None.
        changes: fields to set in the end.
    """
    fields = copy.deepcopy(config.to_dict())
    nested = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    for name in nested:
        fields[name] = tiny_config(getattr(config, name), head_dim=head_dim).to_dict()
    _keep_one_layer_of_each_kind(fields)
    _shrink_widths(fields, head_dim)
    for name, most in AT_MOST.items():
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
            fields[name] = min(fields[name], most)
    for name in fields:
        if ("drop" in name) and isinstance(fields[name], float):
            fields[name] = 0.0
        if name.endswith("_token_id") and isinstance(fields[name], int):
            fields[name] = min(fields[name], 3)
    fields.update(changes or {})
    return type(config).from_dict(fields)


def tiny_model(config: Any, model_class: Any = None, *, seed: int = 0) -> Any:
    """A model of ``config`` on the CPU in float32, with weights so random that every one of them matters.

    Args:
        config: small enough to build.
        model_class: of the model; what ``AutoModelForCausalLM`` chooses if None.
        seed: of the weights; the caller's random state is left alone.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config) if model_class is None else model_class(config)
        for parameter in model.parameters():
            if parameter.ndim < 2:  # norms, biases, decays: near what their layer starts them from
                parameter.data += 0.3 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.float()


def _keep_one_layer_of_each_kind(fields: dict[str, Any]) -> None:
    counts = {name: fields[name] for name in LAYERS if isinstance(fields.get(name), int)}
    if not counts:
        return
    total = max(counts.values())
    per_layer = [name for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == total > 0]
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(total):
        kinds.setdefault(tuple(repr(fields[name][layer]) for name in per_layer), layer)
    kept = sorted(kinds.values())
    kept = (kept * 2)[:2] if len(kept) == 1 else kept[:6]
    for name in per_layer:
        fields[name] = [fields[name][layer] for layer in kept]
    for name in counts:
        fields[name] = len(kept)


def _shrink_widths(fields: dict[str, Any], head_dim: int | None) -> None:
    heads = next((fields[name] for name in HEADS if isinstance(fields.get(name), int)), None)
    hidden = next((fields[name] for name in HIDDEN if isinstance(fields.get(name), int)), None)
    if heads is None or hidden is None:
        return
    width = head_dim or fields.get("head_dim") or hidden // heads
    for name in KV_HEADS:
        if isinstance(fields.get(name), int):
            kv = fields[name]
            fields[name] = N_HEADS if kv == heads else 1 if kv == 1 else 2
    for name in HEADS:
        if isinstance(fields.get(name), int):
            fields[name] = N_HEADS
    for name in HIDDEN:
        if isinstance(fields.get(name), int):
            fields[name] = N_HEADS * width if not fields.get("head_dim") else max(64, width)
    if fields.get("head_dim"):
        fields["head_dim"] = width
