"""Steps over compiled layers, compared with steps of another model: on a CPU with interpreted kernels, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.torch_backend.graphs import counted_compilation
from tests.torch_backend.models import documents, error
from torch_backend import PackedCollator, make_train_step
from torch_backend.steps import cuda_graph, fast_backward

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.gpu,
)
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), CUDA]


@pytest.fixture
def compiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device of ``DEVICES``, on which layers are compiled; a GPU also records graphs."""
    if request.param == "cpu":
        request.getfixturevalue("interpreted")
        monkeypatch.setattr(cuda_graph, "DEVICE", "cpu")
        counted_compilation(monkeypatch, fast_backward)
    return str(request.param)


def with_gradient(call: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, Tensor]:
    """The result of a call, and the gradient that its input gets from the sum of the squares."""
    x = given.clone().requires_grad_()
    y = call(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def assert_train_alike(
    models: Iterable[tuple[Any, bool]], device: str, layers: str = "compiled", **options: Any
) -> None:
    """Two patched models have equal losses and weights after four steps; ``models`` says which steps are compiled.

    ``layers`` is what a compiled step says of its layers.
    """
    trained, losses = [], []
    for model, compiles in models:
        weights = [p for p in model.parameters() if p.requires_grad]
        options["compile"] = "auto" if compiles else False
        options["capture"] = "auto" if compiles and device == "cuda" else False
        step = make_train_step(model, torch.optim.SGD(weights, lr=0.1), **options)
        batch = PackedCollator(model, capacity=64)([{"input_ids": d.tolist()} for d in documents((20, 9, 14))])
        losses.append([float(step(batch)["loss"]) for _ in range(4)])
        trained.append(weights)
        if compiles:
            assert step.parts["layers"] == layers, step.parts
            assert device == "cpu" or step.parts["graph"] == "CUDA graph"
    tolerance = 1e-5 if device == "cpu" else 1e-3
    assert losses[0] == pytest.approx(losses[1], rel=tolerance) and losses[0][0] > losses[0][-1]
    for one, other in zip(*trained, strict=True):
        assert error(one.detach(), other.detach()) <= 10 * tolerance
