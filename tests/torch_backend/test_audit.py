"""audit(model): exact where it is, contaminated where it is not, and quick enough to run at every patch."""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

import pytest
import torch

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import tiny
from torch_backend.ops.attention import sdpa
from torch_backend.segments import PackedMetadata


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_patched_families_are_exact(family: str) -> None:
    report = torch_backend.audit(tiny(family))
    assert report.verdict == "exact", str(report)
    assert max(report.logits, report.loss, report.gradients) < 1e-5
    assert report.leak == report.noise == 0 and report.moved > 0.1
    assert (report.device, report.dtype, report.implementation) == ("cpu", "float32", "auto")


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    report = torch_backend.audit(tiny("llama").bfloat16())
    assert report.verdict == "exact", str(report)
    assert 1e-3 < report.logits <= report.tolerance < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    whole = type(sdpa.SDPA).__call__

    def joined(self: Any, q: Any, k: Any, v: Any, packed: PackedMetadata, *args: Any, **kwargs: Any) -> Any:
        one = PackedMetadata.from_lengths([packed.tokens])
        return whole(self, q, k, v, one, *args, **kwargs)

    monkeypatch.setattr(type(sdpa.SDPA), "__call__", joined)
    report = torch_backend.audit(tiny("llama").to(dtype), implementation="sdpa")
    assert report.verdict == "contaminated"
    assert report.logits > 0.1 and report.leak > 0.1


def test_a_wrong_gradient_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = import_module("torch_backend.ops.documents")
    monkeypatch.setattr(
        documents._Unpad, "backward", staticmethod(lambda ctx, g: (g.index_select(0, ctx.laid.gather) * 0.9, None))
    )
    report = torch_backend.audit(tiny("llama"), implementation="sdpa")
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
    report = torch_backend.audit(tiny("llama"), tolerance=1e-3)
    assert str(report).startswith("LlamaForCausalLM (auto, float32 on cpu): exact; logits ")
    assert json.loads(report.to_json())["verdict"] == "exact"
    assert json.loads(report.to_json())["tolerance"] == 1e-3
    refused = torch_backend.AuditReport("M", "auto", "cpu", "float32", refused="it cannot")
    assert (refused.verdict, str(refused)) == ("refused", "M (auto, float32 on cpu): refused, it cannot")


def test_a_model_that_cannot_be_cloned_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("torch_backend.auditing.model"), "tiny_config", lambda config: config.nonsense)
    with pytest.raises(UnsupportedModelError, match="no tiny clone of LlamaForCausalLM can be made .* verify=False"):
        torch_backend.audit(tiny("llama"))


def test_verified_patching_is_quick_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("torch_backend.auditing.model"), "_verdicts", {})
    start = time.process_time()
    torch_backend.patch(tiny("llama"))
    first = time.process_time() - start
    start = time.process_time()
    torch_backend.patch(tiny("llama", seed=1))
    again = time.process_time() - start
    assert first < 2, first
    assert again < first / 2
