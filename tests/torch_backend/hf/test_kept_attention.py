"""A layer runs its attention once at ``memory="attention"``, and twice at "full", whoever recomputes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from tests.torch_backend.hf import test_tiled_layers
from tests.torch_backend.models import tiny
from torch_backend import patch
from torch_backend.ops.attention import probe
from torch_backend.ops.attention.triton import TRITON
from torch_backend.ops.recomputing import KeptResults, computed_once, is_recomputing, keeping, recomputing
from torch_backend.steps.cuda_graph import compile_layers
from torch_backend.steps.memory import Level, recomputed_as_whole, set_level


def gradients(model: Any) -> list[Tensor]:
    return test_tiled_layers.gradients(model, test_tiled_layers.batch(32))


class Noted:
    """A kernel that notes whether each of its launches is in a forward that runs again."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.again: list[bool] = []

    def __getitem__(self, grid: Any) -> Any:
        self.again.append(is_recomputing())
        return self.kernel[grid]


@pytest.fixture
def forward(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """The kernel of attention's forward, interpreted."""
    from torch_backend.ops.attention import triton_kernels

    noted = Noted(triton_kernels.forward)
    monkeypatch.setattr(triton_kernels, "forward", noted)
    return noted


@pytest.mark.parametrize(
    ("level", "compiled"),
    [("attention", False), ("full", False), pytest.param("attention", True, marks=pytest.mark.slow)],
)
def test_attention_runs_once_around_exchanges(level: Level, compiled: bool, forward: Noted) -> None:
    """Under torch's checkpoint around several graphs of a layer."""
    model = patch(tiny("qwen3", vocab_size=64), implementation="triton", verify=False).train()
    exact, layers = gradients(model), len(model.model.layers)
    forward.again.clear()
    if compiled:
        compile_layers(model, backend=aot_eager)
    for layer in model.model.layers:
        layer._compiled_call_impl = recomputed_as_whole(layer._compiled_call_impl or layer._call_impl, level)
    torch.testing.assert_close(gradients(model), exact, rtol=1e-5, atol=1e-6)
    assert forward.again == [False] * layers + [True] * layers * (level == "full")


@pytest.mark.parametrize("level", ["attention", "full"])
def test_attention_of_plain_layers_runs_once(level: Level, forward: Noted) -> None:
    model = patch(tiny("qwen3", vocab_size=64), implementation="triton", verify=False).train()
    exact = gradients(model)
    forward.again.clear()
    set_level(model, level)
    torch.testing.assert_close(gradients(model), exact, rtol=1e-5, atol=1e-6)
    assert len(forward.again) == len(model.model.layers) * (2 if level == "full" else 1)


def test_a_trial_run_in_the_first_forward_is_not_kept(forward: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials launch the kernel too, where nobody asked before whether it works here."""
    monkeypatch.delattr(TRITON, "supports")  # which makes none in tests
    exact = gradients(patch(tiny("qwen3", vocab_size=64), implementation="triton", verify=False).train())
    model = patch(tiny("qwen3", vocab_size=64), implementation="triton", verify=False).train()
    for layer in model.model.layers:
        layer._compiled_call_impl = recomputed_as_whole(layer._call_impl, "attention")
    forward.again.clear()
    probe._outcome.cache_clear()
    torch.testing.assert_close(gradients(model), exact, rtol=1e-5, atol=1e-6)
    assert len(forward.again) > len(model.model.layers) and not any(forward.again)


def test_a_result_that_was_changed_in_place_is_refused() -> None:
    launch = computed_once(lambda x: (x + 1, x + 2))
    results: list[KeptResults] = []
    with keeping(results):
        first, _ = launch(torch.zeros(3))
    with recomputing(results):
        again, _ = launch(torch.full((3,), torch.nan))
        assert again is first
    first.add_(1)
    with recomputing(results), pytest.raises(RuntimeError, match='in place.*pass memory="full"'):
        launch(torch.zeros(3))


def test_a_layer_inside_another_keeps_results_of_its_own() -> None:
    def computed(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(float(x))
        return (x,)

    calls: list[float] = []
    launch = computed_once(computed)
    outer: list[KeptResults] = []
    inner: list[KeptResults] = []
    with keeping(outer):
        launch(torch.tensor(1.0))
        with keeping(inner):
            launch(torch.tensor(2.0))
        launch(torch.tensor(3.0))
    assert [float(each.tensors[0]) for each in outer] == [1, 3]
    with recomputing(outer):
        assert float(launch(torch.tensor(0.0))[0]) == 1
        with recomputing(inner):
            assert float(launch(torch.tensor(0.0))[0]) == 2
        assert float(launch(torch.tensor(0.0))[0]) == 3
    assert calls == [1, 2, 3]
    launch(torch.tensor(4.0))
    assert calls == [1, 2, 3, 4]
