"""Heads on packed rows: classifiers of documents and of tokens, models without a head, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torch_backend
from packing_core import pack
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.hf.test_conditions import model_of
from tests.torch_backend.models import LENGTHS, assert_same_gradients, collate, documents, error, gradients, tiny
from torch_backend import PackedCollator
from torch_backend.auditing.tiny import tiny_config, tiny_model
from torch_backend.hf.anatomy.model import anatomy_of
from torch_backend.hf.document_rows import DocumentRows
from torch_backend.hf.patch import state_of
from torch_backend.ops.attention import sdpa
from torch_backend.ops.attention.request import AttentionInputs
from torch_backend.segments import PackedMetadata

# Attention; sinks and windows; linear attention; frequencies per document; the decoder per document.
ROUTES = ("qwen3", "gpt_oss", "qwen3_5_text", "phi3", "falcon_alibi")
KINDS = {"single_label_classification": 3, "regression": 1, "multi_label_classification": 3}
PAD = 0


def classifier(
    family: str,
    kind: str = "single_label_classification",
    auto: Any = transformers.AutoModelForSequenceClassification,
    **changes: Any,
) -> Any:
    """A fresh tiny classifier of documents, or what ``auto`` builds, in train mode."""
    config = model_of("phi3").config if family == "phi3" else tiny(family).config
    config.num_labels, config.problem_type = KINDS[kind], kind
    config.pad_token_id = PAD
    for name, value in changes.items():
        setattr(config, name, value)
    return tiny_model(config, auto._model_mapping[type(config)]).train()


def labels_for(kind: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind == "single_label_classification":
        return torch.randint(KINDS[kind], (count,), generator=generator)
    if kind == "regression":
        return torch.randn(count, generator=generator)
    return torch.randint(2, (count, KINDS[kind]), generator=generator).float()


def padded_documents() -> list[Tensor]:
    """Documents of which one ends with padding tokens and one holds nothing else."""
    docs = documents()
    docs[3][-2:] = PAD
    docs[5][:] = PAD
    return docs


def features(docs: list[Tensor], labels: Tensor | None = None) -> list[dict[str, Any]]:
    if labels is None:
        return [{"input_ids": document} for document in docs]
    return [{"input_ids": document, "labels": y.tolist()} for document, y in zip(docs, labels, strict=True)]


def step(model: Any) -> dict[str, Tensor]:
    """The gradients, and the weights after one step of gradient descent."""
    gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients | {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ROUTES)
def test_a_packed_classifier_is_that_of_each_document(family: str, kind: str) -> None:
    docs, labels = padded_documents(), labels_for(kind, 8)
    stock, model = classifier(family, kind), classifier(family, kind)
    alone = [stock(input_ids=d[None], labels=y[None]) for d, y in zip(docs, labels, strict=True)]
    loss = torch.stack([output.loss for output in alone]).mean()
    loss.backward()
    torch_backend.patch(model, verify=False)
    collate = PackedCollator(model, capacity=64, strategy="best_fit")
    batch = collate(features(docs, labels))  # in two rows, out of order
    assert batch["packed_documents"] != tuple(sorted(batch["packed_documents"]))
    output = model(**batch)
    assert output.logits.shape == (8, KINDS[kind])
    assert error(output.logits.detach(), torch.cat([each.logits for each in alone]).detach()) <= 1e-5
    assert error(output.loss.detach(), loss.detach()) <= 1e-5
    output.loss.backward()
    found, want = step(model), step(stock)
    assert found.keys() == want.keys()
    for name in want:
        assert error(found[name], want[name]) <= 1e-5, name


class DelegatingForSequenceClassification(transformers.Qwen3ForSequenceClassification):
    """A classifier of one's own, which lets the stock head find the last token."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None, **others: Any):
        return super().forward(input_ids, attention_mask, inputs_embeds=inputs_embeds, **others)


@pytest.mark.parametrize("kind", [transformers.Qwen3ForSequenceClassification, DelegatingForSequenceClassification])
def test_embedded_documents_are_classified_by_their_last_tokens(kind: Any) -> None:
    model, docs = tiny_model(classifier("qwen3").config, kind), documents()
    embed = model.get_input_embeddings()
    want = torch.cat([model(inputs_embeds=embed(d[None])).logits for d in docs])
    batch = PackedCollator(torch_backend.patch(model), capacity=64)(features(docs))
    batch["inputs_embeds"] = embed(batch.pop("input_ids").as_subclass(Tensor))
    assert error(model(**batch).logits.detach(), want.detach()) <= 1e-5


