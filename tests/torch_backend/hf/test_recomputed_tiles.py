"""A layer that recomputes around exchanges leaves out the MLP whose result no backward reads, and that one alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from tests.torch_backend.hf.forwards import written
from tests.torch_backend.hf.test_tiled_layers import gradients
from tests.torch_backend.hf.test_tiled_layers import short as short
from tests.torch_backend.models import tiny
from torch_backend import patch
from torch_backend.hf.anatomy.data_flow import last_part
from torch_backend.ops import tiled_mlp as tiles
from torch_backend.ops.recomputing import is_recomputing, recomputing
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.memory import recomputed_as_whole
from torch_backend.steps.tiled_layers import can_be_tiled, tiled

ENDS_IN_ITS_MLP = {"llama": True, "qwen3": True, "gemma3_text": False, "olmo2": False}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each tile of an MLP that was computed, whether a forward ran again."""
    calls: list[bool] = []
    for name, (act, backward) in tiles.ACTIVATIONS.items():

        def noted(x: Tensor, act: Any = act) -> Any:
            calls.append(is_recomputing())
            return act(x)

        monkeypatch.setitem(tiles.ACTIVATIONS, name, (noted, backward))
    return calls


@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        *((family, False) for family in ENDS_IN_ITS_MLP),
        *(pytest.param(family, True, marks=pytest.mark.slow) for family in ("llama",)),
    ],
)
def test_gradients_are_the_same_without_what_no_backward_reads(
    family: str, compiled: bool, short: None, poisoned: None, computed: list[bool]
) -> None:
    model = patch(tiny(family, vocab_size=64), verify=False).train()
    parts = can_be_tiled(model)
    with tiled(parts):
        exact = gradients(model)
    assert computed and not any(computed)
    computed.clear()
    if compiled:
        torch._dynamo.reset()
        compile_layers(model, backend=aot_eager)
    for layer in model.model.layers:
        call = layer._compiled_call_impl or layer._call_impl
        layer._compiled_call_impl = recomputed_as_whole(call)
    with tiled(parts):
        found = gradients(model)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    assert any(computed) == (not ENDS_IN_ITS_MLP[family])


def test_hooks_see_what_an_mlp_computes(short: None, computed: list[bool]) -> None:
    model = patch(tiny("llama", vocab_size=64), verify=False).train()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    parts = can_be_tiled(model)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    for layer in model.model.layers:
        layer._compiled_call_impl = recomputed_as_whole(layer._call_impl)
    with tiled(parts):
        gradients(model)
    assert sum(computed) == 2 * -(-128 // 24)  # tiles of both layers


def test_a_forward_runs_again_inside_a_mark_alone() -> None:
    assert not is_recomputing()
    with recomputing(), recomputing():
        assert is_recomputing()
    assert not is_recomputing()


ENDS = [
    ("residual = x", "x = self.norm(x)", "x = self.mlp(x)", "x = x + residual", "return x"),  # as in most layers
    ("y = self.mlp(x)", "y = x + y", "return y"),
]
GOES_ON = [
    ("residual = x", "x = self.mlp(x)", "x = self.norm(x)", "x = residual + x", "return x"),
    ("residual = x", "x = self.mlp(x)", "x = residual + x * self.scale", "return x"),
    ("residual = x", "x = self.mlp(x)", "x = residual * x", "return x"),
    ("x = self.mlp(x)", "x = x + x", "return x"),
    ("residual = x", "x = self.mlp(x)", "x = residual + x", "return x, residual"),
    ("residual = x", "x = self.last = self.mlp(x)", "x = residual + x", "return x"),
    ("residual = x", "x, _ = self.mlp(x)", "x = residual + x", "return x"),
    ("residual = x", "if self.training:", "    x = self.mlp(x)", "x = residual + x", "return x"),
]


def test_the_last_part_of_a_layer_is_only_added_to_what_it_returns() -> None:
    assert all(last_part(written(*statements)) == "mlp" for statements in ENDS)
    for statements in GOES_ON:
        assert last_part(written(*statements)) != "mlp", statements
