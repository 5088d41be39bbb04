"""config.router_loss = "document": the balance loss of DeepSeek-V3 in packed rows is that of each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import collate, documents, tiny, with_mask
from tests.torch_backend.steps import test_packed_step, test_sft_step
from torch_backend.context_parallel.router_loss import document_balance

LENGTHS = (7, 3, 5)
ASKED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_loss": "document"}
SOFTMAX, SIGMOID = ("qwen3_moe", "gpt_oss", "jetmoe"), ("deepseek_v3", "glm4_moe", "nemotron_h", "minimax_m2")
FAMILIES = {**dict.fromkeys(SOFTMAX, "softmax"), **dict.fromkeys(SIGMOID, "sigmoid")}


def made(family: str, **changes: Any) -> Any:
    model = tiny(family)
    for name, value in {**ASKED, **changes}.items():
        setattr(model.config, name, value)
    for name in {"router_aux_loss_coef", "aux_loss_coef"} & vars(model).keys():
        setattr(model, name, 0.5)
    return model


def scores_of(model: Any, ids: Tensor, kind: str) -> list[Tensor]:
    """Returns what the router of each layer says to a document by itself, [T, E]."""
    layers = model.model(input_ids=ids[None], output_router_logits=True, use_cache=False).router_logits
    logits = [x.detach().flatten(0, -2).double() for x in layers]
    return [x.sigmoid() if kind == "sigmoid" else x.softmax(-1) for x in logits]


def balance_alone(scores: Tensor, chosen: int) -> Tensor:
    """Equations 17 to 20 of DeepSeek-V3, without alpha, of one document: ``scores`` [T, E] are above 0."""
    tokens, experts = scores.shape
    hits = scores.topk(chosen).indices.flatten().bincount(minlength=experts)
    return (hits * experts / (chosen * tokens) * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()


def balance_of(model: Any, docs: list[Tensor], kind: str) -> float:
    """Averages over documents that run by themselves, and adds up over layers."""
    chosen, layers = model.config.num_experts_per_tok, [scores_of(model, ids, kind) for ids in docs]
    return float(sum(sum(balance_alone(x, chosen) for x in scores) for scores in layers) / len(docs))


@pytest.mark.parametrize("masked", [False, True])
def test_it_and_its_gradient_are_those_of_each_document_alone(masked: bool) -> None:
    torch.manual_seed(0)
    lengths, kept = (4, 1, 6), torch.ones(11, dtype=torch.bool)
    scores = [(0.1 + 0.9 * torch.rand(11, 5, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    if masked:
        kept[4] = False  # all of a document, which does not count
    numbers = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    found = document_balance(scores, numbers, 4, 2, kept[None] if masked else None)
    documents_alone = [x for layer in scores for i, x in enumerate(layer.split(lengths)) if i != 1 or not masked]
    wanted = sum(balance_alone(x, 2) for x in documents_alone) * len(scores) / len(documents_alone)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    for gradient, right in zip(torch.autograd.grad(found, scores), torch.autograd.grad(wanted, scores), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-6, atol=1e-12)


def test_nothing_is_read_back() -> None:
    """A tensor on the meta device has no values to read."""
    scores, documents = torch.ones(11, 5, device="meta"), torch.zeros(11, dtype=torch.int32, device="meta")
    assert document_balance([scores] * 2, documents, 4, 2, torch.ones(1, 11, device="meta")).is_meta


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_it_is_the_mean_of_the_documents_alone(family: str) -> None:
    model, docs = made(family), documents(LENGTHS)
    wanted = balance_of(model, docs, FAMILIES[family])
    torch_backend.patch(model, verify=False)
    for capacity in (7, 8, 16, 64):
        batch = with_mask(collate(docs, capacity=capacity))
        found = model(**batch)
        plain = model(**batch, output_router_logits=False)
        assert float(found.aux_loss.detach()) == pytest.approx(wanted, rel=1e-5), capacity
        added = float((found.loss - plain.loss).detach())
        assert added == pytest.approx(0.5 * wanted, rel=1e-4), capacity


def test_a_piece_of_a_document_that_was_split_is_one_of_its_own() -> None:
    model, docs = made("qwen3_moe"), documents((7, 11))
    wanted = balance_of(model, [docs[0], docs[1][:8], docs[1][8:]], "softmax")
    torch_backend.patch(model, verify=False)
    batch = torch_backend.PackedCollator(model, capacity=8, overflow="split")([{"input_ids": ids} for ids in docs])
    assert float(model(**batch).aux_loss.detach()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("stack", "family"),
    [(test_packed_step, "qwen3_moe"), (test_packed_step, "deepseek_v3"), (test_sft_step, "qwen3_moe")],
    ids=["Trainer", "Trainer, DeepSeek-V3", "SFTTrainer"],
)
def test_trainers_have_it_too(stack: Any, family: str, tmp_path: Path) -> None:
    """TRL computes the loss of all tokens, in a forward of its own."""
    options = {"router_aux_loss_coef": 0.5} if stack is test_sft_step else {}
    trainer = stack.built(tmp_path, True, make=lambda: made(family), **options)
    found = trainer.evaluate()
    model, data = trainer.model.eval(), trainer.eval_dataset
    wanted = balance_of(model, [torch.tensor(ids) for ids in data["input_ids"]], FAMILIES[family])
    if stack is test_sft_step:
        assert found["eval_aux_loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["eval_loss_per_batch"] - found["eval_loss"] == pytest.approx(0.5 * wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"router_loss": "sequence"}, 'config.router_loss is "batch" or "document", got \'sequence\''),
        (
            "deepseek_v3",
            {"router_aux_loss_coef": None},
            "DeepseekV3ForCausalLM .* set config.router_aux_loss_coef",
        ),
    ],
)
def test_what_it_cannot_be_is_said(family: str, changes: dict[str, Any], message: str) -> None:
    model = torch_backend.patch(made(family, **changes), verify=False)
    with pytest.raises(UnsupportedModelError, match=message):
        model(**with_mask(collate(documents(LENGTHS))))
