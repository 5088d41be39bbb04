"""Adapters of 4-bit weights (bitsandbytes, NF4): packed documents train them as each document alone does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.torch_backend.models import Run, alone, assert_same, collate, documents, packed, tiny
from tests.torch_backend.steps import test_packed_step, test_sft_step
from tests.torch_backend.steps.test_packed_step import FAST, trained
from tests.torch_backend.trainers.test_trainer import llama, peft
from torch_backend import patch
from torch_backend.hf.anatomy.expert_layouts import layout_of
from torch_backend.hf.anatomy.layers import find_experts

WHY = "unsupported here: bitsandbytes is no dependency of any extra"
parametrize = pytest.importorskip("bitsandbytes.nn.parametrize", reason=WHY)

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.gpu,
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
NOISE = 2.0  # times the error of bfloat16 itself


def loaded(folder: Path, device: str, dtype: torch.dtype) -> Any:
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantised, device_map={"": device}, dtype=dtype
    )


def adapted(folder: Path, device: str, dtype: torch.dtype, *, prepared: bool = False) -> Any:
    """A saved model with 4-bit weights that computes in ``dtype``, and adapters of its projections."""
    model = loaded(folder, device, dtype)
    if prepared:
        model = peft.prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()


def gradients(run: Run) -> torch.Tensor:
    return torch.cat([gradient.flatten().float().cpu() for gradient in run.gradients.values()])


@DEVICES
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_documents_give_the_gradients_of_each_alone(family: str, device: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path)
    docs = [document.to(device) for document in documents()]
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in collate(documents()).items()}
    exact = alone(adapted(tmp_path, device, torch.float32), docs)
    assert any("Linear4bit" in type(module).__name__ for module in adapted(tmp_path, device, torch.float32).modules())
    found = packed(patch(adapted(tmp_path, device, torch.float32), verify=False), docs, batch)
    assert_same(found, exact, tolerance=1e-5)
    rounded = alone(adapted(tmp_path, device, torch.bfloat16), docs)
    found = packed(patch(adapted(tmp_path, device, torch.bfloat16), verify=False), docs, batch)
    want, noise = gradients(exact), (gradients(rounded) - gradients(exact)).norm()
    assert noise > 0
    assert (gradients(found) - want).norm() <= NOISE * noise


@DEVICES
@pytest.mark.parametrize("build", [test_packed_step.built, test_sft_step.built], ids=["Trainer", "SFTTrainer"])
def test_the_fast_step_trains_them_as_the_plain_one(build: Any, device: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")

    def make() -> Any:
        return adapted(tmp_path / "model", device, torch.bfloat16, prepared=True)

    fast, plain = (build(tmp_path / str(kind), kind, make=make, use_cpu=device == "cpu") for kind in (True, False))
    for found, wanted in zip(trained(fast), trained(plain), strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)
    assert fast.packed_step.parts["loss"] == FAST
    layers = "not compiled: the model computes on cpu" if device == "cpu" else "compiled"
    level = ', memory="full"'  # what prepare_model_for_kbit_training asks for: gradient checkpointing
    assert fast.packed_step.parts["layers"] == f"{layers}{level}"


def on_experts(family: str) -> Any:
    """A tiny model with adapters on its experts, and its modules of experts."""
    model = tiny(family)
    up = layout_of(next(iter(find_experts(model).values()))).up
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=[f"experts.{up}", "experts.down_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train(), up


@DEVICES
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_4_bit_experts_train_as_on_what_the_bits_stand_for(family: str, device: str) -> None:
    """Adapters first, then the 4 bits: afterwards PEFT finds no parameter of that name."""
    docs = [document.to(device) for document in documents()]
    (model, up), (held, _) = on_experts(family), on_experts(family)
    model, held = model.to(device), held.to(device)
    for module, copied in zip(find_experts(model).values(), find_experts(held).values(), strict=True):
        for name in (up, "down_proj"):
            before = getattr(module, name).detach().clone()
            parametrize.replace_parameter_4bit(module, name, quant_type="nf4")
            getattr(copied, name).data = getattr(module, name)
            assert not torch.equal(before, getattr(module, name))
    exact = alone(held, docs)
    assert any("experts" in name for name in exact.gradients)
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in collate(documents()).items()}
    assert_same(packed(patch(model, verify=False), docs, batch), exact, tolerance=2e-5)


LORA = {
    "qwen3_moe": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "llama4_text": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
}


@DEVICES
@pytest.mark.parametrize("family", LORA)
def test_adapters_beside_layers_that_load_in_4_bits_are_exact(family: str, device: str, tmp_path: Path) -> None:
    """``load_in_4bit`` takes linear layers, those of shared experts among them, and leaves stacked experts."""
    tiny(family).save_pretrained(tmp_path)
    docs = [document.to(device) for document in documents()]
    runs = []
    for _ in range(2):
        model = loaded(tmp_path, device, torch.float32)
        torch.manual_seed(0)
        runs.append(peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **LORA[family])).train())
    exact = alone(runs[0], docs)
    assert any("expert" in name for name in exact.gradients)
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in collate(documents()).items()}
    assert_same(packed(patch(runs[1], verify=False), docs, batch), exact, tolerance=2e-5)
