"""gpt-oss as it is published: experts in MXFP4 beside adapters, and the same model with the values of its weights."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import torch_backend
from packing_core.errors import LayoutError, UnsupportedModelError
from tests.torch_backend.compiled_steps import DEVICES, assert_train_alike
from tests.torch_backend.compiled_steps import compiling as compiling
from tests.torch_backend.expert_layers import CLAMPED, Layer
from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, Where, assert_within_budget
from tests.torch_backend.models import alone, assert_same, collate, documents, packed, tiny, with_mask
from tests.torch_backend.trainers.test_trainer import peft
from tests.training_jobs import losses, small_job, with_options
from torch_backend import audit, patch
from torch_backend.hf.anatomy.expert_layouts import layout_of
from torch_backend.hf.anatomy.layers import find_experts
from torch_backend.hf.mxfp4 import load_mxfp4
from torch_backend.job.models import build_model
from torch_backend.job.train import train
from torch_backend.ops.experts import experts
from torch_backend.ops.mxfp4 import Mxfp4Weight, dequantize, shared_bytes, shared_values
from torch_backend.steps.graph_collectives import place_of
from torch_backend.steps.memory import Level
from torch_backend.steps.memory_fit import StepMemory

WEIGHTS = ("gate_up_proj", "down_proj")
ON_EXPERTS = {"target_modules": ["q_proj", "v_proj"], "target_parameters": [f"experts.{name}" for name in WEIGHTS]}


def published(folder: Path, **changes: Any) -> Path:
    """A checkpoint of a tiny gpt-oss whose experts are blocks and scales."""
    tiny("gpt_oss", **changes).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if name.endswith(WEIGHTS)]:
        count, width, outer = stored.pop(name).shape
        shape = count, outer, width // 32
        stored[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(119, 125, shape, generator=generator, dtype=torch.uint8)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def both(folder: Path, dtype: torch.dtype = torch.float32, **adapters: Any) -> tuple[Any, Any]:
    """The model in 4 bits, and with the values that transformers makes of them; with adapters."""
    published(folder)
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=dtype
    )
    for parameter in dense.parameters():  # of which transformers before 5.23 makes bfloat16
        parameter.data = parameter.data.to(dtype)
    models = load_mxfp4(folder, dtype=dtype), dense
    return tuple(adapted(model, **adapters) for model in models) if adapters else models  # type: ignore[return-value]


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **options)).train()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_have_the_bits_of_transformers(where: Any, dtype: torch.dtype) -> None:
    """Every byte with every scale whose values bfloat16 holds as normal numbers; 255 stands for none."""
    scales = torch.arange(256, dtype=torch.uint8, device=where.device).clamp(2, 254).view(1, 32, 8)
    blocks = torch.arange(256, dtype=torch.uint8, device=where.device).view(16, 1, 1, 16).expand(16, 32, 8, 16)
    scales = scales.expand(16, 32, 8)
    right = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
    values = dequantize(blocks.reshape(16, 32, 128), scales, dtype)
    assert values.is_contiguous() and torch.equal(values, right)


class InMxfp4(Layer):
    """Weights in MXFP4, of which the oracle takes the values; adapters on both products."""

    def __init__(self, where: Where) -> None:
        super().__init__(where, width=64, inner=32, rank=3, activation=CLAMPED, biased=True, interleaved=True)
        self.packed: dict[str, Tensor] = {}
        for name in ("up", "down"):
            count, out, width = self.leaves[name].shape
            generator = torch.Generator().manual_seed(out)
            blocks = torch.randint(256, (count, out, width // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, (count, out, width // 32), generator=generator, dtype=torch.uint8)
            self.packed |= {name: blocks.to(where.device), f"{name}_scales": scales.to(where.device)}
            self.leaves[name] = dequantize(self.packed[name], self.packed[f"{name}_scales"], where.dtype)

    def results(self, implementation: Any = "auto", tile: int | None = None) -> dict[str, Tensor]:
        values = self.leaves
        trained = {name: leaf for name, leaf in values.items() if name not in self.packed}
        self.leaves = trained | self.packed
        y = self.run(implementation, tile)
        self.leaves = values
        return {"y": y, **dict(zip(trained, torch.autograd.grad(y, list(trained.values()), self.dy), strict=True))}


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
def test_experts_in_4_bits_are_the_oracle_of_their_values(where: Where, tile: int | None) -> None:
    layer = InMxfp4(where)
    results = layer.results("triton", tile)
    exact, rounded = (layer.oracle(dtype) for dtype in ("float64", str(where.dtype).removeprefix("torch.")))
    assert len(results) == 9
    for each in (exact, rounded):
        each.pop("up"), each.pop("down")
    assert_within_budget(results, exact, rounded, where.dtype)


def test_a_checkpoint_is_loaded_in_4_bits_and_has_the_numbers_of_its_values(tmp_path: Path) -> None:
    model, dense = both(tmp_path)
    for module, held in zip(find_experts(model).values(), find_experts(dense).values(), strict=True):
        for name in WEIGHTS:
            weight = getattr(module, name)
            assert isinstance(weight, Mxfp4Weight) and isinstance(weight, nn.Parameter)
            assert weight.blocks.dtype == torch.uint8 and weight.nbytes == weight.numel() * 17 // 32
            assert torch.equal(weight.dequantize(), getattr(held, name))
            assert place_of(weight) == weight.blocks.data_ptr() != 0  # a graph is recorded again if it moves
            assert not weight.requires_grad
    ids = documents((20,))[0][None]
    assert torch.equal(model(ids).logits, dense(ids).logits)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.bfloat16)):
        weight = next(iter(find_experts(again).values())).down_proj
        assert isinstance(weight, Mxfp4Weight) and isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert weight.dtype == torch.bfloat16


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is no checkpoint in MXFP4: load it with from_pretrained"):
        load_mxfp4(tmp_path)


@pytest.mark.parametrize("adapters", [ON_EXPERTS, {"target_modules": ["q_proj", "o_proj"]}], ids=["experts", "others"])
def test_adapters_train_as_on_the_values(adapters: dict[str, Any], tmp_path: Path) -> None:
    """In packed rows, and document by document."""
    (model, dense), docs = both(tmp_path, **adapters), documents((7, 3, 5))
    want, batch = alone(dense, docs), with_mask(collate(docs, capacity=16))
    assert any("lora" in name for name in want.gradients)
    assert_same(alone(model, docs), want, 1e-5)
    for each in (model, dense):
        patch(each, verify=False)
    found = packed(model, docs, batch)
    assert_same(found, packed(dense, docs, batch), 1e-6)
    assert_same(found, want, 1e-5)
    assert_same(alone(model, docs), want, 1e-5)
    layers = [x for x in torch_backend.explain(model).layers if x.route == "experts"]
    assert all("weights in MXFP4" in x.request for x in layers)


@pytest.mark.parametrize(("options", "kept"), [({}, True), ({"merge_lora": True}, False)])
def test_crosspack_train_keeps_4_bits_beside_adapters(options: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    job = with_options(small_job(str(published(tmp_path, vocab_size=512)), **options), lora=2)
    assert kept == any(isinstance(p, Mxfp4Weight) for p in build_model(job).parameters())
    if kept:
        found = losses(train(job))
        assert len(found) > 1 and all(map(math.isfinite, found))


def test_no_values_are_kept_for_the_backward(tmp_path: Path) -> None:
    model = patch(both(tmp_path, **ON_EXPERTS)[0], verify=False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        model(**with_mask(collate(documents((7, 3, 5)), capacity=16)))
    weight = next(iter(find_experts(model).values())).gate_up_proj
    assert any(x.dtype == torch.uint8 for x in kept)
    assert not any(x.numel() == weight.numel() and x.is_floating_point() for x in kept)


def test_all_weights_share_memory_for_the_values_of_one(tmp_path: Path) -> None:
    """It goes with the last of them, and results are no views of it."""
    gc.collect()
    model, cpu = patch(both(tmp_path, **ON_EXPERTS)[0], verify=False), torch.device("cpu")
    weights = [getattr(module, name) for module, name in product(find_experts(model).values(), WEIGHTS)]
    assert shared_bytes(cpu) == 0
    model(**with_mask(collate(documents((7, 3, 5)), capacity=16))).logits.sum().backward()
    assert shared_bytes(cpu) == max(x.numel() * x.element_size() for x in weights)
    values = [x.dequantize() for x in weights[:2]]
    shared = shared_values(weights[0].blocks, weights[0].scales, torch.float32)
    assert torch.equal(shared.mT, values[0])
    shared_values(weights[1].blocks, weights[1].scales, torch.float32)
    assert not torch.equal(shared.mT, values[0]) and torch.equal(weights[0].dequantize(), values[0])
    del model, weights
    gc.collect()
    assert shared_bytes(cpu) == 0


def test_threads_do_not_overwrite_each_others_values() -> None:
    where = Where(torch.device("cpu"), torch.float32)
    layers = [InMxfp4(where), InMxfp4(where)]
    layers[1].packed |= {name: layers[1].packed[name].flip(0) for name in ("up", "down")}
    kept = Mxfp4Weight(layers[0].packed["up"], layers[0].packed["up_scales"], torch.float32)
    right = [layer.results("plain") for layer in layers]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(40):
            for found, want in zip(threads.map(lambda layer: layer.results("plain"), layers), right, strict=True):
                assert all(torch.equal(found[name], want[name]) for name in want)
    assert kept.shared.buffers


@pytest.mark.parametrize("compiling", DEVICES, indirect=True)
@pytest.mark.parametrize(("level", "layers"), [("none", "compiled"), ("full", 'compiled, memory="full"')])
def test_compiled_layers_train_adapters_as_on_the_values(
    level: Level, layers: str, compiling: str, tmp_path: Path
) -> None:
    patched = (patch(m.to(compiling), implementation="triton", verify=False) for m in both(tmp_path, **ON_EXPERTS))
    assert_train_alike(((model, True) for model in patched), compiling, layers, memory=level)


@pytest.mark.parametrize("adapters", [{}, ON_EXPERTS], ids=["none", "on experts"])
def test_weights_in_4_bits_are_proved_on_the_model_itself(adapters: dict[str, Any], tmp_path: Path) -> None:
    report = audit(patch(both(tmp_path, **adapters)[0]))
    assert report.verdict == "exact"
    assert any("Mxfp4Weight" in addition for addition in report.additions)


def test_weights_that_shall_train_and_half_a_module_are_named(tmp_path: Path) -> None:
    model, dense = both(tmp_path)
    module, held = (next(iter(find_experts(m).values())) for m in (model, dense))
    module.gate_up_proj.requires_grad_()
    assert layout_of(module) == "its weights are in MXFP4, which does not train: requires_grad_(False)"
    held.down_proj = module.down_proj
    assert layout_of(held) == "one of its weights is in MXFP4, and the other is not"
    with pytest.raises(NotImplementedError, match="cannot write into a weight in MXFP4"), torch.no_grad():
        module.down_proj.copy_(2 * module.down_proj)
    module.down_proj.data.copy_(module.down_proj.dequantize())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"down_scales": None}, "up and down are both in MXFP4 or neither"),
        ({"up": torch.zeros(4, 128, 64)}, r"up must be \[4, 128, 32\], got \[4, 128, 64\]"),
        ({"up": torch.zeros(4, 128, 32)}, "up is torch.float32, and weights in MXFP4 are uint8"),
    ],
)
def test_operands_that_are_no_blocks_are_refused(change: dict[str, Any], reason: str) -> None:
    def stored(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)

    given = {"up": stored(4, 128, 32), "up_scales": stored(4, 128, 2)}
    given |= {"down": stored(4, 64, 32), "down_scales": stored(4, 64, 2)}
    x, indices, weights = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    assert experts(x, indices, weights, **given).shape == x.shape
    with pytest.raises(LayoutError, match=reason):
        experts(x, indices, weights, **given | change)


def test_the_formula_of_memory_counts_4_bits(tmp_path: Path) -> None:
    """17 bytes for 32 values, and the values of one weight."""
    model, dense = both(tmp_path, torch.bfloat16, **ON_EXPERTS)
    values = [getattr(module, name).numel() for module, name in product(find_experts(model).values(), WEIGHTS)]
    for options in ({}, {"autocast": torch.float16}):
        saved = StepMemory(dense, **options).formula().fixed - StepMemory(model, **options).formula().fixed
        copies = 2 * sum(values) if options else 0  # autocast makes copies of dense weights
        assert saved == sum(values) * 2 - sum(values) * 17 // 32 - 2 * max(values) + copies
