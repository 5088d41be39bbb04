"""Operators: kernels are started on the device of their tensors, and traces ask for its sizes and keep contexts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_backend
from torch_backend.ops.linear_stored import linear_stored, stored_weight
from torch_backend.ops.operators import on_its_device, shared_memory


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_started_on_the_device_of_its_tensors(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def switched(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", switched)
    launch = on_its_device(lambda x, factor: (x.device.index, current[0], factor))
    assert launch(SimpleNamespace(device=torch.device("cuda", index)), 3) == (index, index, 3)
    assert current == [0]


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_a_rotation_on_the_second_device_is_that_of_the_first() -> None:
    from torch_backend.ops.rope import apply_rope

    q, k = torch.randn(64, 4, 32, device="cuda:0"), torch.randn(64, 2, 32, device="cuda:0")
    angles = torch.randn(64, 16, device="cuda:0")
    inputs = q, k, angles.cos(), angles.sin()
    with torch.cuda.device(0):
        found = apply_rope(*(x.to("cuda:1") for x in inputs))
    for x, y in zip(found, apply_rope(*inputs), strict=True):
        assert x.device.index == 1 and torch.equal(x.to("cuda:0"), y)


@pytest.mark.filterwarnings("error")
def test_a_trace_that_asks_for_shared_memory_warns_of_nothing() -> None:
    compiled = torch.compile(lambda x: x + shared_memory(x.device), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [1, 1]


def test_an_operator_takes_and_returns_what_its_launcher_is_annotated_with() -> None:
    import_module("torch_backend.ops.norm")
    assert str(torch.ops.crosspack.row_norm_backward.default._schema) == (
        "crosspack::row_norm_backward(Tensor x, Tensor? weight, Tensor? gate, Tensor dy, float eps, int count, "
        "bool silu) -> (Tensor, Tensor, Tensor)"
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_product_over_a_stored_weight_is_traced_where_nothing_has_a_gradient(parts: int) -> None:
    values = torch.randn(5, 3)
    weight = stored_weight([values, *values.new_ones(parts - 1)], "values", (5, 3), lambda parts, dtype: parts[0])
    x = torch.randn(2, 3)
    traced = torch.compile(lambda x: linear_stored(x, weight), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(traced(x), x @ values.T)


def test_functions_of_any_number_of_arguments_name_none_of_them() -> None:
    """Dynamo leaves out the context where a call has as many arguments as the forward has parameters."""
    variadic = {}
    for path in Path(torch_backend.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.ClassDef) and any(ast.unparse(x).endswith("Function") for x in function.bases):
                (forward,) = (x for x in function.body if isinstance(x, ast.FunctionDef) and x.name == "forward")
                if forward.args.vararg is not None:
                    variadic[function.name] = [argument.arg for argument in forward.args.args]
    assert {"_LinearStored", "ByTiles", "_Tied", "_EarlierTokens"} <= variadic.keys()
    assert all(names == ["ctx"] for names in variadic.values()), variadic
