"""Table of exceptions by transformers' names: families, layer classes and functions.

A family that needs an exception is one line here. ``attention`` is the rule: the segments reach every attention layer,
and layers that carry state along the row are handled by :mod:`torch_backend.hf.edits.mixers`. ``documents`` is the
exception: attention that cannot be given segments from outside, so the whole decoder runs on padded batches of
documents of similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packing_core.errors import UnsupportedModelError

Route = Literal["attention", "documents"]

# Families with attention that transformers' interface cannot serve, and what it does instead.
DOCUMENTS = {
    "convbert": "its attention convolves along the row",
    "deberta": "its attention scores relative positions along the row",
    "deberta-v2": "its attention scores relative positions along the row",
    "deepseek_v4": "keys are compressed along the row",
    "doge": "a dynamic mask picks keys along the row",
    "esm": "its rotary embedding counts along the row",
    "inkling2_text": "a relative position bias runs along the row",
    "inkling_text": "a relative position bias runs along the row",
    "mobilebert": "its embeddings join neighbouring tokens of the row",
    "squeezebert": "its layers are convolutions",
    "zaya": "a convolution inside its attention does not receive the segments",
}
OWN_ATTENTION = "its attention is its own and not transformers' interface"

# Of these, the ones in which even tokens after a document's end would change it: they run without any padding.
SEE_PADDING = ("doge",)

# Encoders of this route whose mask leaves padding out exactly, so that documents of similar length run together.
MASK_PADDING = ("deberta", "deberta-v2", "mpnet")

# Causal decoders that cannot be trained packed.
REFUSED = {
    "blt": "it forms patches of bytes along the row",
    "gemma4_assistant": "it drafts for another model and reads that one's states",
    "gemma4_unified_assistant": "it drafts for another model and reads that one's states",
    "git": "its loss skips as many tokens of a row as an image would take",
    "xlstm": "transformers' own code for it updates states in place, and no gradient can be taken",
}
# Families of which some models cannot be trained packed: (name of the option, why), where the option is set.
REFUSED_WITH = {"doge": ("is_moe", "with is_moe its router mixes the scores of different tokens of a batch")}
# Encoders that cannot be trained packed.
REFUSED_ENCODERS = {
    "big_bird": "its attention picks random blocks along the row",
    "flaubert": "its heads are of XLM's kind",
    "funnel": "it pools tokens along the row",
    "layoutlm": "it reads places on a page, which packed batches do not carry",
    "longformer": "some of its tokens see the whole row",
    "perceiver": "its latents read the whole row",
    "reformer": "it sorts the tokens of a row into buckets",
    "tapas": "it reads rows and columns of a table, which packed batches do not carry",
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


def refusal(family: str, config: Any, *, next_token: bool = True) -> str | None:
    """Explains why a family cannot be trained packed, None if it can; reads ``config`` only if the name is not enough.

    Args:
        next_token: whether the model predicts the next token, which no encoder does.
    """
    reason = REFUSED.get(family) or NO_DECODERS.get(family) or (None if next_token else REFUSED_ENCODERS.get(family))
    if reason is None:
        option, why = REFUSED_WITH.get(family, ("", ""))
        if option and getattr(config, option, False):
            reason = why
        elif getattr(config, "is_encoder_decoder", False):
            reason = "it is an encoder-decoder"
        elif _has_switch(family, config) and next_token:
            reason = "it is an encoder, or the decoder of an encoder-decoder"
        elif _has_switch(family, config) and config.is_decoder:
            reason = "it is the decoder of an encoder-decoder"
    return None if reason is None else f"{family} cannot be trained packed: {reason}"


def _has_switch(family: str, config: Any) -> bool:
    """Returns whether a config can make its model another's decoder; in all but a few families it is an encoder."""
    return family not in PURE_DECODERS and "is_decoder" in config.to_dict()


def route_of(config: Any, decoder: Any, *, head: str, takes_segments: bool) -> tuple[Route, str]:
    """The route of a family and the reason for it.

    Args:
        config: of the outermost model.
        decoder: the config of the decoder inside it, which is of another family in vision-language models.
        head: of the outermost model, see :mod:`.heads`.
        takes_segments: whether its decoder has layers that segments reach, and takes positions.

    Raises:
        UnsupportedModelError: the family is refused.
    """
    reason = refusal(config.model_type, config, next_token=head == "next token")
    if reason is None and decoder.model_type in REFUSED:
        reason = f"{decoder.model_type} cannot be trained packed: {REFUSED[decoder.model_type]}"
    if reason is not None:
        raise UnsupportedModelError(reason)
    families = (config.model_type, decoder.model_type)
    unknown = None if takes_segments else OWN_ATTENTION
    why = next((DOCUMENTS[family] for family in families if family in DOCUMENTS), unknown)
    return ("attention", "its attention takes segments") if why is None else ("documents", why)


