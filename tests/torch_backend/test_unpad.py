"""unpad(model): padded calls of libraries that know nothing of packing run packed and return what they expect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torch_backend
from packing_core.errors import LayoutError
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.test_document_heads import classifier
from tests.torch_backend.test_encoders import encoder
from torch_backend.hf.patch import state_of

LENGTHS = (5, 19, 7, 1)


def padded(*, left: bool = False) -> dict[str, Tensor]:
    """Four documents [4, 19] with their mask."""
    docs = documents(LENGTHS)
    ids, mask = torch.zeros(4, 19, dtype=torch.long), torch.zeros(4, 19, dtype=torch.long)
    for row, document in enumerate(docs):
        where = slice(19 - len(document), 19) if left else slice(0, len(document))
        ids[row, where], mask[row, where] = document, 1
    return {"input_ids": ids, "attention_mask": mask}


def pooled(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """What libraries for embeddings do with the hidden states [B, S, D] of a padded batch."""
    if how == "mean":
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    place = mask.argmax(1) if how == "cls" else 18 - mask.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), place]


class Embedder(nn.Module):
    """As sentence-transformers has it: the model inside, and its forward called without its hooks."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.model.forward(**batch).last_hidden_state
        return pooled(hidden, batch["attention_mask"], self.how)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet", "qwen3"])
def test_embeddings_and_their_gradients_are_those_of_each_document(family: str, how: str) -> None:
    alone, model = (Embedder(encoder(family, transformers.AutoModel), how) for _ in range(2))
    want = torch.cat([pooled_alone(alone, document, how) for document in documents(LENGTHS)])
    want.square().sum().backward()
    torch_backend.unpad(model, verify=False)
    found = model(padded())
    assert state_of(model.model).choices  # it did run packed
    assert error(found.detach(), want.detach()) <= 1e-5
    found.square().sum().backward()
    scale = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or float((p.grad - q.grad).abs().max()) <= 1e-5 * scale, name


def pooled_alone(embedder: Embedder, document: Tensor, how: str) -> Tensor:
    hidden = embedder.model(input_ids=document[None]).last_hidden_state
    return {"mean": hidden.mean(1), "cls": hidden[:, 0], "last": hidden[:, -1]}[how]


@pytest.mark.parametrize("left", [False, True])
def test_a_classifier_scores_every_row_of_a_padded_batch(left: bool) -> None:
    model, labels = classifier("qwen3"), torch.arange(4) % 3
    alone = [model(input_ids=d[None], labels=labels[i : i + 1]) for i, d in enumerate(documents(LENGTHS))]
    torch_backend.unpad(model, verify=False)
    output = model(**padded(left=left), labels=labels)
    assert error(output.logits.detach(), torch.cat([each.logits for each in alone]).detach()) <= 1e-5
    assert error(output.loss.detach(), torch.stack([each.loss for each in alone]).mean().detach()) <= 1e-5


def test_a_masked_language_model_keeps_the_labels_of_first_tokens() -> None:
    model, batch = encoder("bert", transformers.AutoModelForMaskedLM), padded()
    labels = batch["input_ids"].where(batch["attention_mask"] == 1, -100)
    stock = model(**batch, labels=labels)
    torch_backend.unpad(model, verify=False)
    output = model(**batch, labels=labels)
    assert error(output.loss.detach(), stock.loss.detach()) <= 1e-5
    real = batch["attention_mask"] == 1
    assert error(output.logits[real].detach(), stock.logits[real].detach()) <= 1e-5


def test_a_document_with_a_hole_is_refused() -> None:
    model = torch_backend.unpad(encoder("bert", transformers.AutoModel), verify=False)
    batch = padded()
    batch["attention_mask"][1, 8] = 0
    with pytest.raises(LayoutError, match="attention_mask leaves out tokens inside row 1"):
        model(**batch)


def test_generation_and_calls_without_a_mask_run_as_before() -> None:
    model = tiny("qwen3").eval()
    prompt = {name: x[:, :5] for name, x in padded(left=True).items()}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    before = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    plain = model(input_ids=prompt["input_ids"]).logits
    torch_backend.unpad(model, verify=False)
    assert torch.equal(model.generate(**prompt, max_new_tokens=4, do_sample=False), before)
    assert torch.equal(model(input_ids=prompt["input_ids"]).logits, plain)


def test_a_copy_is_unpadded_on_its_own_and_unpatch_ends_it() -> None:
    model = torch_backend.unpad(encoder("bert", transformers.AutoModel).eval(), verify=False)
    other = copy.deepcopy(model)
    assert other.forward.root is other
    torch_backend.unpatch(model)
    fresh = encoder("bert", transformers.AutoModel).eval()
    assert torch.equal(model.forward(**padded()).last_hidden_state, fresh(**padded()).last_hidden_state)
