"""Log-probabilities without logits are those of the model's logits, whatever its output layer is and what wraps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_backend
from packing_core.errors import LayoutError, PackingError, UnsupportedModelError
from tests.torch_backend.kernels import Elements
from tests.torch_backend.models import collate, documents, tiny
from torch_backend import token_logprobs
from torch_backend.losses import output_layer
from torch_backend.ops import linear_logprobs as op


@pytest.fixture
def batch() -> dict[str, Any]:
    found = collate(documents((5, 9, 3)))
    found["labels"][0, :3] = -100  # a prompt
    return found


def of_logits(model: nn.Module, batch: dict[str, Any], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-softmax that predicts each token [B, S, V], and where a token is trained [B, S]."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    log_p = (logits.float() / temperature).log_softmax(-1)
    return torch.cat([torch.zeros_like(log_p[:, :1]), log_p[:, :-1]], 1), batch["labels"] != -100


def picked(log_p: Tensor, batch: dict[str, Any]) -> Tensor:
    trained = batch["labels"] != -100
    return log_p.gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0].masked_fill(~trained, 0)


def assert_logprobs_of_logits(model: nn.Module, batch: dict[str, Any], **changes: Any) -> None:
    """Values of both kinds, and every gradient of a random combination of them."""
    torch.manual_seed(0)
    log_p, trained = of_logits(model, batch, **changes)
    right = picked(log_p, batch), -(log_p.exp() * log_p).sum(-1).masked_fill(~trained, 0)
    torch.manual_seed(0)
    found = token_logprobs(model, batch, entropy=True, **changes)
    assert found.entropy is not None and found.logprobs.dtype == torch.float32
    assert not found.logprobs[~trained].any() and not found.entropy[~trained].any()
    torch.testing.assert_close((found.logprobs, found.entropy), right)
    weights = torch.randn(2, *trained.shape, generator=torch.Generator().manual_seed(7))
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [
        torch.autograd.grad((torch.stack(pair) * weights).sum(), parameters, allow_unused=True)
        for pair in ((found.logprobs, found.entropy), right)
    ]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "granite", "cohere", "falcon_h1", "gpt2", "phi", "minicpm3"]
)
def test_they_are_those_of_the_logits(family: str, batch: dict[str, Any]) -> None:
    assert_logprobs_of_logits(torch_backend.patch(tiny(family), verify=False), batch)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])  # without and with a softcap, which comes before it
def test_temperature_divides_the_final_logits_once(family: str, batch: dict[str, Any]) -> None:
    assert_logprobs_of_logits(torch_backend.patch(tiny(family), verify=False), batch, temperature=0.6)


def test_the_most_likely_ids_come_with_their_log_probabilities(batch: dict[str, Any]) -> None:
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    log_p, trained = of_logits(model, batch)
    found = token_logprobs(model, batch, top_k=4)
    assert found.candidates is not None and found.candidate_logprobs is not None
    values, ids = log_p.topk(4, -1)
    torch.testing.assert_close(found.candidate_logprobs[trained], values[trained])
    torch.testing.assert_close(found.candidates[trained], ids[trained])
    assert not found.candidate_logprobs[~trained].any()


def test_log_probabilities_of_given_ids_are_differentiable_also_where_one_is_the_target(batch: dict[str, Any]) -> None:
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    ids = torch.randint(0, 90, (*batch["labels"].shape, 3), generator=torch.Generator().manual_seed(3))
    ids[..., 1] = batch["labels"].clamp(min=0)
    log_p, trained = of_logits(model, batch)
    right = log_p.gather(-1, ids).masked_fill(~trained[..., None], 0)
    found = token_logprobs(model, batch, candidates=ids)
    assert found.candidate_logprobs is not None
    torch.testing.assert_close(found.candidate_logprobs, right)
    weights = torch.randn(right.shape)
    parameters = list(model.parameters())
    pairs = (
        torch.autograd.grad((x * weights).sum() + y.sum(), parameters)
        for x, y in ((found.candidate_logprobs, found.logprobs), (right, picked(log_p, batch)))
    )
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_lora_on_every_layer_and_its_reference_with_the_adapter_off(batch: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = torch_backend.patch(tiny("qwen2"), verify=False)
    with torch.no_grad():
        before = token_logprobs(model, batch).logprobs
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    assert_logprobs_of_logits(wrapped, batch)
    with torch.no_grad(), wrapped.disable_adapter():
        torch.testing.assert_close(token_logprobs(wrapped, batch).logprobs, before)


def test_many_chunks_are_one(batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(300, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    hidden.requires_grad_(), weight.requires_grad_()
    bias = torch.randn(50, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(-1, 50, (300, 2))
    found = [
        op.linear_logprobs(hidden, weight, ids, bias=bias, softcap=3.0, scale=0.7, entropy=True, chunk_bytes=size)
        for size in (2**28, 128 * 4 * 50, 1)
    ]
    cotangents = [torch.randn_like(x) for x in found[0]]
    gradients = [torch.autograd.grad(pair, (hidden, weight, bias), cotangents) for pair in found]
    for pair, gradient in zip(found[1:], gradients[1:], strict=True):
        torch.testing.assert_close(pair, found[0])
        torch.testing.assert_close(gradient, gradients[0])
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 1)  # and for layers that are called
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert_logprobs_of_logits(model, batch)


def test_no_tensor_has_the_size_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    batch = collate(documents((5, 9, 30) * 5), capacity=None)
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", 1)
    monkeypatch.setitem(op.linear_logprobs.__kwdefaults__, "chunk_bytes", 4 * model.config.vocab_size)
    tokens, entries = batch["labels"].numel(), model.config.vocab_size
    token_logprobs(model, batch)  # the first call looks at what the model does to its logits
    with Elements() as seen:
        token_logprobs(model, batch, entropy=True, top_k=2).logprobs.sum().backward()
    assert 0 < seen.largest < tokens * entries


def test_a_routers_loss_comes_apart_from_the_log_probabilities() -> None:
    model = torch_backend.patch(tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.5), verify=False)
    batch = collate(documents((5, 9, 3)), model=model)
    output = model(**batch)
    found = token_logprobs(model, batch)
    torch.testing.assert_close(found.auxiliary, 0.5 * output.aux_loss)
    mean = found.logprobs.sum() / (batch["labels"] != -100).sum()
    torch.testing.assert_close(found.auxiliary - mean, output.loss)


def test_what_cannot_be_done_is_refused(batch: dict[str, Any]) -> None:
    model = torch_backend.patch(tiny("qwen2"), verify=False)
    without = {name: x for name, x in batch.items() if name != "labels"}
    with pytest.raises(LayoutError, match="token_logprobs takes a batch with labels"):
        token_logprobs(model, without)
    with pytest.raises(LayoutError, match="leave shift_labels out"):
        token_logprobs(model, {**batch, "shift_labels": batch["labels"]})
    with pytest.raises(PackingError, match="temperature must be above 0, got 0.0"):
        token_logprobs(model, batch, temperature=0.0)
    with pytest.raises(PackingError, match="pass one of them"):
        token_logprobs(model, batch, top_k=2, candidates=batch["labels"][..., None])
    with pytest.raises(PackingError, match="top_k must be at least 1, got 0"):
        token_logprobs(model, batch, top_k=0)
    with pytest.raises(LayoutError, match="candidates must be"):
        token_logprobs(model, batch, candidates=batch["labels"])
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with pytest.raises(UnsupportedModelError, match="has a loss function of its own"):
        token_logprobs(model, batch)
