"""patch(model): packed equals alone, everything else stays as it was, and what cannot be exact raises."""

from __future__ import annotations

import pickle
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel

import torch_backend
from packing_core.errors import ContaminationError, PackingError, UnsupportedError, UnsupportedModelError
from packing_core.protocol import DTYPES
from tests.torch_backend.models import alone, assert_same, collate, documents, error, packed, tiny
from torch_backend.hf.patch import state_of


def config() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=64, **sizes, initializer_range=0.2)


def patched(family: str, **changes: Any) -> Any:
    return torch_backend.patch(tiny(family, **changes), verify=False)


@pytest.mark.parametrize(("implementation", "stock"), [("sdpa", "eager"), ("reference", "sdpa")])
def test_packed_equals_each_document_alone(implementation: str, stock: str) -> None:
    model, docs = tiny("llama"), documents()
    model.set_attn_implementation(stock)
    truth = alone(model, docs)
    torch_backend.patch(model, implementation=implementation, verify=False)
    assert_same(packed(model, docs), truth)


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
    monkeypatch.setattr(import_module("packing_core.budget"), "FACTOR", 0.0)
    monkeypatch.setattr(import_module("packing_core.budget"), "FLOOR", dict.fromkeys(DTYPES, 0.0))
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


def test_positions_that_trl_pads_to_a_multiple_are_exact() -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    model, docs = patched("gemma3_text"), documents((5, 1, 14))
    stock = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=16)
    batch = torch_backend.with_boundaries(stock, model)([{"input_ids": document.tolist()} for document in docs])
    assert batch["input_ids"].shape == (1, 32)
    assert_same(packed(model, docs, batch), alone(model, docs))


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


def test_what_is_no_argument_by_position_is_refused_by_name() -> None:
    for function in (torch_backend.patch, torch_backend.unpad, torch_backend.audit):
        with pytest.raises(PackingError, match=r"takes model by position and got 512 beside: name .* implementation="):
            function(tiny("llama"), 512)


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, weights: torch.func.grad(loss)(weights),
        torch.func.vjp,
        lambda loss, weights: torch.func.vmap(loss)({name: torch.stack([x, x]) for name, x in weights.items()}),
        lambda loss, weights: torch.func.jvp(loss, (weights,), (weights,)),
    ],
    ids=["grad", "vjp", "vmap", "jvp"],
)
def test_transforms_of_torch_func_are_refused_and_functional_calls_are_not(transform: Any) -> None:
    model = patched("qwen3")
    batch = collate(documents((5, 9)))
    weights = {name: weight.detach().requires_grad_() for name, weight in model.named_parameters()}

    def loss(weights: Any) -> Any:
        return torch.func.functional_call(model, weights, (), dict(batch)).loss

    found = torch.autograd.grad(loss(weights), list(weights.values()))
    model(**batch).loss.backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(found, model.parameters(), strict=True))
    refused = r"transforms of torch.func .*: take gradients by loss.backward\(\)"
    with pytest.raises(UnsupportedError, match=refused):
        transform(loss, weights)
    decoder, inputs = model.get_decoder(), {name: x for name, x in batch.items() if name != "labels"}
    weights = {name: weight.detach() for name, weight in decoder.named_parameters()}

    def size(weights: Any) -> Any:
        return torch.func.functional_call(decoder, weights, (), inputs).last_hidden_state.square().sum()

    with pytest.raises(UnsupportedError, match=refused):
        transform(size, weights)


def test_a_wrapper_that_took_the_forward_before_the_patch_calls_the_entry() -> None:
    peft = pytest.importorskip("peft", reason="its AdaptionPrompt keeps the forward of the model")
    adapter = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(config()), adapter)
    with torch.no_grad():
        [parameter.fill_(1.0) for name, parameter in model.named_parameters() if name.endswith("adaption_gate")]
    examples = [[5, 6, 7, 8], [9, 8, 7]]
    right = [model(input_ids=torch.tensor([each])).logits[0] for each in examples]
    torch_backend.patch(model)
    batch = torch_backend.PackedCollator(model)([{"input_ids": each} for each in examples])
    assert error(model(**batch).logits[0], torch.cat(right)) <= 1e-5
    torch_backend.unpatch(model)
    assert torch.equal(model(input_ids=torch.tensor([examples[0]])).logits[0], right[0])


# Model classes of one's own.


class Decoder(PreTrainedModel):
    """Layers without a way to find their embeddings."""

    config_class = LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        logits = self.head(self.words(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1])
        return {"loss": loss, "logits": logits}


class OneForward(Decoder):
    """Embeds tokens and computes its loss in one module."""

    def get_input_embeddings(self) -> Any:
        return self.words

    def get_output_embeddings(self) -> Any:
        return self.head


class Held(Decoder):
    """Holds a decoder of transformers, and returns a dict."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.words
        self.model = LlamaModel(config)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.head

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        logits = self.head(self.model(input_ids, **others).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1])
        return {"loss": loss, "logits": logits}


class WithoutKeywords(Held):
    """Takes nothing of a packed batch but tokens and labels."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids, labels)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Decoder, r"Decoder does not say which module embeds its tokens: let its get_input_embeddings\(\) return it"),
        (OneForward, "OneForward embeds tokens and makes logits and loss in one forward.*: put its layers into"),
        (
            WithoutKeywords,
            r"cannot be proved \(TypeError: .*'position_ids'\): let forward\(input_ids=...\) return logits",
        ),
    ],
)
def test_a_class_of_ones_own_that_cannot_be_packed_is_refused_by_name(kind: Any, reason: str) -> None:
    model = kind(config())
    with pytest.raises(UnsupportedModelError, match=reason):
        torch_backend.patch(model)


def test_a_class_of_ones_own_that_returns_a_dict_is_proved_and_trained() -> None:
    model = torch_backend.patch(Held(config()))
    examples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 8, 7]}]
    packed = model(**torch_backend.PackedCollator(model)(examples))["loss"]
    alone = [model(**torch_backend.PackedCollator(model)([each]))["loss"] for each in examples]
    assert torch.allclose(packed, (3 * alone[0] + 2 * alone[1]) / 5)
