"""unpad(model): padded calls of libraries that know nothing of packing run packed and return what they expect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torch_backend
from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.vision_models import image_documents, vision_model
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
    """Pools the hidden states [B, S, D] of a padded batch as libraries for embeddings do."""
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
    assert state_of(other).unpadding.root is other
    torch_backend.unpatch(model)
    fresh = encoder("bert", transformers.AutoModel).eval()
    assert torch.equal(model.forward(**padded()).last_hidden_state, fresh(**padded()).last_hidden_state)


# -- what a call may ask for beside its logits ---------------------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "hidden_states": {"output_hidden_states": True},
    "tuple": {"return_dict": False},
    "tuple_of_hidden_states": {"return_dict": False, "output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "float_mask": {"attention_mask": padded()["attention_mask"].float()},
    "bool_mask": {"attention_mask": padded()["attention_mask"].bool()},
    "one_row_of_positions": {"position_ids": torch.arange(19)[None]},
    "last_logits": {"logits_to_keep": 3},
    "chosen_logits": {"logits_to_keep": torch.tensor([0, 4])},
    "mask_of_pairs": {"attention_mask": torch.ones(4, 1, 19, 19, dtype=torch.bool).tril()},
}
MODELS: dict[str, Any] = {
    "qwen3": lambda: tiny("qwen3").eval(),
    "qwen3_moe": lambda: tiny("qwen3_moe", output_router_logits=True).eval(),
    "falcon_alibi": lambda: tiny("falcon_alibi").eval(),
    "bert": lambda: encoder("bert", transformers.AutoModel).eval(),
    "roberta": lambda: encoder("roberta", transformers.AutoModel).eval(),
    "tokens": lambda: encoder("bert", transformers.AutoModelForTokenClassification).eval(),
    "documents": lambda: classifier("qwen3").eval(),
}


def compared(found: Any, want: Any, kept: slice | Tensor = slice(None)) -> int:
    """The tensors in two outputs, equal at real tokens, 0 at padding or what the padded call has there."""
    if isinstance(want, tuple | list):
        assert len(found) == len(want)
        return sum(compared(one, other, kept) for one, other in zip(found, want, strict=True))
    if hasattr(want, "items"):
        assert list(found) == list(want)
        return sum(compared(found[name], want[name], kept) for name in want)
    if not isinstance(want, Tensor):
        return 0
    assert found.shape == want.shape
    real = padded()["attention_mask"].bool()
    if want.ndim > 1 and len(want) == real.numel():
        real = real.flatten()
    elif want.ndim < 3 or want.shape[-1] == want.shape[-2] == 19:  # of documents, or attention weights
        real = torch.ones(want.shape, dtype=torch.bool)
    else:
        real = real[:, kept] if want.shape[1] != real.shape[1] else real
    assert error(found[real].detach(), want[real].detach()) <= 1e-5
    return 1


# Heads of tokens and documents take no logits_to_keep; Bloom, and the loss of a router, no mask of four dimensions.
CALLS = [
    (name, asked)
    for name in MODELS
    for asked in ASKED
    if not ("logits" in asked and name not in ("qwen3", "qwen3_moe", "falcon_alibi"))
    and not (asked == "mask_of_pairs" and name in ("qwen3_moe", "falcon_alibi"))
]


@pytest.mark.parametrize(("name", "asked"), CALLS)
def test_a_call_gets_what_it_asks_for(name: str, asked: str) -> None:
    inputs = {**padded(), **ASKED[asked]}
    kept = inputs.get("logits_to_keep", slice(None))
    want = MODELS[name]()(**inputs)
    found = torch_backend.unpad(MODELS[name](), verify=False)(**inputs)
    assert compared(found, want, slice(-kept, None) if isinstance(kept, int) else kept)


def test_an_option_of_the_config_is_an_option_of_the_call() -> None:
    for option, value in (("output_hidden_states", True), ("return_dict", False)):
        stock, model = MODELS["bert"](), MODELS["bert"]()
        for each in (stock, model):
            setattr(each.config, option, value)
        assert compared(torch_backend.unpad(model, verify=False)(**padded()), stock(**padded()))


def test_a_call_that_wants_a_cache_makes_one_and_another_says_that_it_made_none() -> None:
    """A loop that generates by itself, with left padding, token by token."""
    batch, model = padded(left=True), torch_backend.unpad(tiny("qwen3").eval(), verify=False)
    stock = tiny("qwen3").eval()
    assert torch.equal(model(**batch, use_cache=True).logits, stock(**batch, use_cache=True).logits)
    chosen = [each.generate(**batch, max_new_tokens=4, do_sample=False, use_cache=cached) for each in (stock, model)
              for cached in (True, False)]  # fmt: skip
    assert all(torch.equal(tokens, chosen[0]) for tokens in chosen)
    output = model(**batch)
    with pytest.raises(UnsupportedError, match=r"\(crosspack.unpad\), and so made no cache: pass use_cache=True"):
        output.past_key_values.get_seq_length()
    with pytest.raises(UnsupportedError, match="made no cache"):
        model(input_ids=batch["input_ids"][:, -1:], past_key_values=output.past_key_values)
    assert not hasattr(copy.deepcopy(output.past_key_values), "to")


def test_labels_of_documents_may_be_as_many_as_a_row_has_tokens() -> None:
    model = classifier("qwen3", "multi_label_classification", num_labels=19)
    stock, labels = classifier("qwen3", "multi_label_classification", num_labels=19), torch.rand(4, 19).round()
    torch_backend.unpad(model, verify=False)
    assert error(model(**padded(), labels=labels).loss.detach(), stock(**padded(), labels=labels).loss.detach()) <= 1e-5


def test_images_that_a_model_numbers_by_the_row_stay_padded_and_positions_on_axes_are_taken_along() -> None:
    stock, model = (vision_model("qwen2_vl").eval() for _ in range(2))
    torch_backend.unpad(model, verify=False)
    docs = [document for row in image_documents("qwen2_vl") for document in row]
    width = max(document.ids.shape[-1] for document in docs)

    def side(x: Tensor) -> Tensor:
        return nn.functional.pad(x.flatten(), (0, width - x.numel()))

    batch = {"input_ids": torch.stack([side(d.ids) for d in docs])}
    batch["mm_token_type_ids"] = torch.stack([side(d.types) for d in docs])
    batch["attention_mask"] = torch.stack([side(torch.ones_like(d.ids)) for d in docs])
    images = [document.images for document in docs if document.images]
    batch |= {name: torch.cat([each[name] for each in images]) for name in images[0]}
    want = stock(**batch).logits
    assert torch.equal(model(**batch).logits, want)
    batch["position_ids"], _ = stock.model.get_rope_index(
        *(batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")),
        attention_mask=batch["attention_mask"],
    )
    found, real = model(**batch).logits, batch["attention_mask"] == 1
    assert state_of(model).choices and error(found[real].detach(), want[real].detach()) <= 1e-5
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    text["input_ids"] = text["input_ids"].where(text["input_ids"] < 90, 5)
    assert error(model(**text).logits[real].detach(), stock(**text).logits[real].detach()) <= 1e-5
