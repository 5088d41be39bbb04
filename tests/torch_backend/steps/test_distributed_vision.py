"""Ranks whose rows have no image or clip train with those whose rows have some, as one process does on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.audio_models import CASES as OF_AUDIO
from tests.torch_backend.audio_models import audio_documents, audio_model, omni_documents
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.vision_models import image_documents, vision_model
from tests.torch_backend.wrappers import Model, assert_same_weights, whole
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.collate.vision import VisionReader
from torch_backend.hf.anatomy.families import OMNI

pytestmark = pytest.mark.slow  # starts processes that train; test_multimodal has blank images in one process

TOWER = r".*visual.*(qkv|linear_fc1|up_proj|merger.mlp.0)"


def frozen(part: str) -> Callable[[Model], Model]:
    """Freezes the "tower" of a model or all the rest, its "text"."""

    def change(model: Model) -> Model:
        text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        of_text = {id(p) for module in text for p in module.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_((id(parameter) in of_text) == (part == "tower"))
        return model

    return change


def adapted(targets: str) -> Callable[[Model], Model]:
    def change(model: Model) -> Model:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    return change


def sharded(model: Model) -> Model:
    """FSDP2 over each layer of the decoder and of the tower, an audio tower and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inner = model.model
    if hasattr(inner, "audio_tower"):
        blocks = [*inner.audio_tower.layers, inner.audio_tower]
    else:
        blocks = inner.visual.blocks if hasattr(inner, "visual") else inner.vision_tower.encoder.layers
    for module in (*model.get_decoder().layers, *blocks):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unchanged(model: Model) -> Model:
    return model


CASES: dict[str, tuple[str, Callable[[Model], Model], Callable[[Model], Model]]] = {
    "DDP": ("qwen2_5_vl", unchanged, DDP),
    "DDP, frozen tower": ("qwen2_5_vl", frozen("tower"), DDP),
    "DDP, frozen decoder": ("qwen2_5_vl", frozen("text"), DDP),
    "DDP, LoRA on the tower": ("qwen2_5_vl", adapted(TOWER), DDP),
    "DDP, DeepStack": ("qwen3_vl", unchanged, DDP),
    "FSDP2, frozen tower": ("qwen2_5_vl", frozen("tower"), sharded),
    "FSDP2, frozen decoder": ("qwen2_5_vl", frozen("text"), sharded),
    "FSDP2, both ways": ("gemma3", unchanged, sharded),
    "DDP, clips": ("qwen2_audio", unchanged, DDP),
    "DDP, clips, frozen decoder": ("qwen2_audio", frozen("text"), DDP),
    "DDP, images beside clips": ("qwen3_omni_moe_thinker", unchanged, DDP),
    "FSDP2, clips": ("audioflamingo3", unchanged, sharded),
    "FSDP2, clips in windows": ("qwen3_asr", frozen("tower"), sharded),
}


def train(case: str, *, ranks: int, rank: int) -> dict[str, Any]:
    """Two steps, in the second of which the ranks have changed places; returns the losses and the trained weights."""
    name, change, wrap = CASES[case]
    make, documents_of, capacity = (
        (audio_model, audio_documents, 400) if name in OF_AUDIO else (vision_model, image_documents, 96)
    )
    model = change(make(name))
    patch(model, verify=False)
    collate = PackedCollator(model, capacity)
    collate.vision, collate.pad_id = VisionReader(make(name)), 0
    model = wrap(model) if ranks > 1 else model
    documents = omni_documents(name) if name in OMNI else [x for row in documents_of(name) for x in row]
    examples = [{"input_ids": document.ids.tolist(), **document.images} for document in documents]
    shown, text = [x for x in examples if len(x) > 1][:4], [x for x in examples if len(x) == 1]
    step = make_train_step(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))
    steps = ([shown, text], [text, shown])
    losses = [float(step([collate(row) for row in rows[rank::ranks]])["loss"]) for rows in steps]
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {"losses": losses, "weights": whole(trained)}


def on_rank(case: str) -> dict[str, Any]:
    return train(case, ranks=dist.get_world_size(), rank=dist.get_rank())


@pytest.mark.parametrize("case", CASES)
def test_a_rank_without_images_or_clips_trains_with_one_that_has_some(case: str) -> None:
    one, many = train(case, ranks=1, rank=0), on_ranks(on_rank, case)
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert_same_weights(many["weights"], one["weights"])
