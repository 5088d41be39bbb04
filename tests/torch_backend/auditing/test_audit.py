"""audit(model): exact where it is, contaminated where it is not, and quick enough to run at every patch."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import CONFIG_MAPPING

import torch_backend
from packing_core.errors import ContaminationError, UnsupportedModelError
from tests.torch_backend.auditing.test_audit_mutants import LEAKS, model_with
from tests.torch_backend.models import alone, assert_same, collate, documents, in_float64, packed, tiny
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.ops.attention import sdpa
from torch_backend.ops.attention.request import AttentionInputs
from torch_backend.segments import PackedMetadata


def test_a_patched_model_is_exact() -> None:
    report = torch_backend.audit(tiny("llama"), patched=True)
    assert report.verdict == "exact", str(report)
    assert max(report.logits, report.loss, report.gradients) < 1e-5
    assert report.leak == report.noise == 0 and report.moved > 0.1
    assert (report.device, report.dtype, report.implementation) == ("cpu", "float32", "auto")


def test_a_model_that_is_not_patched_is_judged_as_it_is() -> None:
    """The stock model, whose documents see each other; its patched clone was judged in its place, and exact."""
    model = tiny("gpt2")
    report = torch_backend.audit(model)
    assert (report.verdict, report.audited) == ("contaminated", "as it is") and report.leak > 0.1, str(report)
    assert torch_backend.audit(model, patched=True).audited == "once patched"
    patched = torch_backend.audit(torch_backend.patch(model, verify=False))
    assert (patched.verdict, patched.audited) == ("exact", "patched"), str(patched)
    assert torch_backend.audit(model, patched=False).verdict == "contaminated"


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    report = torch_backend.audit(tiny("llama").bfloat16(), patched=True)
    assert report.verdict == "exact", str(report)
    assert 1e-3 < report.logits <= report.allowed_logits < 0.2


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_a_proof_does_not_follow_the_defaults_of_the_process(family: str) -> None:
    model = tiny(family)
    want = torch_backend.audit(model, patched=True)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        assert torch_backend.audit(model, patched=True) == want
        assert torch_backend.patch(model) is model
        assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.bfloat16, "meta")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    whole = type(sdpa.SDPA).__call__

    def joined(self: Any, inputs: AttentionInputs, request: Any) -> Any:
        one = PackedMetadata.from_lengths([inputs.packed.tokens])
        return whole(self, inputs._replace(packed=one), request)

    monkeypatch.setattr(type(sdpa.SDPA), "__call__", joined)
    report = torch_backend.audit(tiny("llama").to(dtype), patched=True, implementation="sdpa")
    assert report.verdict == "contaminated"
    assert report.logits > 0.1 and report.leak > 0.1


def test_a_wrong_gradient_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = import_module("torch_backend.ops.document_batches")
    monkeypatch.setattr(
        documents._Unpad, "backward", staticmethod(lambda ctx, g: (g.index_select(0, ctx.laid.gather) * 0.9, None))
    )
    report = torch_backend.audit(tiny("llama"), patched=True, implementation="sdpa")
    assert report.logits < 1e-5 and report.gradients > 1e-3
    assert report.verdict == "contaminated"


def test_the_model_itself_is_not_touched() -> None:
    model = tiny("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    torch_backend.audit(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not model._forward_pre_hooks


def test_the_report_reads_as_text_and_json() -> None:
    report = torch_backend.audit(tiny("llama"), patched=True, tolerance=1e-3)
    assert str(report).startswith("LlamaForCausalLM once patched (auto, float32 on cpu): exact; logits ")
    assert json.loads(report.to_json())["verdict"] == "exact"
    assert json.loads(report.to_json())["allowed_gradients"] == 1e-3
    refused = torch_backend.AuditReport("M", "auto", "cpu", "float32", refused="it cannot")
    assert (refused.verdict, str(refused)) == ("refused", "M patched (auto, float32 on cpu): refused, it cannot")


@pytest.mark.parametrize(
    ("family", "positions"),
    [("gpt2", "n_positions"), ("opt", "max_position_embeddings"), ("mpt", "max_seq_len")],
)
def test_a_model_of_few_positions_is_proven_with_more_of_them(family: str, positions: str) -> None:
    model = tiny(family, **{positions: 32})
    assert getattr(model.config, positions) == 32
    report = torch_backend.audit(model, patched=True)
    assert report.verdict == "exact", str(report)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma4_unified_text"])
def test_layers_that_share_keys_are_kept_in_the_clone(family: str) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = CONFIG_MAPPING[family](
        num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2, hidden_size=64, head_dim=16, vocab_size=96
    )
    clone = tiny_config(config)
    assert (clone.layer_types, clone.num_kv_shared_layers) == (kinds, 2)
    report = torch_backend.audit(tiny_model(clone), patched=True)
    assert report.verdict == "exact", str(report)


def test_layers_that_share_keys_are_refused_fewer_queries() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2)
    model = torch_backend.patch(tiny_model(tiny_config(config)), verify=False)
    batch = collate(documents())
    del batch["labels"]
    with pytest.raises(UnsupportedModelError, match="a packed forward computes all logits: leave logits_to_keep out"):
        model(**batch, logits_to_keep=2)


def test_dense_and_sparse_layers_are_kept_in_the_clone() -> None:
    clone = tiny_config(CONFIG_MAPPING["qwen3_moe"](num_hidden_layers=6, mlp_only_layers=[0, 1, 2]))
    assert (clone.num_hidden_layers, clone.mlp_only_layers) == (2, [0])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_router_loss_is_no_contamination_and_reported_by_itself(family: str) -> None:
    model = tiny(family, output_router_logits=True, router_aux_loss_coef=1.0)
    torch_backend.patch(model)
    report = torch_backend.audit(model)
    assert report.verdict == "exact", str(report)
    assert report.loss < 1e-5 and report.router_loss < 1e-5
    assert "; router loss, not judged: " in str(report)
    assert model.config.output_router_logits
    assert torch_backend.audit(tiny(family), patched=True).router_loss is None


def test_a_router_loss_that_would_count_padding_is_refused_at_the_patch() -> None:
    with pytest.raises(UnsupportedModelError, match="routes inside layers that run per document"):
        torch_backend.patch(tiny("deepseek_v4", output_router_logits=True))


def test_a_padding_dependent_router_loss_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = import_module("transformers.models.mixtral.modeling_mixtral")
    right = modeling.load_balancing_loss_func
    monkeypatch.setattr(modeling, "load_balancing_loss_func", lambda *args: right(*args[:3]))  # without the mask
    report = torch_backend.audit(tiny("mixtral", output_router_logits=True), patched=True)
    assert report.verdict == "exact" and report.router_loss > 1e-4


def test_offloaded_models_are_proven_where_they_run() -> None:
    model, docs = tiny("qwen3").eval(), documents()
    with torch.no_grad():
        want = alone(model, docs)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    report = torch_backend.audit(model, patched=True)
    assert (report.verdict, report.device) == ("exact", "cpu"), str(report)
    torch_backend.patch(model)
    with torch.no_grad():
        assert_same(packed(model, docs), want)


def test_a_model_that_cannot_be_cloned_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("torch_backend.auditing.model"), "tiny_config", lambda config: config.nonsense)
    with pytest.raises(UnsupportedModelError, match="no tiny clone of LlamaForCausalLM can be made .* verify=False"):
        torch_backend.audit(tiny("llama"), patched=True)


def test_verified_patching_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model of other weights too: the audit runs clones of its config."""
    auditing = import_module("torch_backend.auditing.model")
    monkeypatch.setattr(auditing, "_verdicts", {})
    cloned: list[Any] = []
    tiny_config = auditing.tiny_config
    monkeypatch.setattr(
        auditing, "tiny_config", lambda *a, **options: (cloned.append(a), tiny_config(*a, **options))[1]
    )
    torch_backend.patch(tiny("llama"))
    audited = len(cloned)
    torch_backend.patch(tiny("llama", seed=1))
    assert audited and len(cloned) == audited
    torch_backend.patch(tiny("llama", num_hidden_layers=1))
    assert len(cloned) > audited


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float64) for family in ("llama", "mixtral", "mamba2", "gpt2", "gemma3_text")),
        # on the CPU, layer norms of the first three sum gradients in their dtype
        *((family, torch.bfloat16) for family in ("gpt2", "opt", "llama")),
        *((family, torch.float16) for family in ("gpt2", "gpt_neox", "llama")),
    ],
    ids=str,
)
def test_rounding_is_no_contamination_in_any_dtype(family: str, dtype: torch.dtype) -> None:
    model = in_float64(tiny(family)) if dtype == torch.float64 else tiny(family).to(dtype)
    report = torch_backend.audit(model, patched=True)
    assert report.verdict == "exact" and report.leak == report.gradient_leak == 0, str(report)
    assert re.search(r"gradients \d\.\de-\d+ of \d\.\de-\d+, leak", str(report))


def test_what_differs_without_a_leak_is_named_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that number the row: no document sees another, and none is what it is alone."""
    monkeypatch.setattr(import_module("torch_backend.auditing.model"), "_verdicts", {})
    with pytest.raises(ContaminationError) as raised:
        torch_backend.patch(model_with(LEAKS["absolute positions"]))
    text = str(raised.value)
    assert "see each other" not in text and re.match(
        r"packed documents are not what they are alone in Model: they differ in logits by 0\.\d+, where rounding "
        r"allows \d\.\de-06 and in loss by ",
        text,
    ), text


def test_an_audit_seeds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []  # ranks that are seeded alike would drop the same channels
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch_backend.audit(tiny("llama"), patched=True)
    assert seeded == []