# -- arguments of a batch ----------------------------------------------------------------------------------------------

# Families whose rotary positions have three axes (time, height, width) where there are images or videos: by the kinds
# of tokens, mm_token_type_ids, or by their ids, as thinkers do, which take audio too.
NUMBERED_BY_KINDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
)
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
M_ROPE = (*NUMBERED_BY_KINDS, *OMNI)
PIXELS = ("pixel_values", "pixel_values_videos")
# Families whose forward spells out the mean loss that transformers' loss_function makes.
SPELL_OUT_LOSS = ("qwen2_audio",)
# Families whose processors give a row of images to each row of tokens, pixel_values [B, images, ...].
ROWS_OF_IMAGES = ("idefics2", "idefics3", "smolvlm")
_GRIDS = frozenset(("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "mm_token_type_ids"))
_PIXELS = frozenset(("pixel_values",))
_SIZES = _PIXELS | {"image_sizes"}
_FRAMES = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")  # Gemma 4's videos
_PIXEL_MASK = _PIXELS | {"pixel_attention_mask"}
_CLIPS = frozenset(("input_features",))
# Tensor arguments with which a family is exact when packed; tests/torch_backend/hf/test_multimodal.py proves every one.
# Others are refused: nothing else tells whether tokens attend in both directions or positions depend on the row.
EXACT_KEYS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(NUMBERED_BY_KINDS, _GRIDS),
    **dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "got_ocr2", "internvl", "vipllava"), _PIXELS),
    **dict.fromkeys(("lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3"), _SIZES),
    **dict.fromkeys(("idefics2", "idefics3", "smolvlm"), _PIXEL_MASK),
    "lfm2_vl": _PIXEL_MASK | {"spatial_shapes"},
    **dict.fromkeys(("gemma3", "paligemma"), _PIXELS | {"token_type_ids"}),
    "gemma4": _PIXELS | {"image_position_ids", "mm_token_type_ids", *_FRAMES},
    "gpt2": frozenset(("token_type_ids",)),
    "voxtral": _CLIPS,
    **dict.fromkeys(("audioflamingo3", "qwen3_asr"), _CLIPS | {"input_features_mask"}),
    "qwen2_audio": _CLIPS | {"feature_attention_mask"},
    **dict.fromkeys(OMNI, (_GRIDS - {"mm_token_type_ids"}) | _CLIPS | {"feature_attention_mask"}),
}


def media_keys(config: Any) -> frozenset[str]:
    """Arguments of a family that hold images or clips, and no value per token."""
    return EXACT_KEYS.get(config.model_type, frozenset()) - {"mm_token_type_ids", "token_type_ids"}


def exact_in_encoders(config: Any) -> frozenset[str]:
    """Tensor arguments with which an encoder is exact when packed: the kinds of its tokens, one by one."""
    return frozenset(("token_type_ids",)) if getattr(config, "type_vocab_size", None) else frozenset()


@dataclass(frozen=True)
class BothWays:
    """The tokens of a family that see each other in both directions, in attention that is causal elsewhere.

    Attributes:
        key: the argument that gives the kind of each token.
        kinds: neighbours of these kinds see each other.
        layers: the kind of layers in which they do; None for all.
        prefix: whether they are the first tokens of every document (prefix-LM), and not images alone.
    """

    key: str
    kinds: tuple[int, ...]
    layers: str | None = None
    prefix: bool = False


_BOTH_WAYS = {
    "gemma3": BothWays("token_type_ids", (1,)),
    "gemma4": BothWays("mm_token_type_ids", (1, 2), layers="sliding_attention"),
    "paligemma": BothWays("token_type_ids", (0,), prefix=True),
}


def both_ways_of(config: Any) -> BothWays | None:
    """Returns which tokens of a model see each other in both directions; None if attention is causal throughout."""
    is_causal = config.model_type == "gemma4" and config.get_text_config().use_bidirectional_attention != "vision"
    return None if is_causal else _BOTH_WAYS.get(config.model_type)


