"""Modules that hold several transformers models: all of them are patched, or the one that is not is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import collate, documents, tiny
from torch_backend.losses.causal_lm import causal_lm_loss


class Pair(nn.Module):
    """Two models, of which the second runs the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = tiny("llama"), tiny("qwen3")

    def forward(self, **batch: Any) -> Any:
        return self.student(**batch)


class Nested(nn.Module):
    """A module as Lightning and Composer hold models: inside modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleDict({"policy": tiny("llama"), "reference": tiny("llama")})


@pytest.mark.parametrize(("kind", "name"), [(Pair, "teacher"), (Nested, "models.policy")])
def test_a_module_with_several_models_is_not_patched_as_if_it_held_one(kind: type[nn.Module], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"holds 2 transformers models, and {name} is not patched"):
        torch_backend.patch(kind(), verify=False)


def test_steps_and_losses_name_the_model_that_is_not_patched() -> None:
    pair, batch = Pair(), collate(documents())
    torch_backend.patch(pair.teacher, verify=False)
    refused = r"and student is not patched.*crosspack\.patch\(module\.student\)"
    with pytest.raises(UnsupportedModelError, match=refused):
        torch_backend.make_train_step(pair, torch.optim.SGD(pair.parameters()))
    with pytest.raises(UnsupportedModelError, match=refused):
        causal_lm_loss(pair, batch)
    with pytest.raises(UnsupportedModelError, match=refused):
        torch_backend.token_logprobs(pair, batch)


def test_a_module_whose_models_are_all_patched_is_taken() -> None:
    pair, batch = Pair(), collate(documents())
    for model in (pair.teacher, pair.student):
        torch_backend.patch(model, verify=False)
    torch_backend.patch(pair, verify=False)
    assert torch.isfinite(pair(**batch).loss)


def test_one_model_in_two_places_and_models_inside_of_models_count_as_one() -> None:
    pair = Pair()
    pair.teacher = pair.student
    torch_backend.patch(pair, verify=False)
    torch_backend.patch(nn.ModuleList([tiny("llama").model]), verify=False)
