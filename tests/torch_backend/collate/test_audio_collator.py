"""``PackedCollator``: rows of documents with audio equal each document alone.

The truth is the family's own model, one document at a time; documents without, with one and with two clips stand in one
row, and clips are shorter than, as long as and longer than what a window of an encoder holds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_backend
from packing_core.errors import CapacityError, LayoutError, PackingError
from tests.torch_backend.audio_models import AUDIO, CASES, audio_documents, audio_model, omni_documents
from tests.torch_backend.collate import test_vision_collator
from tests.torch_backend.collate.test_vision_collator import collator_of_processed, update
from tests.torch_backend.vision_models import IMAGE, VIDEO, Document
from torch_backend.hf.anatomy.audio import FEATURES, audio_of
from torch_backend.hf.anatomy.families import OMNI
from torch_backend.hf.blank_images import absent_media
from torch_backend.hf.patch import state_of
from torch_backend.ops.attention import dispatch
from torch_backend.steps.eligibility import holds_images
from torch_backend.steps.tower_blocks import compile_towers

TOLERANCE = 1e-5
RECORDS_OF_SHORT_CLIPS = ((), (5, 31), (80,), (13, 4))


def alone(document: Document) -> dict[str, Any]:
    """Returns the batch of one document as the family's own model takes it, with labels at text alone."""
    ids = document.ids[None]
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(torch.isin(ids, torch.tensor([AUDIO, IMAGE, VIDEO])), -100),
        **document.images,
    }


def features_of(documents: list[Document]) -> list[dict[str, Any]]:
    return [{"input_ids": document.ids.tolist(), **document.images} for document in documents]


assert_same = partial(test_vision_collator.assert_same, tower=("audio",))


@pytest.mark.parametrize("case", CASES)
def test_packed_clips_equal_each_document_alone(case: str) -> None:
    model, rows = audio_model(case), audio_documents(case)
    documents = [document for row in rows for document in row]
    truth = update(model, [alone(document) for document in documents])
    collate = collator_of_processed(model, max(sum(len(x.ids) for x in row) for row in rows))
    batch = collate(features_of(documents))
    assert batch["input_ids"].shape[0] == 2 and len(batch["packed_documents"]) == 8
    assert not (batch["labels"] == AUDIO).any() and (batch["labels"] >= 0).any()
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


@pytest.mark.parametrize("case", OMNI)
def test_images_and_videos_beside_clips_equal_each_document_alone(case: str) -> None:
    model, documents = audio_model(case), omni_documents(case)
    embeddings = model.get_input_embeddings().weight.data
    embeddings[VIDEO] = embeddings[IMAGE]  # a place is known by its token, not by the embedding of it
    truth = update(model, [alone(document) for document in documents])
    assert all(truth[name].any() for name in truth if "visual" in name)
    batch = collator_of_processed(model, 96)(features_of(documents))
    assert batch["position_ids"].ndim == 3 and len(batch["packed_documents"]) == 6 > len(batch["input_ids"]) > 1
    assert_same(update(torch_backend.patch(model, verify=False), [batch]), truth)


def test_sound_between_the_frames_of_a_video_and_frames_between_positions_are_refused() -> None:
    model, document = audio_model("qwen3_omni_moe_thinker"), omni_documents("qwen3_omni_moe_thinker")[5]
    collate, example = collator_of_processed(model, 96), features_of([document])[0]
    with pytest.raises(PackingError, match="frames of a video lie between whole positions"):
        collate([{**example, "video_second_per_grid": torch.tensor([0.5])}])
    ids = torch.tensor(example["input_ids"])
    ids[(ids == 90).nonzero()[0] - 1] = 90
    ids[(ids == 90).nonzero()[1]] = 94
    with pytest.raises(PackingError, match="has pieces of its sound between its frames"):
        collate([{**example, "input_ids": ids.tolist()}])


