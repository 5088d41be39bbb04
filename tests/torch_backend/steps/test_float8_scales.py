"""Scales of float8 in compiled layers: made once, by fewer passes over weights, with the bits of torchao's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx as inductor
from torch._inductor.decomposition import select_decomp_table
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from torch_backend.steps import cuda_graph
from torch_backend.steps.float8_scales import SCALES_ONCE
from torch_backend.steps.memory import Level, marked

ATEN = torch.ops.aten


class Projections(nn.Module):
    """Two projections of one input, and one of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 96), (64, 96), (96, 64)))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (64,))
        mixed: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return mixed


def model(recipe: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    layers = Projections().to(dtype)
    return convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name(recipe))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def results(layers: Any, call: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The output for an input with a row of zeros and one of large values, and all gradients."""
    x = torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, 5], x[:, 6] = 0, x[:, 6] * 1e4
    x.requires_grad_()
    y = call(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layers.parameters()])]


def compiled(layers: Any, *, once: bool, level: Level = "none", dynamic: bool = False) -> tuple[Any, list[fx.Graph]]:
    """A compiled call with the operations of Inductor, and the graphs of its forward and its backward."""
    graphs: list[fx.Graph] = []

    def kept(module: fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if once:
            SCALES_ONCE(joint.graph)
            joint.graph.lint()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    backend = aot_autograd(fw_compiler=kept, partition_fn=partition, decompositions=select_decomp_table())
    return torch.compile(layers, backend=marked(backend, level), fullgraph=True, dynamic=dynamic), graphs


@pytest.mark.parametrize("level", ["none", "full"])
@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise", "tensorwise"])
def test_outputs_and_gradients_have_the_same_bits(recipe: str, level: Level) -> None:
    layers = model(recipe)
    one, other = (results(layers, compiled(layers, once=once, level=level)[0]) for once in (True, False))
    assert len(one) == 5 and all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_weights_in_float32_have_the_same_bits_too() -> None:
    layers = model("rowwise_with_gw_hp", torch.float32)
    one, other = (results(layers, compiled(layers, once=once)[0], torch.float32) for once in (True, False))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_weight_is_not_read_again_for_its_largest_value() -> None:
    """It is that of the largest values of rows [1, N]."""
    sizes = {}
    for once in (True, False):
        layers = model("rowwise_with_gw_hp")
        call, graphs = compiled(layers, once=once)
        results(layers, call)
        largest = [node for graph in graphs for node in graph.nodes if node.target is ATEN.max.default]
        sizes[once] = sorted(node.args[0].meta["val"].numel() for node in largest)
    assert sizes == {True: [64, 96, 96], False: [64 * 96] * 3}


def test_every_scale_is_a_tensor_of_its_own() -> None:
    layers = model("rowwise_with_gw_hp")
    call, graphs = compiled(layers, once=True)
    results(layers, call)
    scales = [node for graph in graphs for node in graph.nodes if node.target is ATEN.exp2.default]
    assert len(scales) >= 2 + 3 + 3 + 3  # inputs, weights forward and backward, gradients
    assert all([user.target for user in scale.users] == [ATEN.as_strided.default] for scale in scales)


def test_rows_of_any_length_are_left_as_they_are() -> None:
    layers = model("rowwise_with_gw_hp")
    call, graphs = compiled(layers, once=True, dynamic=True)
    one, other = results(layers, call), results(layers, compiled(layers, once=False)[0])
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert graphs and len(graphs[0].find_nodes(op="call_function", target=ATEN.exp2.default)) > 0


def test_layers_are_compiled_so(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[Any] = []
    monkeypatch.setattr(inductor, "compile_fx", lambda *_, config_patches: options.append(config_patches))
    cuda_graph._recompute_cheap(fx.GraphModule({}, fx.Graph()), [])
    assert options == [{"joint_custom_post_pass": SCALES_ONCE}]
    assert SCALES_ONCE.uuid() == SCALES_ONCE.uuid()
