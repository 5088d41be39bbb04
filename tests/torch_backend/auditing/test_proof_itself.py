"""Adapters, quantisers and parametrisations are proved on the model itself, forward and backward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.config import VeloraConfig
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import torch_backend
from packing_core.errors import ContaminationError, UnsupportedModelError
from tests.torch_backend.models import alone, assert_same, documents, packed, tiny
from torch_backend.hf.patch import state_of

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def adapted(config: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(tiny("llama"), config)


def velora(kind: str) -> Any:
    config = VeloraConfig(num_groups=2, init_type=kind)  # type: ignore[arg-type]
    return adapted(peft.LoraConfig(r=2, target_modules=PROJECTIONS, init_lora_weights=False, velora_config=config))


def linears(model: Any, change: Callable[[nn.Module, str, nn.Linear], None]) -> Any:
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                change(module, name, child)
    return model


def dynamic() -> Any:
    """Int8 activations, whose scale is that of all tokens of a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(tiny("llama"), {nn.Linear}, dtype=torch.qint8)


def fake_quantised() -> Any:
    """Weights and inputs that are rounded in training; an observer keeps the range of the inputs that it saw."""
    model = tiny("llama")
    config = torch.ao.quantization.get_default_qat_qconfig("x86")

    def change(module: nn.Module, name: str, child: nn.Linear) -> None:
        child.qconfig = config  # type: ignore[assignment]
        setattr(module, name, nn.Sequential(config.activation(), torch.ao.nn.qat.Linear.from_float(child)))

    return linears(model, change)


class RowScale(torch.autograd.Function):
    """Scales the gradient of a weight by what all tokens of the call are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2) * x.abs().mean()


class ScaledGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return RowScale.apply(x, self.weight)  # type: ignore[no-any-return]


def scaled_gradient() -> Any:
    model = tiny("llama")
    mlp = model.model.layers[1].mlp
    mlp.down_proj.__class__ = ScaledGradient
    return model


MIXING: dict[str, Callable[[], Any]] = {
    "VeLoRA, average of the batch": lambda: velora("batch_average"),
    "VeLoRA, average of the first batch": lambda: velora("batch_average_once"),
    "dynamic int8": dynamic,
    "fake quantisation": fake_quantised,
    "a weight's gradient alone": scaled_gradient,
}


@pytest.mark.parametrize("build", MIXING.values(), ids=MIXING)
def test_what_mixes_the_documents_of_a_row_is_refused_whatever_package_it_is_of(build: Callable[[], Any]) -> None:
    model = build()
    with pytest.raises(ContaminationError, match=r"packed documents see each other in LlamaForCausalLM: .* moved by"):
        torch_backend.patch(model)
    root = model if not isinstance(model, peft.PeftModel) else model.base_model.model
    assert state_of(root) is None


def test_an_adapter_that_holds_a_model_of_its_own_is_refused_by_name() -> None:
    model = adapted(peft.ShadowConfig(r=2))
    with pytest.raises(UnsupportedModelError, match="shadow_backbone"):
        torch_backend.patch(model)
    with pytest.raises(UnsupportedModelError, match="a packed batch reached a model that is not patched"):
        torch_backend.patch(model.base_model.model)


class Experts(nn.Module):
    """Tokens of some groups, of which one of few tokens is rounded otherwise, as products of few rows are."""

    def __init__(self, mlp: nn.Module, groups: int, few: int) -> None:
        super().__init__()
        self.mlp, self.groups, self.few = mlp, groups, few

    def forward(self, x: Tensor) -> Tensor:
        group = x[..., : self.groups].argmax(-1)
        few = torch.bincount(group.flatten(), minlength=self.groups)[group] <= self.few
        return self.mlp(x) * (1 + few[..., None] * torch.finfo(x.dtype).eps)


def rounding_experts(groups: int, few: int, seed: int = 0) -> Any:
    model = tiny("llama", seed=seed)
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp, groups, few)
    return model


def observers(model: Any) -> Any:
    """The quantised model with ranges that it has learned, which training keeps."""
    model(input_ids=documents()[0][None])
    return model.apply(torch.ao.quantization.disable_observer)


EXACT: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: adapted(peft.LoraConfig(r=2, target_modules=PROJECTIONS, lora_dropout=0.5)),
    "DoRA": lambda: adapted(peft.LoraConfig(r=2, target_modules=PROJECTIONS, use_dora=True)),
    "VeRA": lambda: adapted(peft.VeraConfig(r=2, target_modules=["q_proj"])),
    "IA3": lambda: adapted(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "OFT": lambda: adapted(peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"])),
    "VeLoRA, random": lambda: velora("random"),
    "fake quantisation, ranges kept": lambda: observers(fake_quantised()),
    "experts that round few tokens otherwise": lambda: rounding_experts(groups=4, few=3),
    "experts that round one or two tokens otherwise": lambda: rounding_experts(groups=3, few=2, seed=2),
    "weight norm": lambda: linears(tiny("llama"), lambda _, __, x: parametrizations.weight_norm(x)),
    "prune": lambda: linears(tiny("llama"), lambda _, __, x: prune.random_unstructured(x, "weight", 0.2)),
}


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
def test_what_computes_each_token_alone_passes_and_is_left_as_it_was(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    torch.manual_seed(0)
    other = build().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    torch.manual_seed(3)
    draws = torch.get_rng_state()
    torch_backend.patch(model)
    assert torch.equal(torch.get_rng_state(), draws) and not any(m.training for m in model.modules())
    assert all(p.grad is None or bool((p.grad == 1).all()) for p in model.parameters())
    for (name, value), (_, wanted) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(value, wanted), name
    for parameter in model.parameters():
        parameter.grad = None
    assert_same(packed(model, documents()), alone(other, documents()), 2e-5)


def test_what_a_failed_proof_has_changed_is_put_back() -> None:
    model = fake_quantised()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ContaminationError):
        torch_backend.patch(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model = velora("batch_average_once")
    with pytest.raises(ContaminationError):
        torch_backend.patch(model)
    layers = [m for m in model.modules() if hasattr(m, "lora_velora_initialized")]
    assert layers and not any(m.lora_velora_initialized["default"] for m in layers)


def test_adapters_that_join_a_patched_model_are_proved_at_its_next_packed_call() -> None:
    model = torch_backend.patch(tiny("llama"))
    packed(model, documents())
    torch.manual_seed(0)
    lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=PROJECTIONS))
    packed(lora, documents())
    assert state_of(lora.base_model.model).proved
    config = peft.LoraConfig(r=2, target_modules=PROJECTIONS, velora_config=VeloraConfig(num_groups=2))
    model = peft.get_peft_model(model, config)
    for _ in range(2):
        with pytest.raises(ContaminationError, match="see each other"):
            packed(model, documents())


def test_a_model_without_weights_is_proved_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        right, wrong = type(tiny("llama"))(tiny("llama").config), type(tiny("llama"))(tiny("llama").config)
    wrong.model.norm.register_forward_hook(lambda _, args, output: output + output.cumsum(1) / 10)
    for model in (right, wrong):
        torch_backend.patch(model)
        assert state_of(model).proved is None
        model.load_state_dict(tiny("llama").state_dict(), assign=True)
        model.model.rotary_emb = tiny("llama").model.rotary_emb
    assert_same(packed(right, documents()), alone(tiny("llama"), documents()), 2e-5)
    assert state_of(right).proved == ()
    with pytest.raises(ContaminationError, match="see each other"):
        packed(wrong, documents())
