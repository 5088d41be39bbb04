"""Helpers for tests of the Triton kernels: devices, poisoned memory, and the error budget.

The same tests run on the CPU, where kernels are interpreted (in float16 and float32: the interpreter's bfloat16 dot
product is wrong), and on a GPU with ``-m gpu`` (in bfloat16 as well).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packing_core.budget import largest, over_budget
from torch_backend.ops import operators


class Where(NamedTuple):
    device: torch.device
    dtype: torch.dtype

    def draw(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Standard normal numbers, the same on every device."""
        generator = torch.Generator().manual_seed(hash((seed, *shape)))
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)


def _on(device: str, dtype: str) -> object:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return pytest.param((device, dtype), id=f"{device}-{dtype}", marks=marks)


EVERYWHERE = [
    _on("cpu", "float32"),
    _on("cpu", "float16"),
    *(_on("cuda", x) for x in ("bfloat16", "float16", "float32")),
]
FLOAT32 = [_on("cpu", "float32"), _on("cuda", "float32")]
ONE_DTYPE = [_on("cpu", "float32"), _on("cuda", "bfloat16")]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton kernels run on the CPU for the rest of a test, which is skipped where they are compiled.

    Attention makes no trial run before its first call, which would take most of the time.
    """
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled in this process: a test marked gpu runs them")
    from torch_backend.ops.attention.triton import TRITON

    monkeypatch.setattr(TRITON, "supports", TRITON.refuses)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(operators, "INTERPRETED", True)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton kernels run on the CPU, in layers that no other test compiled."""
    interpret(monkeypatch)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=EVERYWHERE)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """A device and dtype on which the kernels run; memory that nobody has written yet is NaN."""
    device, dtype = request.param
    if device == "cpu":
        interpret(monkeypatch)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    yield Where(torch.device(device), getattr(torch, dtype))
    torch.use_deterministic_algorithms(deterministic)


def assert_compiles(step: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """A step is one graph for ``torch.compile``, whose gradients have the bits of the step."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, right = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, step))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def with_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor
) -> list[torch.Tensor]:
    """The output of a function, and the gradients of its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_isolated(run: Callable[[], list[torch.Tensor]], inputs: Sequence[torch.Tensor], own: slice) -> None:
    """Results [T, ...] change with the inputs of one document at its tokens, and to the bit nowhere else."""
    before = run()
    for x in inputs:
        x[own] = float("nan")
    for x, y in zip(before, run(), strict=True):
        assert torch.equal(x[: own.start], y[: own.start]) and torch.equal(x[own.stop :], y[own.stop :])
        assert not torch.equal(x[own], y[own])


def numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


def assert_within_budget(
    found: Mapping[str, torch.Tensor],
    exact: Mapping[str, np.ndarray],
    rounded: Mapping[str, np.ndarray],
    dtype: torch.dtype,
) -> None:
    """Every result lies within the suite's one error budget of the oracle."""
    scale = largest(exact.values())
    assert found.keys() == exact.keys()
    for name, x in found.items():
        working = str(dtype).removeprefix("torch.")
        assert x.shape == exact[name].shape, name
        over = over_budget(numpy(x), exact[name], rounded[name], scale=scale, dtype=working).max()
        assert over <= 1, f"{name} is {over:.3g} budgets away from the oracle"


class Elements(TorchDispatchMode):
    """The largest tensor that any operation makes, and all the multiplications of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.squares = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        if "scaled_dot_product" in str(func):
            q, k = args[0], args[1]
            self.squares += q.shape[0] * q.shape[-2] * k.shape[-2]
        return out
