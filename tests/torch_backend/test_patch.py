"""patch(model): packed equals alone, everything else stays as it was, and what cannot be exact raises."""

from __future__ import annotations

import pickle
import re
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import torch_backend
from packing_core.errors import ContaminationError, LayoutError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.models import Run, alone, assert_same, collate, documents, error, packed, tiny, traces
from torch_backend.hf.patch import state_of

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def patched(family: str, **changes: Any) -> Any:
    return torch_backend.patch(tiny(family, **changes), verify=False)


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_document_alone(family: str, implementation: str) -> None:
    model, docs = tiny(family), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, implementation=implementation, verify=False)
    assert_same(packed(model, docs), truth)


@pytest.mark.parametrize("mode", ["padded_rows", "one_row", "padding_free"])
def test_layouts(mode: str) -> None:
    model, docs = tiny("qwen3"), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    options = {"padded_rows": {}, "one_row": {"capacity": 128}, "padding_free": {"capacity": None}}[mode]
    batch = collate(docs, **options)
    assert batch["input_ids"].shape == {"padded_rows": (2, 64), "one_row": (1, 128), "padding_free": (1, 125)}[mode]
    assert_same(packed(model, docs, batch), truth)


def test_an_all_ones_mask_and_an_explicit_cache_flag_change_nothing() -> None:
    model, docs = patched("llama"), documents()
    batch = collate(docs)
    want = packed(model, docs, batch)
    ones = torch.ones_like(batch["input_ids"])
    assert_same(packed(model, docs, {**batch, "attention_mask": ones}, use_cache=True), want, 0.0)
    assert model.config.use_cache and model(**batch).past_key_values is None


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_rotary_frequencies_that_a_cast_rounded_are_named_once(family: str, caplog: Any) -> None:
    model = tiny(family).to(torch.bfloat16)
    for implementation in ("sdpa", "sdpa", "reference"):
        torch_backend.patch(model, implementation=implementation, verify=False)
    (said,) = (record.getMessage() for record in caplog.records if "rotary" in record.getMessage())
    kind = "inv_freq" if family == "qwen3" else "full_attention_inv_freq"
    assert f"rotary frequencies are in torch.bfloat16 (model.rotary_emb.{kind}, " in said
    assert "from_pretrained(..., dtype=torch.bfloat16)" in said


def test_a_model_that_was_loaded_or_made_in_half_precision_has_its_frequencies(tmp_path: Path, caplog: Any) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    made = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float16)
    for model in (loaded, made, tiny("qwen3")):
        torch_backend.patch(model, verify=False)
    assert loaded.dtype == torch.bfloat16 and made.dtype == torch.float16
    assert not [record for record in caplog.records if "rotary" in record.getMessage()]


def test_without_patch_the_same_batch_is_contaminated() -> None:
    """The measure can fail: the unpatched model, asked the same, is far off."""
    model, docs = tiny("llama"), documents()
    truth = alone(model, docs)
    batch = collate(docs)
    stock = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], labels=batch["labels"])
    got = torch.split(stock.logits.flatten(0, 1), list(batch["packed_lengths"]))
    assert (got[1] - truth.logits[1]).abs().max() > 0.1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_two_forwards_before_one_backward(reentrant: bool) -> None:
    model, first, second = tiny("llama"), documents(), documents((30, 3, 11), seed=5)
    truths = [alone(model, first), alone(model, second)]
    torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    losses = [model(**collate(docs)).loss for docs in (first, second)]
    sum(losses).backward()
    for name, parameter in model.named_parameters():
        want = truths[0].gradients[name] + truths[1].gradients[name]
        assert (parameter.grad - want).abs().max() <= 1e-5 * want.abs().max(), name


