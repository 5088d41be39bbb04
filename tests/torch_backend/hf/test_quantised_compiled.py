"""4-bit weights of bitsandbytes inside compiled layers and CUDA graphs: the numbers of layers that run as they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.torch_backend.compiled_steps import DEVICES, assert_train_alike, with_gradient
from tests.torch_backend.compiled_steps import compiling as compiling
from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.kernels import interpret
from tests.torch_backend.models import documents, error, tiny
from tests.torch_backend.ranks import on_ranks
from tests.torch_backend.trainers.test_trainer import peft
from torch_backend import PackedCollator, make_train_step, patch
from torch_backend.hf.quantised import quantised_layers, traceable_weights, why_weights_stay
from torch_backend.steps import cuda_graph, dynamic_compile, fast_backward
from torch_backend.steps.dynamic_compile import COMPILED, CompiledCalls, run_plain_layers
from torch_backend.steps.memory import Level, marked
from torch_backend.steps.memory_fit import StepMemory

bnb = pytest.importorskip("bitsandbytes", reason="unsupported here: bitsandbytes is no dependency of any extra")
DTYPES = (torch.float32, torch.bfloat16)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantised(root: Any, **options: Any) -> Any:
    """The model with its projections in 4 bits, as transformers loads it."""
    options = {"compute_dtype": torch.float32, "quant_type": "nf4"} | options
    for parent in list(root.modules()):
        for name, old in parent.named_children():
            if name in TARGETS:
                new = bnb.nn.Linear4bit(old.in_features, old.out_features, old.bias is not None, **options)
                new.load_state_dict(old.state_dict())
                setattr(parent, name, new.to(old.weight.device))
    root.is_quantized, root.is_loaded_in_4bit = True, True
    root.quantization_method = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    return root


@pytest.mark.parametrize(("kind", "double"), [*product(("nf4", "fp4"), (True, False))])
@pytest.mark.parametrize(("compute", "stored"), [*product((*DTYPES, None), (*DTYPES, torch.float16))])
@pytest.mark.parametrize("bias", [True, False])
def test_a_traced_layer_has_the_bits_of_its_own(
    kind: str, double: bool, compute: torch.dtype | None, stored: torch.dtype, bias: bool
) -> None:
    torch.manual_seed(0)
    layer: Any = bnb.nn.Linear4bit(128, 192, bias, compute, compress_statistics=double, quant_type=kind)
    layer.weight.data = layer.weight.data.to(stored)
    layer = layer.to("cpu")
    given = torch.randn(1, 37, 128, dtype=torch.bfloat16)

    right = with_gradient(layer, given)
    with traceable_weights([layer]):
        torch._dynamo.reset()
        found = with_gradient(torch.compile(layer, backend="aot_eager", fullgraph=True), given)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, right, strict=True))
    assert type(layer) is bnb.nn.Linear4bit and with_gradient(layer, given)[0].equal(right[0])


class GatedMLP(nn.Module):
    """Columns: 64, inside 192, which the selective level finds wide."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((64, 192), (64, 192), (192, 64))
        self.layers = nn.ModuleList(bnb.nn.Linear4bit(*each, compute_dtype=torch.float32) for each in sizes)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = self.layers
        y: Tensor = down(nn.functional.silu(gate(x)) * up(x))
        return y


@pytest.mark.parametrize(("level", "again"), [("none", 0), ("selective", 2), ("full", 2)])
def test_a_compiled_layer_keeps_no_values_of_its_weights(level: Level, again: int, monkeypatch: Any) -> None:
    product, calls, kept = torch.ops.bitsandbytes.gemm_4bit, list[int](), list[Tensor]()
    own = product.default
    monkeypatch.setattr(product, "default", lambda *given, **named: calls.append(1) or own(*given, **named))
    torch.manual_seed(0)
    model = GatedMLP().to("cpu")
    x = torch.randn(1, 37, 64, requires_grad=True)
    (right,) = torch.autograd.grad(model(x).square().sum(), x)
    calls.clear()
    with traceable_weights(quantised_layers([model])):
        torch._dynamo.reset()
        call = torch.compile(model, backend=marked(aot_eager_decomp_partition, level), fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            y = call(x)
        assert len(calls) == 3
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], right)
    assert len(calls) == 3 + again
    assert kept and all(x.dtype == torch.uint8 or x.numel() <= 37 * 192 for x in kept)


def adapters(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False} | options)
    return peft.get_peft_model(model, config).train()


def two_adapters(model: Any) -> Any:
    model = adapters(model)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "LoRA": adapters,
    "rsLoRA": lambda model: adapters(model, use_rslora=True),
    "DoRA": lambda model: adapters(model, use_dora=True),
    "two adapters": two_adapters,
    "some projections": lambda model: adapters(model, target_modules=["q_proj", "down_proj"]),
    "modules_to_save": lambda model: adapters(model, modules_to_save=["input_layernorm"]),
}


@pytest.mark.parametrize("compiling", DEVICES, indirect=True)
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_layers_train_adapters_as_plain_ones_do(name: str, compiling: str) -> None:
    models = [VARIANTS[name](quantised(tiny("qwen3").to(compiling))) for _ in range(2)]
    for model in models:
        patch(model, implementation="triton", verify=False)
    assert_train_alike(zip(models, (True, False), strict=True), compiling)
    assert all(type(quantised_layers([model])[0]) is bnb.nn.Linear4bit for model in models)


