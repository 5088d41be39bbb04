"""A tiny model of the same kind: every layer kind, head width and window kind of a config, at a thousandth of it.

A config -> :func:`tiny_config` -> a config whose model is built and run in milliseconds, and in which documents of a
few dozen tokens cross every limit that the large model has (windows, chunks, original positions, scan chunks).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from torch_backend.hf.anatomy.families import LEFT_OPEN, TINY_SIZES
from torch_backend.hf.anatomy.random_draws import is_random_setting

# Lengths that the documents of an audit cross, whatever they are in the large model.
WINDOW = 12
CHUNK = 16
POSITIONS = 24
N_HEADS = 4
ROOM = 64  # positions for documents, also where the large model has fewer

_NAMES = {
    "layers": "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks "
    "encoder_layers num_encoder_layers num_layers_per_stack",
    "hidden": "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim pooler_hidden_size",
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
    (16, "state_size mamba_d_state ssm_state_size linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (4, "linear_num_value_heads"),
    (2, "linear_num_heads linear_num_key_heads"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
    (WINDOW, "sliding_window sliding_window_size window_size local_attention attention_window_size"),
    (CHUNK, "attention_chunk_size chunk_size mamba_chunk_size floor_scale log_scaling_n_floor"),
    (8, "index_topk keep_window_size rel_extent index_block_size"),
    (POSITIONS, "original_max_position_embeddings"),
)
AT_MOST = {name: most for most, names in _AT_MOST for name in names.split()}


def all_families() -> list[str]:
    """The model types that ``AutoModelForCausalLM`` knows, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def family_config(family: str) -> Any:
    """Returns the default config of a transformers model type, with its missing fields filled in.

    By transformers' own class: ``CONFIG_MAPPING`` may hold another, as fla registers its own for ``mamba2`` and others.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES[family])(**LEFT_OPEN.get(family, {}))


def tiny_config(
    config: Any, *, head_dim: int | None = None, changes: Mapping[str, Any] | None = None, positions: int = ROOM
) -> Any:
    """A config of the same class that keeps one layer of every kind.

    Args:
        config: of a transformers model; not modified.
        head_dim: replaces the config's head width, which is kept if None.
        changes: fields to set in the end.
        positions: of the longest document, for which there is room also where the large model has fewer.
    """
    return type(config).from_dict(_tiny_fields(config, head_dim, positions) | dict(changes or {}))


def tiny_model(config: Any, model_class: Any = None, *, seed: int = 0) -> Any:
    """A model of ``config`` on the CPU in float32, with weights so random that every one of them matters.

    Args:
        model_class: of the model; what ``AutoModelForCausalLM`` chooses if None.
        seed: of the weights; the caller's random state is left alone.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
        model = AutoModelForCausalLM.from_config(config) if model_class is None else model_class(config)
        for parameter in model.parameters():
            if parameter.ndim < 2:  # norms, biases, decays: near what their layer starts them from
                parameter.data += 0.3 * torch.randn_like(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # classifiers have some that no field of the config sets
            module.p = 0.0
    return model.float()


def _tiny_fields(config: Any, head_dim: int | None, positions: int) -> dict[str, Any]:
    fields: dict[str, Any] = copy.deepcopy(config.to_dict())
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None and any(hasattr(inner, layers) for layers in LAYERS):
            fields[name] = _tiny_fields(inner, head_dim, positions)
    _keep_one_layer_of_each_kind(fields)
    _shrink_widths(fields, head_dim)
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool):
            fields[name] = min(value, 3 if name.endswith("_token_id") else AT_MOST.get(name, value))
        elif isinstance(value, list) and name in AT_MOST:  # one for each layer
            fields[name] = [min(each, AT_MOST[name]) for each in value]
        elif isinstance(value, float) and is_random_setting(name):
            fields[name] = 0.0
    _shrink_positions(fields, positions)
    _keep_consistent(fields)
    return fields


