"""LoRA in compiled layers: adapters of one input are one product, and the numbers are those of PEFT's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.torch_backend.models import collate, documents, error, tiny
from torch_backend import patch
from torch_backend.steps.adapter_products import with_joined_adapters
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.memory import Level, marked

peft = pytest.importorskip("peft", reason="the adapters are PEFT's")
WIDTH, TOKENS = 64, 37
TARGETS = ["q", "k", "v", "out", "gate", "up", "down"]


class ProjectedBlock(nn.Module):
    """Projections of one input: q, k and v; gate and up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (64, 64), "k": (64, 32), "v": (64, 32), "out": (64, 64)}
        sizes |= {"gate": (64, 192), "up": (64, 192), "down": (192, 64)}
        for name, (columns, rows) in sizes.items():
            setattr(self, name, nn.Linear(columns, rows, bias=name == "q"))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (WIDTH,))
        x = x + self.out(torch.sin(self.q(y)) * torch.cat([self.k(y), self.v(y)], -1))
        y = nn.functional.rms_norm(x, (WIDTH,))
        mixed: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return mixed


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.get_peft_model(ProjectedBlock(), peft.LoraConfig(**config | options)).train()


def two_adapters() -> Any:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q", "down"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


# Adapters, and the ranks of what multiplies with an input in the forward.
VARIANTS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "LoRA": (adapted, [12, 4, 8, 4]),
    "rsLoRA": (lambda: adapted(use_rslora=True, lora_alpha=3), [12, 4, 8, 4]),
    "ranks that differ": (lambda: adapted(rank_pattern={"k": 2, "up": 7}), [10, 4, 11, 4]),
    "some projections": (lambda: adapted(target_modules=["q", "v", "down"]), [8, 4]),
    "bias of B": (lambda: adapted(lora_bias=True), [12, 4, 8, 4]),
    "dropout": (lambda: adapted(lora_dropout=0.5), [4] * 7),
    "two adapters": (two_adapters, [14, 4, 8, 6]),
}


def results(model: Any, call: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The output for one input, its gradient and those of the adapters."""
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    y = call(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.double().square().sum(), [x, *weights])]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, level: Level = "none") -> tuple[Callable[..., Any], list[torch.fx.Graph]]:
    """A compiled call of a model, and the graphs of its forward and its backward."""
    graphs: list[torch.fx.Graph] = []

    def kept(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    return torch.compile(model, backend=with_joined_adapters(marked(backend, level)), fullgraph=True), graphs


def shapes(graph: torch.fx.Graph, *targets: Any) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in graph.nodes if node.target in targets]


@pytest.mark.parametrize("name", VARIANTS)
def test_adapters_of_one_input_are_one_product(name: str) -> None:
    model = VARIANTS[name][0]().double()
    call, graphs = compiled(model)
    results(model, call)
    ranks = VARIANTS[name][1]
    products = shapes(graphs[0], torch.ops.aten.mm.default)
    assert [columns for rows, columns in products if columns < 32] == ranks
    inputs = [64] * (len(ranks) - 1) + [192]
    of_a = [shape for shape in shapes(graphs[1], torch.ops.aten.mm.default) if shape in zip(ranks, inputs, strict=True)]
    assert len(of_a) == len(ranks)
    scaled = [node for node in graphs[1].nodes if node.target is torch.ops.aten.mul.Tensor and node.args[1] == 3.0]
    assert any(TOKENS in node.meta["val"].shape for node in scaled) == (name == "bias of B")


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "dropout"])
def test_outputs_and_gradients_are_those_of_peft_in_float64(name: str) -> None:
    model = VARIANTS[name][0]().double()
    right = results(model, model)
    assert len(right) > 7
    for x, y in zip(results(model, compiled(model)[0]), right, strict=True):
        assert error(x, y) <= 1e-14


class ChangingBlock(nn.Module):
    """Projections of one input, which is another when the second reads it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (WIDTH,))
        first = self.q(y)
        self.change(y)
        changed: Tensor = first + self.k(y)
        return changed


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "by a method": lambda y: y.mul_(2),
    "by an index": lambda y: y[:, 0].fill_(3),
    "by another name": lambda y: y.view(-1).neg_(),
    "by an option": lambda y: nn.functional.relu(y, inplace=True),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_an_input_that_is_changed_in_place_between_two_products_is_read_twice(how: str, weights: torch.dtype) -> None:
    """Over weights in bfloat16, adapters in float32 read casts of it."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q", "k"], init_lora_weights=False)
    model = peft.get_peft_model(ChangingBlock(CHANGES[how]), config)
    for name, p in model.named_parameters():
        p.data = p.data if "lora" in name else p.data.to(weights)
    x = torch.randn(1, TOKENS, WIDTH).to(weights)
    with torch.no_grad():
        assert error(compiled(model)[0](x).float(), model(x).float()) <= (1e-6 if weights is torch.float32 else 1e-2)


@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("autocast", [False, True])
def test_over_bfloat16_weights_they_are_as_near_to_float64_as_those_of_peft(level: Level, autocast: bool) -> None:
    """Adapters in float32, as PEFT makes them, without autocast and with it."""
    model = adapted()
    for name, p in model.named_parameters():
        base = p.data.bfloat16().to(p.dtype if autocast else torch.bfloat16)
        p.data = torch.randn_like(p) / 10 if "lora" in name else base
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        call, graphs = compiled(model, level)
        plain, joined = results(model, model, dtype), results(model, call, dtype)
    narrow = [n for _, n in shapes(graphs[0], torch.ops.aten.mm.default) if n < 32]
    assert narrow == [12, 4, 8, 4]  # also where PEFT casts the input for each adapter
    exact = copy.deepcopy(model).double()
    right = results(exact, exact)
    assert [x.dtype for x in joined] == [x.dtype for x in plain]
    ours, theirs = (sum(error(x.double(), y) for x, y in zip(each, right, strict=True)) for each in (joined, plain))
    assert 0 < ours <= 1.2 * theirs


def test_layers_are_compiled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, backend, **_: backends.append(backend))
    model = patch(tiny("qwen2"), verify=False)
    model(**collate(documents()))
    widths: list[int] = []

    def counted(module: torch.fx.GraphModule, _: Any) -> Any:
        products = [node for node in module.graph.nodes if node.target is nn.functional.linear]
        widths.extend(node.meta["example_value"].shape[-1] for node in products)
        return module.forward

    compile_layers(model, backend=counted)
    assert len(backends) == 3 and len(set(backends)) == 1
    torch.compile(adapted(), backend=backends[0])(torch.randn(1, TOKENS, WIDTH))
    assert [width for width in widths if width < 32] == [12, 4, 8, 4]
