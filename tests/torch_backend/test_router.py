"""A router's auxiliary loss of a packed batch is that of its real tokens, however much padding stands beside them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.models import collate, documents, tiny
from torch_backend.auditing.tiny import all_families
from torch_backend.losses.causal_lm import causal_lm_loss

# Row of 7: | 7 |   | 3 | .. |   | 5 | .. |     row of 8: | 7 | . |   | 3 | 5 |     row of 16: | 7 | 3 | 5 | . |
LENGTHS = (7, 3, 5)
CAPACITIES = (7, 8, 16, 64)

# Families that transformers gives an auxiliary loss, and whose routers run on whole rows.
WITH_ROUTERS = (
    *("dbrx", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "jamba", "jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
# Their routers run inside layers or decoders that run per document.
PER_DOCUMENT = ("deepseek_v4", "minimax_m3_vl_text", "qwen4_exp", "qwen4_exp_text")


def with_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its padding marked, which is token 0 and in no document."""
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def load_balance(router_logits: list[Tensor], top_k: int) -> float:
    """Switch Transformer, equations 4 to 6, over the tokens of all layers: E * sum_e f_e P_e, in float64."""
    logits = torch.cat(router_logits).double()
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(-1, probabilities.topk(top_k, -1).indices, 1.0)
    return float(logits.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum())


def truth(model: Any, docs: list[Tensor]) -> float:
    """Over what the routers say to each document alone."""
    layers = [x for d in docs for x in model(input_ids=d[None], output_router_logits=True).router_logits]
    return load_balance([x.detach().flatten(0, -2) for x in layers], model.num_experts_per_tok)


@pytest.mark.parametrize("family", WITH_ROUTERS)
def test_it_is_that_of_the_real_tokens(family: str) -> None:
    model, docs = tiny(family), documents(LENGTHS)
    want = truth(model, docs)
    torch_backend.patch(model, verify=False)
    for capacity in CAPACITIES:
        found = model(**with_mask(collate(docs, capacity=capacity)), output_router_logits=True).aux_loss
        assert float(found.detach()) == pytest.approx(want, rel=1e-5), capacity


def test_a_batch_that_does_not_mark_its_padding_is_refused_and_our_collators_mark_it() -> None:
    model, docs = torch_backend.patch(tiny("mixtral", output_router_logits=True)), documents(LENGTHS)
    unmarked = collate(docs)
    with pytest.raises(LayoutError, match="MixtralForCausalLM computes a router's auxiliary loss .* no attention_mask"):
        model(**unmarked)
    features = [{"input_ids": d} for d in docs]
    found = model(**torch_backend.PackedCollator(model, capacity=64)(features)).aux_loss
    again = model(**torch_backend.with_boundaries(dict, model)(collate(docs, capacity=None))).aux_loss
    assert float(found.detach()) == pytest.approx(float(again.detach()), rel=1e-5)


@pytest.mark.parametrize("family", PER_DOCUMENT)
def test_routers_in_layers_that_run_per_document_are_refused(family: str) -> None:
    model = torch_backend.patch(tiny(family), verify=False)
    batch = with_mask(collate(documents(LENGTHS)))
    assert model(**batch).loss.isfinite()
    with pytest.raises(UnsupportedModelError, match="its router loss would count padding: set output_router_logits=F"):
        model(**batch, output_router_logits=True)


def test_a_router_that_mixes_tokens_is_refused() -> None:
    """Transformers says so itself in its forward; documents of one unpacked batch change each other too."""
    torch_backend.patch(tiny("doge"), verify=False)
    with pytest.raises(UnsupportedModelError, match="doge cannot be trained packed: with is_moe its router mixes"):
        torch_backend.patch(tiny("doge", is_moe=True), verify=False)


def test_no_family_with_an_auxiliary_loss_is_left_out() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    with_loss = {
        family
        for family in all_families()
        if hasattr(sys.modules[getattr(transformers, CLASSES[family]).__module__], "load_balancing_loss_func")
    }
    assert with_loss == {*WITH_ROUTERS, *PER_DOCUMENT, "doge"}


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_loss_without_logits_contains_it(capacity: int) -> None:
    model, docs = tiny("mixtral", router_aux_loss_coef=0.5), documents(LENGTHS)
    want = 0.5 * truth(model, docs)
    torch_backend.patch(model, verify=False)
    batch = with_mask(collate(docs, capacity=capacity))
    plain, weight = causal_lm_loss(model, batch)
    loss, _ = causal_lm_loss(model, {**batch, "output_router_logits": True})
    assert float((loss - plain).detach() / weight) == pytest.approx(want, rel=1e-4)
    own = model(**batch, output_router_logits=True).loss
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss / weight, parameters), torch.autograd.grad(own, parameters), rtol=1e-4, atol=1e-6
    )
