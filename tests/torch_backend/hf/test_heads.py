"""Models without a language-model head: exact for each document, or refused by their class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.models import LENGTHS, assert_same_gradients, collate, documents, error, gradients, tiny
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.hf.anatomy.heads import trains_first_token
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.patch import state_of
from torch_backend.ops.attention import sdpa
from torch_backend.segments import PackedMetadata

# A family of every route: attention, sinks and windows, a mixer on the row, one per document, the decoder per document.
ROUTES = ("qwen3", "gpt_oss", "qwen3_next", "mamba", "falcon_alibi")


def with_head(family: str, auto: Any, **changes: Any) -> Any:
    """A fresh tiny model of the family that ``auto`` builds."""
    config = tiny(family, **changes).config
    return tiny_model(config, auto._model_mapping[type(config)]).train()


@pytest.mark.parametrize("family", ROUTES)
def test_hidden_states_are_those_of_each_document(family: str) -> None:
    model, docs = with_head(family, transformers.AutoModel), documents()
    want = [model(input_ids=document[None]).last_hidden_state[0] for document in docs]
    direction = torch.randn(want[0].shape[-1])
    want_gradients = gradients(model, torch.cat(want).matmul(direction).square().sum())
    torch_backend.patch(model)
    batch = collate(docs)
    del batch["labels"]
    hidden = model(**batch).last_hidden_state
    found = hidden.flatten(0, 1).split(batch["packed_lengths"])[: len(docs)]
    for x, y in zip(found, want, strict=True):
        assert error(x, y) <= 1e-5
    found_gradients = gradients(model, torch.cat(found).matmul(direction).square().sum())
    assert_same_gradients(found_gradients, want_gradients)


def test_a_vision_model_inside_a_headless_decoder_is_not_its_decoder() -> None:
    with torch.device("meta"):
        model = transformers.Phi4MultimodalModel(tiny_config(transformers.Phi4MultimodalConfig()))
    assert anatomy_of(model).decoder is model


def test_the_audit_of_a_headless_model_compares_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head("qwen3", transformers.AutoModel)
    report = torch_backend.audit(model, patched=True, implementation="sdpa")
    assert report.verdict == "exact" and report.model == "Qwen3Model", str(report)
    assert report.leak == 0 and report.moved > 0.1
    whole = type(sdpa.SDPA).__call__

    def joined(self: Any, q: Any, k: Any, v: Any, packed: PackedMetadata, *args: Any, **kwargs: Any) -> Any:
        return whole(self, q, k, v, PackedMetadata.from_lengths([packed.tokens]), *args, **kwargs)

    monkeypatch.setattr(type(sdpa.SDPA), "__call__", joined)
    report = torch_backend.audit(model, patched=True, implementation="sdpa")
    assert report.verdict == "contaminated" and report.logits > 0.1 and report.leak > 0.1


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gpt2", "falcon_alibi"])
def test_a_token_classifier_trains_every_token_of_every_document(family: str) -> None:
    model, docs = with_head(family, transformers.AutoModelForTokenClassification), documents()
    classes = [document % model.config.num_labels for document in docs]
    logits = [model(input_ids=document[None]).logits[0] for document in docs]
    want = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(classes))
    want_gradients = gradients(model, want)
    torch_backend.patch(model)
    batch = collate(docs)
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["labels"].view(-1)[: sum(LENGTHS)] = torch.cat(classes)
    loss = model(**batch).loss
    assert error(loss.detach(), want.detach()) <= 1e-5
    assert_same_gradients(gradients(model, loss), want_gradients)


def test_only_classifiers_of_tokens_train_first_tokens() -> None:
    from peft import LoraConfig, get_peft_model

    classifier = with_head("qwen3", transformers.AutoModelForTokenClassification)
    assert trains_first_token(classifier)
    assert trains_first_token(get_peft_model(classifier, LoraConfig(target_modules=["q_proj"])))
    assert not trains_first_token(tiny("qwen3"))
    assert not trains_first_token(tiny("qwen3").model)
    assert not trains_first_token(nn.Linear(2, 2)) and not trains_first_token(None)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        ("Qwen3ForQuestionAnswering", "it predicts one span for each row, not for each document in it"),
        ("GPT2DoubleHeadsModel", "its second head reads one token of each row, not of each document in it"),
    ],
)
def test_heads_that_read_rows_are_refused_by_class(model_class: str, reason: str, verify: bool) -> None:
    family = "gpt2" if model_class.startswith("GPT2") else "qwen3"
    model = tiny_model(tiny(family, pad_token_id=0).config, getattr(transformers, model_class))
    text = rf"{model_class} cannot be trained packed, because {reason}: patch its decoder alone \(AutoModel\)"
    with pytest.raises(UnsupportedModelError, match=text):
        torch_backend.patch(model, verify=verify)
    assert state_of(model) is None and not model._forward_pre_hooks


class Rewards(transformers.Qwen3PreTrainedModel):
    """A head of somebody's own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.Qwen3Model(config)
        self.reward = nn.Linear(config.hidden_size, 1)
        self.post_init()


class Spans(transformers.Qwen3ForQuestionAnswering):
    """A class of another name over one that is refused."""


def test_unknown_heads_are_refused_and_derived_classes_are_known() -> None:
    config = tiny("qwen3").config
    with pytest.raises(UnsupportedModelError, match="Rewards cannot be trained packed, because it is no language"):
        torch_backend.patch(Rewards(config))
    with pytest.raises(UnsupportedModelError, match="Spans cannot be trained packed, because it predicts one span"):
        torch_backend.patch(Spans(config))
