"""Settings and modules that change after patch(model): a packed call follows them, or says to patch again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import torch_backend
from packing_core.errors import UnsupportedModelError
from tests.torch_backend.hf.test_document_heads import classifier, features
from tests.torch_backend.hf.test_encoders import encoder
from tests.torch_backend.models import LENGTHS, collate, documents, error, packed, patched, tiny
from torch_backend import PackedCollator
from torch_backend.hf.patch import state_of
from torch_backend.losses.causal_lm import causal_lm_loss

AGAIN = r"exchanged after crosspack\.patch\(model\).* call crosspack\.patch\(model\) again"


def dynamic(model: Any) -> nn.Module:
    """A rotary module for ``model`` whose frequencies follow from the longest position."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config.max_position_embeddings = 16
    return type(model.model.rotary_emb)(config)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "falcon_alibi"])
def test_a_padding_token_that_is_set_later_is_the_one_that_heads_read(family: str) -> None:
    """As RewardTrainer does; documents that end with it are scored by the token before it."""
    docs = documents()
    docs[1][-3:] = 7
    model, stock = torch_backend.patch(classifier(family), verify=False), classifier(family)
    model.config.pad_token_id = stock.config.pad_token_id = 7
    want = torch.cat([stock(input_ids=document[None]).logits for document in docs])
    assert error(model(**PackedCollator(model, capacity=64)(features(docs))).logits.detach(), want.detach()) <= 1e-5
    model.config.pad_token_id = None
    with pytest.raises(UnsupportedModelError, match="its config names none: set model.config.pad_token_id"):
        model(**PackedCollator(model, capacity=64)(features(docs)))


def test_a_rotary_module_that_is_exchanged_is_found_and_patching_again_serves_it() -> None:
    model, docs = patched(), documents()
    model.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    model(**collate(docs))  # one of the same kind needs nothing else
    model.model.rotary_emb = dynamic(model)
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        model(**collate(docs))
    torch_backend.patch(model, verify=False)
    stock = tiny("llama")
    stock.model.rotary_emb = dynamic(stock)
    found = packed(model, docs)
    for length, document, logits in zip(LENGTHS, docs, found.logits, strict=True):
        stock.model.rotary_emb = dynamic(stock)
        assert error(logits, stock(input_ids=document[None]).logits[0].detach()) <= 1e-5, length


def test_a_rotary_module_whose_kind_is_changed_in_place_is_found() -> None:
    model = patched()
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        model(**collate(documents()))


class Causal(nn.Module):
    """Attention of somebody's own, which sees the whole row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        q, k, v = self.qkv(hidden_states).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), None


@pytest.mark.parametrize("part", ["attention", "layer", "another layer", "copied", "mixer", "pooler", "config"])
def test_any_other_part_that_is_exchanged_is_found(part: str) -> None:
    if part == "mixer":
        model = patched("mamba")
        model.backbone.layers[0].mixer = copy.deepcopy(tiny("mamba").backbone.layers[0].mixer)
    elif part == "pooler":
        model = torch_backend.patch(encoder("bert", transformers.AutoModel), verify=False)
        model.pooler = copy.deepcopy(encoder("bert", transformers.AutoModel).pooler)
    else:
        model = patched()
        layers, other = model.model.layers, tiny("llama").model.layers[0]
        if part == "attention":
            layers[0].self_attn = Causal(model.config.hidden_size)
        elif part == "another layer":
            layers.append(other)
        elif part == "config":
            layers[0].self_attn.config = copy.deepcopy(model.config)
        else:
            layers[0] = other if part == "layer" else copy.deepcopy(layers[0])
    with pytest.raises(UnsupportedModelError, match=AGAIN):
        model(**collate(documents()))


def test_what_says_nothing_about_packing_may_change() -> None:
    """Another norm, head or MLP of the same class, a copy: all of them keep their patch."""
    model, docs = patched(), documents()
    want = model(**collate(docs)).logits
    state = state_of(model)
    model.config.use_cache = False
    model.model.norm = copy.deepcopy(model.model.norm)
    model.lm_head = copy.deepcopy(model.lm_head)
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(each(**collate(docs)).logits, want)
    assert torch_backend.patch(model, verify=False) is model and state_of(model) is state


def test_an_encoder_that_becomes_a_decoder_is_refused() -> None:
    model = torch_backend.patch(encoder("bert", transformers.AutoModel), verify=False)
    model.config.is_decoder = True
    with pytest.raises(UnsupportedModelError, match="bert cannot be trained packed: it is the decoder of"):
        model(**collate(documents()))


def test_a_loss_without_logits_leaves_the_patch_as_it_was_seen() -> None:
    """Its stand-in for the output layer, and the hidden states in it, are gone after the call."""
    model = patched()
    model(**collate(documents()))
    structure = state_of(model).structure
    causal_lm_loss(model, collate(documents()))
    assert state_of(model).structure is structure
