"""Compiled layers in preference and reward trainers and under heads for documents: the same updates, and who runs them.

Compiling is replaced by counting, except in one test: what is compiled for the CPU is not what a GPU runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.async_compile import AsyncCompile

from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.hf.test_document_heads import classifier, features
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.preference import assert_same_training, trained
from tests.torch_backend.scored_trainers import dpo, reward
from tests.torch_backend.trainers.test_classification_trainer import trainer as classifying
from torch_backend import PackedCollator, explain, make_train_step, patch
from torch_backend.hf.patch import state_of
from torch_backend.hf.unpadding import unpad_calls
from torch_backend.segments import PackedMetadata
from torch_backend.steps import compiling, fast_backward
from torch_backend.steps import dynamic_compile as packed_calls
from torch_backend.steps.dynamic_compile import COMPILED, CompiledCalls
from torch_backend.trainers import preference
from torch_backend.trainers.enable_packing import enable_packing


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers can be compiled on the CPU."""
    monkeypatch.setattr(packed_calls, "why_not_compiled", lambda model: None)


def layers_of(trainer: Any) -> list[str]:
    return [what for part, what in trainer.packed_step.parts.items() if part.startswith("layers")]


@pytest.mark.parametrize(("make", "checkpointing"), [(dpo, False), (dpo, True), (reward, False)])
def test_updates_through_compiled_layers_are_those_of_plain_ones(
    compiled: SimpleNamespace, possible: None, make: Any, checkpointing: bool, tmp_path: Any
) -> None:
    options = {"gradient_checkpointing": checkpointing, "max_steps": 2}
    plain = trained(enable_packing(make(tmp_path, **options), verify=False, fast=False))
    assert compiled.calls == 0
    trainer = enable_packing(make(tmp_path, **options), verify=False)
    assert all(what.startswith("decided at the first packed call") for what in layers_of(trainer))
    assert_same_training(trained(trainer), plain, 1e-6)
    policy, *reference = layers_of(trainer)
    assert policy == COMPILED + (', memory="full"' if checkpointing else "")
    assert all(what == COMPILED for what in reference)
    models = 2 if make is dpo else 1
    assert len(layers_of(trainer)) == models
    # Two micro-batches in each of two steps, the first one of all too; two layers and the norm.
    packed = models * 4 * (2 + 1)
    assert compiled.calls >= packed  # layers that recompute and recordings call them again


def test_plain_layers_keep_nothing_for_a_backward(compiled: SimpleNamespace, possible: None) -> None:
    """The first call asks the attention without gradients, and its backward reads what compiled layers kept."""
    model = patch(tiny("qwen2"), verify=False).train()
    unpad_calls(model, always=True)
    CompiledCalls(model)
    mask, kept = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), []
    model.model.layers[0].register_forward_hook(lambda *call: kept.append((call[2].requires_grad, compiled.calls)))
    model(input_ids=torch.full((2, 4), 5), attention_mask=mask).logits.sum().backward()
    assert kept == [(False, 0), (True, 1)]


def test_compilers_start_while_plain_layers_run(
    compiled: SimpleNamespace, possible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes take seconds to start: once, before the first call's kernels are compiled in this one."""
    order: list[str] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: order.append("compilers"))
    for has_gpu in (True, False):
        cuda = SimpleNamespace(is_available=lambda has_gpu=has_gpu: has_gpu)
        with monkeypatch.context() as patched:  # not of torch itself, which would keep the answer
            patched.setattr(compiling, "torch", SimpleNamespace(cuda=cuda))
            compiling.start_compilers()
    assert order == ["compilers"]
    monkeypatch.setattr(packed_calls, "start_compilers", lambda: order.append("compilers"))
    model = patch(tiny("qwen2"), verify=False).train()
    unpad_calls(model, always=True)
    CompiledCalls(model)
    model.model.layers[0].register_forward_pre_hook(lambda *call: order.append("layer"))
    for _ in range(2):
        model(input_ids=torch.full((1, 4), 5), attention_mask=torch.ones(1, 4, dtype=torch.long))
    assert order[1:3] == ["compilers", "layer"] and order.count("compilers") == 2
    order.clear()
    monkeypatch.setattr(fast_backward, "start_compilers", lambda: order.append("compilers"))
    compiled.model = model = patch(tiny("qwen2"), verify=False)
    model.model.layers[0].register_forward_pre_hook(lambda *call: order.append("layer"))
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(PackedCollator(model, capacity=16)([{"input_ids": [5] * 8}]))
    assert order[:2] == ["compilers", "layer"] and order.count("compilers") == 1


def test_other_calls_run_the_layers_as_they_are(compiled: SimpleNamespace, possible: None, tmp_path: Any) -> None:
    trainer = enable_packing(dpo(tmp_path), verify=False)
    trainer.train()
    before, prompt = compiled.calls, torch.arange(4, 12)[None]
    trainer.model(input_ids=prompt)
    trainer.model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False)
    assert compiled.calls == before > 0


def test_layers_that_do_not_compile_run_as_usual_and_explain_says_so(
    compiled: SimpleNamespace, possible: None, caplog: Any, tmp_path: Any
) -> None:
    plain = trained(enable_packing(dpo(tmp_path), verify=False, fast=False))
    compiled.error = TorchDynamoException("no kernel for this\nmore")
    trainer = enable_packing(dpo(tmp_path), verify=False)
    assert_same_training(trained(trainer), plain, 0)
    assert compiled.calls == 2  # once for each model
    assert layers_of(trainer) == ["not compiled: it failed, no kernel for this"] * 2
    assert "layers that are not compiled" in caplog.text


