"""Vision-language models: with images packed equals each document alone, or the batch is refused by name.

Each family of ``EXACT_KEYS`` is proved here on a tiny model: two packed rows of documents with and without images
against every document by itself, logits and gradients, those of the vision tower too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend import audio_models
from tests.torch_backend.models import Run, alone, collate, documents, packed, run_of
from tests.torch_backend.vision_models import (
    CASES,
    FAMILY,
    IMAGE,
    VIDEO,
    Document,
    gemma4_videos,
    image_documents,
    joined_images,
    kinds_of,
    vision_model,
)
from torch_backend.auditing.compare import relative_error
from torch_backend.hf.anatomy.families import EXACT_KEYS, NUMBERED_BY_KINDS, OMNI
from torch_backend.hf.blank_images import tie_blank_image
from torch_backend.packed_tokens import plain

TEXT_ONLY = {"gpt2"}  # its further key is no modality; tests/torch_backend/hf/inputs/test_inputs.py proves it


def each_alone(model: Any, docs: list[Document], **named: list[Tensor]) -> Run:
    """Every document in a batch of its own; the loss is the mean over all their targets."""
    logits = [
        model(input_ids=doc.ids[None], **doc.images, **{name: values[i] for name, values in named.items()}).logits[0]
        for i, doc in enumerate(docs)
    ]
    losses = [F.cross_entropy(x[:-1], doc.ids[1:], reduction="sum") for x, doc in zip(logits, docs, strict=True)]
    return run_of(model, logits, torch.stack(losses).sum() / sum(len(doc.ids) - 1 for doc in docs))


TOLERANCE = 2e-5


def assert_same(got: Run, want: Run) -> None:
    """Logits, loss and gradients agree; a key's bias has next to no gradient and is measured against the largest."""
    largest = max(float(gradient.abs().max()) for gradient in want.gradients.values())
    errors = {"loss": relative_error(got.loss, want.loss)}
    for i, (g, w) in enumerate(zip(got.logits, want.logits, strict=True)):
        errors[f"logits of document {i}"] = relative_error(g, w)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        errors[f"gradient of {name}"] = relative_error(got.gradients[name], gradient, largest)
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def rows_of(rows: list[list[Document]]) -> dict[str, Any]:
    """Text and segments of packed rows; the second row is padded at its end."""
    capacity = sum(len(document.ids) for document in rows[0])
    batch = collate([document.ids for row in rows for document in row], capacity=capacity)
    assert batch["input_ids"].shape == (2, capacity) and len(batch["packed_lengths"]) == 6
    return batch


def on_axes(batch: dict[str, Any], positions: list[Tensor]) -> Tensor:
    """position_ids [3, B, S]: those of the documents [3, 1, L], and numbers at padding."""
    axes = batch["position_ids"].expand(3, -1, -1).flatten(1).clone()
    found = torch.cat(positions, dim=2).flatten(1)
    axes[:, : found.shape[1]] = found
    return axes.view(3, *batch["input_ids"].shape)


def joined_kinds(case: str, rows: list[list[Document]]) -> dict[str, Tensor]:
    """The kinds of the tokens of packed rows [B, S], 0 in padding."""
    capacity = sum(len(document.ids) for document in rows[0])
    kinds = [kinds_of(case, document) for row in rows for document in row]
    return {name: collate([each[name][0] for each in kinds], capacity=capacity)["input_ids"] for name in kinds[0]}


def rope_index(model: Any, document: Document) -> Tensor:
    """Computes the positions of one document as a collator does: [3, 1, L]."""
    grid = document.images.get("image_grid_thw")
    return model.model.get_rope_index(document.ids[None], mm_token_type_ids=document.types, image_grid_thw=grid)[0]


