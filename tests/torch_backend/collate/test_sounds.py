"""Raw examples with clips: files, arrays and rates, read by the family's processor, and what is refused by name."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import WhisperFeatureExtractor
from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

import torch_backend
from packing_core.errors import LayoutError, PackingError, UnsupportedError, UnsupportedModelError
from tests.processes import limited
from tests.torch_backend.audio_models import AUDIO, BINS, audio_model
from tests.torch_backend.audio_processors import PROCESSORS, RATE, omni_processor, sound, wav
from tests.torch_backend.collate import test_vision_collator
from tests.torch_backend.collate.test_audio_collator import assert_same
from tests.torch_backend.collate.test_vision_collator import update
from tests.torch_backend.processors import picture
from tests.torch_backend.vision_models import IMAGE
from torch_backend import PackedCollator, PackedMediaDataset
from torch_backend.collate.sounds import clips_of, resampled
from torch_backend.hf.anatomy.audio import FEATURES, audio_of

chat = partial(test_vision_collator.chat, column="audios")


def at_rate(clip: Any, rate: int = RATE) -> dict[str, Any]:
    return {"array": clip, "sampling_rate": rate}


CHATS = [
    chat(ask="w4"),
    chat(at_rate(sound(0.3, 1)), answer="w10 w11"),
    chat(at_rate(sound(1.0, 2)), ask="w20"),
    chat({"bytes": wav(sound(0.11, 3)), "path": None}, ask="w30 w31"),
]


def processed(processor: Any, example: dict[str, Any]) -> dict[str, Any]:
    clips = [clips_of({"audio": clip}, "it", RATE)[0] for clip in example["audios"]]
    return test_vision_collator.processed(processor, example, clips, "audio", AUDIO, sampling_rate=RATE)


@pytest.mark.parametrize("case", PROCESSORS)
def test_raw_chats_equal_each_document_alone(case: str) -> None:
    model, processor = audio_model(case), PROCESSORS[case]()
    truth = update(model, [processed(processor, example) for example in CHATS])
    batch = PackedCollator(model, 160, processor=processor, strategy="sequential")(CHATS)
    assert len(batch["packed_documents"]) == 4 and (batch["input_ids"].as_subclass(torch.Tensor) == AUDIO).any()
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


def test_images_beside_clips_in_raw_chats_equal_each_document_alone() -> None:
    model, processor = audio_model("qwen2_5_omni_thinker"), omni_processor()
    clip, shown = sound(0.3, 1), picture(0)
    image, audio, text = {"type": "image", "image": shown}, {"type": "audio", "audio": clip}, {"type": "text"}

    def turns(*parts: Any) -> list[dict[str, Any]]:
        answer = [{**text, "text": "w7 w8"}]
        return [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]

    asked = {**text, "text": "w5 w6"}
    whole = [turns(asked), turns(image, asked, audio), turns(audio, image, asked), turns(image, asked), turns(audio)]
    options = {"add_special_tokens": False, "sampling_rate": RATE}
    read = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "processor_kwargs": options}
    found = [dict(processor.apply_chat_template([each], **read)) for each in whole]
    media = torch.tensor([AUDIO, IMAGE])
    for each in found:
        each["labels"] = each["input_ids"].masked_fill(torch.isin(each["input_ids"], media), -100)
    truth = update(model, found)
    kept = {"images": [shown], "audios": [at_rate(clip)]}
    raw = [{"messages": whole[0]}, {"messages": turns({"type": "image"}, asked, {"type": "audio"}), **kept}]
    raw += [{"messages": turns(asked), **kept}, {"messages": whole[3]}, {"messages": turns(), "audio": at_rate(clip)}]
    with pytest.raises(LayoutError, match=r"example 0: clip 0 has 1\.2 seconds and the model 1: cut"):
        PackedCollator(model, 160, processor=processor)([{**raw[4], "audio": at_rate(sound(1.2))}])
    batch = PackedCollator(model, 160, processor=processor)(raw)
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)
    text_of = {"prompt": "<|vision_start|> <|image_pad|> <|vision_end|> w5 <|audio_bos|> <|AUDIO|> <|audio_eos|>"}
    batch = PackedCollator(model, processor=processor)([{**text_of, "completion": "w6 w7", **kept}])
    assert batch["labels"][batch["labels"] != -100].tolist() == [6, 7] and {"pixel_values", FEATURES} <= batch.keys()


@limited()
def test_a_data_set_reads_its_clips_in_workers() -> None:
    model, processor = audio_model("qwen2_audio"), PROCESSORS["qwen2_audio"]()
    bad = chat({"bytes": b"nothing", "path": None})
    rows = PackedMediaDataset([*CHATS, bad], 64, model, processor, on_error="skip", seed=None)
    assert list(rows.skipped) == [4] and "example 4: clip 0 cannot be decoded" in rows.skipped[4]
    collate = PackedCollator(model, processor=processor)
    here = [collate([row]) for row in rows]
    there = list(DataLoader(rows, batch_size=1, num_workers=1, collate_fn=collate, multiprocessing_context="fork"))
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a["input_features"], b["input_features"]) and a["packed_images"] == b["packed_images"]


def test_a_prompt_with_a_place_and_a_completion() -> None:
    model, processor = audio_model("qwen2_audio"), PROCESSORS["qwen2_audio"]()
    collate = PackedCollator(model, processor=processor)
    batch = collate([{"prompt": "w4 <|AUDIO|> w5", "completion": "w6 w7", "audio": at_rate(sound(0.2))}])
    assert batch["labels"][batch["labels"] != -100].tolist() == [6, 7]
    places = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "w4"}]}]
    with pytest.raises(LayoutError, match="example 0 has 1 places for audios and 2 audios"):
        collate([{"messages": places, "audios": [at_rate(sound(0.2))] * 2}])


def test_parts_of_apis_hold_clips(tmp_path: Path) -> None:
    content, clip = wav(sound(0.1)), clips_of({"audio": {"bytes": wav(sound(0.1))}}, "example 3", RATE)[0]
    (tmp_path / "a.wav").write_bytes(content)
    text = base64.b64encode(content).decode()
    for part in (
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": (tmp_path / "a.wav").as_uri()}},
        {"type": "audio_url", "audio_url": f"data:audio/wav;base64,{text}"},
        {"type": "audio", "base64": text},
    ):
        (read,) = clips_of({"messages": [{"role": "user", "content": [part]}]}, "example 3", RATE)
        assert np.array_equal(read, clip)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_files_of_every_width_and_of_two_channels_are_read(width: int, tmp_path: Path) -> None:
    clip = sound(0.1)
    both = np.stack([clip, -0.5 * clip], 1)
    (tmp_path / "a.wav").write_bytes(wav(both, channels=2, width=width))
    (found,) = clips_of({"audio": str(tmp_path / "a.wav")}, "example 3", RATE)
    assert found.dtype == np.float32 and np.abs(found - 0.25 * clip).max() < 2.0 ** (2 - 8 * width) + 1e-6


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_clips_of_other_rates_are_resampled(rate: int) -> None:
    """A tone keeps its frequency, its amplitude and its length; one above half the rate is gone."""
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    found = resampled(tone, rate, RATE)
    want = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(found) == RATE and np.abs(found - want)[500:-500].max() < 1e-3
    if rate > 2 * 11_000:
        high = np.sin(2 * np.pi * 10_000 * np.arange(rate) / rate).astype(np.float32)
        assert np.abs(resampled(high, rate, RATE))[500:-500].max() < 2e-3


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ("absent.wav", "FileNotFoundError"),
        ({"bytes": b"RIFF\0\0\0\0WAVEfmt ", "path": None}, "cannot be decoded"),
        ({"bytes": b"", "path": None}, "cannot be decoded"),
        (sound(0.1), "an array whose sampling_rate is None"),
        (at_rate(np.stack([sound(0.1)] * 2)), r"an array of shape \[2, 1600\]: pass one channel"),
        (at_rate(np.zeros(0)), "it has no samples"),
        (at_rate(np.zeros(1), 48_000), "it has no samples"),
        (at_rate(np.zeros(9, np.int16)), "an array of int16: pass numbers from -1 to 1"),
        (at_rate(np.zeros(9, np.complex64)), "an array of complex64: pass numbers from -1 to 1"),
        (at_rate(np.full(9, 1e300)), "samples that are not finite"),
        (at_rate(np.full(9, np.nan)), "samples that are not finite"),
        (at_rate(sound(1.1)), "clip 0 has 1.1 seconds and the model 1: cut it into clips"),
        (at_rate(np.zeros(1)), "clip 0 has 1 frames, too few for a single token"),
    ],
)
def test_clips_that_cannot_be_used_are_named_by_their_record(clip: Any, words: str) -> None:
    collate = PackedCollator(audio_model("qwen2_audio"), processor=PROCESSORS["qwen2_audio"]())
    with pytest.raises(PackingError, match=f"example 1.*{words}"):
        collate([CHATS[0], chat(clip)])


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({**CHATS[1], "image": picture(0)}, "has image, which Qwen2AudioForCond.* does not take packed"),
        ({**CHATS[1], "video": Path("a.mp4")}, "has a video: run the processor on it first"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "a.mp4"}}]}]},
            "has a video: run the processor on it first",
        ),
        (
            {"messages": "w4 w5"},
            r"cannot be read \(AttributeError: .*leave out the example \(messages are turns",
        ),
        ({"prompt": CHATS[0]["messages"][:1], "completion": "w5"}, "cannot be read .*prompt and completion likewise"),
        ({"text": ""}, "has no tokens: leave it out"),
        ({"input_ids": "w4"}, "input_ids of example 1 has dtype"),
        ({"input_ids": [4.5, 5.0]}, r"input_ids of example 1 is float64 \[2\]: pass integers"),
        (
            {"input_ids": torch.tensor([[4, 5], [6, 7]])},
            r"input_ids of example 1 is int64 \[2, 2\]: pass integers in one",
        ),
    ],
)
def test_records_that_cannot_be_read_are_named_and_left_out(example: dict[str, Any], words: str) -> None:
    model, processor = audio_model("qwen2_audio"), PROCESSORS["qwen2_audio"]()
    with pytest.raises(PackingError, match=words):
        PackedMediaDataset([CHATS[0], example], 64, model, processor)
    rows = PackedMediaDataset([CHATS[0], example], 64, model, processor, on_error="skip")
    assert list(rows.skipped) == [1] and "example 1" in rows.skipped[1]


def test_silence_is_a_clip() -> None:
    collate = PackedCollator(audio_model("qwen2_audio"), processor=PROCESSORS["qwen2_audio"]())
    assert collate([chat(at_rate(np.zeros(RATE // 4)))])["input_features"].isfinite().all()


def test_images_and_processors_of_others_are_refused() -> None:
    model = audio_model("qwen2_audio")
    with pytest.raises(UnsupportedError, match="example 0 has image, which Qwen2AudioForCond.* does not take packed"):
        PackedCollator(model, processor=PROCESSORS["qwen2_audio"]())([chat(images=[0])])
    processor = PROCESSORS["qwen2_audio"]()
    processor.audio_token_id = 5
    with pytest.raises(PackingError, match="marks audio by the token 5 and Qwen2AudioForCond.* expects 93"):
        PackedCollator(model, processor=processor)
    from tests.torch_backend.processors import tiny_processor

    with pytest.raises(PackingError, match="has no tokenizer and feature_extractor"):
        PackedCollator(model, processor=tiny_processor("llava"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Whisper", "whisper cannot be trained packed: it is the decoder of an encoder-decoder"),
        ("Speech2Text", "speech_to_text cannot be trained packed: it is an encoder-decoder"),
        ("GraniteSpeech", r"GraniteSpeechFor.* \(its encoder has batch norms"),
        ("GlmAsr", r"GlmAsrFor.* \(its encoder sees the padding of a clip"),
    ],
)
def test_other_families_are_refused_by_name(kind: str, words: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(getattr(transformers, f"{kind}Config")())
    with pytest.raises(UnsupportedModelError, match=words):
        PackedCollator(model, processor=PROCESSORS["qwen2_audio"]())


def test_a_model_of_images_takes_no_audio() -> None:
    from tests.torch_backend.processors import tiny_processor
    from tests.torch_backend.vision_models import vision_model

    collate = PackedCollator(vision_model("llava"), processor=tiny_processor("llava"))
    with pytest.raises(UnsupportedError, match="example 0 has audio, which LlavaForCond.* does not take packed"):
        collate([chat(at_rate(sound(0.1)))])


def test_clips_beside_tokens_are_heard_as_by_voxtrals_processor() -> None:
    """Its tokeniser is not needed; a clip longer than the encoder's length is cut into clips of it."""
    model = audio_model("voxtral")
    extractor = WhisperFeatureExtractor(
        feature_size=BINS, sampling_rate=RATE, hop_length=200, chunk_length=1, n_fft=400
    )
    clips, audio = [sound(0.4, 1), sound(1.5, 2)], audio_of(model.config)
    count = audio.tokens(audio.width) * 3
    ids = [5, *[AUDIO] * count, 6, 7]
    own = VoxtralProcessor._retrieve_input_features
    options = {"sampling_rate": RATE, "padding": True, "truncation": False, "pad_to_multiple_of": RATE}
    options |= {"max_source_positions": audio.width, "return_tensors": "pt"}
    features = own(SimpleNamespace(feature_extractor=extractor), clips, **options)
    assert features.shape == (3, BINS, audio.width)
    collate = PackedCollator(torch_backend.patch(model, verify=False), 128, processor=extractor)
    batch = collate([{"input_ids": ids, "audios": [at_rate(clip) for clip in clips]}, {"input_ids": [8, 9]}])
    want = collate([{"input_ids": ids, FEATURES: features}, {"input_ids": [8, 9]}])
    assert torch.equal(batch[FEATURES], want[FEATURES]) and torch.equal(batch["labels"], want["labels"])
    assert update(model, [batch])["loss"].isfinite()
    with pytest.raises(LayoutError, match="example 0 has .* audio tokens and clips of"):
        collate([{"input_ids": ids, "audio": at_rate(clips[0])}])
    with pytest.raises(UnsupportedError, match="example 0 has text, and no processor of Voxtral.* pass input_ids"):
        collate([chat(at_rate(clips[0]))])
    other = WhisperFeatureExtractor(feature_size=BINS + 1)
    with pytest.raises(PackingError, match="the feature extractor of WhisperFeatureExtractor makes 9 mel bins"):
        PackedCollator(model, 128, processor=other)
