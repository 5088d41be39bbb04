"""Tiny vision-language models, one per family that takes images packed, and documents with images for them.

``CASES[family]`` says how the family's config is made small, which tensors an image comes as, and how many tokens stand
for it. Every image is drawn at random, so a feature that lands at the wrong place shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from torch_backend.auditing.tiny import tiny_model
from torch_backend.hf.anatomy.families import M_ROPE

IMAGE, VIDEO = 91, 92  # token ids; text has ids from 4 to 89

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
_CLIP = {**_VISION, "model_type": "clip_vision_model"}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 16}
_INTERN = {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 12}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _text(model_type: str = "", **changes: Any) -> dict[str, Any]:
    return {**TEXT, **({"model_type": model_type} if model_type else {}), **changes}


Pixels = Callable[[int, torch.Generator], dict[str, Tensor]]


def _images(count: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=random)}


def _large_images(count: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 64, 64, generator=random)}


def _sized_images(count: int, random: torch.Generator) -> dict[str, Tensor]:
    return {**_images(count, random), "image_sizes": torch.tensor([[16, 16]] * count)}


def _tiled_images(count: int, random: torch.Generator) -> dict[str, Tensor]:
    tiles = torch.randn(count, 2, 3, 16, 16, generator=random)
    return {"pixel_values": tiles, "image_sizes": torch.tensor([[16, 16]] * count)}


def _rows_of_images(count: int, random: torch.Generator) -> dict[str, Tensor]:
    pixels = torch.randn(1, count, 3, 16, 16, generator=random)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, count, 16, 16, dtype=torch.long)}


def _patches(count: int, random: torch.Generator) -> dict[str, Tensor]:
    """4 x 4 patches of 2 frames, 3 channels and 4 x 4 pixels."""
    grid = torch.tensor([[1, 4, 4]] * count)
    return {"pixel_values": torch.randn(count * 16, 96, generator=random), "image_grid_thw": grid}


def _placed_patches(count: int, random: torch.Generator) -> dict[str, Tensor]:
    """4 x 4 patches of 3 channels and 4 x 4 pixels, in room for 24."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    places = torch.cat([places, torch.full((8, 2), -1)]).expand(count, -1, -1).clone()
    pixels = torch.rand(count, 24, 48, generator=random)
    return {"pixel_values": pixels * (places[..., :1] >= 0), "image_position_ids": places}


def _masked_patches(count: int, random: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(count, 16, 48, generator=random),
        "spatial_shapes": torch.tensor([[4, 4]] * count),
        "pixel_attention_mask": torch.ones(count, 16, dtype=torch.long),
    }


@dataclass(frozen=True)
class Case:
    """One family: its config, its images, the tokens of one, and the axis along which images are put together."""

    config: dict[str, Any]
    images: Pixels
    tokens: int
    join: int = 0