def test_every_family_and_every_key_of_the_table_is_proved_here() -> None:
    proved: dict[str, set[str]] = {}
    for case in CASES:
        found = [document for row in image_documents(case) for document in row]
        keys = {key for document in found for key in (*document.images, *kinds_of(case, document))}
        proved.setdefault(FAMILY.get(case, case), set()).update(keys)
    for family in NUMBERED_BY_KINDS:
        proved[family] |= {"pixel_values_videos", "video_grid_thw", "mm_token_type_ids"}
    for case in audio_models.CASES:  # by tests/torch_backend/collate/test_audio_collator.py
        found = [document for row in audio_models.audio_documents(case) for document in row]
        found += audio_models.omni_documents(case) if case in OMNI else []
        proved[case] = {key for document in found for key in document.images} - {"video_second_per_grid"}
    proved["gemma4"] |= {key for document in gemma4_videos() for key in document.images}  # test_gemma_videos.py
    assert proved == {family: set(keys) for family, keys in EXACT_KEYS.items() if family not in TEXT_ONLY}


@pytest.mark.parametrize("case", CASES)
def test_packed_images_equal_each_document_alone(case: str) -> None:
    model, rows = vision_model(case), image_documents(case)
    docs = [document for row in rows for document in row]
    m_rope = FAMILY.get(case, case) in NUMBERED_BY_KINDS
    # alone, an M-RoPE model computes the positions by itself
    kinds = [kinds_of(case, doc) for doc in docs]
    truth = each_alone(model, docs, **{name: [each[name] for each in kinds] for name in kinds[0]})
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images(case, rows), **joined_kinds(case, rows)}
    if m_rope:
        batch["position_ids"] = on_axes(batch, [rope_index(model, doc) for doc in docs])
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)


@pytest.mark.parametrize("family", NUMBERED_BY_KINDS)
def test_packed_videos_at_given_positions_equal_each_document_alone(family: str) -> None:
    """Two frames of 2 x 2 tokens in each of two documents, at positions that only the caller knows."""
    model, random = vision_model(family), torch.Generator().manual_seed(4)
    frames = torch.full((8,), IMAGE if family.startswith("glm") else VIDEO)  # GLM marks both by the same token
    docs = []
    for before in (3, 6):
        text = torch.randint(4, 90, (before + 2,), generator=random)
        pixels = {"pixel_values_videos": torch.randn(32, 96, generator=random)}
        grid = {"video_grid_thw": torch.tensor([[2, 4, 4]])}
        docs.append(Document(torch.cat([text[:before], frames, text[before:]]), pixels | grid))
    positions = [torch.randint(0, 3, (3, 1, len(doc.ids)), generator=random).cumsum(-1) for doc in docs]
    truth = each_alone(model, docs, position_ids=positions)
    torch_backend.patch(model, verify=False)
    batch = collate([doc.ids for doc in docs], capacity=32)
    batch |= {key: torch.cat([doc.images[key] for doc in docs]) for key in docs[0].images}
    batch["position_ids"] = on_axes(batch, positions)
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)


def test_positions_with_the_text_s_own_before_the_three_axes_are_exact() -> None:
    """[4, B, S], as transformers itself makes them in generation."""
    model, rows = vision_model("qwen2_vl"), image_documents("qwen2_vl")
    docs = [document for row in rows for document in row]
    truth = each_alone(model, docs, mm_token_type_ids=[doc.types for doc in docs])
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images("qwen2_vl", rows)}
    axes = on_axes(batch, [rope_index(model, doc) for doc in docs])
    batch["position_ids"] = torch.cat([batch["position_ids"][None], axes])
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)


@pytest.mark.parametrize("family", NUMBERED_BY_KINDS)
def test_images_without_positions_on_three_axes_are_refused_with_the_way_out(family: str) -> None:
    model, rows = torch_backend.patch(vision_model(family), verify=False), image_documents(family)
    batch = {**rows_of(rows), **joined_images(family, rows)}
    message = (
        r"came with pixel_values and without position_ids \[3, B, S\]: .* in the collator, model.model.get_rope_index"
    )
    for positions in (batch["position_ids"], None):
        with pytest.raises(UnsupportedModelError, match=message):
            model(**{**batch, "position_ids": positions})


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "paligemma"])
def test_images_without_the_kinds_of_tokens_are_refused(case: str) -> None:
    """Without them these models would let the tokens of an image see the past alone."""
    model, rows = torch_backend.patch(vision_model(case), verify=False), image_documents(case)
    batch = {**rows_of(rows), **joined_images(case, rows)}
    key = "mm_token_type_ids" if case == "gemma4" else "token_type_ids"
    message = f"a packed batch came without {key}, by which {type(model).__name__} knows the tokens that see"
    with pytest.raises(UnsupportedModelError, match=message):
        model(**batch)
    with pytest.raises(LayoutError, match=rf"{key} must have the shape of input_ids, got \[1, 3\]"):
        model(**batch, **{key: torch.zeros(1, 3, dtype=torch.long)})