def test_weights_that_compiled_layers_cannot_run_are_named() -> None:
    model = quantised(tiny("llama"))
    assert why_weights_stay(model) is None
    layer = model.model.layers[1].mlp
    own, state = layer.up_proj, layer.up_proj.weight.quant_state
    layer.up_proj = bnb.nn.Linear8bitLt(own.in_features, own.out_features, has_fp16_weights=False)
    reason = "its weights are quantised: Linear8bitLt of bitsandbytes, which holds no whole 8-bit weight"
    assert why_weights_stay(model) == reason  # before it is moved
    layer.up_proj = own
    model.register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    assert why_weights_stay(model) == "its weights are quantised: LlamaForCausalLM of transformers"
    del model.qweight
    state.state2.blocksize = 128
    reason = "its weights are quantised: Linear4bit of bitsandbytes, whose magnitudes have blocks of 128 and not 256"
    assert why_weights_stay(model) == reason
    state.state2.blocksize, own.forward = 256, own.forward
    assert (
        why_weights_stay(model) == "its weights are quantised: Linear4bit of bitsandbytes, whose forward was replaced"
    )
    plain = tiny("llama")
    assert why_weights_stay(plain) is None
    plain.is_quantized = True
    assert why_weights_stay(plain) == "its weights are quantised"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_any_length_run_through_one_graph(device: str, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters and without them, as a trainer with a reference runs the layers."""
    counter = None
    if device == "cpu":
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
        counter = counted_compilation(monkeypatch, dynamic_compile, "eager")
    model = patch(adapters(quantised(tiny("qwen2").to(device))), implementation="triton", verify=False)
    calls, found = CompiledCalls(model), []
    for number, lengths in enumerate([(5, 9), (7, 3), (7, 3), (2, 10, 6), (7, 3)] * 2):
        batch = PackedCollator(model)([{"input_ids": d.tolist()} for d in documents(lengths)])
        batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items() if name != "labels"}
        if number == 5:
            run_plain_layers(model)
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits
        model.zero_grad()
        logits = model(**batch).logits
        (logits * reference).sum().backward()
        found.append([reference, logits.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
        if number == 4:
            assert calls.layers == COMPILED
    for fast, plain in zip(found[:5], found[5:], strict=True):
        assert all(error(x, y) <= (1e-4 if device == "cpu" else 1e-3) for x, y in zip(fast, plain, strict=True))
    assert counter is None or counter.frame_count <= 8


def on_a_rank(shards: bool) -> tuple[list[float], list[Tensor]]:
    """The losses of four steps and the adapters after them, of layers that are compiled where FSDP2 shards."""
    with pytest.MonkeyPatch.context() as patched:
        model = adapters(quantised(tiny("qwen3"), quant_storage=torch.float32))
        wrapped: Any = nn.parallel.DistributedDataParallel(model)
        if shards:
            interpret(patched)
            patched.setattr(cuda_graph, "DEVICE", "cpu")
            counted_compilation(patched, fast_backward)
            wrapped = model
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        patch(model, implementation="triton" if shards else "sdpa", verify=False)
        weights = [p for p in model.parameters() if p.requires_grad]
        step = make_train_step(wrapped, torch.optim.SGD(weights, lr=0.1), capture=False)
        docs = documents((20, 9, 14), seed=dist.get_rank())
        batch = PackedCollator(model, capacity=64)([{"input_ids": d.tolist()} for d in docs])
        losses = [float(step(batch)["loss"]) for _ in range(4)]
        assert step.parts["layers"] == ("compiled" if shards else "not compiled: the model computes on cpu")
    assert not shards or all(isinstance(layer.weight, DTensor) for layer in quantised_layers([model]))
    return losses, [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in weights]


@pytest.mark.slow
def test_compiled_layers_gather_4_bits_that_fsdp_shards() -> None:
    """``bnb_4bit_quant_storage`` of the dtype of other weights, with which FSDP2 gathers them."""
    (found, trained), (wanted, whole) = on_ranks(on_a_rank, True), on_ranks(on_a_rank, False)
    assert found == pytest.approx(wanted, rel=1e-5) and found[0] > found[-1]
    assert all(error(one, other) <= 1e-4 for one, other in zip(trained, whole, strict=True))


def test_the_formula_of_memory_counts_4_bits() -> None:
    """Half a byte a value, four bytes a block of 64, and the values of one weight; autocast copies no packed ones."""
    dense, model = adapters(tiny("qwen2")), adapters(quantised(tiny("qwen2"), compress_statistics=False))
    sizes = [layer.in_features * layer.out_features for layer in quantised_layers([model])]
    saved = StepMemory(dense).formula().fixed - StepMemory(model).formula().fixed
    assert saved == sum(sizes) * (4 - 1 / 2 - 4 / 64) - 4 * max(sizes)
    cast = StepMemory(model, autocast=torch.bfloat16).formula().fixed - StepMemory(model).formula().fixed
    assert cast == 2 * sum(p.numel() for p in model.parameters() if p.is_floating_point()) - 2 * max(sizes)