def test_patch_proves_a_classifier_and_the_proof_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_backend.hf.document_rows import DocumentRows

    model = classifier("qwen3")
    assert torch_backend.audit(model, patched=True).verdict == "exact"
    stock = DocumentRows.keep_last

    def of_the_next_document(self: Any, input_ids: Any, pad_id: Any) -> None:
        stock(self, input_ids, pad_id)
        self.index = self.index.roll(1, 0)

    monkeypatch.setattr(DocumentRows, "keep_last", of_the_next_document)
    assert torch_backend.audit(model, patched=True).verdict == "contaminated"


def test_the_loss_is_a_share_of_the_steps_mean_however_documents_are_split() -> None:
    docs, labels = documents(), labels_for("single_label_classification", 8)
    model = torch_backend.patch(classifier("qwen3"), verify=False)
    collate = PackedCollator(model, capacity=64)
    whole = model(**collate(features(docs, labels))).loss
    for cut in (1, 3):
        parts = [features(docs, labels)[:cut], features(docs, labels)[cut:]]
        split = sum(model(**collate(part), num_items_in_batch=torch.tensor(8)).loss for part in parts)
        assert error(split.detach(), whole.detach()) <= 1e-6


def test_a_row_without_documents_adds_nothing_to_a_step() -> None:
    from packing_core.batches.dataset import with_empty_row

    model = torch_backend.patch(classifier("qwen3", "regression"), verify=False)
    packed = pack([[5, 6]], 8, per_document={"labels": [1.0]})
    batch = PackedCollator(model)(with_empty_row(packed)[1])
    output = model(**batch, num_items_in_batch=torch.tensor(4))
    assert output.logits.shape == (0, 1) and output.loss == 0
    output.loss.backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_what_a_classifier_cannot_take_is_refused_for_what_it_is() -> None:
    model = classifier("qwen3")
    model.config.pad_token_id = None
    with pytest.raises(UnsupportedModelError, match="its config names none: set model.config.pad_token_id"):
        torch_backend.patch(model)
    model.config.pad_token_id = PAD
    torch_backend.patch(model, verify=False)
    split = pack([[5] * 6, [6] * 9], 8, overflow="split", per_document={"labels": [0, 1]})
    with pytest.raises(LayoutError, match="document 1 is split, and this model classifies whole documents"):
        PackedCollator(model)(split)
    batch = PackedCollator(model)(features(documents(), labels_for("single_label_classification", 8)))
    with pytest.raises(LayoutError, match=r"labels have shape \[7\] and the batch holds 8 documents"):
        model(**{**batch, "labels": batch["labels"][1:]})
    with pytest.raises(LayoutError, match="document 0 of the batch stands in 2 segments"):
        model(**{**batch, "packed_documents": ((0, 1), *batch["packed_documents"][2:]), "labels": None})
    with pytest.raises(LayoutError, match="example 1 has no label and others have"):
        PackedCollator(model)([{"input_ids": [5], "label": 1}, {"input_ids": [6]}])
    with pytest.raises(LayoutError, match="each takes a label or a vector of labels of one length"):
        PackedCollator(model)([{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [6], "labels": [1]}])


@pytest.mark.parametrize(("named", "wrong"), [((0, 2), 2), ((1, -1), -1), ((3, -2), 3)])
def test_a_document_of_no_segment_is_refused_by_the_first_that_is_none(named: tuple[int, ...], wrong: int) -> None:
    segments = PackedMetadata.from_lengths([2, 3])
    with pytest.raises(LayoutError, match=f"names segment {wrong} and the batch has 2"):
        DocumentRows(segments, [(segment,) for segment in named])


# A family of every route: attention, sinks and windows, a mixer on the row, one per document, the decoder per document.
HEADLESS_ROUTES = ("qwen3", "gpt_oss", "qwen3_next", "mamba", "falcon_alibi")


def with_head(family: str, auto: Any, **changes: Any) -> Any:
    """A fresh tiny model of the family that ``auto`` builds."""
    config = tiny(family, **changes).config
    return tiny_model(config, auto._model_mapping[type(config)]).train()


@pytest.mark.parametrize("family", HEADLESS_ROUTES)
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

    def joined(self: Any, inputs: AttentionInputs, request: Any) -> Any:
        return whole(self, inputs._replace(packed=PackedMetadata.from_lengths([inputs.packed.tokens])), request)

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
