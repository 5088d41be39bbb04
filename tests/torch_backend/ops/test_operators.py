"""Operators: kernels are started on the device of their tensors, and traces ask for its sizes and keep contexts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import torch_backend
from tests.torch_backend.kernels import ONE_DTYPE, Where
from torch_backend.ops.attention import attention
from torch_backend.ops.conv import short_convolution
from torch_backend.ops.linear_stored import linear_stored, stored_weight
from torch_backend.ops.norm import gated_rms_norm
from torch_backend.ops.operators import on_its_device, shared_memory
from torch_backend.segments import PackedMetadata


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


def _convolved(x: Tensor, bias: Tensor) -> Tensor:
    return short_convolution(x.flatten(1), torch.ones(len(bias), 3).to(x), _packed(x), bias=bias)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return gated_rms_norm(x.flatten(1), weight, x.flatten(1), eps=1e-6, silu=True)


def _attended(x: Tensor, sinks: Tensor) -> Tensor:
    return attention(x, x, x, _packed(x), sinks=sinks, implementation="triton")


def _biased(x: Tensor, slopes: Tensor) -> Tensor:
    return attention(x, x, x, _packed(x), alibi_slopes=slopes.detach(), implementation="triton")


def _packed(x: Tensor) -> PackedMetadata:
    return PackedMetadata.from_lengths([len(x) - 3, 3], device=x.device)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize(("run", "size"), [(_convolved, 64), (_normed, 64), (_attended, 4), (_biased, 4)])
def test_vectors_may_have_gaps(where: Where, run: Callable[[Tensor, Tensor], Tensor], size: int) -> None:
    """Kernels take no stride of a bias, a norm's weight, sinks and slopes."""
    x, vector = where.draw(9, 4, 16).requires_grad_(), where.draw(size, seed=1).abs()
    results = []
    for laid in (vector, vector.repeat_interleave(2)[::2]):
        leaf = laid.detach().requires_grad_()
        out = run(x, leaf)
        results.append([out, *torch.autograd.grad(out, (x, leaf), torch.ones_like(out), allow_unused=run is _biased)])
    for whole, spread in zip(*results, strict=True):
        assert whole is spread is None or torch.equal(whole, spread)


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
