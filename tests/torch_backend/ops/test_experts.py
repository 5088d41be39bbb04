"""Routed experts against the float64 oracle, by implementation, layout, activation and routing; compiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packing_core.errors import LayoutError
from tests.torch_backend.expert_layers import CLAMPED, LAYERS, SMALL, Layer
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_compiles, assert_within_budget, numpy
from torch_backend.ops import experts as ops
from torch_backend.ops import operators
from torch_backend.ops.experts import Adapter, experts, grouped_mm, triton
from torch_backend.ops.experts.dispatch import order
from torch_backend.ops.experts.products import Places
from torch_backend.ops.experts.request import request_of


def check(layer: Layer, implementation: str) -> None:
    dtype = layer.where.dtype
    exact, rounded = layer.oracle("float64"), layer.oracle(str(dtype).removeprefix("torch."))
    assert_within_budget(layer.found(implementation), exact, rounded, dtype)


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_triton_is_the_oracle(where, options):
    check(Layer(where, **options), "triton")


def test_triton_is_the_oracle_in_every_dtype(where):
    check(Layer(where, rank=3, activation=CLAMPED, biased=True), "triton")


@pytest.mark.parametrize("options", LAYERS)
def test_plain_is_the_oracle(options):
    layer = Layer(Where(torch.device("cpu"), torch.float64), **options)
    found, exact = layer.found("plain"), layer.oracle("float64")
    assert found.keys() == exact.keys()
    for name in exact:
        np.testing.assert_allclose(numpy(found[name]), exact[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("options", [LAYERS[1], LAYERS[6]])
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_an_activation_in_two_parts_is_the_oracle(where, options, monkeypatch):
    monkeypatch.setattr(triton, "BACKWARD", ((2**62, triton.TileSize(64, 64, 32, 4, 2, parts=2)),))
    check(Layer(where, **options), "triton")


def sizes(where: Where, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Returns sizes that torch's grouped product serves: wide ones on a GPU, and those of every layer on the CPU."""
    if where.device.type == "cuda":
        return {"tokens": 190, "width": 128, "inner": 64}
    monkeypatch.setattr(grouped_mm, "_NARROW", 16)
    return {}


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_grouped_mm_is_the_oracle(where, options, monkeypatch):
    layer = Layer(where, **options | sizes(where, monkeypatch))
    layer.indices = torch.where(layer.indices == 1, layer.count, layer.indices)  # padding, and nobody for expert 1
    check(layer, "grouped_mm")


@pytest.mark.parametrize("options", [LAYERS[1], LAYERS[3]])
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_a_first_product_in_steps_is_the_oracle(where, options, monkeypatch):
    """As it runs where experts have many tokens: gathered rows, torch's product, bias and activation."""
    monkeypatch.setattr(grouped_mm, "WIDE_UP", 0)
    check(Layer(where, **options | sizes(where, monkeypatch)), "grouped_mm")


def test_what_runs_first_depends_on_the_tokens_of_an_expert():
    meta = {"device": "meta", "dtype": torch.bfloat16}
    up, down = torch.empty(8, 64, 32, **meta), torch.empty(8, 32, 32, **meta)

    def first(tokens: int) -> str:
        routed = torch.empty(tokens, 2, dtype=torch.int64, device="meta"), torch.empty(tokens, 2, **meta)
        request = request_of(torch.empty(tokens, 32, **meta), *routed, up, down)
        return order(replace(request, device=torch.device("cuda")))[0]

    assert [first(tokens) for tokens in (4, 255, 256, 9_000)] == ["triton", "triton", "grouped_mm", "grouped_mm"]


