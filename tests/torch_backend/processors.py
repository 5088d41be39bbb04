"""Tiny processors for the models of ``vision_models``, built without downloads.

``tiny_processor(case)`` pairs a tokeniser of 96 words with the family's own image processor, in the sizes of the tiny
model. The words are ``w4`` to ``w69``; :func:`picture` draws an image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.torch_backend.vision_models import IMAGE, VIDEO

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
# Writes every part of a message between spaces; what the assistant says is marked.
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {% if message['role'] == 'assistant' %}{% generation %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %} </s>{% endgeneration %}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE w69 {% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>"}
_QWEN |= {"vision_eos_token": "<|vision_end|>"}


def tiny_tokenizer(image: str = "<image>", video: str = "<video>", **named: str) -> PreTrainedTokenizerFast:
    """One token for each word; ``named`` are further special tokens, such as ``boi_token``."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(4, 70)), "<user>", "<assistant>", "<system>"]
    others = [word for word in dict.fromkeys(named.values()) if word not in (image, video)]
    vocabulary = {word: number for number, word in enumerate(words)} | {image: IMAGE, video: VIDEO}
    free = (number for number in range(95, len(words), -1) if number not in (IMAGE, VIDEO))
    vocabulary |= dict(zip(others, free, strict=False))
    vocabulary |= {f"<{number}>": number for number in {*range(96)} - {*vocabulary.values()}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, extra_special_tokens={**named})
    fast.add_tokens([image, video, *others], special_tokens=True)
    return fast


def without_videos(kind: type) -> type:
    """The processor class with None for a video processor, which would need torchvision."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})


def _qwen(kind: type, **sizes: Any) -> Any:
    images = Qwen2VLImageProcessorPil(
        min_pixels=64, max_pixels=256, patch_size=4, temporal_patch_size=2, merge_size=2, **HALVES, **sizes
    )
    tokenizer = tiny_tokenizer("<|image_pad|>", "<|video_pad|>", **_QWEN)
    return without_videos(kind)(images, tokenizer, None, chat_template=_template("<|image_pad|>"))


def _template(image: str) -> str:
    return TEMPLATE.replace("IMAGE", image)


def _fixed(**changes: Any) -> dict[str, Any]:
    return {"size": {"height": 16, "width": 16}, "do_center_crop": False, **HALVES, **changes}


def _llava() -> Any:
    images = CLIPImageProcessorPil(**_fixed())
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tiny_tokenizer(), chat_template=_template("<image>"), **options)


def _internvl() -> Any:
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = tiny_tokenizer("<IMG_CONTEXT>", "<video>", **named, video_token="<video>")
    images = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, **HALVES)
    template = _template("<IMG_CONTEXT>")
    return without_videos(InternVLProcessor)(images, tokenizer, None, image_seq_length=4, chat_template=template)


def _gemma3() -> Any:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image>"}
    images = Gemma3ImageProcessorPil(**_fixed(do_pan_and_scan=False))
    return Gemma3Processor(
        images, tiny_tokenizer(**named), image_seq_length=4, chat_template=_template("<start_of_image>")
    )


def _paligemma() -> Any:
    images = CLIPImageProcessorPil(**_fixed())
    images.image_seq_length = 16
    return PaliGemmaProcessor(images, tiny_tokenizer(image_token="<image>"))


def _idefics3() -> Any:
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, **HALVES
    )
    named = {"f": "<fake_token_around_image>", "g": "<global-img>", "u": "<end_of_utterance>"}
    return Idefics3Processor(images, tiny_tokenizer(**named), image_seq_len=4, chat_template=_template("<image>"))


PROCESSORS = {
    "qwen2_vl": lambda: _qwen(Qwen2VLProcessor),
    "qwen2_5_vl": lambda: _qwen(Qwen2_5_VLProcessor),
    "qwen3_vl": lambda: _qwen(Qwen3VLProcessor),
    "qwen3_5": lambda: _qwen(Qwen3VLProcessor),
    "llava": _llava,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
}
OF_PREFIXES = {"paligemma": _paligemma}  # which take a prompt and a completion, and no chats


def tiny_processor(case: str) -> Any:
    """The processor of a model of ``vision_models.CASES``."""
    return (PROCESSORS | OF_PREFIXES)[case]()


def picture(seed: int, height: int = 16, width: int = 16) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
