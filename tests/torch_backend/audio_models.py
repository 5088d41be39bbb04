"""Tiny models that take audio, one per family that takes it packed, and documents with clips for them.

Clips are drawn at random, padding behind their ends too, so a frame that lands at the wrong place shows, and so does an
encoder that reads further behind the end of a clip than it does alone.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from tests.torch_backend.vision_models import IMAGE, TEXT, VIDEO, Document
from torch_backend.auditing.tiny import tiny_model
from torch_backend.hf.anatomy.audio import Audio, audio_of

AUDIO, BINS, POSITIONS = 93, 8, 40  # the token of clips, mel bins, and positions of an encoder of Whisper's kind
_WHISPER: dict[str, Any] = {
    "num_mel_bins": BINS,
    "d_model": 32,
    "hidden_size": 32,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "encoder_attention_heads": 2,
    "num_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "intermediate_size": 64,
    "max_source_positions": POSITIONS,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
}
_WINDOWS = {**_WHISPER, "intermediate_size": 32, "output_dim": 64, "n_window": 8, "n_window_infer": 32}
_WINDOWS |= {"downsample_hidden_size": 8, "max_source_positions": 200, "conv_chunksize": 2}
_WINDOWS_50 = {**_WINDOWS, "n_window": 50, "n_window_infer": 200}
_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "num_heads": 2}
_VISION |= {"in_channels": 3, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_VISION_2_5 = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
_VISION_3 = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_OMNI: dict[str, Any] = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 90}
_OMNI |= {"vision_end_token_id": 3, "audio_start_token_id": 94, "audio_end_token_id": 95}
_OMNI |= {"position_id_per_seconds": 25, "seconds_per_chunk": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _config(text: dict[str, Any], audio: dict[str, Any], **more: Any) -> dict[str, Any]:
    tokens = {"audio_token_id": AUDIO, "audio_token_index": AUDIO, "pad_token_id": 0}
    return {"text_config": text, "audio_config": audio, **tokens, **more}


CASES: dict[str, dict[str, Any]] = {
    "qwen2_audio": _config({**TEXT, "model_type": "qwen2"}, {**_WHISPER, "model_type": "qwen2_audio_encoder"}),
    "audioflamingo3": _config({**TEXT, "model_type": "qwen2"}, {**_WHISPER, "model_type": "audioflamingo3_encoder"}),
    "voxtral": _config({**TEXT, "model_type": "llama"}, {**_WHISPER, "model_type": "voxtral_encoder"}),
    "qwen2_5_omni_thinker": _config({**TEXT, **_M_ROPE}, _WINDOWS, vision_config=_VISION_2_5, **_OMNI),
    "qwen3_omni_moe_thinker": _config({**TEXT, **_M_ROPE, **_EXPERTS}, _WINDOWS_50, vision_config=_VISION_3, **_OMNI),
    "qwen3_asr": _config({**TEXT, "model_type": "qwen3"}, _WINDOWS_50),
}
KINDS = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
}
# Frames of the clips of each document, of two rows: none is longer than an encoder takes.
TWO_ROWS = (((), (13,), (5, 31), (80,)), ((), (22, 80), (79,), (4,)))
LONG = (((), (13,), (5, 131), (300,)), ((), (222, 80), (100,), (4,)))


def audio_model(case: str) -> Any:
    """A fresh tiny model with weights so random that every one of them matters, in train mode."""
    config = CONFIG_MAPPING[case](**CASES[case])
    kind = getattr(transformers, KINDS[case])
    return tiny_model(config, kind).train()


def clips_of(audio: Audio, frames: tuple[int, ...], random: torch.Generator) -> dict[str, Tensor]:
    """The tensors of clips of so many frames, as the family's processor gives them for one document."""
    if not frames:
        return {}
    width = audio.width or -(-max(frames) // audio.multiple) * audio.multiple
    features = torch.randn(len(frames), BINS, width, generator=random)
    if audio.mask is None:
        return {"input_features": features}
    return {"input_features": features, audio.mask: (torch.arange(width) < torch.tensor(frames)[:, None]).long()}


def audio_documents(case: str, rows: Any = None) -> list[list[Document]]:
    """The documents of two rows; text stands around every clip."""
    random, audio = torch.Generator().manual_seed(3), audio_of(CONFIG_MAPPING[case](**CASES[case]))
    assert audio is not None
    rows = rows or (TWO_ROWS if audio.width else LONG)

    def text(length: int) -> Tensor:
        return torch.randint(4, 90, (length,), generator=random)

    def document(frames: tuple[int, ...]) -> Document:
        shown = [x for count in frames for x in (torch.full((audio.tokens(count),), AUDIO), text(2))]
        return Document(torch.cat([text(3), *shown, text(2)]), clips_of(audio, frames, random))

    return [[document(frames) for frames in row] for row in rows]


def omni_documents(case: str) -> list[Document]:
    """Documents of a thinker: clips, images and videos in one record, and records of one kind alone."""
    random, audio = torch.Generator().manual_seed(5), audio_of(CONFIG_MAPPING[case](**CASES[case]))
    assert audio is not None

    def document(*shown: int | tuple[int, ...]) -> Document:
        """Text around clips of so many frames, and around images (1, H, W) and videos of more grids than one."""
        ids, grids = [torch.randint(4, 90, (3,), generator=random)], {IMAGE: [], VIDEO: []}
        for what in shown:
            grid = torch.tensor(what)
            token = AUDIO if isinstance(what, int) else IMAGE if what[0] == 1 else VIDEO
            count = audio.tokens(what) if isinstance(what, int) else int(grid.prod()) // 4
            around = (94, 95) if isinstance(what, int) else (90, 3)
            ids += [
                torch.tensor([around[0], *[token] * count, around[1]]),
                torch.randint(4, 90, (2,), generator=random),
            ]
            if not isinstance(what, int):
                grids[token].append(grid)
        tensors = clips_of(audio, tuple(what for what in shown if isinstance(what, int)), random)
        for token, pixels, sizes in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
            if grids[token]:
                tensors[f"{sizes}_grid_thw"] = torch.stack(grids[token])
                patches = int(tensors[f"{sizes}_grid_thw"].prod(-1).sum())
                tensors[pixels] = torch.randn(patches, 96, generator=random)
        if grids[VIDEO]:
            tensors["video_second_per_grid"] = torch.full((len(grids[VIDEO]),), 2.0)
        return Document(torch.cat(ids), tensors)

    image, wide, video = (1, 4, 4), (1, 4, 8), (2, 4, 4)
    return [document(*x) for x in ((13, image, 31), (), (wide, image), (80,), (video, 22, image), (31, video))]
