"""A router's auxiliary loss of a packed batch is that of its real tokens, however much padding stands beside them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_backend
from packing_core import PackedDataset
from packing_core.batches.dataset import with_empty_row
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.graphs import stand_in
from tests.torch_backend.models import collate, documents, tiny, with_mask
from torch_backend.auditing.tiny import all_families
from torch_backend.hf.patched import Patched
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps import eligibility
from torch_backend.steps.fixed_shapes import FixedShapes

# Row of 7: | 7 |   | 3 | .. |   | 5 | .. |     row of 8: | 7 | . |   | 3 | 5 |     row of 16: | 7 | 3 | 5 | . |
LENGTHS = (7, 3, 5)
CAPACITIES = (7, 8, 16, 64)

# Families that transformers gives an auxiliary loss, and whose routers run on whole rows.
WITH_ROUTERS = (
    *("dbrx", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "jamba", "jetmoe", "laguna", "mellum", "minimax", "minimax_m2", "minimax_m3_vl_text"),
    *("mixtral", "olmoe", "phimoe", "qwen4_exp", "qwen4_exp_text"),
    *("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
)
# Their routers run inside layers or decoders that run per document.
PER_DOCUMENT = ("deepseek_v4",)


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


@pytest.mark.parametrize("family", WITH_ROUTERS)
def test_a_batch_of_padding_alone_trains_nothing(family: str) -> None:
    """Such a batch fills up the last step of an epoch; a mean over its tokens is 0 / 0."""
    model = torch_backend.patch(tiny(family), verify=False)
    padding = with_empty_row(PackedDataset(documents(LENGTHS), 16)[[0]][:0])
    output = model(
        **torch_backend.PackedCollator(model)(padding), output_router_logits=True, num_items_in_batch=torch.tensor(9)
    )
    output.loss.backward()
    assert output.aux_loss.item() == output.loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


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


# -- in fixed shapes, which add padding --------------------------------------------------------------------------------

# In rows of 64:  | 40 | 9 | .. |  | 20 | 31 | .. |     | 12 | 3 | ... |     | 64 |  | 5 | ... |     | 50 | . |
ROWS = ((40, 9, 20, 31), (12, 3), (64, 5), (50,))


def with_loss(family: str, coefficient: float = 0.5, **changes: Any) -> Any:
    return tiny(family, output_router_logits=True, router_aux_loss_coef=coefficient, **changes)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_fixed_shapes_leave_it_as_it_is(family: str) -> None:
    model, fixed = with_loss(family), FixedShapes(96, longest=64, segments=8)
    docs = documents(ROWS[1])
    want = truth(model, docs)
    torch_backend.patch(model, verify=False)
    batch = fixed(with_mask(collate(docs, capacity=64)))
    assert batch["input_ids"].shape == (1, 96) and int(batch["attention_mask"].sum()) == sum(ROWS[1])
    assert float(model(**batch).aux_loss.detach()) == pytest.approx(want, rel=1e-5)
    everything = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert float(model(**everything).aux_loss.detach()) != pytest.approx(want, rel=1e-3), "padding would be seen here"


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3_moe", "batch"), ("gpt_oss", "batch"), ("gpt_oss", "document"), ("glm4_moe", "document")],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_captured_step_trains_it_as_the_eager_step_does(
    family: str, kind: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one row get a row of padding, since the first one has two."""
    graphs: SimpleNamespace = stand_in(monkeypatch.setattr)
    rows = [with_mask(collate(documents(lengths, seed=i), capacity=64)) for i, lengths in enumerate(ROWS * 3)]
    losses, models = [], []
    for options in ({}, {"capture": False, "compile": False}):
        model = torch_backend.patch(with_loss(family, router_loss=kind), verify=False)
        graphs.model = model
        step = torch_backend.make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        given = [rows[i : i + microbatches] for i in range(0, len(rows), microbatches)]
        losses.append([float(step(each)["loss"]) for each in given])
        models.append(model)
        assert step.parts["graph"] == ("no CUDA graph: capture=False" if options else "CUDA graph"), step.parts
    assert graphs.recorded == microbatches and graphs.replayed > 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(*(list(model.parameters()) for model in models))


def test_fixed_shapes_are_refused_where_a_routers_loss_would_count_their_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eligibility, "_why_not_here", lambda state: None)  # as on a GPU
    monkeypatch.setattr(Patched, "layers_need_lengths", False)
    reason = "its router's auxiliary loss would count the padding that fixed shapes need"
    with_loss, without = (
        torch_backend.patch(tiny("mixtral", output_router_logits=on), verify=False) for on in (True, False)
    )
    batch = collate(documents())
    assert eligibility._why_not_fixed(with_loss, batch) == reason != eligibility._why_not_fixed(without, batch)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert eligibility._why_not_fixed(with_loss, batch) != reason