@pytest.mark.parametrize("case", CASES)
def test_rows_without_clips_give_the_encoder_gradients_of_zero(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch_backend.hf.patch.blank_media", lambda root, decoder, kwargs: absent_media(root.config, kwargs)
    )
    model, document = torch_backend.patch(audio_model(case), verify=False), audio_documents(case)[0][0]
    update(model, [collator_of_processed(model, 64)(features_of([document]))])
    tower = [p for name, p in model.named_parameters() if "audio_tower" in name and p.requires_grad]
    used = [p for p in tower if p.grad is not None]
    assert len(used) > len(tower) - 3 and not any(p.grad.any() for p in used)


@pytest.mark.parametrize("case", ["qwen2_audio", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"])
def test_other_collators_batches_are_read_from_the_mask(case: str) -> None:
    """A batch without the frames of its clips on the host gives the same loss, by the record of every clip."""
    model, (row,) = (
        torch_backend.patch(audio_model(case), verify=False),
        audio_documents(case, [RECORDS_OF_SHORT_CLIPS]),
    )
    batch = collator_of_processed(model, 400)(features_of(row))
    want = update(model, [batch])
    del batch["packed_images"]
    assert_same(update(model, [batch]), want)
    fewer = {name: batch[name][1:] for name in batch if name.startswith(("input_feat", "feature_att"))}
    with pytest.raises(LayoutError, match="audio tokens and clips of .*: placeholders and clips must agree"):
        update(model, [batch | fewer])
    if case == "qwen2_audio":  # whose convolutions make no token of one frame
        one = batch["feature_attention_mask"].clone()
        one[-1, 1:] = 0
        with pytest.raises(LayoutError, match=rf"clip {len(one) - 1} of the batch is too short for a single token"):
            update(model, [batch | {"feature_attention_mask": one}])


def processed(case: str = "qwen2_audio") -> tuple[Any, dict[str, Any]]:
    """A collator, and a document of it with two clips."""
    model = audio_model(case)
    return collator_of_processed(model, 64), features_of([audio_documents(case)[0][2]])[0]


def test_placeholders_and_clips_must_agree() -> None:
    collate, example = processed()
    example["input_ids"] = example["input_ids"][:-3]
    collate([example])
    with pytest.raises(LayoutError, match="example 0 has 10 audio tokens and clips of 9"):
        collate([{**example, "input_ids": [AUDIO, *example["input_ids"]]}])


def test_a_clip_of_one_frame_and_silence_and_nan() -> None:
    collate, example = processed()
    mask, features = example["feature_attention_mask"].clone(), example[FEATURES]
    collate([{**example, FEATURES: torch.zeros_like(features)}])
    with pytest.raises(LayoutError, match="example 0 has audio that is not finite"):
        collate([{**example, FEATURES: features * float("nan")}])
    mask[0, 1:] = 0
    with pytest.raises(LayoutError, match="example 0: clip 0 has 1 frames, too few for a single token"):
        collate([{**example, "feature_attention_mask": mask}])
    with pytest.raises(LayoutError, match="feature_attention_mask of clip 0 has a hole"):
        collate([{**example, "feature_attention_mask": example["feature_attention_mask"].flip(1)}])


def test_features_of_another_length_and_without_a_mask() -> None:
    collate, example = processed()
    with pytest.raises(LayoutError, match="features of 60 frames and the encoder takes 80"):
        collate([{**example, FEATURES: example[FEATURES][..., :60]}])
    with pytest.raises(LayoutError, match="audio without feature_attention_mask"):
        collate([{name: x for name, x in example.items() if name != "feature_attention_mask"}])


def test_no_overflow_cuts_a_clip() -> None:
    model = audio_model("qwen2_audio")
    long = features_of([audio_documents("qwen2_audio")[0][3]])
    for overflow in ("error", "truncate", "split"):
        collate = collator_of_processed(model, 16)
        collate.plan_options["overflow"] = overflow
        with pytest.raises(CapacityError, match="20 of them of clips"):
            collate(long)


def test_the_number_of_tokens_is_that_of_the_family() -> None:
    """By transformers' own counts, from one frame on."""
    for case, lengths in {"qwen2_audio": range(1, 80), "qwen3_omni_moe_thinker": range(1, 350)}.items():
        model = audio_model(case)
        audio, tower = audio_of(model.config), model.model.audio_tower
        for frames in lengths:
            if case == "qwen2_audio":
                want = tower._get_feat_extract_output_lengths(torch.tensor(frames))[1]
            else:
                module = __import__(type(model).__module__, fromlist=["_"])
                want = module._get_feat_extract_output_lengths(torch.tensor(frames), tower.n_window)
            assert audio.tokens(frames) == int(want), (case, frames)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("audioflamingo3", "all clips as segments of one row, without padding"),
        ("qwen3_asr", "the windows of all clips as segments of one row"),
        ("voxtral", "all clips have its full length"),
    ],
)
def test_explain_says_how_clips_run_through_the_encoder(case: str, words: str) -> None:
    notes = torch_backend.explain(torch_backend.patch(audio_model(case), verify=False)).notes
    assert [note for note in notes if note.startswith("audio: ") and words in note]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", ["qwen2_audio", "qwen3_omni_moe_thinker"])
