"""What is known about transformers by name: families, layer classes, functions, and what the package touches.

A family that needs an exception is one line here. ``attention`` is the rule: the segments reach every attention layer,
and layers that carry state along the row are handled by :mod:`.mixers`. ``documents`` is the exception: attention that
cannot be given segments from outside, so the whole decoder runs on padded batches of documents of similar length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from packing_core.errors import UnsupportedModelError

Route = Literal["attention", "documents"]

# Families with attention that transformers' interface cannot serve, and what it does instead.
DOCUMENTS = {
    "axk2": "an indexer picks keys along the row",
    "deepseek_v32": "an indexer picks keys along the row",
    "deepseek_v4": "keys are compressed along the row",
    "doge": "a dynamic mask picks keys along the row",
    "dots3_note": "an indexer picks keys along the row",
    "dots3_note_text": "an indexer picks keys along the row",
    "glm_moe_dsa": "an indexer picks keys along the row",
    "hy_v4": "an indexer picks keys along the row",
    "inkling2_text": "a relative position bias runs along the row",
    "inkling_text": "a relative position bias runs along the row",
    "minimax_m3_vl_text": "an indexer picks blocks of keys along the row",
    "qwen4_exp": "an indexer picks keys along the row",
    "qwen4_exp_text": "an indexer picks keys along the row",
    "zaya": "a convolution inside its attention is not told of segments",
}
OWN_ATTENTION = "its attention is its own and not transformers' interface"

# Of these, the ones in which even tokens after a document's end would change it: they run without any padding.
SEE_PADDING = ("doge", "dots3_note", "dots3_note_text")

# Causal decoders that cannot be trained packed.
REFUSED = {
    "blt": "it forms patches of bytes along the row",
    "gemma4_assistant": "it drafts for another model and reads that one's states",
    "gemma4_unified_assistant": "it drafts for another model and reads that one's states",
    "git": "its loss skips as many tokens of a row as an image would take",
    "xlstm": "transformers' own code for it updates states in place, and no gradient can be taken",
}
# Families that are no causal decoders; most are known by their config, see refusal().
NO_DECODERS = {
    "cpmant": "it sees tokens on both sides",
    "whisper": "it is the decoder of an encoder-decoder",
    "xlm": "it is an encoder",
    "xlnet": "it sees tokens on both sides",
}
# Families whose config can make them the decoder half of something, and that are pure decoders all the same.
PURE_DECODERS = ("gpt_neox", "gpt_neox_japanese")


def refusal(family: str, config: Any) -> str | None:
    """Why a family cannot be trained packed, None if it can; ``config`` is not looked at where the name says enough."""
    reason = REFUSED.get(family) or NO_DECODERS.get(family)
    if reason is None:
        has_switch = "is_decoder" in config.to_dict() and family not in PURE_DECODERS
        if has_switch or getattr(config, "is_encoder_decoder", False):
            reason = "it is an encoder, or the decoder of an encoder-decoder"
    return None if reason is None else f"{family} cannot be trained packed: {reason}"


def route_of(config: Any, decoder: Any, *, uses_interface: bool) -> tuple[Route, str]:
    """The route of a family and the reason for it.

    Args:
        config: of the outermost model.
        decoder: the config of the decoder inside it, which is of another family in vision-language models.
        uses_interface: whether its decoder has layers that call transformers' attention interface, or mixers.

    Raises:
        UnsupportedModelError: the family is refused.
    """
    reason = refusal(config.model_type, config)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if decoder.model_type in REFUSED:
        raise UnsupportedModelError(f"{decoder.model_type} cannot be trained packed: {REFUSED[decoder.model_type]}")
    for family in (config.model_type, decoder.model_type):
        if family in DOCUMENTS:
            return "documents", DOCUMENTS[family]
    if not uses_interface:
        return "documents", OWN_ATTENTION
    return "attention", "its attention takes segments"


# -- layers that carry state along the row -------------------------------------------------------------------------

# Layer classes without a convolution to recognise them by, and which instances of them carry state.
STATEFUL_LAYERS: dict[str, Callable[[Any], bool]] = {
    "MiniMaxLightningAttention": lambda layer: True,
    "JambaMambaDecoderLayer": lambda layer: True,  # does not pass segments on to its mixer
    "Llama4TextAttention": lambda layer: layer.attn_temperature_tuning and not layer.use_rope,  # counts along the row
}
# Global names of functions in modeling files, by what they do.
CONVOLUTION = "causal_conv1d_fn"
SCANS = {  # the library whose kernel transformers uses for each
    "torch_chunk_gated_delta_rule": "fla",
    "chunk_kimi_delta_attention": "fla",
    "mamba2_chunk_scan": "mamba_ssm",
}
FUSED_STEPS = ("mamba2_split_conv1d_scan_combined",)  # may return None, and the layer then takes its steps one by one
WITHIN_TOKENS = ("apply_mask_to_padding_states",)  # no effect across tokens
ONLY_WITH_A_CACHE = (
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
)
WITHIN_TOKENS_METHODS = ("fix_query_key_value_ordering",)
# Keywords of these functions that carry a state in or out, which packed documents do not have.
STATE_ARGUMENTS = (
    *("initial_state", "initial_states", "output_final_state", "return_final_states", "final_states_out"),
)
BOUNDARY_ARGUMENTS = (
    "cu_seqlens",
    "seq_idx",
)  # what kernels call them; layers pass the PackedForward under these names

# -- attention ------------------------------------------------------------------------------------------------------

ROTATION = "apply_rotary_pos_emb"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# What an attention layer may pass along without meaning anything for the packed result.
WITHOUT_EFFECT = (
    *("position_embeddings", "layer_idx", "use_cache", "packed"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
)

# -- what the package touches ---------------------------------------------------------------------------------------

# Every name of transformers that this package touches, as "module:name" or "module:class.attribute"; a test finds them
# all in the installed version, and finds no other import of transformers here.
TOUCHED = (
    "transformers:AttentionInterface",
    "transformers:AttentionMaskInterface",
    "transformers:AutoConfig",
    "transformers:AutoModelForCausalLM",
    "transformers:AutoTokenizer",
    "transformers:CONFIG_MAPPING",
    "transformers:LlamaConfig",
    "transformers:LlamaForCausalLM",
    "transformers:MistralConfig",
    "transformers:MistralForCausalLM",
    "transformers:PreTrainedModel",
    "transformers:PreTrainedTokenizerFast",
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS",
    "transformers.loss.loss_utils:ForCausalLMLoss",
    "transformers:TrainingArguments",
    "transformers.modeling_layers:GradientCheckpointingLayer",
    "transformers.models.auto.modeling_auto:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    # attributes: where a config keeps the name of its attention, and what the trainers' glue reads
    "transformers:PretrainedConfig._attn_implementation",
    "transformers.models.llama.modeling_llama:eager_attention_forward",
    "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
    "transformers.models.mamba.modeling_mamba:causal_conv1d_fn",
    "transformers:Trainer._prepare_inputs",
    "transformers:Trainer._set_signature_columns_if_needed",
    "transformers:Trainer.compute_loss",
    "transformers:Trainer.compute_loss_context_manager",
    "transformers:Trainer.get_batch_samples",
    "transformers:Trainer.get_train_dataloader",
)
