"""Batches in a DataLoader with ``pin_memory=True``: its thread pins every tensor, and what the model computes stays.

Without a GPU nothing can be pinned, so copies stand for pinned tensors; torch's own function walks through a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.data._utils.pin_memory import pin_memory as pinned_batch

import torch_backend
from tests.torch_backend.audio_models import audio_documents, audio_model
from tests.torch_backend.collate.test_audio_collator import features_of
from tests.torch_backend.collate.test_vision_collator import collator_of_processed
from tests.torch_backend.models import collate, documents, tiny
from tests.torch_backend.vision_models import image_documents, vision_model
from torch_backend.collate.loading import ReadyBatch
from torch_backend.packed_tokens import PackedTokens


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The copies that ``Tensor.pin_memory`` made in place of pinned tensors."""
    copies: list[Tensor] = []

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if has_torch_function_unary(tensor):
            return handle_torch_function(pin_memory, (tensor,), tensor)
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return copies


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, those inside of packed tokens too."""
    if isinstance(value, PackedTokens):
        yield from (value.ids, value.segments)
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_in(x)


def batch_of(kind: str) -> tuple[Any, dict[str, Any]]:
    if kind == "text":
        return torch_backend.patch(tiny("llama"), verify=False), ReadyBatch(collate(documents((5, 9, 2)), capacity=20))
    if kind == "audio":
        model, rows = audio_model("qwen2_audio"), audio_documents("qwen2_audio")
    else:
        model, rows = vision_model(kind), image_documents(kind)
    batch = collator_of_processed(model, 400)(features_of([document for row in rows for document in row]))
    return torch_backend.patch(model, verify=False), batch


@pytest.mark.parametrize("kind", ["audio", "qwen2_5_vl", "llava", "text"])
def test_every_tensor_of_a_batch_is_pinned_and_the_loss_is_the_same(kind: str, pinned: list[Tensor]) -> None:
    model, batch = batch_of(kind)
    want = model(**batch).loss
    ready = pinned_batch(batch)
    places = {copy.data_ptr() for copy in pinned}
    assert type(ready) is type(batch) and ready.keys() == batch.keys()
    assert len(places) == len([*tensors_in(ready)]) and places == {x.data_ptr() for x in tensors_in(ready)}
    assert isinstance(ready["input_ids"], PackedTokens)
    assert torch.equal(model(**ready).loss, want)
