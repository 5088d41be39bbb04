"""The loss without logits is the model's own, in every family that it accepts, and it refuses the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import collate, documents, tiny
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.losses.cross_entropy import next_token_targets, packed_cross_entropy


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "granite", "cohere", "falcon_h1", "gpt2", "phi"])
def test_it_is_the_loss_of_the_logits(family):
    model, batch = tiny(family), collate(documents((5, 9, 3)))
    batch.pop("attention_mask", None)
    torch_backend.patch(model, verify=False)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    right, weight = packed_cross_entropy(logits, next_token_targets(batch["labels"]))
    loss, total = causal_lm_loss(model, batch)
    torch.testing.assert_close(loss, right)
    assert total == weight
    parameters = list(model.parameters())
    found, want = (torch.autograd.grad(x, parameters, allow_unused=True) for x in (loss, right))
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_weights_stand_at_the_tokens_of_their_labels():
    model, batch = torch_backend.patch(tiny("qwen2"), verify=False), collate(documents((5, 9, 3)))
    weights = torch.rand(batch["labels"].shape)
    without_some = {**batch, "labels": batch["labels"].masked_fill(weights < 0.5, -100)}
    found = causal_lm_loss(model, batch, weights=(weights >= 0.5).float())
    right = causal_lm_loss(model, without_some)
    torch.testing.assert_close(found[0], right[0])
    assert found[1] == right[1]


def test_autocast_and_training_mode_are_kept():
    model, batch = torch_backend.patch(tiny("qwen2").train(), verify=False), collate(documents((5, 9, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        loss, total = causal_lm_loss(model, batch)
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    right, _ = packed_cross_entropy(logits, next_token_targets(batch["labels"]))
    assert model.training
    torch.testing.assert_close(loss / total, right / total, rtol=1e-2, atol=0)


def test_what_makes_its_logits_otherwise_is_refused():

    class NotLinear(nn.Module):
        def forward(self, x):
            return x

    model = tiny("qwen2")
    forward = model.forward
    model.forward = lambda **kwargs: type("Output", (), {"logits": forward(**kwargs).logits ** 2})
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM does more to its logits than a scale"):
        causal_lm_loss(model, collate(documents((5, 9, 3))))
    model = tiny("qwen2")
    model.lm_head = NotLinear()
    with pytest.raises(UnsupportedModelError, match="Qwen2ForCausalLM has no linear output layer"):
        causal_lm_loss(model, collate(documents((5, 9, 3))))
