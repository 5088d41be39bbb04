"""audit(model) rejects models with a planted leak, each by its defaults, and passes the model without one.

Every leak is a function of a row [B, S, D]: the same for a document alone, which it leaves right, and for packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

import torch_backend
from tests.torch_backend.models import tiny
from torch_backend.auditing.compare import gradients_error
from torch_backend.auditing.tiny import tiny_model


def previous(x: Tensor) -> Tensor:
    """At each token what stands at the one before it in the row."""
    return torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def following(x: Tensor) -> Tensor:
    """At each token what stands at the one after it in the row."""
    return previous(x.flip(1)).flip(1)


class LeakingBackward(torch.autograd.Function):
    """The gradient of a document's first token reaches the last token of the document before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + 0.1 * following(g)


def between_chunks(size: int) -> Callable[[Tensor], Tensor]:
    """A state that is handed from chunk to chunk, whatever begins in between."""

    def leak(x: Tensor) -> Tensor:
        chunks = x.split(size, dim=1)
        states = [torch.zeros_like(x[:, :1]), *(chunk.mean(1, keepdim=True) for chunk in chunks[:-1])]
        return torch.cat([chunk + 0.1 * state for chunk, state in zip(chunks, states, strict=True)], 1)

    return leak


def absolute_positions(x: Tensor) -> Tensor:
    return x + 0.1 * torch.arange(x.shape[1]).sin()[:, None].to(x)


LEAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "forward": lambda x: x + 0.1 * previous(x),
    "from later documents": lambda x: x + 0.1 * following(x),
    "backward alone": LeakingBackward.apply,
    "between chunks of 64": between_chunks(64),
    "between chunks of 128": between_chunks(128),
    "between chunks of 256": between_chunks(256),
    "absolute positions": absolute_positions,
    "normalisation over the row": lambda x: x / x.square().mean(1, keepdim=True).sqrt(),
    "by 1e-6": lambda x: x + 1e-6 * previous(x),
}


def model_with(leak: Callable[[Tensor], Tensor], base: Any = LlamaForCausalLM, family: str = "llama") -> Any:
    """A tiny model whose first layer has the leak. Without one it is exact as it is, because it makes no cache."""

    class Model(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers[0].register_forward_hook(lambda module, args, output: leak(output))

    return tiny_model(tiny(family, use_cache=False).config, Model)


@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "patched"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_without_a_leak_is_exact(dtype: torch.dtype, patched: bool) -> None:
    report = torch_backend.audit(model_with(lambda x: x).to(dtype), patched=patched)
    assert report.verdict == "exact" and report.leak == 0, str(report)


@pytest.mark.parametrize(
    ("leak", "patched"),
    [
        *((leak, False) for leak in LEAKS),
        *((leak, True) for leak in ("backward alone", "between chunks of 256", "by 1e-6")),
    ],
)
def test_a_leak_is_found(leak: str, patched: bool) -> None:
    report = torch_backend.audit(model_with(LEAKS[leak]), patched=patched)
    assert report.verdict == "contaminated", str(report)
    if leak == "backward alone":
        assert report.leak == 0 and report.logits <= report.allowed_logits


@pytest.mark.parametrize("leak", ["backward alone", "between chunks of 128"])
def test_a_leak_is_found_below_float32(leak: str) -> None:
    report = torch_backend.audit(model_with(LEAKS[leak]).bfloat16(), patched=True)
    assert report.verdict == "contaminated", str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_without_a_gradient_decides_on_nothing_but_itself(dtype: torch.dtype) -> None:
    """The bias of keys adds the same to every score of a query, so its gradient is rounding and nothing else."""
    right = torch_backend.audit(model_with(lambda x: x, Qwen2ForCausalLM, "qwen2").to(dtype))
    assert right.verdict == "exact", str(right)
    wrong = torch_backend.audit(model_with(LEAKS["backward alone"], Qwen2ForCausalLM, "qwen2").to(dtype))
    assert wrong.verdict == "contaminated" and wrong.leak == 0 and wrong.gradient_leak > 0, str(wrong)


def test_a_missing_or_infinite_gradient_is_infinitely_wrong() -> None:
    want = {"weight": torch.tensor([1.0, -1.0]), "bias": torch.tensor([1e-9])}
    for got in ({"weight": want["weight"]}, {**want, "bias": torch.tensor([torch.inf])}):
        assert gradients_error(got, want) == (float("inf"), "bias")
