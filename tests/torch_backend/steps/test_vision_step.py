"""The fast step with images: compiled decoder layers behind the vision tower, the loss without logits, and no graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.models import error
from tests.torch_backend.vision_models import image_documents, kinds_of, vision_model
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.collate.vision import VisionReader
from torch_backend.losses import next_tokens, output_layer
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps import cuda_graph, fast_backward
from torch_backend.steps.eligibility import why_not_captured, why_not_compiled
from torch_backend.steps.fixed_shapes import FixedShapes

ROWS = ((1, 3), (0, 1), (2, 1), (3,))  # documents of each batch: without images, with one, with three, without


def batches_of(
    case: str, capacity: int = 32, implementation: str = "triton", rows: Sequence[Sequence[int]] = ROWS
) -> tuple[Any, list[dict[str, Any]]]:
    """A patched model, and batches of one row: text, one image, two images, text."""
    model = patch(vision_model(case), implementation=implementation, verify=False)
    collate = PackedCollator(model, capacity)
    collate.vision, collate.pad_id = VisionReader(vision_model(case)), 0
    documents = [document for row in image_documents(case) for document in row]
    kinds = [{name: x[0] for name, x in kinds_of(case, d).items() if name == "token_type_ids"} for d in documents]
    examples = [{"input_ids": d.ids.tolist(), **d.images, **each} for d, each in zip(documents, kinds, strict=True)]
    return model, [collate([examples[number] for number in row]) for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("case", "first"), [("gemma3", "text"), ("qwen3_vl", "image")])
def test_decoder_layers_are_compiled_behind_the_tower(case: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    counter = counted_compilation(monkeypatch, fast_backward)
    trained, losses = [], []
    for choice in ("auto", False):
        model, batches = batches_of(case, implementation="triton" if choice == "auto" else "sdpa")
        if first == "image":
            batches = [*batches[1:], batches[0]]
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=choice, capture=False)
        seen = []
        for batch in (*batches, batches[1]):
            losses.append(float(step(batch)["loss"]))
            seen.append(counter.frame_count)
        trained.append({name: x.detach() for name, x in model.named_parameters()})
        if choice == "auto":
            assert step.parts["layers"] == "compiled" and step.parts["loss"] == "without logits"
            assert 0 < seen[-1] == seen[3], seen  # no batch of the second round compiles anything anew
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-4)
    for name, value in trained[0].items():
        assert error(value, trained[1][name]) <= 1e-4, name


@pytest.mark.usefixtures("interpreted")
def test_the_step_says_why_it_records_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    model, (text, image, *_) = batches_of("qwen2_5_vl")
    assert why_not_compiled(model, image) is None is why_not_captured(model, text)
    assert why_not_captured(model, image) == "its batches hold images, whose number and sizes differ"
    for module in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)
    assert (why_not_captured(model, text) or "").startswith("ranks whose rows have no image run the vision tower on a")


def test_tokens_of_images_have_no_part_in_the_loss_nor_in_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch says how many targets it has at most, so hidden states of others stay out; nothing is read back."""
    monkeypatch.setattr(next_tokens, "ROUNDED", 8)
    model, (_, _, batch, _) = batches_of("qwen2_5_vl", implementation="sdpa")
    trained = int((batch["labels"] != -100).sum())
    assert batch["packed_targets"] == trained <= 16
    seen, own = [], output_layer.linear_cross_entropy
    monkeypatch.setattr(
        output_layer,
        "linear_cross_entropy",
        lambda hidden, *given, **named: seen.append(hidden) or own(hidden, *given, **named),
    )
    found = []
    for more in ({}, {"packed_targets": None}):
        model.zero_grad()
        loss, count = causal_lm_loss(model, {**batch, **more})
        loss.backward()
        found.append((loss.detach(), count, {name: x.grad for name, x in model.named_parameters()}))
    assert [x.shape[1] for x in seen[-2:]] == [16, 32]
    (loss, count, gradients), (want, wanted, truth) = found
    assert error(loss, want) <= 1e-6 and int(count) == int(wanted) == trained
    for name, value in truth.items():
        assert error(gradients[name], value) <= 1e-5, name
    batch["packed_targets"] = 3  # of as many as fill twice the rows
    assert causal_lm_loss(model, batch)[0].isnan()


def test_fixed_shapes_pad_what_is_one_for_each_token_and_leave_images_as_they_are() -> None:
    _, (_, batch, *_) = batches_of("paligemma", capacity=48)
    batch["token_type_ids"][..., -1] = 1
    fixed = FixedShapes(tokens=64)(batch)
    assert fixed["input_ids"].shape == fixed["token_type_ids"].shape == (1, 64)
    assert bool((fixed["token_type_ids"][:, 47:] == 1).all())  # no prefix in padding
    assert torch.equal(fixed["pixel_values"], batch["pixel_values"])
