"""Describes how a family takes audio: which tensors, how many tokens stand for a clip, and how its encoder runs.

A config -> :func:`audio_of` -> :class:`Audio`, which holds no weights. Clips come as log-mel features [clips, bins,
frames], padded at the end, and a mask of their frames. An encoder is run in one of these ways:

    row       attention masks padding, so all clips lie in one row without any: each is a segment (Whisper's kind)
    windows   the encoder cuts clips into chunks and attends inside windows, which are the segments of one row
    equal     the encoder sees the padding of a clip, so every clip has the full length, and is a row of one batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from torch_backend.hf.anatomy.families import EXACT_KEYS
from torch_backend.ops.conv.clip_rows import BEYOND

FEATURES = "input_features"
# What a batch carries of its clips on the host: the frames of each, and those of the longest clip of its record.
FRAMES, LONGEST = "clip_frames", "clip_longest"
Encoder = Literal["row", "windows", "equal"]

_DESCRIPTIONS: dict[Encoder, str] = {
    "row": "the encoder runs all clips as segments of one row, without padding",
    "windows": "the encoder runs the windows of all clips as segments of one row, and pads last chunks alone",
    "equal": "the encoder sees the padding of a clip, so all clips have its full length and run as one batch",
}
# Families that take audio, of which no clip is packed, with the reason.
_UNPROVED = "its encoder is not known to be exact on clips of unequal length"
REFUSED_AUDIO = {
    **dict.fromkeys(("gemma3n", "gemma4", "phi4_multimodal"), _UNPROVED),
    "glmasr": "its encoder sees the padding of a clip, whose length depends on the batch",
    "granite_speech": "its encoder has batch norms over all frames of a batch",
    **dict.fromkeys(("kyutai_speech_to_text", "moshi"), "it reads codes beside text tokens, frame by frame"),
    "musicflamingo": "its rotary embedding finds the windows of clips by the tokens of a batch",
    "vibevoice_asr": "it draws its features at random",
    "voxtral_realtime": "it adds audio to text tokens, frame by frame",
}


@dataclass(frozen=True)
class Audio:
    """Describes the clips of a family.

    Attributes:
        mask: the argument that marks the frames of clips; None where clips are never shorter than their features.
        encoder: how clips run through the encoder.
        tokens: of a clip of so many frames.
        width: frames of the features of every clip; None if they may have any number.
        multiple: frames of features are a multiple of this.
        chunk: the encoder fills chunks up to this, or to the longest clip, and convolves unmasked; so records whose
            clips are all shorter run by themselves, those of one length at a time.
        placeholder: the token that stands for a piece of a clip.
        spans: the segments of a clip of so many frames in the encoder.
        cuts: whether its processor silently cuts clips that are longer than its feature extractor takes.
    """

    mask: str | None
    encoder: Encoder
    tokens: Callable[[int], int]
    spans: Callable[[int], list[int]]
    placeholder: int
    width: int | None = None
    multiple: int = 1
    chunk: int = 1
    cuts: bool = False

    @property
    def description(self) -> str:
        """Says how clips run through the encoder."""
        return f"audio: {_DESCRIPTIONS[self.encoder]}"

    @property
    def keys(self) -> frozenset[str]:
        """The tensors that clips come as."""
        return frozenset((FEATURES,) if self.mask is None else (FEATURES, self.mask))

    def frames(self, clips: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Counts the frames of each clip of a document, on the host."""
        if FEATURES not in clips:
            return ()
        if self.mask is None:
            return (clips[FEATURES].shape[-1],) * len(clips[FEATURES])
        return tuple(clips[self.mask].sum(-1).tolist())

    def sizes(self, records: Iterable[Mapping[str, Tensor]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Returns what a batch of records carries of their clips on the host."""
        frames = [self.frames(clips) for clips in records]
        longest = (max(of_record) for of_record in frames for _ in of_record)
        return (FRAMES, tuple(chain.from_iterable(frames))), (LONGEST, tuple(longest))

    def cropped(self, clips: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The clips of a packed batch without the frames that no encoder reads there."""
        last = max(self.frames(clips)) + BEYOND if self.encoder == "row" else None
        return {name: x[..., :last] for name, x in clips.items()}

    def check(self, marked: int, clips: Mapping[str, Tensor], where: str) -> None:
        """Raises LayoutError if a document's clips cannot be encoded, or its ``marked`` placeholders disagree."""
        missing = sorted(self.keys - clips.keys()) if clips else []
        if missing:
            raise LayoutError(f"{where} has audio without {missing[0]}: pass what the processor returns")
        frames = self.frames(clips)
        width = clips[FEATURES].shape[-1] if clips else 0
        if clips and self.width not in (None, width):
            raise LayoutError(
                f"{where} has features of {width:,} frames and the encoder takes {self.width:,}: let the processor pad "
                "clips to the encoder's length and cut longer ones into clips"
            )
        if clips and not bool(clips[FEATURES].isfinite().all()):
            raise LayoutError(f"{where} has audio that is not finite: repair it or leave out the example")
        if width % self.multiple:
            raise LayoutError(
                f"{where} has features of {width:,} frames, and the encoder takes multiples of {self.multiple}: pass "
                "what the processor of the model returns"
            )
        for number, count in enumerate(frames):
            if self.tokens(count) < 1:
                raise LayoutError(
                    f"{where}: clip {number} has {count} frames, too few for a single token: leave it out"
                )
            if self.mask is not None and not bool(clips[self.mask][number][:count].all()):
                raise LayoutError(f"{where}: {self.mask} of clip {number} has a hole: it marks padding at the end")
        tokens = sum(map(self.tokens, frames))
        if tokens != marked:
            raise LayoutError(
                f"{where} has {marked:,} audio tokens and clips of {tokens:,}: placeholders and clips must agree"
            )

    def check_processor(self, processor: Any, kind: str, tower: Any) -> None:
        """Raises PackingError if a processor is not one for a model of this ``kind``."""
        name, its = type(processor).__name__, getattr(processor, "audio_token_id", None)
        if its is None:
            its = getattr(processor.tokenizer, "audio_token_id", None)
        if its is None and isinstance(token := getattr(processor, "audio_token", None), str):
            its = processor.tokenizer.convert_tokens_to_ids(token)
        if its != self.placeholder:
            raise PackingError(
                f"{name} marks audio by the token {its} and {kind} expects {self.placeholder}: pass the processor of "
                "the model"
            )
        self.check_bins(processor.feature_extractor, name, kind, tower)

    def check_bins(self, extractor: Any, name: str, kind: str, tower: Any) -> None:
        """Raises PackingError if a feature extractor makes other features than a model takes."""
        bins = getattr(extractor, "feature_size", tower.num_mel_bins)
        if bins != tower.num_mel_bins:
            raise PackingError(
                f"the feature extractor of {name} makes {bins} mel bins and the encoder of {kind} takes "
                f"{tower.num_mel_bins}: pass the processor of the model"
            )


def require_encoder(root: Any) -> None:
    """Raises UnsupportedModelError if an installed model keeps its encoder elsewhere, as those of old versions do."""
    if root.base_model is root or not hasattr(root.base_model, "audio_tower"):
        raise UnsupportedModelError(
            f"{type(root).__name__} of this version of transformers has no base model with an audio_tower, in which "
            "clips are packed: pip install --upgrade transformers, or pack text alone"
        )


def audio_of(config: Any) -> Audio | None:
    """Returns how a model takes audio, None if it takes none packed."""
    family = config.model_type
    keys = EXACT_KEYS.get(family, frozenset())
    if FEATURES not in keys:
        return None
    tower: Any = config.audio_config
    mask = next((key for key in keys if key.endswith("mask") and "feature" in key), None)
    make = partial(Audio, mask=mask, placeholder=int(config.audio_token_id))
    if mask is None:  # each 30 seconds are one clip
        tokens = tower.max_source_positions * tower.hidden_size // tower.intermediate_size
        return make(
            encoder="equal",
            tokens=partial(_always, tokens),
            spans=_halved,
            width=2 * tower.max_source_positions,
            cuts=True,
        )
    if family in ("qwen2_audio", "audioflamingo3"):
        return make(encoder="row", tokens=_pooled, spans=_halved, width=2 * tower.max_source_positions, cuts=True)
    chunk = 2 * tower.n_window
    if family == "qwen2_5_omni_thinker":
        return make(encoder="windows", tokens=_pooled, spans=partial(_spans_of_chunks, chunk), cuts=True)
    spans = partial(_spans_of_windows, chunk, tower.n_window_infer // chunk)
    filled_up = {"multiple": chunk} if family == "qwen3_asr" else {"chunk": chunk}
    return make(encoder="windows", tokens=partial(_of_chunks, chunk), spans=spans, **filled_up)


def _always(tokens: int, frames: int) -> int:
    return tokens


def _halved(frames: int) -> list[int]:
    return [(frames + 1) // 2]


def _pooled(frames: int) -> int:
    """A convolution of stride 2, and the mean of every two frames."""
    return (frames + 1) // 2 // 2


def _three_halvings(frames: int) -> int:
    """Three convolutions of stride 2."""
    return (frames + 7) // 8


def _of_chunks(chunk: int, frames: int) -> int:
    return frames // chunk * _three_halvings(chunk) + _three_halvings(frames % chunk)


def _spans_of_chunks(chunk: int, frames: int) -> list[int]:
    return [(min(chunk, frames - start) + 1) // 2 for start in range(0, frames, chunk)]


def _spans_of_windows(chunk: int, ratio: int, frames: int) -> list[int]:
    window, total = _three_halvings(min(chunk, frames)) * ratio, _of_chunks(chunk, frames)
    return [min(window, total - start) for start in range(0, total, window)]
