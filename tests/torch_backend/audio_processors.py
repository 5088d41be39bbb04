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
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

from tests.torch_backend.audio_models import BINS
from tests.torch_backend.processors import TEMPLATE, tiny_tokenizer

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
