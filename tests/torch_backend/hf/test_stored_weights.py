"""Weights of torchao that make their values themselves: compiled layers run them as operators, by what they make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization import quantize_ as quantise
from torchao.quantization.granularity import PerGroup

from tests.torch_backend.compiled_steps import DEVICES, assert_train_alike, with_gradient
from tests.torch_backend.compiled_steps import compiling as compiling
from tests.torch_backend.models import error, tiny
from tests.torch_backend.trainers.test_trainer import peft
from torch_backend import patch
from torch_backend.hf.quantised import quantised_layers, traceable_weights, why_weights_stay
from torch_backend.steps import cuda_graph
from torch_backend.steps.eligibility import why_not_compiled
from torch_backend.steps.memory import Level, marked
from torch_backend.steps.memory_fit import StepMemory

KINDS: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int4 in groups": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


def in_decoder(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] != "lm_head"


def dense(model: Any) -> Any:
    """A copy that holds the values."""
    model = copy.deepcopy(model)
    for layer in quantised_layers([model]):
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_traced_layer_multiplies_with_the_values(kind: str, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 192, bias)).requires_grad_(False)
    quantise(layer, KINDS[kind]())
    given = torch.randn(1, 37, 128)

    right, own = with_gradient(dense(layer), given), with_gradient(layer, given)
    with traceable_weights(quantised_layers([layer])):
        torch._dynamo.reset()
        found = with_gradient(torch.compile(layer, backend="aot_eager", fullgraph=True), given)
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    assert all(error(x, y) <= 1e-6 for x, y in zip(found, own, strict=True))
    assert type(layer[0]) is nn.Linear and "_crosspack_stored_weight" not in layer[0].__dict__


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_a_compiled_layer_keeps_no_values_of_its_weights(level: Level) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192), nn.SiLU(), nn.Linear(192, 64)).requires_grad_(False)
    quantise(model, Int8WeightOnlyConfig())
    x, kept = torch.randn(1, 37, 64, requires_grad=True), list[Tensor]()
    (right,) = torch.autograd.grad(dense(model)(x).square().sum(), x)
    with traceable_weights(quantised_layers([model])):
        torch._dynamo.reset()
        call = torch.compile(model, backend=marked(aot_eager_decomp_partition, level), fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
            y = call(x)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], right)
    assert kept and all(x.dtype == torch.int8 or x.numel() <= 37 * 192 for x in kept)


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()


@pytest.mark.parametrize("compiling", DEVICES, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_train_adapters_as_on_the_values(kind: str, compiling: str) -> None:
    quantised = tiny("qwen3").to(compiling).requires_grad_(False)
    quantise(quantised, KINDS[kind](), in_decoder)
    assert len(quantised_layers([quantised])) == 14
    bases = (adapted(base) for base in (quantised, dense(quantised)))
    assert_train_alike(((patch(m, implementation="triton", verify=False), True) for m in bases), compiling)


def test_weights_that_quantise_what_they_multiply_with_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny("llama"), verify=False).requires_grad_(False)
    monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
    quantise(model, Int8WeightOnlyConfig(), in_decoder)
    assert why_weights_stay(model) is None
    quantise(model.lm_head, Int8DynamicActivationInt8WeightConfig())
    reason = "its weights are quantised: Linear of torch, whose Int8Tensor quantises what it multiplies with"
    assert why_not_compiled(model) == why_weights_stay(model) == reason


def test_the_formula_of_memory_counts_8_bits() -> None:
    """A byte a value, a scale for each row, and the values of one weight."""
    model = tiny("qwen2").to(torch.bfloat16).requires_grad_(False)
    quantise(model, Int8WeightOnlyConfig(), in_decoder)
    layers = quantised_layers([model])
    parts = [layer.weight.__tensor_flatten__()[0] for layer in layers]
    stored = sum(getattr(x.weight, name).nbytes for x, names in zip(layers, parts, strict=True) for name in names)
    values = [layer.weight.numel() for layer in layers]
    saved = StepMemory(dense(model)).formula().fixed - StepMemory(model).formula().fixed
    assert sum(values) <= stored <= 1.1 * sum(values) and saved == 2 * sum(values) - stored - 2 * max(values)