@pytest.mark.parametrize("case", ["gemma3", "gemma4"])
def test_token_types_that_mark_no_image_are_exact_and_others_need_one(case: str) -> None:
    """Processors add them to text as well."""
    key = "token_type_ids" if case == "gemma3" else "mm_token_type_ids"
    model, docs = vision_model(case), documents((5, 9, 7))
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    batch = collate(docs, capacity=32)
    types = torch.zeros_like(batch["input_ids"])
    assert_same(packed(model, docs, {**batch, key: types}), truth)
    types[0, 7] = 1
    with pytest.raises(
        UnsupportedModelError,
        match=rf"{key} other than 0 \(row 0, token 7\) and without pixel_values: {type(model).__name__}",
    ):
        model(**batch, **{key: types})


def test_gemma4_without_images_that_attend_both_ways_takes_them_as_the_text() -> None:
    """The small models of the family are causal throughout, whatever the kinds of tokens say."""
    model, rows = vision_model("gemma4"), image_documents("gemma4")
    model.config.text_config.use_bidirectional_attention = None
    docs = [document for row in rows for document in row]
    truth = each_alone(model, docs, mm_token_type_ids=[doc.types for doc in docs])
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images("gemma4", rows), **joined_kinds("gemma4", rows)}
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)
    del batch["mm_token_type_ids"]
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)


def test_a_prefix_that_does_not_begin_its_document_is_refused() -> None:
    model, rows = torch_backend.patch(vision_model("paligemma"), verify=False), image_documents("paligemma")
    batch = {**rows_of(rows), **joined_images("paligemma", rows), **joined_kinds("paligemma", rows)}
    last = len(rows[0][0].ids) - 1
    batch["token_type_ids"][0, last] = 0
    message = rf"token_type_ids returns to the prefix inside a document \(row 0, token {last}\)"
    with pytest.raises(LayoutError, match=message):
        model(**batch)


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "paligemma2"])
def test_spans_longer_than_the_window_are_refused(case: str) -> None:
    model, rows = vision_model(case), image_documents(case)
    model.config.text_config.sliding_window = 3
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images(case, rows), **joined_kinds(case, rows)}
    message = "more than 3 tokens see each other in both directions at row 0, token .*make images smaller"
    with pytest.raises(UnsupportedModelError, match=message):
        model(**batch)


