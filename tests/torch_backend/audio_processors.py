"""Tiny processors for the models of ``audio_models``, built without downloads, and clips as arrays and files.

Feature extractors make 80 frames a second of 16,000 samples, and take one second where an encoder has one length.
"""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
from transformers import WhisperFeatureExtractor
from transformers.models.audioflamingo3.processing_audioflamingo3 import AudioFlamingo3Processor
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from tests.torch_backend.audio_models import BINS
from tests.torch_backend.processors import HALVES, TEMPLATE, tiny_tokenizer, without_videos

RATE = 16_000


def _extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=BINS, sampling_rate=RATE, hop_length=200, chunk_length=1, n_fft=400)


def _template(token: str) -> str:
    return TEMPLATE.replace("'image'", "'audio'").replace("IMAGE", token)


def _tokenizer(bos: str, eos: str, token: str) -> Any:
    return tiny_tokenizer(audio_bos_token=bos, audio_eos_token=eos, audio_token=token)


def _qwen2() -> Any:
    token = "<|AUDIO|>"
    return Qwen2AudioProcessor(
        _extractor(), _tokenizer("<|audio_bos|>", "<|audio_eos|>", token), chat_template=_template(token)
    )


def _flamingo() -> Any:
    token = "<sound>"
    return AudioFlamingo3Processor(
        _extractor(), _tokenizer("<b>", "<e>", token), chat_template=_template(token), max_audio_len=3
    )


def _asr() -> Any:
    token = "<|audio_pad|>"
    tokenizer = _tokenizer("<|audio_start|>", "<|audio_end|>", token)
    extractor = Qwen3ASRFeatureExtractor(feature_size=BINS, sampling_rate=RATE, hop_length=200, n_fft=400, n_window=50)
    return Qwen3ASRProcessor(extractor, tokenizer, chat_template=_template(token))


def omni_processor() -> Any:
    """Qwen2.5-Omni's, of images and clips."""
    named = {"audio_eos_token": "<|audio_eos|>", "audio_bos_token": "<|audio_bos|>", "audio_token": "<|AUDIO|>"}
    named |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    image, video = "<|image_pad|>", "<|video_pad|>"
    tokenizer = tiny_tokenizer(image, video, **named, image_token=image, video_token=video)
    audio = "{% elif part['type'] == 'audio' %}<|audio_bos|> <|AUDIO|> <|audio_eos|> {% else %}{{ part['text'] }}"
    template = TEMPLATE.replace("IMAGE w69 ", f"<|vision_start|> {image} <|vision_end|> ")
    template = template.replace("{% else %}{{ part['text'] }}{% endif %}", audio + "{% endif %}")
    pixels = {"min_pixels": 64, "max_pixels": 256, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    images = Qwen2VLImageProcessorPil(**pixels, **HALVES)
    return without_videos(Qwen2_5OmniProcessor)(images, None, _extractor(), tokenizer, chat_template=template)


PROCESSORS = {"qwen2_audio": _qwen2, "audioflamingo3": _flamingo, "qwen3_asr": _asr}


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A clip of noise [samples]."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)


def wav(samples: Any, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """A file of PCM of samples [n] or [n, channels] from -1 to 1."""
    numbers = np.round(np.asarray(samples, np.float64).reshape(-1) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    numbers = numbers + 128 if width == 1 else numbers
    kept = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(kept)
    return made.getvalue()
