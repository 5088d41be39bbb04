"""Inputs of layers on the host: the same gradients, whichever layers share one, and less that stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from packing_core.errors import PackingError, UnsupportedError
from tests.torch_backend.models import tiny
from torch_backend import patch
from torch_backend.steps import boundaries, memory_fit
from torch_backend.steps.boundaries import Host, why_not_shared
from torch_backend.steps.memory_fit import StepMemory, group_on_host

LAYERS = 5


class Layer(nn.Module):
    """Keeps its input alone between forward and backward, as a compiled layer does, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 3)
        self.forwards = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.forwards += 1
        found: Tensor = _Squared.apply(x, self.weight, scale)
        return found


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return (x @ weight).square() * scale + x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        inner = 2 * ctx.scale * dy * (x @ weight)
        return inner @ weight.T + dy, x.T @ inner, None


def run(calls: list[Callable[..., Any]], x: Tensor, between: Callable[[int, Tensor], Tensor]) -> Tensor:
    hidden = x
    for number, call in enumerate(calls):
        hidden = call(between(number, hidden), scale=0.1 * (number + 1))
    return hidden.sum()


def gradients(
    group: int | None, between: Callable[[int, Tensor], Tensor] = lambda n, x: x
) -> tuple[list[Tensor], Host, list[Layer]]:
    torch.manual_seed(0)
    layers, x = [Layer() for _ in range(LAYERS)], torch.randn(6, 8, dtype=torch.float64)
    host = Host()
    host.group = group or 1
    calls: list[Callable[..., Any]] = [layer if group is None else host.around(layer) for layer in layers]
    for _ in range(2):  # steps
        for layer in layers:
            layer.weight.grad = None
        host.begin()
        run(calls, x, between).backward()
    return [layer.weight.grad for layer in layers], host, layers  # type: ignore[misc]


@pytest.mark.parametrize("group", [1, 2, 3, LAYERS])
def test_gradients_are_those_of_inputs_that_were_kept(group: int) -> None:
    found, host, layers = gradients(group)
    for got, right in zip(found, gradients(None)[0], strict=True):
        assert torch.equal(got, right)
    assert len(host.buffers) == -(-LAYERS // group), "one input on the host for each group"
    again = [n for n in range(LAYERS) if n % group != group - 1 and n != LAYERS - 1]
    assert [layer.forwards for layer in layers] == [2 * (1 + (n in again)) for n in range(LAYERS)]
    assert not host.here and not host.coming


@pytest.mark.parametrize("in_place", [True, False])
def test_an_input_that_was_changed_between_layers_begins_a_group(in_place: bool) -> None:
    def between(number: int, x: Tensor) -> Tensor:
        if number != 2:
            return x
        return x.add_(1.0) if in_place else x + 1.0

    found, host, _ = gradients(3, between)
    for got, right in zip(found, gradients(None, between)[0], strict=True):
        assert torch.equal(got, right)
    assert len(host.buffers) == 2, "layers 0 and 1, layers 2 to 4"


def test_inputs_are_freed_in_the_forward() -> None:
    """A layer of a group keeps nothing; that of its first layer is freed when it was copied."""
    alive: list[int] = []
    seen: list[Any] = []

    def between(number: int, x: Tensor) -> Tensor:
        seen.append(ref(x))
        alive.append(sum(r() is not None for r in seen))
        return x

    gradients(3, between)
    # the row's own input stays with the caller; two copies are on their way at most
    assert max(alive) <= 4 and alive[LAYERS - 1] <= 3


def test_rows_of_another_length_get_buffers_of_their_own() -> None:
    host, layers = Host(), [Layer() for _ in range(3)]
    for tokens in (6, 4, 6):
        host.begin()
        run(
            [host.around(layer) for layer in layers],
            torch.randn(tokens, 8, dtype=torch.float64),
            lambda n, x: x,
        ).backward()
        assert [buffer.shape[0] for buffer in host.buffers] == [tokens] * 3
        assert host.held == 3 * tokens * 8 * 8


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x.view(1, 4, 16)], ids=["transposed", "reshaped"])
def test_views_of_an_input_come_back_as_they_were(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    weight = torch.randn(view(x).shape[-1], 3, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return view(x) @ weight

    (exact,) = torch.autograd.grad(call(x).square().sum(), weight)
    (found,) = torch.autograd.grad(Host().around(call)(x).square().sum(), weight)
    torch.testing.assert_close(found, exact)


def test_layers_share_what_the_host_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny("llama", num_hidden_layers=6), verify=False)
    one = StepMemory(model).formula().hidden
    for inputs, group in ((6, 1), (5, 2), (3, 2), (2, 3), (1, 6)):
        monkeypatch.setattr(memory_fit, "host_bytes", lambda inputs=inputs: inputs * 128 * one)
        assert group_on_host(model, 128) == group
    assert group_on_host(model, 128, held=5 * 128 * one) == 1, "what is held already counts"
    with pytest.raises(
        PackingError, match=r'memory="offload" keeps .* of a row of 129 tokens on the host, and .* free'
    ):
        group_on_host(model, 129)
    monkeypatch.setattr(memory_fit, "why_not_shared", lambda model: "its layers cannot")
    with pytest.raises(PackingError, match="on the host, because its layers cannot, and"):
        group_on_host(model, 100)


def test_memory_that_cannot_be_page_locked_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    host, x = Host(), torch.zeros(2**20, 128)
    with pytest.raises(
        UnsupportedError, match=r'"offload" needs 0\.50 GiB of page-locked memory for each group of layers'
    ):
        host.around(lambda hidden: hidden)(x)


def test_sharded_layers_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    assert why_not_shared(model) is None
    monkeypatch.setattr(boundaries, "FSDPModule", type(model.model.layers[0]))
    assert (
        why_not_shared(model)
        == "FSDP2 gathers weights in a forward, and layers that share inputs run one in the backward"
    )
