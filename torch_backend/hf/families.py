"""Which route a model family takes, and which families are refused: the one table of them.

``attention`` (the rule): the segments reach every attention layer and are served there; what happens to layers that
carry state along the row says :mod:`torch_backend.hf.mixers`. ``documents`` (the exceptions below): attention cannot be
told of segments from outside, so the whole decoder runs on padded batches of documents of similar length.
"""

from __future__ import annotations

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


def route_of(config: Any, *, uses_interface: bool) -> tuple[Route, str]:
    """The route of a family and the reason for it.

    Args:
        config: of the causal language model.
        uses_interface: whether its decoder has layers that call transformers' attention interface, or mixers.

    Raises:
        UnsupportedModelError: the family is refused.
    """
    reason = refusal(config.model_type, config)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if config.model_type in DOCUMENTS:
        return "documents", DOCUMENTS[config.model_type]
    if not uses_interface:
        return "documents", OWN_ATTENTION
    return "attention", "its attention takes segments"