@pytest.mark.parametrize(
    ("kib", "rank", "stages"), [(227, 0, 4), (227, 16, 4), (227, 64, 3), (163, 0, 3), (99, 0, 2), (16, 0, 1)]
)
def test_tiles_have_as_many_stages_as_shared_memory_holds(kib, rank, stages, monkeypatch):
    monkeypatch.setattr(operators, "shared_memory", lambda device: kib * 1_024)
    monkeypatch.setattr(operators, "INTERPRETED", False)
    routing = Places(torch.empty(8_192), torch.empty(4_096, 2), torch.empty(9), torch.empty(4_096, 2))
    for table, columns in ((triton.ROWS, 1), (triton.GATED, 2)):
        tile = triton._tile(table, routing, torch.empty(0, dtype=torch.bfloat16), columns=columns, rank=rank)
        assert tile.stages == stages <= table[-1][1].stages


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "grouped_mm"])
def test_a_graph_serves_any_routing_without_a_read(implementation):
    layer = Layer(Where(torch.device("cuda"), torch.bfloat16), tokens=190, width=128, inner=64, rank=8)
    layer.found(implementation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.found(implementation)
    for shift in (0, 1, 2):
        layer.indices.copy_((layer.indices + shift) % 5)
        graph.replay()
        right = layer.found(implementation)
        assert all(torch.equal(captured[name], right[name]) for name in right)


def routings(layer: Layer) -> dict[str, torch.Tensor]:
    """Ways to route that leave experts without tokens, or all of them."""
    count, chosen = 5, layer.indices
    some = chosen.clone()
    some[::3], some[1, 0] = count, -1
    return {
        "nobody": torch.full_like(chosen, count),
        "one expert": torch.zeros_like(chosen),
        "padding": some,
        "the last two": chosen % 2 + 3,
    }


@pytest.mark.parametrize(
    ("implementation", "routing"),
    [
        *(("triton", routing) for routing in ("nobody", "one expert", "padding", "the last two")),
        *((name, routing) for name in ("grouped_mm", "plain") for routing in ("nobody", "padding")),
    ],
)
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_any_routing_is_the_oracle(where, routing, implementation, monkeypatch):
    layer = Layer(where, activation=CLAMPED, biased=True, **sizes(where, monkeypatch))
    layer.indices = routings(layer)[routing]
    check(layer, implementation)
    if routing == "nobody":
        assert not any(value.any() for value in layer.found(implementation).values())


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("implementation", ["triton", "grouped_mm", "plain"])
def test_an_index_out_of_range_that_nobody_reads_reaches_no_expert(where, implementation, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.experts.request._check_indices", lambda indices, count: None)
    layer = Layer(where, biased=True, **SMALL | sizes(where, monkeypatch))
    layer.indices = layer.indices.clone()
    layer.indices[::4] = layer.count
    right = layer.found(implementation)
    layer.indices[::4] = torch.tensor([-9, 2**31 - 1], device=layer.indices.device)
    found = layer.found(implementation)
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("implementation", ["triton", "grouped_mm", "plain"])
def test_padding_is_never_read(where, implementation, monkeypatch):
    layer = Layer(where, biased=True, **SMALL | sizes(where, monkeypatch))
    layer.indices = layer.indices.clone()
    layer.indices[5:10] = layer.count
    before = layer.found(implementation)
    with torch.no_grad():
        layer.leaves["x"][5:10] = float("nan")
        layer.dy[5:10] = float("nan")
    after = layer.found(implementation)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not before["y"][5:10].any() and not before["x"][5:10].any() and not before["weights"][5:10].any()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_only_the_gradients_that_are_needed_are_made(where):
    layer = Layer(where, rank=4, **SMALL)
    whole = layer.found("triton")
    for name in ("up", "down", "weights"):
        layer.leaves[name].requires_grad_(False)
    names = [name for name, leaf in layer.leaves.items() if leaf.requires_grad]
    found = torch.autograd.grad(layer.run("triton"), [layer.leaves[name] for name in names], layer.dy)
    assert all(torch.equal(a, whole[name]) for name, a in zip(names, found, strict=True))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_frozen_weights_can_be_made_again_for_the_backward(where):
    layer = Layer(where, rank=4, **SMALL)
    whole, made = layer.found("triton"), []
    up, down = (layer.leaves.pop(name).detach() for name in ("up", "down"))

    def again():
        made.append(1)
        return up, down

    adapters = {f"{n}_adapter": Adapter(layer.leaves[f"{n}_a"], layer.leaves[f"{n}_b"], 0.5) for n in ("up", "down")}
    given = layer.leaves["x"], layer.indices, layer.leaves["weights"]
    y = experts(*given, up.clone(), down.clone(), again=again, implementation="triton", **adapters)
    assert not made
    found = torch.autograd.grad(y, list(layer.leaves.values()), layer.dy)
    assert made == [1] and all(torch.equal(x, whole[name]) for name, x in zip(layer.leaves, found, strict=True))
    with pytest.raises(LayoutError, match="weights that are made again for the backward have no gradient"):
        experts(*given, up.clone().requires_grad_(), down, again=again)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_operands_may_have_any_strides(where):
    layer = Layer(where, rank=3, activation=CLAMPED, biased=True)
    layer.leaves = {name: x.detach().mT.contiguous().mT.requires_grad_() for name, x in layer.leaves.items()}
    check(layer, "triton")


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_gradients_keep_the_strides_of_transposed_weights(where):
    layer = Layer(where, transposed=True, **SMALL)
    found = layer.found("triton")
    assert found["up"].stride() == layer.leaves["up"].stride()
    assert found["down"].stride() == layer.leaves["down"].stride()


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("implementation", ["triton", "plain"])
def test_compiles_into_one_graph(where, implementation):
    layer = Layer(where, rank=4, **SMALL)
    leaves = [layer.leaves[name] for name in ("x", "weights", "up", "down", "up_a", "up_b")]

    def step(x, weights, up, down, a, b):
        y = experts(
            x * 2, layer.indices, weights, up, down, up_adapter=Adapter(a, b, 0.5), implementation=implementation
        )
        return y.float().sum()

    assert_compiles(step, leaves)


class NothingIsRead(TorchDispatchMode):
    """Raises at operations whose results the host would have to wait for on a GPU."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.add(name)
        by_mask = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1] if isinstance(args[1], list)
        )
        if name in self.READS or by_mask:
            raise AssertionError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("implementation", ["triton", "grouped_mm"])
def test_nothing_is_read_by_the_host(where, implementation, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.experts.request._check_indices", lambda indices, count: None)  # on the CPU
    for name in ("forward", "backward"):  # an operator would hide what it runs
        monkeypatch.setattr(ops, f"_{name}", getattr(ops, f"_launch_{name}"))
    layer = Layer(where, rank=4, biased=True, activation=CLAMPED, **SMALL | sizes(where, monkeypatch))
    with NothingIsRead() as mode:
        layer.found(implementation)
        assert {"cumsum", "empty_like"} <= mode.seen, "of the forward and of the backward"
        for wrong in (lambda: layer.indices.max().item(), lambda: layer.dy[layer.dy > 0]):
            with pytest.raises(AssertionError, match="reads from the device"):
                wrong()


def test_no_tokens_give_no_rows():
    layer = Layer(Where(torch.device("cpu"), torch.float32), tokens=0)
    assert layer.run().shape == (0, 24)
