"""Families whose layers compute attention themselves: in packed calls every layer runs packed attention instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_backend
from packing_core.errors import CapacityError
from tests.torch_backend.models import alone, assert_same, collate, documents, error, packed, tiny
from tools.tables.families import audit_encoder
from torch_backend.hf.anatomy.layers import computes_attention
from torch_backend.hf.forward import AttentionChoice
from torch_backend.hf.patch import state_of
from torch_backend.steps.cuda_graph import compile_layers

LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": 7}
MANY_QUERIES = {"new_decoder_architecture": True, "num_kv_heads": 2}
# Families, and options of theirs that attention follows. Six heads have slopes that are no powers of two.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f: (f, {}) for f in ("bloom", "codegen", "falcon", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm")},
    "bloom, 6 heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "falcon, grouped": ("falcon", MANY_QUERIES),
    "falcon, a key for each head": ("falcon", {"multi_query": False}),
    "gpt_neo": ("gpt_neo", LOCAL),
    "mpt, 6 heads": ("mpt", {"n_heads": 6, "d_model": 96}),
}
NO_FLOAT64 = ("xglm",)  # its own code fails


def model_of(name: str) -> Any:
    family, options = MODELS[name]
    return tiny(family, **options)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_runs_packed_attention_and_is_exact(name: str) -> None:
    model, docs = model_of(name), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    batch = collate(docs)
    del batch["position_ids"]  # which then restart at every document
    found = packed(model, docs, batch)
    for run in (found, truth):
        run.gradients = {n: x for n, x in run.gradients.items() if not n.endswith("k_proj.bias")}  # rounding alone
    assert_same(found, truth, 1e-5)
    state = state_of(model)
    assert state is not None and state.anatomy.route == "attention"
    assert len(state.choices) == model.config.num_hidden_layers
    assert all(isinstance(choice, AttentionChoice) for choice in state.choices.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_FLOAT64])
def test_in_float64_no_error_is_left_but_that_of_their_float32_scores(name: str) -> None:
    model, docs = model_of(name).double(), documents()
    truth = alone(model, docs)
    found = packed(torch_backend.patch(model, verify=False), docs)
    assert max(error(g, w) for g, w in zip(found.logits, truth.logits, strict=True)) <= 5e-7


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "openai-gpt", "falcon", "bloom", "mpt", "xglm"])
def test_dropout_of_weights_is_applied_in_training_alone(name: str) -> None:
    model, docs = torch_backend.patch(model_of(name), verify=False), documents((40, 20))
    for module in model.modules():
        if "ttention" in type(module).__name__:
            for dropout in filter(None, (getattr(module, n, None) for n in ("attn_dropout", "attention_dropout"))):
                dropout.p = 0.5
            for setting in {"dropout", "attn_dropout_p"} & vars(module).keys():
                setattr(module, setting, 0.5)
    dry = packed(model.eval(), docs)
    assert {request.dropout for request in state_of(model).requests} == {0.0}
    wet = packed(model.train(), docs)
    assert {request.dropout for request in state_of(model).requests} == {0.0 if name == "falcon" else 0.5}
    assert (error(wet.logits[0], dry.logits[0]) > 1e-2) is (name != "falcon")  # which drops none, as its own code


@pytest.mark.parametrize("family", ["megatron-bert", "rembert"])
def test_encoders_of_bert_s_form_are_exact(family: str) -> None:
    for found in audit_encoder(family).values():
        assert found.report is not None and (found.verdict, found.report.route) == ("exact", "attention"), found


def test_local_layers_of_gpt_neo_ask_for_their_window() -> None:
    model = torch_backend.patch(model_of("gpt_neo"), verify=False)
    packed(model, documents())
    assert [(request.window, request.scale) for request in state_of(model).requests] == [(None, 1.0), (7, 1.0)]


@pytest.mark.parametrize("name", ["gptj", "falcon", "bloom"])
def test_compiled_layers_are_exact(name: str) -> None:
    model, docs = model_of(name), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    packed(model, docs)
    compile_layers(model, backend="eager")
    assert_same(packed(model, docs), truth, 1e-5)
    torch._dynamo.reset()


# -- what is not known runs by documents -----------------------------------------------------------------------------


def subclassed(model: nn.Module, method: str) -> nn.Module:
    """The model with layers of a class that has a method of its own."""
    for layer in model.modules():
        if computes_attention(layer):
            kind = type(layer)
            layer.__class__ = type(
                "Ours", (kind,), {method: lambda self, *args, kind=kind: getattr(kind, method)(self, *args)}
            )
    return model


def with_a_forward(model: nn.Module) -> nn.Module:
    for layer in [layer for layer in model.modules() if computes_attention(layer)]:
        own = layer.forward
        layer.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    return model


BY_DOCUMENTS = {
    "Falcon's ALiBi, which rounds positions to bfloat16": lambda: tiny("falcon", alibi=True),
    "Bloom's output in parts": lambda: tiny("bloom", slow_but_exact=True, pretraining_tp=2),
    "another method": lambda: subclassed(tiny("gptj"), "_attn"),
    "another forward": lambda: subclassed(tiny("falcon"), "forward"),
    "a forward on the instance": lambda: with_a_forward(tiny("xglm")),
}


@pytest.mark.parametrize("case", BY_DOCUMENTS)
def test_attention_that_is_not_known_runs_by_documents(case: str) -> None:
    model = torch_backend.patch(BY_DOCUMENTS[case](), verify=False)
    assert state_of(model).anatomy.route == "documents"


def test_a_document_longer_than_the_table_of_angles_is_named() -> None:
    model = torch_backend.patch(tiny("gptj", n_positions=32), verify=False)
    packed(model, documents((20, 32, 12)))
    with pytest.raises(CapacityError, match="a document has 33 tokens and GPTJForCausalLM learned positions for 32"):
        model(**collate(documents((33, 12))))


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_shared_prefixes_take_distances_along_a_document(family: str) -> None:
    """A branch is far from its prefix in the row, and next to it in its document."""
    from tests.torch_backend.hf.test_shared_prefix_families import answers
    from torch_backend.hf.unpadding import unpad_calls

    ids, mask = answers(80, 3, 5, 4)
    found: list[Tensor] = []
    for share in (False, "auto"):
        model = torch_backend.patch(tiny(family), verify=False).train()
        unpad_calls(model, always=True, share_prefix=share)
        found.append(model(input_ids=ids % 30, attention_mask=mask).logits.detach() * mask[..., None])
    assert state_of(model).unpadding.prefixes.refused is None
    assert error(found[1], found[0]) <= 1e-5
