"""config.index_loss_coef: indexers learn what attention looks at, inside each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from packing_core.errors import UnsupportedModelError
from tests.torch_backend.graphs import compiled as compiled
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import collate, documents, error, in_float64, tiny
from torch_backend import audit, make_train_step, patch

LENGTHS = (5, 19, 33, 1, 12)
BUDGET = 8
FAMILIES = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")


class _Scores(TorchFunctionMode):
    """Takes the scores [1, L, L] among which stock indexers choose, with their graph."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.enable_grad():
            if function is Tensor.topk and args[0].ndim == 3 and args[0].shape[1] == args[0].shape[2]:
                self.taken.append(args[0])
            return function(*args, **(kwargs or {}))


def loss_alone(model: Any, ids: Tensor) -> Tensor:
    """Equation 4 of DeepSeek-V3.2 in the stock model, averaged over the tokens of a document; its graph is whole."""
    with _Scores() as scores:
        attentions = model(input_ids=ids[None], output_attentions=True, use_cache=False).attentions
    losses = []
    indexed = [i for i, layer in enumerate(model.model.layers) if getattr(layer.self_attn, "indexer", None) is not None]
    for layer, weights in zip(scores.taken, [attentions[i] for i in indexed], strict=True):
        best = layer[0].topk(min(BUDGET, len(ids))).indices
        seen = torch.zeros(len(ids), len(ids), dtype=torch.bool).scatter_(1, best, True).tril()
        target = weights.detach()[0, ..., : len(ids)].sum(0).double() * seen
        target = target / target.sum(-1, keepdim=True)
        choice = layer[0].double().masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
        losses.append((torch.xlogy(target, target) - target * choice).sum() / len(ids))
    return torch.stack(losses).sum()


def of_indexers(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if ".indexer." in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_that_of_each_document_alone_and_trains_indexers(family: str) -> None:
    docs = documents(LENGTHS)
    model = in_float64(tiny(family, index_topk=BUDGET))
    model.set_attn_implementation("eager")
    want = torch.stack([loss_alone(model, ids) for ids in docs]).sum() / len(docs)
    right = torch.autograd.grad(want, list(of_indexers(model).values()), allow_unused=True)
    model.config.index_loss_coef = 0.5
    plain = tiny(family, index_topk=BUDGET)
    plain = patch(in_float64(plain), verify=False)(**collate(docs)).loss
    output = patch(model, verify=False)(**collate(docs))
    assert error(output.index_loss.double(), want) <= 1e-6
    assert error(output.loss.double(), plain.double() + 0.5 * want) <= 1e-6
    output.index_loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(of_indexers(model))
    scale = max(float(x.abs().max()) for x in right)
    for (name, parameter), gradient in zip(of_indexers(model).items(), right, strict=True):
        assert float((parameter.grad - gradient).abs().max()) <= 1e-6 * scale, name


def with_loss(family: str = "deepseek_v32", **changes: Any) -> Any:
    model = tiny(family, index_topk=BUDGET, **changes)
    model.config.index_loss_coef = 0.5
    return model


def test_layers_that_share_a_choice_train_it_once() -> None:
    kinds = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    kinds |= {"layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense"] * 3}
    model = in_float64(with_loss("glm_moe_dsa", **kinds))
    model.set_attn_implementation("eager")
    alone = torch.stack([loss_alone(model, ids) for ids in documents(LENGTHS)]).mean()
    assert error(patch(model, verify=False)(**collate(documents(LENGTHS))).index_loss.double(), alone) <= 1e-6


def test_checkpointed_layers_train_indexers_the_same() -> None:
    def gradients(model: Any) -> list[Tensor]:
        patch(model, verify=False)(**collate(documents(LENGTHS))).loss.backward()
        return [p.grad for p in model.parameters()]

    model = with_loss()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for found, want in zip(gradients(model), gradients(with_loss()), strict=True):
        torch.testing.assert_close(found, want)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedModelError, match="no gradients under reentrant gradient checkpointing"):
        gradients(model)


def test_steps_train_indexers_beside_compiled_layers(compiled: Any) -> None:
    """Documents within the budget too, which run as a graph where indexers do not train."""
    model = patch(with_loss(), verify=False)
    before = {name: p.detach().clone() for name, p in of_indexers(model).items()}
    compiled.model = model
    step = make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        step(collate(documents((5, 7)), capacity=64))
    assert not compiled.replayed
    assert all(not torch.equal(p, before[name]) for name, p in of_indexers(model).items())


def test_an_audit_leaves_it_out() -> None:
    assert audit(with_loss(), patched=True).verdict == "exact"


@pytest.mark.parametrize(
    ("family", "reason"),
    [("llama", "which has no indexers"), ("qwen4_exp_text", "whose indexers choose blocks of keys")],
)
def test_models_without_such_a_choice_are_refused(family: str, reason: str) -> None:
    model = tiny(family)
    model.config.index_loss_coef = 0.5
    with pytest.raises(UnsupportedModelError, match=reason):
        patch(model, verify=False)(**collate(documents(LENGTHS)))
