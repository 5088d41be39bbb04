"""The Triton rotation inside patched models: which modeling files take it, and that nothing else changes."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

import torch_backend
from tests.torch_backend.kernels import FLOAT32
from tests.torch_backend.models import alone, assert_same, collate, documents, in_float64, packed, tiny
from torch_backend.hf.edits import rotary


def rotation(family: str):
    return import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb


@pytest.mark.parametrize(
    ("family", "interleaved"),
    [("llama", False), ("qwen3_next", False), ("glm", True), ("cohere", None), ("gpt_oss", None), ("gptj", None)],
)
def test_a_modeling_file_is_judged_by_calling_its_function(family, interleaved):
    assert rotary.interleaving(rotation(family)) is interleaved


@pytest.fixture
def turns(monkeypatch) -> list[bool]:
    """One entry per rotation by the kernel."""
    seen = []
    apply_rope = rotary.apply_rope
    monkeypatch.setattr(
        rotary, "apply_rope", lambda *args, **named: seen.append(named["interleaved"]) or apply_rope(*args, **named)
    )
    return seen


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
@pytest.mark.parametrize(("family", "interleaved"), [("qwen2", False), ("glm", True)])
def test_packed_forwards_rotate_in_the_kernel_and_equal_each_document_alone(where, turns, family, interleaved):
    model, docs = tiny(family).to(where.device), [x.to(where.device) for x in documents((5, 9, 3))]
    truth = alone(model, docs)
    torch_backend.patch(model, implementation="sdpa", verify=False)
    batch = collate([document.cpu() for document in docs], capacity=None)
    batch = {k: v.to(where.device) if torch.is_tensor(v) else v for k, v in batch.items()}
    assert_same(packed(model, docs, batch), truth)
    assert turns == [interleaved] * model.config.num_hidden_layers


@pytest.mark.parametrize("where", FLOAT32, indirect=True)
def test_unpacked_forwards_siblings_and_unpatched_models_never_see_the_kernel(where, turns):
    sibling, model = tiny("qwen2").to(where.device), tiny("qwen2").to(where.device)
    ids = torch.arange(6, device=where.device)[None]
    before = model(ids).logits
    torch_backend.patch(model, implementation="sdpa", verify=False)
    assert torch.equal(model(ids).logits, before) and torch.equal(sibling(ids).logits, before)
    layer = model.model.layers[0].self_attn
    assert "_crosspack_rotated_forward" in layer.__dict__
    torch_backend.unpatch(model)
    assert "_crosspack_rotated_forward" not in layer.__dict__ and torch.equal(model(ids).logits, before)
    assert turns == []


def test_off_the_gpu_the_models_own_rotation_runs(turns):
    model, docs = tiny("qwen2"), documents((5, 9, 3))
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs, collate(docs, capacity=None)), truth)
    assert turns == []


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3n_text"])
def test_frequencies_are_those_of_each_document_whatever_the_rotary_module_is_called_with(family):
    """Qwen 3.5 passes positions [3, B, S], Gemma 3n hidden states [4, B, S, H]."""
    rope = dict(tiny(family).config.rope_parameters)
    factors = [1.0 + i for i in range(int(8 * rope.get("partial_rotary_factor", 1.0)))]
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [3 * x for x in factors], "factor": 4.0}
    scaling |= {"original_max_position_embeddings": 24, "rope_theta": 10000.0}
    inner = {kind: value | scaling for kind, value in rope.items() if isinstance(value, dict)}
    model, docs = in_float64(tiny(family, rope_parameters=inner or rope | scaling)), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    assert_same(packed(model, docs), truth, 2e-5)
