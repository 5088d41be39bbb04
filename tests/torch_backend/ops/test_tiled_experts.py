"""Experts by tiles of tokens: outputs and gradients of the whole layer, and nothing kept of its products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.torch_backend.expert_layers import LAYERS, Layer
from tests.torch_backend.hf.test_tiled_layers import short as short
from tests.torch_backend.hf.test_tiled_layers import without_rounding
from tests.torch_backend.kernels import Where, assert_compiles, numpy
from tests.torch_backend.models import collate, documents, tiny
from torch_backend import patch
from torch_backend.hf.experts import LAYOUT
from torch_backend.losses.causal_lm import causal_lm_loss
from torch_backend.ops import experts as ops
from torch_backend.ops.experts import Adapter, experts
from torch_backend.steps.memory import set_level
from torch_backend.steps.memory_fit import StepMemory
from torch_backend.steps.tiled_layers import tiled, tiled_modules, tiled_parts

CPU = torch.device("cpu")
TILE = 8  # of 21 tokens: two whole tiles and a rest


@pytest.mark.parametrize("options", LAYERS)
def test_tiles_are_the_oracle(options: dict[str, Any]) -> None:
    layer = Layer(Where(CPU, torch.float64), **options)
    found, exact = layer.found("plain", TILE), layer.oracle("float64")
    assert found.keys() == exact.keys()
    for name in exact:
        np.testing.assert_allclose(numpy(found[name]), exact[name], rtol=1e-12, atol=1e-12, err_msg=name)
        if name in layer.leaves:
            assert found[name].stride() == layer.leaves[name].stride()


def test_nothing_is_kept_but_what_was_given() -> None:
    layer = Layer(Where(CPU, torch.float64), rank=3)
    given = {x.data_ptr() for x in (*layer.leaves.values(), layer.indices)}
    kept: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.data_ptr())
        return x

    with saved_tensors_hooks(note, lambda x: x):
        layer.run("plain", TILE)
    assert kept and set(kept) <= given


def test_products_are_those_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    half = ops._until_activation
    monkeypatch.setattr(
        ops, "_until_activation", lambda call, options: (seen.append(len(call.x)), half(call, options))[1]
    )
    Layer(Where(CPU, torch.float64)).found("plain", TILE)
    assert seen == 2 * [8, 8, 5], "forward, and again in the backward"


def test_weights_sum_their_gradients_in_float32() -> None:
    """2,048 tokens in tiles of 8: sums in bfloat16 would be further away from the exact ones than these are."""
    exact, rounded = (Layer(Where(CPU, dtype), tokens=2_048) for dtype in (torch.float64, torch.bfloat16))
    for name, leaf in rounded.leaves.items():
        exact.leaves[name] = leaf.detach().double().requires_grad_()
    exact.dy = rounded.dy.double()
    right, found = exact.found("plain"), rounded.found("plain", TILE)
    for name in ("up", "down"):
        assert (found[name].double() - right[name]).norm() / right[name].norm() < 0.01


def test_experts_without_our_kernels_have_no_tiles_and_the_formula_says_so() -> None:
    model = tiny("gpt_oss")
    assert tiled_parts(model) == {"projections"}
    whole = StepMemory(model).formula().tiled["full"]
    assert (
        tiled_parts(patch(model, verify=False)) == {"mlp", "projections"}
        and StepMemory(model).formula().tiled["full"] < whole
    )


def test_only_the_gradients_that_are_needed_are_made_and_frozen_weights_again() -> None:
    layer = Layer(Where(CPU, torch.float64), rank=3)
    whole, made = layer.found("plain"), []
    up, down = (layer.leaves.pop(name).detach() for name in ("up", "down"))

    def again() -> tuple[torch.Tensor, torch.Tensor]:
        made.append(1)
        return up, down

    adapters = {f"{n}_adapter": Adapter(layer.leaves[f"{n}_a"], layer.leaves[f"{n}_b"], 0.5) for n in ("up", "down")}
    given = layer.leaves["x"], layer.indices, layer.leaves["weights"]
    y = experts(*given, up, down, again=again, tile=TILE, **adapters)  # type: ignore[arg-type]
    found = torch.autograd.grad(y, list(layer.leaves.values()), layer.dy)
    assert made == [1], "once for all tiles"
    for name, x in zip(layer.leaves, found, strict=True):
        torch.testing.assert_close(x, whole[name], rtol=1e-12, atol=1e-12)


def test_compiles_into_one_graph_and_operators_are_well_formed() -> None:
    layer = Layer(Where(CPU, torch.float64), rank=3)
    leaves = [layer.leaves[name] for name in ("x", "weights", "up", "down", "up_a", "up_b")]

    def step(x: Any, weights: Any, up: Any, down: Any, a: Any, b: Any) -> Any:
        return experts(x * 2, layer.indices, weights, up, down, up_adapter=Adapter(a, b, 0.5), tile=TILE).sum()

    assert_compiles(step, leaves)
    x, weights, up, down, a, b = (leaf.detach() for leaf in leaves)
    tensors = (x, weights, up, down, None, None, a, b, *[None] * 4, layer.indices)
    options = ops._Options("plain", 0.5, 1.0, "silu", True, 1.0, 0.0, 0.0, False)
    needs = [True, True, False, False, False, False, True, True, False, False]
    checked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.crosspack.tiled_experts, (*tensors, *options, TILE), test_utils=checked)
    torch.library.opcheck(
        torch.ops.crosspack.tiled_experts_backward, (x, *tensors, *options, needs, TILE), test_utils=checked
    )


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_layers_give_the_same_gradients_in_float64(short: None, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = without_rounding(patch(tiny(family), verify=False).train(), monkeypatch)
    batch = collate(documents((5, 19, 33, 71)), capacity=128)

    def gradients() -> list[torch.Tensor]:
        total, weight = causal_lm_loss(model, batch)
        return list(
            torch.autograd.grad(total / weight, list(model.parameters()), allow_unused=True, materialize_grads=True)
        )

    exact = gradients()
    tiles: list[int] = []
    run = ops._tiled_forward
    monkeypatch.setattr(ops, "_tiled_forward", lambda *given: (tiles.append(given[-1]), run(*given))[1])
    assert tiled_modules(model, 128) == {}, "at level none"
    set_level(model, "selective")
    assert not any(LAYOUT in m.__dict__ for m in tiled_modules(model, 128)), "which keeps their first product"
    set_level(model, "full")
    modules = tiled_modules(model, 128)
    with tiled(modules):
        found = gradients()
    assert tiles and set(tiles) == {24}
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    before = len(tiles)
    gradients()
    assert len(tiles) == before, "whole again outside"
