"""Families whose indexers select keys (DeepSeek's sparse attention): documents below, at and above the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.guards import DeviceGuard
from tests.torch_backend.models import (
    alone,
    assert_same,
    assert_same_gradients,
    collate,
    documents,
    gradients,
    in_float64,
    packed,
    patched,
    tiny,
)
from torch_backend import explain, make_train_step, patch, unpatch
from torch_backend.hf.anatomy.layers import find_indexers
from torch_backend.hf.edits import indexers as edited
from torch_backend.hf.inputs.context import refuse_context
from torch_backend.hf.latents import latent_of
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops.attention import selected
from torch_backend.segments import PackedMetadata
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.fast_backward import Choice

FAMILIES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
SHARED |= {"layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense"] * 3}


def assert_as_alone(model: Any) -> None:
    """Packed documents have the outputs and gradients of each one alone."""
    model = in_float64(model)
    want = alone(model, documents())
    results = packed(patch(model, verify=False), documents())
    if model.config.model_type == "hy_v4":  # which mixes its streams in float32, whatever the weights are
        assert_same_gradients(results.gradients, want.gradients)
        results.gradients = want.gradients
    assert_same(results, want, 2e-6)


def indexers(model: Any) -> list[Any]:
    return list(find_indexers(model))


def indexed(family: str, budget: int, **changes: Any) -> Any:
    return tiny(family, index_topk=budget, **changes)


@pytest.mark.parametrize("budget", [1, 19, 64], ids=["all but one above", "some at and above", "all below"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_those_alone(family: str, budget: int) -> None:
    assert_as_alone(indexed(family, budget))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_scores_are_chosen_among_as_alone(family: str) -> None:
    model = indexed(family, 8)
    for indexer in indexers(model):
        nn.init.zeros_(indexer.weights_proj.weight)
    assert_as_alone(model)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_layers_share_what_one_of_them_selected(family: str) -> None:
    assert_as_alone(indexed(family, 8, **SHARED))


BLOCKS = {"layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8}
PLE = {"ple_layer_ids": [1], "ple_embed_dim": 16, "eos_token_id": 2, "ngram_vocab_size_base": 97}
PLE |= {"split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 4}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("minimax_m3_vl_text", {**BLOCKS, "index_topk_blocks": 2}),
        ("minimax_m3_vl_text", {**BLOCKS, "index_topk_blocks": 8}),
        ("minimax_m3_vl_text", {**BLOCKS, "index_topk_blocks": 3, "index_local_blocks": 2}),
        ("minimax_m3_vl_text", {**BLOCKS, "index_topk_blocks": 1, "index_local_blocks": 0, "index_block_size": 4}),
        ("minimax_m3_vl_text", {**BLOCKS, "index_topk_blocks": 5, "index_block_size": 1}),
        ("qwen4_exp_text", {}),
        ("qwen4_exp_text", {"indexer_budget": 3, "indexer_compress_ratio": 1}),
        ("qwen4_exp_text", {"indexer_budget": 64}),
        ("qwen4_exp_text", {"indexer_budget": 6, "indexer_compress_ratio": 3}),
        ("qwen4_exp_text", {"indexer_budget": 32, "indexer_compress_ratio": 8}),  # of 39 and 40 tokens, one is long
        ("qwen4_exp_text", PLE),
    ],
)
def test_blocks_begin_anew_in_every_document(family: str, changes: dict[str, Any]) -> None:
    model, docs = tiny(family, **changes), documents((5, 19, 33, 7, 40, 1, 2, 21, 39))
    want = alone(model, docs, use_cache=False)
    results = packed(patch(model, verify=False), docs, collate(docs, capacity=64))
    assert_same_gradients(results.gradients, want.gradients)
    results.gradients = want.gradients
    assert_same(results, want)


@pytest.mark.parametrize(("family", "kind"), [("minimax_m3_vl_text", BLOCKS), ("qwen4_exp_text", {})])
def test_equal_scores_of_blocks_are_chosen_among_as_alone(family: str, kind: dict[str, Any]) -> None:
    changes: dict[str, Any] = {**kind, "index_topk_blocks": 2} if kind else {}
    model = in_float64(tiny(family, **changes))
    for indexer in indexers(model):
        nn.init.zeros_((indexer.q_proj if kind else indexer.index_qk_proj).weight)
    want = alone(model, documents(), use_cache=False)
    assert_same(packed(patch(model, verify=False), documents()), want)


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "qwen4_exp_text"])
def test_checkpointed_layers_select_the_same_blocks(family: str) -> None:
    model = in_float64(tiny(family, **({**BLOCKS, "index_topk_blocks": 2} if "minimax" in family else {})))
    want = alone(model, documents(), use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(packed(patch(model, verify=False), documents()), want)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "minimax_m3_vl_text"])
def test_calls_that_are_not_packed_select_what_they_did_before_the_patch(family: str, checkpointing: bool) -> None:
    few = {"index_topk": 8} if family in FAMILIES else {**BLOCKS, "index_topk_blocks": 2}
    model, ids = tiny(family, **few), documents((40,))[0][None]
    if checkpointing:
        model.gradient_checkpointing_enable()
    want = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    answer = model.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    packed(patch(model.train(), verify=False), documents())
    results = gradients(model, model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert results.keys() == want.keys() and all(torch.equal(results[key], want[key]) for key in want)
    assert torch.equal(model.eval().generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), answer)


def test_calls_that_are_not_packed_leave_the_layer_to_other_threads() -> None:
    model = patch(tiny("deepseek_v32", index_topk=8), verify=False)
    layer, seen = model.model.layers[0].self_attn, []
    config = layer.config
    layer.o_proj.register_forward_pre_hook(lambda *_: seen.append(layer.config))
    model(input_ids=documents((40,))[0][None])
    assert seen == [config] and seen[0] is config and "config" in layer.__dict__


def test_documents_within_the_budget_need_no_scores() -> None:
    model = patched("deepseek_v32", index_topk=40)
    for indexer in indexers(model):
        nn.init.constant_(indexer.wk.weight, torch.nan)
    assert model(**collate(documents())).logits.isfinite().all()


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_recompute_select_the_same(budget: int, reentrant: bool) -> None:
    model = indexed("glm_moe_dsa", budget, **SHARED)
    want = alone(model, documents())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(packed(patch(model, verify=False), documents()), want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_get_their_factors_as_the_layers_made_them(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    """Indexers widen them first; kernels of half precision multiply the same numbers. dots3's rotation widens them."""
    made = torch.float32 if family.startswith("dots3") else dtype
    dtypes = []

    def select(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        dtypes.extend([q.dtype, k.dtype, weights.dtype])
        return selected.select(q, k, weights, *args, **options)

    monkeypatch.setattr(edited, "select", select)
    model = patch(indexed(family, 8).to(dtype), verify=False)
    model(**collate(documents()))
    assert dtypes[:3] == [made, made, torch.float32]


def test_explain_names_the_documents_above_the_budget() -> None:
    model = patched("deepseek_v32", index_topk=33)
    model(**collate(documents()))
    text = str(explain(model))
    assert "causal; 1 document above 33 tokens by selected keys in plain torch (needs Triton and a GPU" in text
    assert "float32), outside of compiled layers" in text
    assert "documents of at most 33 tokens select all of their keys" in text
    model(**collate(documents((33, 5))))
    assert "by selected keys" not in str(explain(model))


def test_padding_above_the_budget_is_dense() -> None:
    model = patched("deepseek_v32", index_topk=8)
    model(**collate(documents((8, 5)), capacity=64))
    assert "by selected keys" not in str(explain(model))


def test_an_indexer_that_multiplies_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("deepseek_v32", index_topk=8)
    stock = nn.functional.relu
    monkeypatch.setattr(nn.functional, "relu", lambda x, **_: stock(torch.matmul(x, x.transpose(-1, -2))))
    with pytest.raises(UnsupportedModelError, match="DeepseekV32Indexer multiplies 3 times"):
        model(**collate(documents()))


def test_documents_are_not_cut_over_ranks() -> None:
    state = state_of(patched("deepseek_v32"))
    assert state is not None
    with pytest.raises(UnsupportedModelError, match="its indexers select among the keys of a whole document"):
        refuse_context(state.anatomy)


@pytest.mark.parametrize(
    ("family", "changes", "graphs"),
    [
        ("glm_moe_dsa", {**SHARED, "v_head_dim": 16, "index_topk": 19}, 3),
        ("minimax_m3_vl_text", {**BLOCKS, "index_block_size": 19, "index_topk_blocks": 1}, 2),
        ("qwen4_exp_text", {"layer_types": ["indexed_attention"] * 2, "indexer_budget": 18}, 1),
    ],
)
def test_compiled_layers_run_documents_within_the_budget(
    interpreted: None, family: str, changes: dict[str, Any], graphs: int
) -> None:
    """As whole graphs, which longer documents break: one of each kind of layer, and one of the last norm, if any."""
    model = patch(tiny(family, **changes), implementation="triton", verify=False)
    state_of(model).guard = DeviceGuard()  # type: ignore[union-attr] # boundaries on the CPU would be read
    batches = [collate(documents(lengths), max_seqlen=64, bucket=16) for lengths in ((19, 5, 1), (19, 40))]
    short, long = ({name: x for name, x in batch.items() if name != "packed_lengths"} for batch in batches)
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return graph

    with torch.no_grad():
        exact = [causal_lm_loss(model, batch)[0] for batch in (short, long)]
        compile_layers(model, backend=backend)
        losses = [causal_lm_loss(model, short)[0]]
        of_short = len(traced)
        losses.append(causal_lm_loss(model, long)[0])
    torch.testing.assert_close(losses, exact)
    assert of_short == graphs


def test_steps_run_longer_documents_beside_their_graph(
    compiled: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest segment that a graph is for is above the budget from the first batch on."""

    def no_read(packed: PackedMetadata) -> tuple[int, ...]:
        assert packed.lengths is not None
        return packed.lengths

    monkeypatch.setattr(selected, "host_lengths", no_read)
    lengths = [(20, 5), (8, 5), (8, 5), (6, 7), (8, 3), (7, 8), (20, 5), (7, 8)]
    models = [patched("deepseek_v32", index_topk=8) for _ in range(2)]
    compiled.model = models[0]
    losses = []
    for model, fast in zip(models, (True, False), strict=True):
        choice: Choice = "auto" if fast else False
        step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=choice, capture=choice)
        losses.append([float(step(collate(documents(each), capacity=64))["loss"]) for each in lengths[:-2]])
        calls = compiled.calls
        losses[-1].append(float(step(collate(documents(lengths[-2]), capacity=64))["loss"]))
        assert compiled.calls == calls, "longer documents run the layers as they are"
        losses[-1].append(float(step(collate(documents(lengths[-1]), capacity=64))["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (compiled.recorded, compiled.replayed) == (1, 3)


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_latent_attention_runs_in_triton_by_what_its_keys_are_made_of(interpreted: None, family: str) -> None:
    """Hunyuan's has sinks. Layers that are computed again find the same vectors, and adapters are not passed over."""
    docs = documents((3, 12, 9))
    model = indexed(family, 8)
    want = alone(model, docs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(model, implementation=("triton", "sdpa"), verify=False)
    results = packed(model, docs)
    assert_same_gradients(results.gradients, want.gradients)
    results.gradients = want.gradients
    assert_same(results, want, 2e-5)
    assert "2 documents above 8 tokens by selected keys in Triton, outside of compiled layers" in str(explain(model))
    layer = next(module for module in model.modules() if hasattr(module, "kv_b_proj"))
    keys, _ = layer.expand_kv(torch.ones(1, 1, 2, layer.kv_lora_rank), torch.ones(1, 1, 2, layer.qk_rope_head_dim))
    assert latent_of(layer, keys) is not None and latent_of(layer, keys.clone()) is None
    layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)
    assert latent_of(layer, keys) is None
    unpatch(model)
    assert "expand_kv" not in layer.__dict__