def _m_rope(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Case:
    own = {"depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2}
    vision = {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 32,
        "temporal_patch_size": 2,
        **own,
        **vision,
    }
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    return Case({"text_config": text, "vision_config": {**own, **vision}, **tokens, **more}, _patches, 4)


def _rope(*sections: int, **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **changes}
    return {"rope_parameters": rope}


def _qwen3(**text: Any) -> Case:
    own = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _m_rope(_text(**_rope(2, 3, 3, mrope_interleaved=True), **text), own)


def _qwen3_5(**text: Any) -> Case:
    linear = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    rope = _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5)
    own = {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return _m_rope(_text(**linear, **heads, **kinds, **rope, **text), own)


def _glm(text_type: str = "", vision_type: str = "", **text: Any) -> Case:
    marks = {"image_start_token_id": 93, "image_end_token_id": 94, "video_start_token_id": 95, "video_end_token_id": 90}
    own = {"image_size": 16, **({"model_type": vision_type} if vision_type else {})}
    return _m_rope(_text(text_type, **_rope(2, 1, 1, partial_rotary_factor=0.5), **text), own, **marks)


def _plain(
    text: dict[str, Any], vision: dict[str, Any], images: Pixels, tokens: int, *, join: int = 0, **more: Any
) -> Case:
    return Case({"text_config": text, "vision_config": vision, **more}, images, tokens, join)


_GRID_16 = {"image_grid_pinpoints": [[16, 16]]}
_RESAMPLER = {
    "hidden_size": 64,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 1,
}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_SAM = {**_VISION, "output_channels": 16, "image_size": 64, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 32}
_SIGLIP2 = {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False}
_SIGLIP2 = {**{k: v for k, v in _VISION.items() if k != "image_size"}, **_SIGLIP2}

_LOCAL_FIRST = ["sliding_attention", "full_attention"]
_GEMMA4 = {"layer_types": _LOCAL_FIRST, "sliding_window": 12, "use_bidirectional_attention": "vision"}
_GEMMA4 |= {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
_GEMMA4 |= {"num_kv_shared_layers": 0}
_GEMMA4_VISION = {**{k: v for k, v in _VISION.items() if k not in ("image_size", "num_channels")}, "head_dim": 16}
_GEMMA4_VISION |= {"num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 16}
_GEMMA4_TOKENS = {"video_token_id": VIDEO, "audio_token_id": 93, "boi_token_id": 94, "eoi_token_id": 95}
_GEMMA4_TOKENS |= {"boa_token_id": 90, "eoa_token_index": 90, "audio_config": None}

CASES: dict[str, Case] = {
    "qwen2_vl": _m_rope(_text(**_rope(2, 3, 3)), {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": _m_rope(_text(**_rope(2, 3, 3)), {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": _qwen3(),
    "qwen3_vl_moe": _qwen3(**_EXPERTS),
    "qwen3_5": _qwen3_5(),
    "qwen3_5_moe": _qwen3_5(**_EXPERTS, shared_expert_intermediate_size=16),
    "glm4v": _glm(),
    "glm4v_moe": _glm(**_SHARED, num_experts_per_tok=2, moe_intermediate_size=16),
    "glm46v": _glm("glm4v_text", "glm4v_vision"),
    "glm_ocr": _glm(),
    "llava": _plain(_text("llama"), _CLIP, _images, 16, image_token_index=IMAGE, vision_feature_layer=-1),
    "pixtral": _plain(
        _text("mistral"), _PIXTRAL, _sized_images, 16, image_token_index=IMAGE, vision_feature_select_strategy="full"
    ),
    "vipllava": _plain(_text("llama"), _CLIP, _images, 16, image_token_index=IMAGE, vision_feature_layers=[-1, -2]),
    "llava_next": _plain(
        _text("llama"), _CLIP, _tiled_images, 36, image_token_index=IMAGE, vision_feature_layer=-1, **_GRID_16
    ),
    "llava_onevision": _plain(
        _text("qwen2"), _SIGLIP, _tiled_images, 36, image_token_index=IMAGE, video_token_index=VIDEO, **_GRID_16
    ),
    "internvl": _plain(_text("qwen2"), _INTERN, _images, 4, image_token_id=IMAGE, image_seq_length=4),
    "mistral3": _plain(_text("mistral"), _PIXTRAL, _sized_images, 4, image_token_index=IMAGE),
    "lighton_ocr": _plain(_text("qwen3"), _PIXTRAL, _sized_images, 4, image_token_id=IMAGE),
    "idefics2": _plain(
        _text("mistral"), _VISION, _rows_of_images, 4, join=1, image_token_id=IMAGE, perceiver_config=_RESAMPLER
    ),
    "idefics3": _plain(_text("llama"), _VISION, _rows_of_images, 4, join=1, image_token_id=IMAGE),
    "smolvlm": _plain(_text("llama"), _VISION, _rows_of_images, 4, join=1, image_token_id=IMAGE),
    "aya_vision": _plain(_text("cohere2", **_WINDOWS), _SIGLIP, _images, 4, image_token_index=IMAGE),
    "cohere2_vision": _plain(
        _text("cohere2", **_WINDOWS), _SIGLIP, _images, 4, image_token_id=IMAGE, alignment_intermediate_size=64
    ),
    "got_ocr2": _plain(_text("qwen2"), _SAM, _large_images, 16, image_token_index=IMAGE),
    "deepseek_vl": _plain(_text("llama"), _SIGLIP, _images, 16, image_token_id=IMAGE),
    "lfm2_vl": _plain(
        _text("lfm2", layer_types=["conv", "full_attention"], block_multiple_of=32),
        _SIGLIP2,
        _masked_patches,
        4,
        image_token_id=IMAGE,
        projector_hidden_size=64,
    ),
    # tokens of an image, or of the prefix, see each other in both directions
    "gemma3": _plain(
        _text(**_WINDOWS, query_pre_attn_scalar=16), _SIGLIP, _images, 4, image_token_index=IMAGE, mm_tokens_per_image=4
    ),
    "gemma4": _plain(
        _text("gemma4_text", **_GEMMA4), _GEMMA4_VISION, _placed_patches, 4, image_token_id=IMAGE, **_GEMMA4_TOKENS
    ),
    "paligemma": _plain(
        _text("gemma"), _SIGLIP, _images, 16, image_token_index=IMAGE, projection_dim=64, hidden_size=64, vocab_size=96
    ),
    "paligemma2": _plain(
        _text("gemma2", layer_types=_LOCAL_FIRST, sliding_window=64, query_pre_attn_scalar=16),
        _SIGLIP,
        _images,
        16,
        image_token_index=IMAGE,
        projection_dim=64,
        hidden_size=64,
        vocab_size=96,
    ),
}
FAMILY = {"pixtral": "llava", "paligemma2": "paligemma"}  # a case that is another one's family with other parts


@dataclass
class Document:
    """Token ids [L] and the tensors of its images."""

    ids: Tensor
    images: dict[str, Tensor] = field(default_factory=dict)

    @property
    def types(self) -> Tensor:
        """0 for text, 1 for an image, 2 for a video; [1, L]."""
        return ((self.ids == IMAGE).int() + 2 * (self.ids == VIDEO).int())[None]


def kinds_of(case: str, document: Document) -> dict[str, Tensor]:
    """The kinds of a document's tokens [1, L], under the name that its family takes; {} if it takes none.

    The prefix of PaliGemma, kind 0, ends a token after the last image, or after two tokens of a text.
    """
    family = FAMILY.get(case, case)
    if family == "paligemma":
        shown = (document.ids == IMAGE).nonzero()
        ends = int(shown[-1]) + 2 if len(shown) else 2
        return {"token_type_ids": (torch.arange(len(document.ids)) >= ends).long()[None]}
    name = {"gemma3": "token_type_ids"}.get(family, "mm_token_type_ids")
    return {name: document.types.long()} if family in (*M_ROPE, "gemma3", "gemma4") else {}


def vision_model(case: str) -> Any:
    """A fresh tiny model with weights so random that every one of them matters, in train mode."""
    config = CONFIG_MAPPING[FAMILY.get(case, case)](**CASES[case].config)
    return tiny_model(config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]).train()


# Images and tokens of text before and after them, of each document; both halves hold as many images.
TWO_ROWS = (((1, 5, 3), (0, 7, 0), (2, 3, 2)), ((0, 4, 0), (3, 1, 1)))


def image_documents(case: str) -> list[list[Document]]:
    """The documents of two rows."""
    random = torch.Generator().manual_seed(3)

    def text(length: int) -> Tensor:
        return torch.randint(4, 90, (length,), generator=random)

    def document(images: int, before: int, after: int) -> Document:
        shown = [x for _ in range(images) for x in (torch.full((CASES[case].tokens,), IMAGE), text(1))]
        pixels = CASES[case].images(images, random) if images else {}
        return Document(torch.cat([text(before), *shown, text(after)]), pixels)

    return [[document(*shape) for shape in row] for row in TWO_ROWS]


def gemma4_videos() -> list[Document]:
    """Documents of Gemma 4: two frames, none, three frames of two videos; text stands between frames."""
    random, case = torch.Generator().manual_seed(4), CASES["gemma4"]

    def text(length: int) -> Tensor:
        return torch.randint(4, 90, (length,), generator=random)

    def document(*videos: int) -> Document:
        frames = sum(videos)
        shown = [x for _ in range(frames) for x in (torch.full((case.tokens,), VIDEO), text(1))]
        ids = torch.cat([text(3), *shown, text(2)])
        if not frames:
            return Document(ids)
        found = case.images(frames, random)
        images = {"pixel_values_videos": found["pixel_values"], "video_position_ids": found["image_position_ids"]}
        return Document(ids, {**images, "num_frames_per_video": torch.tensor(videos)})

    return [document(2), document(), document(1, 2)]


def joined_images(case: str, rows: list[list[Document]]) -> dict[str, Tensor]:
    """The images of packed rows, as the family's processor gives them for a batch of rows."""
    axis = CASES[case].join
    per_row = []
    for row in rows:
        shown = [document.images for document in row if document.images]
        per_row.append({key: torch.cat([images[key] for images in shown], axis) for key in shown[0]})
    return {key: torch.cat([images[key] for images in per_row]) for key in per_row[0]}
