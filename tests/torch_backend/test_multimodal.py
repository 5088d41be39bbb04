"""Vision-language models: with images packed equals each document alone, or the batch is refused by name.

Each family of ``EXACT_KEYS`` is proved here on a tiny model: two packed rows of documents with and without images
against every document by itself, logits and gradients, those of the vision tower too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import Run, alone, collate, documents, packed, run_of, tiny
from tests.torch_backend.vision_models import (
    CASES,
    FAMILY,
    IMAGE,
    VIDEO,
    Document,
    image_documents,
    joined_images,
    vision_model,
)
from torch_backend.auditing.compare import relative_error
from torch_backend.hf.anatomy.families import EXACT_KEYS, M_ROPE

REFUSED = ("gemma3",)
EXACT = [case for case in CASES if case not in REFUSED]
TEXT_ONLY = {"gpt2"}  # its further key is no modality; tests/torch_backend/test_inputs.py proves it


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


def rope_index(model: Any, document: Document) -> Tensor:
    """Computes the positions of one document as a collator does: [3, 1, L]."""
    grid = document.images.get("image_grid_thw")
    return model.model.get_rope_index(document.ids[None], mm_token_type_ids=document.types, image_grid_thw=grid)[0]


def test_every_family_and_every_key_of_the_table_is_proved_here() -> None:
    proved: dict[str, set[str]] = {}
    for case in EXACT:
        keys = {key for row in image_documents(case) for document in row for key in document.images}
        proved.setdefault(FAMILY.get(case, case), set()).update(keys)
    for family in M_ROPE:
        proved[family] |= {"pixel_values_videos", "video_grid_thw", "mm_token_type_ids"}
    assert proved == {family: set(keys) for family, keys in EXACT_KEYS.items() if family not in TEXT_ONLY}


@pytest.mark.parametrize("case", EXACT)
def test_packed_images_equal_each_document_alone(case: str) -> None:
    model, rows = vision_model(case), image_documents(case)
    docs = [document for row in rows for document in row]
    m_rope = FAMILY.get(case, case) in M_ROPE
    # alone, an M-RoPE model computes the positions by itself
    truth = each_alone(model, docs, **({"mm_token_type_ids": [doc.types for doc in docs]} if m_rope else {}))
    torch_backend.patch(model, verify=False)
    batch = {**rows_of(rows), **joined_images(case, rows)}
    if m_rope:
        batch["position_ids"] = on_axes(batch, [rope_index(model, doc) for doc in docs])
        types = collate([doc.types[0].long() for doc in docs], capacity=batch["input_ids"].shape[1])["input_ids"]
        batch["mm_token_type_ids"] = types
    assert_same(packed(model, [doc.ids for doc in docs], batch), truth)


@pytest.mark.parametrize("family", M_ROPE)
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


@pytest.mark.parametrize("family", M_ROPE)
def test_images_without_positions_on_three_axes_are_refused_with_the_way_out(family: str) -> None:
    model, rows = torch_backend.patch(vision_model(family), verify=False), image_documents(family)
    batch = {**rows_of(rows), **joined_images(family, rows)}
    message = (
        r"came with pixel_values and without position_ids \[3, B, S\]: .* in the collator, model.model.get_rope_index"
    )
    for positions in (batch["position_ids"], None):
        with pytest.raises(UnsupportedModelError, match=message):
            model(**{**batch, "position_ids": positions})


@pytest.mark.parametrize("axes", [False, True], ids=["one_axis", "three_axes"])
@pytest.mark.parametrize("family", M_ROPE)
def test_text_alone_is_exact_with_positions_on_one_axis_or_three(family: str, axes: bool) -> None:
    model, docs = vision_model(family), documents((5, 9, 7))
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    batch = collate(docs, capacity=32)
    if axes:
        batch["position_ids"] = batch["position_ids"].expand(3, -1, -1)
    assert_same(packed(model, docs, batch), truth)


def test_gemma3_images_are_refused_by_name() -> None:
    """An image's tokens see each other in both directions, which packed attention cannot do."""
    model, rows = torch_backend.patch(vision_model("gemma3"), verify=False), image_documents("gemma3")
    batch = {**rows_of(rows), **joined_images("gemma3", rows)}
    message = "came with pixel_values, and Gemma3ForConditionalGeneration is not known to be exact with it: pack text"
    with pytest.raises(UnsupportedModelError, match=message):
        model(**batch)


@pytest.mark.parametrize(("family", "key"), [("gemma3", "token_type_ids"), ("gemma4", "mm_token_type_ids")])
def test_token_types_that_mark_no_image_are_exact_and_others_are_refused(family: str, key: str) -> None:
    """Processors add them to text as well."""
    model, docs = tiny(family), documents((5, 9, 7))
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    batch = collate(docs, capacity=32)
    types = torch.zeros_like(batch["input_ids"])
    assert_same(packed(model, docs, {**batch, key: types}), truth)
    types[0, 7] = 1
    with pytest.raises(
        UnsupportedModelError, match=rf"{key} other than 0 \(row 0, token 7\): {type(model).__name__} lets"
    ):
        model(**batch, **{key: types})


@pytest.mark.parametrize("case", ["qwen2_vl", "llava", "idefics3", "gemma3"])
def test_images_in_batches_that_are_not_packed_are_unchanged_to_the_bit(case: str) -> None:
    model = vision_model(case).eval()
    document = image_documents(case)[0][2]
    inputs = {"input_ids": document.ids[None], **document.images}
    inputs |= {"mm_token_type_ids": document.types} if case in M_ROPE else {}
    inputs |= {"token_type_ids": document.types} if case == "gemma3" else {}
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
