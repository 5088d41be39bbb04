"""Compiled blocks of a vision tower: one graph for any number of patches, the same numbers, and nothing read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_backend
from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.models import error
from tests.torch_backend.steps.test_vision_step import batches_of
from torch_backend.hf.edits import patches
from torch_backend.hf.patch import state_of
from torch_backend.ops.attention import dispatch
from torch_backend.steps import dynamic_compile
from torch_backend.steps.tower_blocks import CompiledTower, compile_towers


def gradients_of(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


MORE_ROWS = ((2,), (0, 2), (3,))  # two images, three, none


@pytest.mark.usefixtures("interpreted")
def test_blocks_of_a_tower_share_graphs_for_any_number_of_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (*images, text) = batches_of("qwen2_5_vl", 96, "sdpa", MORE_ROWS)  # of the decoder
    want = [gradients_of(model, batch) for batch in images]
    monkeypatch.setattr(dispatch, "order", lambda request, load: ("triton",))
    counter = CompileCounterWithBackend("eager")
    compile_towers(model, state_of(model).tower_requests, backend=counter)
    frames = []
    for batch, truth in zip(images, want, strict=True):
        got = gradients_of(model, batch)
        frames.append(counter.frame_count)
        for name, value in truth.items():
            assert error(got[name], value) <= 1e-5, name
    assert [len(batch["pixel_values"]) for batch in images] == [32, 48]
    assert frames == [1, 1]  # windows and whole images
    model(**text)
    assert counter.frame_count == 1


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
def test_blocks_find_their_attention_as_on_a_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are kept without the sizes of their batches, by which the order of a GPU asks."""
    model, (_, _, batch, _) = batches_of("qwen2_5_vl", implementation="sdpa")
    model(**batch)
    (request,) = state_of(model).tower_requests["vision"]
    on_gpu = replace(request, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    serving = []
    monkeypatch.setattr(
        dispatch, "refusal", lambda found, request: None if found is dispatch.load(serving[0]) else "does not serve"
    )
    for name, compiled in (("triton", True), ("varlen", True), ("sdpa", False)):
        serving[:] = [name]
        assert CompiledTower({on_gpu}).ready is compiled, name
    assert not CompiledTower(set()).ready


def test_the_tower_reads_grids_on_the_host_and_nothing_from_the_device() -> None:
    """Batches carry grids as plain numbers, which no trainer moves to a device."""
    model, (_, _, batch, _) = batches_of("qwen2_5_vl", implementation="sdpa")
    grids = batch["image_grid_thw"]
    assert batch["packed_images"] == (("image_grid_thw", tuple(map(tuple, grids.tolist()))),)
    want = model(**batch).logits
    batch["image_grid_thw"] = torch.full_like(grids, -1)  # what the device holds is not looked at
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=0)
    del batch["packed_images"]
    batch["image_grid_thw"] = grids
    torch.testing.assert_close(model(**batch).logits, want, rtol=0, atol=0)


def test_patches_are_embedded_by_a_product_in_packed_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = batches_of("qwen2_5_vl", implementation="sdpa")
    batch, conv = batches[2], model.model.visual.patch_embed.proj
    want, calls = gradients_of(model, batch), []
    monkeypatch.setattr(patches, "pays_off", lambda x: True)
    own = torch.nn.functional.conv3d
    monkeypatch.setattr(torch.nn.functional, "conv3d", lambda *given: calls.append(1) or own(*given))
    got = gradients_of(model, batch)
    assert not calls
    for name, value in want.items():
        assert error(got[name], value) <= 1e-5, name
    with torch.no_grad():
        conv(torch.ones(2, *conv.weight.shape[1:]))
        assert len(calls) == 1
        torch_backend.unpatch(model)
        conv(torch.ones(2, *conv.weight.shape[1:]))
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_dpo_with_images_runs_layers_and_tower_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from tests.torch_backend.preference import assert_same_training, trained
    from tests.torch_backend.trainers.test_scored_images import dpo
    from torch_backend.trainers.enable_packing import enable_packing

    plain = trained(enable_packing(dpo("qwen2_5_vl", tmp_path, max_steps=1), verify=False, fast=False))
    counter = counted_compilation(monkeypatch, dynamic_compile, "eager")
    monkeypatch.setattr(dispatch, "order", lambda request, load: ("triton",))
    monkeypatch.setattr(dynamic_compile, "why_not_compiled", lambda model: None)
    ran, own = [], CompiledTower.segments_of
    monkeypatch.setattr(CompiledTower, "segments_of", lambda tower, *given: ran.append(tower) or own(tower, *given))
    trainer = enable_packing(dpo("qwen2_5_vl", tmp_path, max_steps=1), implementation="triton", verify=False)
    assert_same_training(trained(trainer), plain, 1e-5)
    layers = [what for part, what in trainer.packed_step.parts.items() if part.startswith("layers")]
    assert layers == [dynamic_compile.COMPILED] * 2 and counter.frame_count > 0
    assert len(set(ran)) == 2 and not any(tower.failed for tower in ran)  # of the model and of its reference
