"""Modules, forwards and hooks that are added after patch(model) are proved at the next packed call.

Each of the additions below lets every document see those before it in its row.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import torch_backend
from packing_core.errors import ContaminationError
from tests.torch_backend.hf.test_document_heads import classifier
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, patched, tiny
from torch_backend import PackedCollator
from torch_backend.hf.anatomy.structure import STATE
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.steps.train_step import make_train_step

SEEN = r"packed documents (see each other in|are not what they are alone in) {}.* It holds {}"


def with_earlier(x: Tensor) -> Tensor:
    return x + x.cumsum(-2) / 10


class Mixing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_earlier(self.inner(*args, **kwargs))


class First(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[0]


def observing(module: nn.Module, args: Any) -> None:
    """Looks and returns nothing."""


def mixing(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return with_earlier(output)


def doubling(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def mixing_inputs(module: nn.Module, args: Any) -> Any:
    return with_earlier(args[0]), *args[1:]


def hook_on_mlp(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(mixing)


def hook_before_layer(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(mixing_inputs)


def hook_on_decoder(model: Any) -> None:
    model.model.register_forward_hook(lambda _, args, output: type(output)(last_hidden_state=with_earlier(output[0])))


def hook_on_model(model: Any) -> None:
    model.register_forward_hook(lambda _, args, output: type(output)(logits=with_earlier(output.logits)))


def hook_before_head(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(mixing_inputs)


def forward_of_attention(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output, weights = own(*args, **kwargs)
        return with_earlier(output), weights

    attention.forward = forward


def forward_of_decoder(model: Any) -> None:
    own = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        return type(output)(last_hidden_state=with_earlier(output[0]))

    model.model.forward = forward


def head(model: Any) -> None:
    model.lm_head = Mixing(model.lm_head)


def head_of_torch(model: Any) -> None:
    model.lm_head = nn.Sequential(nn.GRU(model.config.hidden_size, model.config.vocab_size, batch_first=True), First())


def mlp(model: Any) -> None:
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp)


def class_of_mlp(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    forward = {"forward": lambda self, x: with_earlier(super(type(self), self).forward(x)), "__module__": __name__}
    mlp.__class__ = type("MixingMLP", (type(mlp),), forward)


ADDITIONS: list[tuple[Callable[[Any], None], str]] = [
    (hook_on_mlp, r"a hook on model\.layers\.0\.mlp \(tests\.\S*\.mixing\)"),
    (hook_before_layer, r"a hook on model\.layers\.1 \(tests\.\S*\.mixing_inputs\)"),
    (hook_on_decoder, r"a hook on model \("),
    (hook_before_head, r"a hook on lm_head \("),
    (forward_of_attention, r"forward of model\.layers\.0\.self_attn \("),
    (forward_of_decoder, r"forward of model \("),
    (head, r"lm_head \(Mixing\)"),
    (head_of_torch, r"lm_head \(Sequential\), lm_head\.0 \(GRU\)"),
    (mlp, r"model\.layers\.0\.mlp \(Mixing\)"),
    (class_of_mlp, r"model\.layers\.0\.mlp \(MixingMLP\)"),
    (hook_on_model, r"a hook on the model \("),
]


def proved() -> Any:
    return torch_backend.patch(tiny("llama"))


@pytest.mark.parametrize(
    ("add", "named", "ran"),
    [(*addition, bool(number % 2)) for number, addition in enumerate(ADDITIONS)],  # before the first call, or later
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_lets_documents_see_each_other_is_refused(add: Callable[[Any], None], named: str, ran: bool) -> None:
    model, batch = proved(), collate(documents())
    if ran:
        model(**batch)
    add(model)
    for _ in range(2):
        with pytest.raises(ContaminationError, match=SEEN.format("LlamaForCausalLM", named)):
            model(**batch)


@pytest.mark.parametrize(("add", "ran"), [(hook_on_mlp, True), (forward_of_attention, False), (head, True)])
def test_an_audit_sees_it_and_accepts_nothing(add: Callable[[Any], None], ran: bool) -> None:
    model, batch = proved(), collate(documents())
    if ran:
        model(**batch)
    add(model)
    assert [torch_backend.audit(model).verdict for _ in range(2)] == ["contaminated"] * 2
    with pytest.raises(ContaminationError, match="It holds"):
        model(**batch)


@pytest.mark.parametrize("add", [hook_on_decoder, hook_before_head, forward_of_attention, head, hook_on_mlp])
def test_losses_and_steps_see_it_too(add: Callable[[Any], None]) -> None:
    model, batch = proved(), collate(documents())
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    step(batch)
    add(model)
    for run in (step, lambda batch: causal_lm_loss(model, batch)):
        with pytest.raises(ContaminationError, match="It holds"):
            run(batch)


def test_a_classifier_sees_what_is_added_to_its_head() -> None:
    model = torch_backend.patch(classifier("llama"))
    batch = PackedCollator(model)([{"input_ids": d} for d in documents()])
    model(**batch)
    model.score.register_forward_hook(lambda _, args, output: output + output.cumsum(0) / 10)
    with pytest.raises(ContaminationError, match=SEEN.format("LlamaForSequenceClassification", "a hook on score")):
        model(**batch)


def test_hooks_that_return_nothing_observe_as_they_like() -> None:
    model, docs = proved(), documents()
    want = packed(model, docs)
    handles = [m.register_forward_pre_hook(observing) for m in model.modules()]
    assert_same(packed(model, docs), want, 0)
    assert_same(packed(pickle.loads(pickle.dumps(model)), docs), want, 0)
    for handle in handles:
        handle.remove()
    assert not any(observing is hook for m in model.modules() for hook in m._forward_pre_hooks.values())


def test_a_hook_on_each_token_alone_is_accepted_and_another_one_in_its_place_is_proved() -> None:
    model, docs = proved(), documents()
    model(**collate(docs))
    stock = tiny("llama")
    handles = [each.model.layers[0].mlp.register_forward_hook(doubling) for each in (model, stock)]
    assert_same(packed(model, docs), alone(stock, docs), 2e-5)
    assert torch.equal(model(input_ids=docs[0][None]).logits, stock(input_ids=docs[0][None]).logits)
    copy.deepcopy(model)(**collate(docs))
    handles[0].remove()
    hook_on_mlp(model)
    with pytest.raises(ContaminationError, match="It holds"):
        model(**collate(docs))


@pytest.mark.parametrize("way", ["hook", "forward"])
def test_another_function_of_the_same_name_in_its_place_is_proved(way: str) -> None:
    """Two lambdas of one function have one name."""
    model, docs = proved(), documents()
    mlp = model.model.layers[0].mlp

    def add(change: Callable[[Tensor], Tensor]) -> None:
        if way == "hook":
            mlp.register_forward_hook(lambda module, args, output: change(output))
        else:
            mlp.__dict__.pop("forward", None)
            mlp.forward = MethodType(lambda module, x, own=mlp.forward: change(own(x)), mlp)

    add(lambda x: x)
    model(**collate(docs))
    add(with_earlier)
    with pytest.raises(ContaminationError, match="It holds"):
        model(**collate(docs))
    torch_backend.patch(model, verify=False)
    model(**collate(docs))  # as its caller wants


def test_modules_of_transformers_and_adapters_change_nothing() -> None:
    model, docs = patched(), documents()
    model(**collate(docs))
    model.resize_token_embeddings(model.config.vocab_size + 8)
    model.lm_head = copy.deepcopy(model.lm_head)
    model(**collate(docs))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    adapted(**collate(docs))
    causal_lm_loss(adapted, collate(docs))


def test_trainers_may_let_embeddings_require_gradients_and_take_it_back_in_every_step() -> None:
    """As TRL's do around their reference, without the model being looked through again."""
    model = patched()
    model(**collate(documents()))
    structure = model.__dict__[STATE].structure
    for change in (model.enable_input_require_grads, model.disable_input_require_grads):
        change()
        model(**collate(documents()))
        assert model.__dict__[STATE].structure is structure
    hook_on_mlp(model)
    model(**collate(documents()))
    assert model.__dict__[STATE].structure is not structure