def test_backward_on_another_thread() -> None:
    model, docs = tiny("llama"), documents()
    truth = alone(model, docs)
    torch_backend.patch(model, verify=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    output = model(**collate(docs))
    thread = threading.Thread(target=output.loss.backward)
    thread.start()
    thread.join()
    got = Run(truth.logits, output.loss.detach(), {n: p.grad for n, p in model.named_parameters()})
    assert_same(got, truth)


def test_one_document_changes_nothing_of_the_others_to_the_bit() -> None:
    model, docs = patched("mistral").eval(), documents()
    before = packed(model, docs).logits
    docs[2] = documents((33,), seed=9)[0]
    after = packed(model, docs).logits
    assert not torch.equal(before[2], after[2])
    for i in (0, 1, 3, 4, 5, 6, 7):
        assert torch.equal(before[i], after[i]), i


def test_unpatch_restores_everything() -> None:
    model = tiny("llama").eval()
    before = traces(model)
    torch_backend.patch(model, verify=False)
    assert traces(model) != before
    torch_backend.unpatch(model)
    assert traces(model) == before
    torch_backend.unpatch(model)
    assert traces(model) == before


def test_patching_twice_is_patching_once() -> None:
    model = patched("llama")
    state = state_of(model)
    assert torch_backend.patch(model, verify=False) is model
    assert state_of(model) is state
    torch_backend.patch(model, implementation="reference", verify=False)
    assert state_of(model).implementation == "reference"
    assert type(model).__mro__[1] is LlamaForCausalLM
    torch_backend.unpatch(model)
    assert type(model) is LlamaForCausalLM and model.config._attn_implementation == "sdpa"


def test_patch_returns_the_wrapper_it_was_given() -> None:
    model = tiny("llama")
    wrapper = nn.Sequential(model)
    assert torch_backend.patch(wrapper, verify=False) is wrapper
    assert state_of(model) is not None


def test_packed_looking_positions_without_segments_raise() -> None:
    model, batch = patched("llama"), collate(documents())
    with pytest.raises(LayoutError, match=r"position_ids restart .*PackedCollator .*with_boundaries\(collator\)"):
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    model(input_ids=batch["input_ids"].flip(1), position_ids=torch.arange(64).expand(2, -1))


def test_segment_numbers_without_boundaries_raise() -> None:
    batch = collate(documents())
    with pytest.raises(LayoutError, match="the batch has seq_idx but no cu_seq_lens_q"):
        patched("llama")(input_ids=batch["input_ids"], seq_idx=batch["seq_idx"])


def test_a_loss_that_calls_the_decoder_itself_is_served() -> None:
    model, batch = patched("llama"), collate(documents())
    whole = model(**batch).logits
    labels = batch.pop("labels")
    assert labels is not None
    assert torch.equal(model.lm_head(model.model(**batch).last_hidden_state), whole)


def test_positions_that_restart_only_inside_left_padding_pass() -> None:
    model = patched("llama")
    ids = torch.stack(documents((6, 6)))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    model(input_ids=ids, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed_lengths": (5, 19)}, "the segments hold 24 tokens and input_ids 128"),
        ({"packed_lengths": (100, 28)}, "a segment crosses from one row of 64 tokens into the next"),
        ({"packed_lengths": (64, 0, 64)}, "segment lengths must be positive"),
    ],
)
def test_segments_that_contradict_the_batch_raise(change: dict[str, Any], message: str) -> None:
    model, batch = patched("llama"), collate(documents())
    ids = {"input_ids": batch["input_ids"]}
    with pytest.raises(LayoutError, match=message):
        model(**ids, **change)


def test_a_cache_or_a_prefix_beside_segments_raises() -> None:
    model, batch = patched("llama"), collate(documents())
    cache = model(input_ids=batch["input_ids"][:, :4], use_cache=True).past_key_values
    with pytest.raises(UnsupportedModelError, match="prefix tuning and caches cannot be packed"):
        model(**batch, past_key_values=cache)


def test_data_parallel_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="use DistributedDataParallel"):
        torch_backend.patch(nn.DataParallel(tiny("llama")))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="no transformers model in Linear: pass one, or a module that holds one"
    ):
        torch_backend.patch(nn.Linear(2, 2))


def test_a_named_implementation_that_does_not_exist_raises() -> None:
    with pytest.raises(UnsupportedError, match="no attention implementation 'flashy'; there are "):
        torch_backend.patch(tiny("llama"), implementation="flashy")