REASONS = {
    "fast=False": ({"fast": False}, {}),
    "torch_compile=True compiles the model as a whole": ({}, {"torch_compile": True}),
    "the model computes on cpu": ({}, {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_explain_says_why_layers_are_not_compiled(reason: str, tmp_path: Any) -> None:
    given, options = REASONS[reason]
    trainer = enable_packing(dpo(tmp_path, **options), verify=False, **given)
    notes = explain(trainer).notes
    assert f"layers of the step: not compiled: {reason}" in notes
    assert f"layers of the reference of the step: not compiled: {reason}" in notes
    assert f"graph of the step: not compiled: {reason}" in notes


def test_layers_are_compiled_unless_a_setting_forbids_it() -> None:
    """GRPO's arguments, for example, have no ``activation_offloading``."""

    def reason(**changes: Any) -> str | None:
        trainer = SimpleNamespace(is_deepspeed_enabled=False, is_fsdp_enabled=False, torch_compile=False, **changes)
        trainer.args = trainer
        return preference.why_not_layers(trainer)

    assert reason() is reason(activation_offloading=False) is None
    assert reason(activation_offloading=True) == "activations are offloaded"


def test_recurrent_layers_are_left_alone(possible: None) -> None:
    calls = CompiledCalls(patch(tiny("qwen3_5_text"), verify=False))
    assert calls.layers == "not compiled: its recurrent layers are compiled for rows of one length alone"


@pytest.mark.slow
def test_rows_of_any_length_share_graphs(interpreted: None, possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the layers and one of the norm, with gradients and without, whatever the first row was."""
    torch._dynamo.reset()
    counter = counted_compilation(monkeypatch, packed_calls, "eager")
    model = patch(tiny("qwen2"), implementation="triton", verify=False).train()
    unpad_calls(model, always=True)
    calls = CompiledCalls(model)
    for number, lengths in enumerate([(5, 9), (7, 3), (2, 10, 6)]):
        ids = torch.nn.utils.rnn.pad_sequence(documents(lengths), batch_first=True)
        given = {
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long(),
        }
        with torch.no_grad():
            found = model(**given).logits
        trained = model(**given).logits
        trained.sum().backward()
        with torch.no_grad():
            for row, length in enumerate(lengths):
                right = model(input_ids=ids[row : row + 1, :length]).logits[0]
                assert error(found[row, :length], right) <= 1e-5, number
                assert error(trained[row, :length], right) <= 1e-5, number
    assert calls.layers == COMPILED
    assert counter.frame_count == 4


# -- heads for documents -----------------------------------------------------------------------------------------------


def batches(model: nn.Module, sizes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    collate = PackedCollator(model, capacity=64)
    return [collate(features(documents(x), torch.arange(len(x)) % 3)) for x in sizes]


@pytest.mark.parametrize("named", [True, False], ids=["packed_documents", "every segment"])
def test_heads_for_documents_run_through_compiled_layers(compiled: SimpleNamespace, named: bool) -> None:
    """As many documents as there are; the padding of fixed shapes is none."""
    model, right = (patch(classifier("qwen3"), verify=False) for _ in range(2))
    compiled.model = model
    given = batches(model, [(9, 30, 20, 40), (60,), (3, 3, 3, 3, 40)])  # two rows, then one and one of padding
    if not named:
        given = [{k: x for k, x in batch.items() if k != "packed_documents"} for batch in given]
        for batch in given:  # a row without padding
            batch["labels"] = batch["labels"].new_ones(len(batch["packed_lengths"]))
    fast, plain = (
        make_train_step(m, torch.optim.SGD(m.parameters(), lr=0.1), **options)
        for m, options in ((model, {}), (right, {"compile": False, "capture": False}))
    )
    for batch in given:
        torch.testing.assert_close(fast(batch), plain(batch), rtol=1e-6, atol=1e-7)
    for x, y in zip(model.parameters(), right.parameters(), strict=True):
        assert error(x.detach(), y.detach()) <= 1e-6
    assert compiled.calls == len(given) * (2 + 1)
    assert fast.parts["layers"] == "compiled"
    assert fast.parts["graph"] == "no CUDA graph: its head reads documents, of which each batch has another number"


def test_a_trainer_that_classifies_documents_runs_through_compiled_layers(
    compiled: SimpleNamespace, tmp_path: Any
) -> None:
    fast, plain = (
        enable_packing(classifying(tmp_path), capacity=48, verify=False, fast=each) for each in (True, False)
    )
    compiled.model = fast.model
    assert_same_training(trained(fast), trained(plain), 1e-6)
    assert compiled.calls == 6 * (2 + 1)  # three steps of two micro-batches
    assert "layers of the step: compiled" in explain(fast).notes


@pytest.mark.slow
def test_a_pooler_reads_its_documents_after_compiled_layers_dropped_their_lengths(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no length is read back from the device for it."""
    model = patch(encoder("bert", transformers.AutoModel), implementation="triton", verify=False).eval()
    batch = PackedCollator(model, capacity=32)([{"input_ids": x} for x in documents((9, 5, 4))])
    del batch["labels"]
    with torch.no_grad():
        right = model(**batch).pooler_output
        state = state_of(model)
        assert state is not None and not state.layers_need_lengths and state.needs_lengths
        state.compiled = set(state.requests)
        monkeypatch.setattr(PackedMetadata, "readable", property(lambda segments: False))
        torch.testing.assert_close(model(**batch).pooler_output, right)
