"""float8 training: which layers multiply in float8, what documents see of each other, and how it is taken back.

The CPU has no products of float8, so torchao emulates them: values are rounded to float8 and multiplied in float32.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from packing_core.errors import PackingError, UnsupportedError, UnsupportedModelError
from tests.torch_backend.graphs import graphs as graphs
from tests.torch_backend.models import collate, documents, error, tiny, traces
from tests.torch_backend.trainers.test_trainer import peft
from torch_backend import audit, explain, make_train_step, patch, unpatch
from torch_backend.hf import float8
from torch_backend.hf.float8 import RECIPES, check_float8, describe_float8, to_bfloat16, to_float8
from torch_backend.steps.memory import marked

OWN_SCALES = "float8"  # the recipe in which every document has its own
CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.gpu,
)
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "EMULATED", True)


def bfloat16(family: str = "llama", **changes: Any) -> Any:
    return tiny(family, **changes).to(torch.bfloat16)


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def stepped(model: Any, lr: float = 0.1, **options: Any) -> Any:
    return make_train_step(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", [OWN_SCALES, *(f"float8:{recipe}" for recipe in RECIPES)])
def test_attention_and_mlps_multiply_in_float8_and_what_is_saved_keeps_its_names(precision: str) -> None:
    model = bfloat16()
    before, weights = list(model.state_dict()), list(model.parameters())
    step = stepped(patch(model, verify=False), precision=precision)
    layers = converted(model)
    assert {name.rpartition(".")[2] for name in layers} == PROJECTIONS
    assert all(".layers." in name for name in layers) and len(layers) == 7 * model.config.num_hidden_layers
    assert list(model.state_dict()) == before
    assert all(now is then for now, then in zip(model.parameters(), weights, strict=True))
    recipe = precision.partition(":")[2] or "rowwise_with_gw_hp"
    assert any(f"{len(layers)} linear layers multiply in float8 ({recipe}" in note for note in explain(step).notes)
    losses = [float(step(collate(documents()))["loss"]) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.usefixtures("emulated")
def test_unpatch_takes_it_back() -> None:
    model, like = patch(bfloat16(), verify=False), bfloat16()
    batch, before = collate(documents()), traces(bfloat16())
    right = model(**batch).logits
    stepped(model, precision="float8")
    assert not torch.equal(model(**batch).logits, right)
    stepped(model, precision="float8:rowwise")  # in place of the first one
    assert "rowwise," in str(describe_float8(model))
    unpatch(model)
    assert describe_float8(model) is None and traces(model) == before
    assert [type(m) for m in model.modules()] == [type(m) for m in like.modules()]
    assert torch.equal(patch(model, verify=False)(**batch).logits, right)


def changed_neighbours(precision: str, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Losses of the first document of a row, and gradients of its loss, beside two sets of other documents.

    Returns:
        For each set, the logits, the gradient of the document's embeddings, and those of all weights.
    """
    first, *others = (document.to(device) for document in documents((19, 33, 7)))
    results = []
    for behind in (others, [other.flip(0) % 80 + 5 for other in others]):
        attention = "auto" if device == "cpu" else "triton"  # which adds up in one order
        model = patch(bfloat16().to(device), implementation=attention, verify=False)
        to_float8(model, precision)
        with torch.no_grad():  # so that other documents have the largest values
            model.get_input_embeddings().weight[:4] *= 4
        large = [other.where(torch.arange(len(other), device=device) % 5 > 0, 1) for other in behind]
        on_host = collate([document.cpu() for document in (first, *large)])
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in on_host.items()}
        embedded: list[Tensor] = []
        model.get_input_embeddings().register_forward_hook(lambda *x, kept=embedded: kept.append(x[2]) or None)
        logits = model(**batch).logits[0, : len(first)]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), first[1:])
        weights = list(model.model.layers.parameters())
        gradients = torch.autograd.grad(loss, [*embedded, *weights])
        results.append([logits.detach(), gradients[0][0, : len(first)], *gradients[1:]])
    return results[0], results[1]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_document_does_not_move_with_what_stands_behind_it(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("emulated")
    one, other = changed_neighbours(OWN_SCALES, device)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.usefixtures("emulated")
def test_the_other_recipes_share_scales_and_that_is_of_the_size_of_their_rounding() -> None:
    """The sizes stand in docs/contract.md. Rows leave forwards and the gradients of inputs alone."""
    one, other = changed_neighbours("float8:rowwise")
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert 0 < max(error(x, y) for x, y in zip(one[2:], other[2:], strict=True)) < 1e-4  # powers of two: underflow
    one, other = changed_neighbours("float8:tensorwise")
    assert 1e-2 < error(one[0], other[0]) < 0.35


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", [OWN_SCALES, "float8:rowwise", "float8:tensorwise"])
def test_the_audit_compares_with_the_same_recipe_on_each_document_alone(precision: str) -> None:
    model = patch(bfloat16())
    to_float8(model, precision)
    report = audit(model)
    assert report.verdict == "exact" and any("Float8Linear" in part for part in report.additions)
    assert str(describe_float8(model)) in str(report)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("memory", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", [OWN_SCALES, "float8:tensorwise"])
def test_compiled_layers_and_the_graph_have_the_numbers_of_plain_ones(precision: str, memory: Any, graphs: Any) -> None:
    losses = {}
    for fast in (False, "auto"):
        model = graphs.model = patch(bfloat16(), verify=False)
        step = stepped(model, precision=precision, memory=memory, compile=fast, capture=fast)
        losses[fast] = [float(step(collate(documents()))["loss"]) for _ in range(8)]
        if fast:
            assert step.parts["layers"].startswith("compiled") and step.parts["graph"] == "CUDA graph"
            assert graphs.replayed > 0
    assert losses["auto"] == pytest.approx(losses[False], rel=2e-2)


def test_what_cannot_multiply_in_float8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(bfloat16(), verify=False)
    for precision in ("float16", "float8:blockwise"):
        with pytest.raises(PackingError, match=f'precision={precision!r} is not known: pass "float8"'):
            stepped(model, precision=precision)
    with pytest.raises(UnsupportedError, match="the model computes on cpu, which has no products of float8"):
        stepped(model, precision="float8")
    monkeypatch.setattr(float8, "execution_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A10")
    with pytest.raises(UnsupportedError, match=re.escape("NVIDIA A10 (compute capability 8.6) has no products")):
        stepped(model, precision="float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_float8(model, "float8")
    assert converted(model) == []


@pytest.mark.usefixtures("emulated")
def test_weights_that_cannot_be_cast_are_refused_by_name() -> None:
    model = bfloat16()
    model.is_quantized = True
    with pytest.raises(UnsupportedModelError, match="its weights are quantised"):
        to_float8(model, "float8")
    model = bfloat16()
    convert_to_float8_training(model.model.layers)
    with pytest.raises(UnsupportedModelError, match="torchao has converted layers.0.self_attn.q_proj already"):
        to_float8(model, "float8")
    to_bfloat16(model)
    assert len(converted(model)) == 14  # which are not ours to take back
    model = bfloat16(intermediate_size=40)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(type("Coded", (Tensor,), {})), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"the weight of layers\.0\.mlp\.down_proj is a Coded"):
        to_float8(model, "float8")
    with pytest.raises(UnsupportedModelError, match="no linear layer of GPT2LMHeadModel can multiply in float8"):
        to_float8(tiny("gpt2"), "float8")


@pytest.mark.usefixtures("emulated")
def test_layers_that_stay_in_bfloat16_are_named_with_the_reason() -> None:
    model = bfloat16(intermediate_size=40)
    to_float8(model, "float8")
    assert len(converted(model)) == 8
    assert "; not layers.0.mlp.gate_proj and 3 more: 64 x 40 features, not multiples of 16" in str(
        describe_float8(model)
    )
    model = bfloat16("qwen2_moe")
    to_float8(model, "float8")
    assert all(
        "gate." not in name and "experts." not in name.replace("shared_expert.", "") for name in converted(model)
    )
    assert any("shared_expert.up_proj" in name for name in converted(model))
    described = str(describe_float8(model))
    assert "; not layers.0.mlp.shared_expert_gate and 1 more: a router or a gate; not layers.0.mlp.experts" in described
    assert described.endswith(
        "experts and 1 more: experts, whose only products in float8 are a prototype of torchao "
        "that scales gradients over documents"
    )
    model = bfloat16("qwen3_5_text")
    to_float8(model, "float8")
    assert all("linear_attn" not in name for name in converted(model)) and "a recurrent layer" in str(
        describe_float8(model)
    )


@pytest.mark.usefixtures("emulated")
def test_adapters_train_in_bfloat16_over_float8_products() -> None:
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = patch(peft.get_peft_model(bfloat16(), config).to(torch.bfloat16), verify=False)
    step = stepped(model, precision="float8")
    assert sum(name.endswith("base_layer") for name in converted(model)) == 4
    assert not any("lora" in name for name in converted(model)) and len(converted(model)) == 14
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(collate(documents()))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora" in name for name in moved)
    assert audit(model).verdict == "exact"


def test_a_model_of_transformers_saves_ordinary_weights(emulated: None, tmp_path: Any) -> None:
    model = patch(bfloat16(), verify=False)
    stepped(model, precision="float8")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert describe_float8(loaded) is None
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("precision", [OWN_SCALES, "float8:rowwise", "float8:tensorwise"])
def test_a_gpu_has_the_numbers_of_bfloat16_but_for_rounding(precision: str, autocast: torch.dtype | None) -> None:
    """Compiled and captured, from weights in bfloat16 and from weights in float32 under autocast."""
    losses = {}
    for name in (None, precision):
        model = patch((tiny("llama") if autocast else bfloat16()).to("cuda"), verify=False)
        step = stepped(model, lr=0.01, precision=name, autocast=autocast)  # at 0.1 one rounding moves the eighth by 10%
        losses[name] = [float(step(collate(documents()))["loss"]) for _ in range(8)]
        assert step.parts["layers"] == "compiled" and step.parts["graph"] == "CUDA graph"
    assert losses[None][-1] < losses[None][0] - 0.2
    assert losses[precision] != losses[None] and losses[precision] == pytest.approx(losses[None], rel=1e-2)


@pytest.mark.parametrize("precision", [OWN_SCALES, "float8:rowwise", "float8:tensorwise"])
def test_products_have_multiples_of_16_whatever_the_length_of_a_row(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the CPU's own products of float8, which take any length, where those of a GPU would raise."""
    sizes: list[int] = []
    multiply = torch._scaled_mm

    def counted(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
        sizes.extend((a.shape[1], *b.shape))
        return multiply(a, b, *args, **options)

    losses = {}
    for emulated in (True, False):
        monkeypatch.setattr(float8, "EMULATED", emulated)
        monkeypatch.setattr(float8, "_why_not_here", lambda _: None)
        monkeypatch.setattr(torch, "_scaled_mm", counted)
        model = patch(bfloat16(), verify=False)
        step = stepped(model, precision=precision)
        losses[emulated] = [float(step(collate(documents((5, 19, 33)), capacity=None))["loss"]) for _ in range(2)]
    assert sizes and all(size % 16 == 0 for size in sizes)
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


@pytest.mark.parametrize(("level", "again"), [("none", 0), ("selective", 1), ("full", 3)])
def test_levels_of_memory_keep_products_of_float8_as_they_keep_others(level: Any, again: int) -> None:
    """Columns: 64, 64, 192, 64. The selective level makes the wide product again, and no narrow one."""
    products: list[int] = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        products.append(sum(node.target is torch.ops.aten._scaled_mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    sizes = ((64, 64), (64, 192), (192, 64))
    layers = [layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.SiLU())]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    call = torch.compile(model, backend=marked(backend, level), fullgraph=True)
    call(torch.randn(1, 37, 64, dtype=torch.bfloat16, requires_grad=True)).float().square().sum().backward()
    assert products == [3, 3 + again]