# -- layers that carry state along the row -------------------------------------------------------------------------

# Layer classes without a convolution to recognise them by, and which instances of them carry state.
STATEFUL_LAYERS: dict[str, Callable[[Any], bool]] = {
    "MiniMaxLightningAttention": lambda layer: True,
    "Llama4TextAttention": lambda layer: layer.attn_temperature_tuning and not layer.use_rope,  # counts along the row
}
# Decoder layers that pass on to their mixer or indexer a single argument by which segments can travel: a mask, which is
# None for packed rows, or the cache that they do not have.
PASS_ON = {
    "JambaMambaDecoderLayer": "attention_mask",
    "MiniMaxM3VLDecoderLayer": "past_key_values",
    "Qwen4ExpTextDecoderLayer": "conv_mask",
}
# Global names of functions in modeling files, by what they do.
CONVOLUTION = "causal_conv1d_fn"
SCANS = {  # the libraries with a kernel for each, in the order they are tried; transformers uses the last
    "torch_chunk_gated_delta_rule": ("flash_qla", "fla"),
    "chunk_kimi_delta_attention": ("fla",),
    "mamba2_chunk_scan": ("mamba_ssm",),
}
# A scan that gets no segments from its layer: the layer's stand-ins know them.
SELECTIVE_SCAN = "mamba_selective_scan"
FUSED_STEPS = (
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
)  # may return None, and the layer then takes its steps one by one
# Classes whose forward is weight * norm(x) * activation(gate), with the attributes weight, variance_epsilon and
# activation. Mamba-2's norms, which gate first, are none of them.
GATED_NORMS = (
    *("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated", "OlmoHybridRMSNormGated"),
    *("KimiLinearRMSNormGated", "BailingHybridRMSNormGated"),
)
WITHIN_TOKENS = ("apply_mask_to_padding_states",)  # no effect across tokens
ONLY_WITH_A_CACHE = (
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
)
WITHIN_TOKENS_METHODS = ("fix_query_key_value_ordering",)
# Keywords of these functions that carry a state in or out, which packed documents do not have.
STATE_ARGUMENTS = (
    *("initial_state", "initial_states", "output_final_state", "return_final_states", "final_states_out"),
)

# -- attention ------------------------------------------------------------------------------------------------------

# Modules that select keys of each query, by what they select (hf/edits/indexers.py): ``index_topk`` tokens (DeepSeek's
# sparse attention), ``topk_blocks`` blocks by their best key, or ``block_topk`` blocks by the mean of their keys.
INDEXERS = {
    **dict.fromkeys(("AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer"), "tokens"),
    "HYV4Indexer": "tokens",
    "MiniMaxM3VLIndexer": "blocks",
    "Qwen4ExpTextQSAIndexer": "pooled blocks",
}
ROTATION = "apply_rotary_pos_emb"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Layers that compute attention themselves and can be given segments, by what computes it for them when packed
# (hf/edits/own_attention.py): those with a method for it alone, and those that compute it in their forward.
ATTENTION_METHOD = "_attn"
OWN_METHODS = {
    "Attention": "openai",
    "CodeGenAttention": "gpt_j",
    "GPTJAttention": "gpt_j",
    "GPTNeoSelfAttention": "gpt_neo",
    "GPTNeoXJapaneseAttention": "gpt_neox_japanese",
}
OWN_FORWARDS = {
    "BloomAttention": "bloom",
    "FalconAttention": "falcon",
    "MegatronBertSelfAttention": "bert",
    "MptAttention": "mpt",
    "RemBertSelfAttention": "bert",
    "XGLMAttention": "xglm",
}
ALIBI = ("bloom", "mpt")  # families whose attention adds it
# What an attention layer may pass along without meaning anything for the packed result.
WITHOUT_EFFECT = (
    *("position_embeddings", "layer_idx", "use_cache", "packed"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
)

# -- configs, for tiny models ------------------------------------------------------------------------------------------

_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
# What the default configs of some families leave open.
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
}
# Fields of a tiny config that only one family has, or has rules of its own for.
TINY_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "dots3_note_text": {"head_dim": 16, "per_layer_config": {}, "index_n_heads": 2, "index_head_dim": 16},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"hidden_size": 256, "embedding_dim": 256, "mode": "train_with_padding", "return_last_states": False},
    "zamba2": {"adapter_rank": 8},
}