@pytest.mark.parametrize("case", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_a_tower_attends_to_all_images_of_a_step_in_one_call_for_each_layer(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock towers call attention for every image, or window, and read the boundaries back in every layer."""
    from torch_backend.hf import attention

    model, rows = vision_model(case), image_documents(case)
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images(case, rows)}
    batch["position_ids"] = on_axes(batch, [rope_index(model, doc) for row in rows for doc in row])
    calls, own = [], attention._of_tower
    monkeypatch.setattr(attention, "_of_tower", lambda *given, **named: calls.append(given[3]) or own(*given, **named))
    model(**batch)
    images = len(batch["image_grid_thw"])
    assert len(calls) == 2 and images > 3  # of two layers
    full = calls[-1].lengths
    assert full == (16,) * images
    if case == "qwen2_5_vl":
        assert set(calls[0].lengths) == {16}  # windows of 4 x 4 patches
    else:
        assert calls[0] is calls[1]  # made once
    calls.clear()
    document = rows[0][0]
    model(input_ids=document.ids[None], **document.images, **kinds_of(case, document))
    assert not calls


def test_no_dense_mask_is_made_above_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's outer model would make masks [S, S] of every batch, for layers that do not read them."""
    from transformers import masking_utils

    model, rows = vision_model("gemma3"), image_documents("gemma3")
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images("gemma3", rows), **joined_kinds("gemma3", rows)}
    made = []
    own = masking_utils.sdpa_mask
    monkeypatch.setitem(
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda *args, **kwargs: made.append(kwargs.get("q_length")) or own(*args, **kwargs),
    )
    row = batch["input_ids"].shape[1]
    model(**batch)
    assert row not in made
    unpacked = {name: plain(batch[name]).flip(1) for name in ("input_ids", "token_type_ids")}
    model(**unpacked, **joined_images("gemma3", rows))
    assert row in made


@pytest.mark.parametrize("case", CASES)
def test_where_nothing_but_the_tower_is_trained_a_batch_without_images_has_gradients_of_zero(case: str) -> None:
    """A blank image runs through the tower; it reaches the same parameters as the images of documents do."""
    model, rows = vision_model(case), image_documents(case)
    torch_backend.patch(model, verify=False)
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    for module in text:
        module.requires_grad_(False)
    batch = {**rows_of(rows), **joined_images(case, rows), **joined_kinds(case, rows)}
    if FAMILY.get(case, case) in NUMBERED_BY_KINDS:
        batch["position_ids"] = on_axes(batch, [rope_index(model, doc) for row in rows for doc in row])

    def gradients(batch: dict[str, Any]) -> dict[str, Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    shown = gradients(batch)
    docs = documents((5, 9, 7))
    batch = collate(docs, capacity=32)
    if "paligemma" in case:
        batch["token_type_ids"] = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        loss = model(**batch).loss
    blank = gradients(batch)
    assert blank.keys() == shown.keys() and blank
    assert not any(gradient.any() for gradient in blank.values())
    assert torch.equal(model(**batch).loss.detach(), loss)
    text[0].requires_grad_(True)  # and no blank image runs
    assert not gradients(batch).keys() & shown.keys()


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "paligemma", "paligemma2"])
def test_the_audit_of_a_family_that_sees_both_ways_is_exact(case: str) -> None:
    assert torch_backend.audit(vision_model(case), patched=True).verdict == "exact"


@pytest.mark.parametrize("case", ["qwen2_vl", "llava", "idefics3", "gemma3", "gemma4", "paligemma"])
def test_images_in_batches_that_are_not_packed_are_unchanged_to_the_bit(case: str) -> None:
    model = vision_model(case).eval()
    document = image_documents(case)[0][2]
    inputs = {"input_ids": document.ids[None], **document.images}
    inputs |= kinds_of(case, document)
    calls = [
        lambda: model(**inputs).logits,
        lambda: model(**inputs, use_cache=False, attention_mask=torch.ones_like(inputs["input_ids"])).logits,
        lambda: model.generate(**inputs, max_new_tokens=4, do_sample=False),
    ]
    with torch.no_grad():
        before = [call() for call in calls]
        torch_backend.patch(model, verify=False)
        after = [call() for call in calls]
    for want, got in zip(before, after, strict=True):
        assert torch.equal(want, got)


FORMS = ("qwen2_vl", "gemma4", "lfm2_vl", "pixtral", "llava_next", "internvl", "idefics3", "llava")
AS_IT_COMES = "got_ocr2"  # its tower takes pixels in its own dtype alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blank_image_of_each_form_runs_through_its_tower(dtype: torch.dtype) -> None:
    """Patches in rows, with places, with a mask; pixels with sizes, in tiles, of a width and height, in rows."""
    for case in (*FORMS, AS_IT_COMES):
        model, embeddings = vision_model(case).to(dtype), torch.ones(1, 3, 64, dtype=dtype, requires_grad=True)
        tied = tie_blank_image(model, SimpleNamespace(blank=("image",)), model.get_input_embeddings(), (), embeddings)
        assert torch.equal(tied, embeddings), case
        tied.sum().backward()
        waiting = [p.grad for p in model.parameters() if p.grad is not None]
        assert waiting and not any(gradient.any() for gradient in waiting), case