def _keep_one_layer_of_each_kind(fields: dict[str, Any]) -> None:
    counts = {name: fields[name] for name in LAYERS if isinstance(fields.get(name), int)}
    if not counts:
        return
    total = max(counts.values())
    per_layer = [name for name, value in fields.items() if isinstance(value, list | tuple) and len(value) == total > 0]
    of_some: dict[int, Any] = {int(k): v for k, v in (fields.get("per_layer_config") or {}).items()}
    dense: list[int] = fields.get("mlp_only_layers") or []
    first_shared = total - (fields.get("num_kv_shared_layers") or 0)  # from here on, layers read other layers' keys
    kinds: dict[tuple[str, ...], int] = {}
    for layer in range(total):
        kind = tuple(repr(fields[name][layer]) for name in per_layer)
        kinds.setdefault((*kind, repr(of_some.get(layer)), repr(layer in dense), repr(layer >= first_shared)), layer)
    kept = sorted(kinds.values())
    kept = (kept * 2)[:2] if len(kept) == 1 else kept[:6]
    for name in per_layer:
        fields[name] = [fields[name][layer] for layer in kept]
    for name in counts:
        fields[name] = len(kept)
    if dense:
        fields["mlp_only_layers"] = [i for i, layer in enumerate(kept) if layer in dense]
    if "num_kv_shared_layers" in fields:
        fields["num_kv_shared_layers"] = sum(layer >= first_shared for layer in kept)
    if of_some:
        fields["per_layer_config"] = {str(i): of_some[layer] for i, layer in enumerate(kept) if layer in of_some}


def _shrink_widths(fields: dict[str, Any], head_dim: int | None) -> None:
    heads = next((fields[name] for name in HEADS if isinstance(fields.get(name), int)), None)
    hidden = next((fields[name] for name in HIDDEN if isinstance(fields.get(name), int)), None)
    if hidden is None:
        return
    if heads is None:
        fields.update({name: 64 for name in HIDDEN if isinstance(fields.get(name), int)})
        return
    width = head_dim or fields.get("head_dim") or hidden // heads
    separate = bool(fields.get("head_dim")) or "qk_rope_head_dim" in fields
    for name, value in fields.items():
        if isinstance(value, int) and name in KV_HEADS:
            fields[name] = N_HEADS if value == heads else 1 if value == 1 else 2
        elif isinstance(value, int) and name in HEADS:
            fields[name] = N_HEADS
        elif isinstance(value, int) and name in HIDDEN:
            fields[name] = max(64, width) if separate else N_HEADS * width
        elif name in ("head_dim", "swa_head_dim", "d_head") and value:
            fields[name] = width
    if isinstance(fields.get("rotary_dim"), int):
        fields["rotary_dim"] = min(fields["rotary_dim"], width // 2)


def _shrink_positions(fields: dict[str, Any], room: int) -> None:
    """Room for the longest document; rotary frequencies that change beyond an original length change within them."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(fields.get(name), int):
            fields[name] = max(fields[name], max(room, ROOM))
    rope = fields.get("rope_parameters") or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    for kind in kinds:
        if "original_max_position_embeddings" in kind:
            kind["original_max_position_embeddings"] = POSITIONS
        if kind.get("rope_type") == "dynamic":
            fields["max_position_embeddings"] = POSITIONS


def _keep_consistent(fields: dict[str, Any]) -> None:
    """Sizes that follow from others in the families that state both."""
    hidden = next((fields[name] for name in HIDDEN if isinstance(fields.get(name), int)), 0)
    layers: dict[str, dict[str, Any]] = fields.get("per_layer_config") or {}
    if "qk_rope_head_dim" in fields:  # multi-head latent attention
        fields |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8}
        fields.pop("qk_head_dim", None)
    elif fields.get("head_dim"):
        for layer in layers.values():
            layer |= {"head_dim": 2 * fields["head_dim"]} if "head_dim" in layer else {}
    if "mamba_n_heads" in fields:
        inner = hidden if "mamba_d_ssm" in fields else 2 * hidden
        fields |= {"mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": inner // 4}
        fields |= {"mamba_d_ssm": inner} if "mamba_d_ssm" in fields else {}
    if "expand" in fields:
        fields |= {"intermediate_size": fields["expand"] * hidden, "time_step_rank": 4}
    if "n_mamba_heads" in fields:
        fields |= {"n_mamba_heads": 2, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
        for name in ("attention_hidden_size", "attention_head_dim", "mamba_headdim", "kv_channels", "hybrid_layer_ids"):
            fields.pop(name, None)
    elif "attn_layer_period" in fields:
        fields |= {"attn_layer_period": 4, "attn_layer_offset": 2, "num_hidden_layers": 4}
    if "block_types" in fields:
        fields |= {"num_hidden_layers": len(fields["block_types"]), "lru_width": hidden}
    if "H_cycles" in fields:
        fields |= {"num_layers_per_stack": 1, "num_hidden_layers": fields["H_cycles"] * (fields["L_cycles"] + 1)}
    family = fields.get("model_type", "")
    if family == "mamba2":
        fields |= {"n_groups": 2, "head_dim": 2 * hidden // N_HEADS}
    fields |= TINY_SIZES.get(family, {})
