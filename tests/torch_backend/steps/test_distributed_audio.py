"""Ranks whose rows have no clip train with those whose rows have some, as one process does on all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.torch_backend.audio_models import audio_documents, audio_model
from tests.torch_backend.collate.test_audio_collator import features_of
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.steps.test_distributed_vision import frozen, unchanged
from tests.torch_backend.wrappers import Model, assert_same_weights, whole
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.collate.vision import VisionReader

pytestmark = pytest.mark.slow  # starts processes that train; test_audio_collator has blank clips in one process


def sharded(model: Model) -> Model:
    """FSDP2 over each layer of the decoder and of the encoder, the encoder and the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    encoder = model.model.audio_tower
    for module in (*model.get_decoder().layers, *encoder.layers, encoder):
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CASES: dict[str, tuple[str, Callable[[Model], Model], Callable[[Model], Model]]] = {
    "DDP": ("qwen2_audio", unchanged, DDP),
    "DDP, frozen decoder": ("qwen2_audio", frozen("text"), DDP),
    "FSDP2": ("audioflamingo3", unchanged, sharded),
    "FSDP2, windows": ("qwen3_asr", frozen("tower"), sharded),
}


def train(case: str, *, ranks: int, rank: int) -> dict[str, Any]:
    """Two steps, in the second of which the ranks have changed places; returns the losses and the trained weights."""
    name, change, wrap = CASES[case]
    model = patch(change(audio_model(name)), verify=False)
    collate = PackedCollator(model, 400)
    collate.vision, collate.pad_id = VisionReader(audio_model(name)), 0
    model = wrap(model) if ranks > 1 else model
    examples = features_of([document for row in audio_documents(name) for document in row])
    shown, text = [x for x in examples if len(x) > 1][:4], [x for x in examples if len(x) == 1]
    step = make_train_step(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))
    steps = ([shown, text], [text, shown])
    losses = [float(step([collate(row) for row in rows[rank::ranks]])["loss"]) for rows in steps]
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {"losses": losses, "weights": whole(trained)}


def on_rank(case: str) -> dict[str, Any]:
    return train(case, ranks=dist.get_world_size(), rank=dist.get_rank())


@pytest.mark.parametrize("case", CASES)
def test_a_rank_without_clips_trains_with_one_that_has_some(case: str) -> None:
    one, many = train(case, ranks=1, rank=0), on_ranks(on_rank, case)
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert_same_weights(many["weights"], one["weights"])
