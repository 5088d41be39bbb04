"""Stand-ins for CUDA graphs and compiled layers on the CPU, and the fixtures that put them in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from torch_backend.steps import cuda_graph as captured
from torch_backend.steps import eligibility, recorded_rows
from torch_backend.steps.cuda_graph import CapturedStep


def stand_in(put: Callable[[Any, str, Any], None] = setattr) -> SimpleNamespace:
    """Let ``put`` replace what records graphs: recording runs nothing, replaying writes or adds gradients.

    Set ``model`` of what is returned to the one that trains.
    """
    seen = SimpleNamespace(recorded=0, replayed=0, model=None, fails="", made=lambda: None)

    def record(step: CapturedStep) -> None:
        seen.recorded += 1
        step.recording = True
        parameters = list(seen.model.parameters())
        before = [p.grad if p.grad is None else p.grad.clone() for p in parameters]
        writes = all(gradient is None for gradient in before)
        step.result = step.step(step.batch)
        if seen.fails == "always" or (seen.fails == "adding" and not writes):
            seen.made = weakref.ref(step.result)
            for parameter, value in zip(parameters, before, strict=True):
                if value is not None:
                    parameter.grad.copy_(value)
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        static = [p.grad for p in parameters]
        for gradient, value in zip(static, before, strict=True):
            if gradient is not None:
                gradient.copy_(torch.full_like(gradient, torch.nan) if value is None else value)

        def replay() -> None:
            seen.replayed += 1
            found = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, static, strict=True):
                parameter.grad = None if writes else gradient
            step.result.copy_(step.step(step.batch))
            for parameter, gradient, old in zip(parameters, static, found, strict=True):
                if gradient is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = old  # a graph knows nothing of Python's attributes

        step.graph, step.recording = SimpleNamespace(replay=replay, pool=lambda: None), False

    def record_rows(call: Callable[[], None], **_: Any) -> tuple[SimpleNamespace, None]:
        gradients = torch.is_grad_enabled()

        def replay() -> None:
            seen.replayed += 1
            with torch.set_grad_enabled(gradients):
                call()

        seen.recorded += 1
        if call.__name__ == "_forward":  # makes what its backward is recorded of
            call()
        return SimpleNamespace(replay=replay), None

    put(CapturedStep, "_record", record)
    put(recorded_rows, "record", record_rows)
    put(CapturedStep, "_aside", lambda step: step.step(step.batch))
    put(captured, "DEVICE", "cpu")
    put(eligibility, "_why_not_fixed", lambda model, batch: None)
    put(nn.Module, "compile", lambda module, **options: None)
    return seen


def counted_compilation(monkeypatch: pytest.MonkeyPatch, module: Any, backend: str = "aot_eager") -> Any:
    """Returns the counter of graphs that ``compile_layers`` makes from now on, where the module calls it."""
    counter, stock = CompileCounterWithBackend(backend), module.compile_layers
    monkeypatch.setattr(module, "compile_layers", lambda model, **options: stock(model, backend=counter, **options))
    return counter


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return stand_in(monkeypatch.setattr)


@pytest.fixture
def compiled(graphs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Layers that only count their calls in place of being compiled; ``fails`` may be an error that they raise."""
    graphs.calls, graphs.error = 0, None

    def compile(module: nn.Module, **options: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            graphs.calls += 1
            if graphs.error is not None:
                raise graphs.error
            return module._call_impl(*args, **kwargs)

        module._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", compile)
    return graphs