def test_a_model_that_loses_the_segments_on_the_way_raises() -> None:
    model = tiny("llama")
    layer = model.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: plain(*args, **{**kwargs, "attention_mask": None})
    torch_backend.patch(model, verify=False)
    with pytest.raises(UnsupportedModelError, match=r"did not hand the segments to layers\.1\.self_attn"):
        model(**collate(documents()))


def test_verify_raises_and_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    audit_module = import_module("torch_backend.auditing.model")
    monkeypatch.setattr(audit_module, "_verdicts", {})
    monkeypatch.setattr(import_module("torch_backend.auditing.compare"), "ROUNDINGS", 0.0)
    monkeypatch.setattr(import_module("torch_backend.auditing.compare"), "FLOOR", 0.0)
    monkeypatch.setattr(import_module("torch_backend.auditing.proof"), "ROUNDINGS", 0.0)
    model = tiny("llama")
    with pytest.raises(ContaminationError, match="LlamaForCausalLM .* contaminated; logits"):
        torch_backend.patch(model)
    assert state_of(model) is None and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_proof_takes_gradients_whatever_the_callers_mode_is(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    monkeypatch.setattr(import_module("torch_backend.auditing.model"), "_verdicts", {})
    with mode():
        report = torch_backend.audit(tiny("llama"), patched=True)
    assert report.verdict == "exact" and report.worst_parameter


def test_metadata_of_another_collator_is_enough() -> None:
    """TRL and DataCollatorWithFlattening give boundaries and the longest, no host lengths."""
    model, docs = patched("llama").eval(), documents()
    batch = collate(docs, capacity=None)
    want = model(**batch).logits
    for key in ("packed_lengths", "seq_idx", "position_ids"):
        del batch[key]
    assert torch.equal(model(**batch).logits, want)


def test_explain_names_what_serves_each_layer_and_why_not_another() -> None:
    model = patched("mistral")
    assert "model.layers.0.self_attn: attention -> not run packed yet" in "model." + str(torch_backend.explain(model))
    model(**collate(documents()))
    (first, second) = torch_backend.explain(model).layers
    assert (first.layer, first.serves) == ("layers.0.self_attn", "sdpa")
    assert "window 12" in second.request
    with pytest.raises(UnsupportedError, match=r"is not patched: call crosspack\.patch"):
        torch_backend.explain(tiny("llama"))


def test_a_softcap_that_sdpa_leaves_out_is_applied_in_packed_and_unpacked_calls(caplog: Any) -> None:
    docs, eager, model = documents(), tiny("gemma2"), tiny("gemma2")
    eager.config._attn_implementation, model.config._attn_implementation = "eager", "sdpa"
    with caplog.at_level("WARNING"):
        torch_backend.patch(model)  # which proves it
    message = r"Gemma2ForCausalLM: attention softcap 50.0: transformers' sdpa leaves it out, .* outputs differ"
    assert re.search(message, caplog.text)
    for document in docs:
        assert torch.equal(model(input_ids=document[None]).logits, eager(input_ids=document[None]).logits)
    padding = {"input_ids": torch.stack([docs[1], docs[1]]), "attention_mask": torch.ones(2, 19, dtype=torch.long)}
    padding["attention_mask"][0, 7:] = 0
    assert torch.equal(model(**padding).logits, eager(**padding).logits)
    want, found = alone(eager, docs), packed(model, docs)
    for one, other in zip(found.logits, want.logits, strict=True):
        assert error(one, other) <= 1e-5
    assert torch.equal(pickle.loads(pickle.dumps(model))(**padding).logits, eager(**padding).logits)
    torch_backend.unpatch(model)
    assert model.config._attn_implementation == "sdpa"


def test_lengths_that_the_host_needs_are_explained() -> None:
    """On the CPU attention runs on batches of documents, and so does the convolution without Triton."""
    assert "segment lengths are needed on the host: PackedCollator carries them" in str(
        torch_backend.explain(torch_backend.patch(tiny("llama"), verify=False))
    )