def test_encoders_that_are_recomputed_give_the_same_gradients(case: str, reentrant: bool) -> None:
    model, rows = audio_model(case), audio_documents(case)
    truth = update(model, [alone(document) for document in rows[1]])
    model = torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(update(model, [collator_of_processed(model, 400)(features_of(rows[1]))]), truth)


@pytest.mark.parametrize("case", ["qwen2_audio", "qwen2_5_omni_thinker", "voxtral"])
def test_a_patch_proves_the_decoder_and_is_taken_back(case: str) -> None:
    model, document = audio_model(case), audio_documents(case)[0][1]
    before = model(**alone(document)).logits
    torch_backend.unpatch(torch_backend.patch(model))
    assert torch.equal(model(**alone(document)).logits, before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", ["audioflamingo3", "qwen2_5_omni_thinker", "qwen3_asr"])
def test_blocks_of_an_encoder_share_a_graph_for_any_number_of_clips(case: str, monkeypatch: Any) -> None:
    model, rows = torch_backend.patch(audio_model(case), verify=False), audio_documents(case)
    batches = [collator_of_processed(model, 400)(features_of(row)) for row in (rows[0][:3], rows[1][:2])]
    assert all(map(holds_images, batches))  # so no CUDA graph records their clips
    want = [update(model, [batch]) for batch in batches]
    monkeypatch.setattr(dispatch, "order", lambda request, load: ("triton",))
    counter = CompileCounterWithBackend("eager")
    compile_towers(model, state_of(model).tower_requests, backend=counter)
    for batch, truth in zip(batches, want, strict=True):
        assert_same(update(model, [batch]), truth)
        assert counter.frame_count == 1
    document = rows[0][1]
    assert torch.equal(model(**alone(document)).logits, audio_model(case)(**alone(document)).logits)  # as they are


def test_adapters_in_an_encoder_that_is_recomputed_are_trained() -> None:
    """transformers marks the first convolution's output, which packed calls do not run as a module."""
    model, rows = audio_model("qwen2_audio"), audio_documents("qwen2_audio")
    model.requires_grad_(False)
    model.model.audio_tower.layers[0].self_attn.q_proj.requires_grad_(True)
    truth = update(model, [alone(document) for document in rows[1] if document.images])
    model = torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    documents = [document for document in rows[1] if document.images]
    got = update(model, [collator_of_processed(model, 400)(features_of(documents))])
    for name, gradient in truth.items():
        assert float((got[name] - gradient).abs().max()) < TOLERANCE * float(gradient.abs().max()), name


@pytest.mark.parametrize("case", CASES)
def test_encoders_in_bfloat16_take_the_features_of_the_collator(case: str) -> None:
    model, rows = torch_backend.patch(audio_model(case), verify=False), audio_documents(case)
    batch = collator_of_processed(model, 400)(features_of(rows[1]))
    want = float(model(**batch).loss.detach())
    assert float(model.to(torch.bfloat16)(**batch).loss.detach()) == pytest.approx(want, rel=0.02)
