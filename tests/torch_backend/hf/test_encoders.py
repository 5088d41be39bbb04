"""Encoders on packed rows: every head is exact for each document alone, or the family is refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import torch_backend
from packing_core.errors import CapacityError, LayoutError, UnsupportedModelError
from tests.torch_backend.models import assert_same_gradients, documents, error, gradients
from tools.tables.families import HEAD_DIM
from torch_backend import PackedCollator
from torch_backend.auditing.tiny import family_config, tiny_config, tiny_model
from torch_backend.hf.anatomy.model import PaddingOffset
from torch_backend.segments import PackedMetadata

# From position 0 on; RoBERTa's offset; windows and two rotary frequencies; no kinds of tokens; shared layers, and a
# pooler that gets one token of each row; attention of its own, per document.
FAMILIES = ("bert", "roberta", "modernbert", "distilbert", "albert", "deberta-v2")
NO_LABEL = -100
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}  # DeBERTa-v3's


def encoder(family: str, auto: Any, **changes: Any) -> Any:
    """A fresh tiny encoder in train mode."""
    config = tiny_config(family_config(family), head_dim=HEAD_DIM, changes=changes)
    return tiny_model(config, auto._model_mapping[type(config)]).train()


def examples(docs: list[Tensor], labels: list[Any] | None = None) -> list[dict[str, Any]]:
    given = [None] * len(docs) if labels is None else labels
    return [{"input_ids": d, "labels": y} for d, y in zip(docs, given, strict=True)]


@pytest.mark.parametrize("head", ["MaskedLM", "TokenClassification"])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_per_token_train_as_in_each_document_alone(family: str, head: str) -> None:
    auto: Any = getattr(transformers, f"AutoModelFor{head}")
    model, docs = encoder(family, auto), documents()
    docs[1][3] = model.config.pad_token_id or 0  # RoBERTa leaves it out of its count
    classes = 90 if head == "MaskedLM" else model.config.num_labels
    labels = [(d % classes).where(torch.arange(len(d)) % 3 == 0, NO_LABEL) for d in docs]
    logits = [model(input_ids=d[None]).logits[0] for d in docs]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
    want = gradients(model, loss)
    torch_backend.patch(model, verify=False)
    batch = PackedCollator(model, capacity=64, strategy="sequential")(examples(docs, labels))
    output = model(**batch)
    found = output.logits.flatten(0, 1).split(batch["packed_lengths"])
    assert all(error(x, y) <= 1e-5 for x, y in zip(found, logits, strict=False))
    assert error(output.loss.detach(), loss.detach()) <= 1e-5
    assert_same_gradients(gradients(model, output.loss), want)


@pytest.mark.parametrize(("family", "options"), [
    ("deberta", {}),
    ("deberta-v2", {}),
    ("deberta-v2", RELATIVE | {"position_buckets": 8}),
    ("deberta-v2", RELATIVE | {"conv_kernel_size": 3, "conv_act": "gelu", "norm_rel_ebd": "layer_norm"}),
    ("mpnet", {}),
])  # fmt: skip
def test_masks_let_documents_of_similar_length_run_together(family: str, options: dict[str, Any]) -> None:
    model = encoder(family, transformers.AutoModel, **options).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    docs = documents((17, 5, 18, 20, 24, 6, 1))
    want = [model(input_ids=d[None]).last_hidden_state[0] for d in docs]
    truth = gradients(model, sum((x * x.roll(1, 0)).sum() for x in want))
    torch_backend.patch(model, verify=False)
    batch = PackedCollator(model, capacity=128, strategy="sequential")(examples(docs))
    calls: list[Any] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: calls.append(tuple(args[0].shape)))
    found = model(**{k: x for k, x in batch.items() if k != "labels"}).last_hidden_state.flatten(0, 1)
    parts = found.split(batch["packed_lengths"])[: len(docs)]
    assert all(error(x, y) <= 1e-5 for x, y in zip(parts, want, strict=True))
    assert_same_gradients(gradients(model, sum((x * x.roll(1, 0)).sum() for x in parts)), truth)
    assert len(calls) == 3, calls


@pytest.mark.parametrize("family", [*FAMILIES, "modernbert mean", "electra"])
def test_documents_are_classified_as_each_alone(family: str) -> None:
    name, _, pooling = family.partition(" ")
    changes = {"classifier_pooling": pooling} if pooling else {}
    model = encoder(name, transformers.AutoModelForSequenceClassification, **changes)
    docs, labels = documents(), [torch.tensor(n % 2) for n in range(8)]
    alone = [model(input_ids=d[None], labels=y[None]) for d, y in zip(docs, labels, strict=True)]
    loss = torch.stack([output.loss for output in alone]).mean()
    want = gradients(model, loss)
    torch_backend.patch(model, verify=False)
    output = model(**PackedCollator(model, capacity=64)(examples(docs, [int(y) for y in labels])))
    assert error(output.logits.detach(), torch.cat([each.logits for each in alone]).detach()) <= 1e-5
    assert error(output.loss.detach(), loss.detach()) <= 1e-5
    assert_same_gradients(gradients(model, output.loss), want)


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "mpnet"])
def test_an_encoder_without_a_head_pools_every_document(family: str) -> None:
    model, docs = encoder(family, transformers.AutoModel).eval(), documents()
    alone = [model(input_ids=d[None]) for d in docs]
    torch_backend.patch(model, verify=False)
    batch = PackedCollator(model, capacity=64)(examples(docs))
    del batch["labels"]
    output = model(**batch)
    assert error(output.pooler_output, torch.cat([each.pooler_output for each in alone])) <= 1e-5
    hidden = output.last_hidden_state.flatten(0, 1).split(batch["packed_lengths"])
    for (segment,), each in zip(batch["packed_documents"], alone, strict=True):
        assert error(hidden[segment], each.last_hidden_state[0]) <= 1e-5


@pytest.mark.parametrize("name", ["CLIPText", "SiglipText"])
def test_a_token_that_an_encoder_takes_of_each_row_is_left_out(name: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=99, bos_token_id=1, eos_token_id=2, **sizes)
    model, docs = getattr(transformers, f"{name}Model")(config).eval(), documents()
    alone = [model(input_ids=d[None]).last_hidden_state[0] for d in docs]
    torch_backend.patch(model, verify=False)
    batch = PackedCollator(model, capacity=64)(examples(docs))
    del batch["labels"]
    output = model(**batch)
    assert output.pooler_output is None and output["pooler_output"] is None
    hidden = output.last_hidden_state.flatten(0, 1).split(batch["packed_lengths"])
    for (segment,), each in zip(batch["packed_documents"], alone, strict=True):
        assert error(hidden[segment], each) <= 1e-5


def test_kinds_of_tokens_travel_with_their_documents() -> None:
    model, docs = encoder("bert", transformers.AutoModelForSequenceClassification).eval(), documents()
    kinds = [(torch.arange(len(d)) > len(d) // 2).long() for d in docs]
    alone = [model(input_ids=d[None], token_type_ids=k[None]).logits for d, k in zip(docs, kinds, strict=True)]
    torch_backend.patch(model, verify=False)
    given = [{"input_ids": d, "token_type_ids": k} for d, k in zip(docs, kinds, strict=True)]
    batch = PackedCollator(model, capacity=64)(given)
    assert error(model(**batch).logits, torch.cat(alone)) <= 1e-5
    assert error(model(**{**batch, "token_type_ids": None}).logits, torch.cat(alone)) > 1e-2


def test_robertas_positions_begin_after_the_number_of_padding() -> None:
    """Padding among tokens is not counted; embedded tokens all are."""
    packed = PackedMetadata.from_lengths((3, 2))
    number = PaddingOffset(padding=1)
    assert number(None, packed).tolist() == [2, 3, 4, 2, 3]
    assert number(torch.tensor([[5, 1, 6, 7, 8]]), packed).tolist() == [2, 1, 3, 2, 3]


def test_robertas_positions_may_not_be_others() -> None:
    model = torch_backend.patch(encoder("roberta", transformers.AutoModelForMaskedLM), verify=False)
    batch = PackedCollator(model)(examples(documents(), documents()))
    batch["position_ids"] = batch["position_ids"] + 1
    with pytest.raises(LayoutError, match="position_ids are not those of a document of its own at row 0, token 0"):
        model(**batch)


def test_an_unpacked_batch_runs_as_before_to_the_bit() -> None:
    ids = torch.stack([d[:5] for d in documents((5, 19, 7))])
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 3)
    for family in FAMILIES:
        model = encoder(family, transformers.AutoModelForSequenceClassification).eval()
        before = model(input_ids=ids, attention_mask=mask).logits
        torch_backend.patch(model, verify=False)
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before), family


@pytest.mark.parametrize(
    ("family", "head", "reason"),
    [
        ("Longformer", "SequenceClassification", "longformer cannot be trained packed: some of its tokens see the"),
        ("Bart", "SequenceClassification", "bart cannot be trained packed: it is an encoder-decoder"),
        ("Bert", "MultipleChoice", "it reads each choice as a row"),
        ("Bert", "QuestionAnswering", "it predicts one span for each row"),
        ("Bert", "PreTraining", "one of its heads reads one token of each row"),
        ("Bert", "NextSentencePrediction", "it classifies each row, not each document in it"),
    ],
)
def test_what_no_packed_row_serves_is_refused_by_name(family: str, head: str, reason: str) -> None:
    config = tiny_config(getattr(transformers, f"{family}Config")())
    with torch.device("meta"):
        model = getattr(transformers, f"{family}For{head}")(config)
    with pytest.raises(UnsupportedModelError, match=reason):
        torch_backend.patch(model, verify=False)


def test_a_bidirectional_model_predicts_no_next_token() -> None:
    config = tiny_config(family_config("bert"))
    with pytest.raises(UnsupportedModelError, match="bert cannot be trained packed: it is an encoder, or the"):
        torch_backend.patch(transformers.BertLMHeadModel(config), verify=False)


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "opt"])
def test_a_document_over_the_learned_positions_is_an_error_and_padding_is_not(family: str) -> None:
    """RoBERTa numbers from the padding token on, and OPT's table has two vectors that no token uses."""
    auto = transformers.AutoModelForMaskedLM if "bert" in family else transformers.AutoModelForCausalLM
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    model = encoder(family, auto, **{name: 10})
    limit = 10 - (model.config.pad_token_id + 1 if family == "roberta" else 0)
    torch_backend.patch(model, verify=False)
    ids = [[7] * limit, [8] * 3]
    assert model(**PackedCollator(model, capacity=64)(examples(list(map(torch.tensor, ids)), ids))).loss.isfinite()
    ids[1] = [8] * (limit + 1)
    batch = PackedCollator(model)(examples(list(map(torch.tensor, ids)), ids))
    with pytest.raises(
        CapacityError, match=rf"a document has {limit + 1} tokens and .* learned positions for {limit}:"
    ):
        model(**batch)


def test_what_a_call_keeps_is_freed_with_its_output() -> None:
    """A pooler's hook keeps hidden states; a cycle of references would hold all activations until it is looked for."""
    model, encoded = encoder("bert", transformers.AutoModel), []
    model.encoder.register_forward_hook(lambda *call: encoded.append(weakref.ref(call[2][0])))
    torch_backend.patch(model, verify=False)
    batch = PackedCollator(model, capacity=64)(examples(documents()))
    gc.disable()
    try:
        output = model(**batch)
        assert [x() is None for x in encoded] == [False]
        del output
        assert [x() is None for x in encoded] == [True]
    finally:
        gc.enable()
