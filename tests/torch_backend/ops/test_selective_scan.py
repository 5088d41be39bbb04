"""The kernels of diagonal scans against the float64 recurrence of Mamba, their isolation, and errors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from packing_core import reference
from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, Where, assert_within_budget, numpy
from tests.torch_backend.scans import assert_moved_alone, packed_on, working
from torch_backend.ops.scan.selective.operators import diagonal_scan, selective_scan, selective_scan_with_states

CHUNK = 8  # tokens here: interpreted scans take milliseconds an element
LENGTHS = (1, 6, 5, 19, 3)  # two documents inside a chunk; one that reaches over two chunk ends
TOKENS = sum(LENGTHS)
NAMES = ("x", "dt", "A", "B", "C", "D", "z")


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr("torch_backend.ops.scan.selective.operators._L", CHUNK)


def drawn(where: Where, n: int = 2, channels: int = 3) -> list[torch.Tensor]:
    """x, dt, A, B, C, D and z; the fastest channels fade within a token."""
    generator = torch.Generator().manual_seed(3)
    dt = torch.rand(TOKENS, channels, generator=generator).to(where.device, where.dtype)
    A = -torch.exp(torch.randn(channels, n, generator=generator)).to(where.device, where.dtype)
    B, C, z = (where.draw(TOKENS, size, seed=seed) for seed, size in ((1, n), (2, n), (5, channels)))
    given = where.draw(TOKENS, channels), dt, A, B, C, where.draw(channels, seed=4), z
    return [x.detach().requires_grad_() for x in given]


def run(where: Where, inputs, dy=None):
    x, dt, A, B, C, D, z = inputs
    y = selective_scan(x, dt, A, B, C, packed_on(where, LENGTHS), D=D, z=z)
    dy = where.draw(*y.shape, seed=6) if dy is None else dy
    return {"y": y, **dict(zip(NAMES, torch.autograd.grad(y, inputs, dy), strict=True))}, dy


def oracle(inputs, dy, dtype: str) -> dict[str, np.ndarray]:
    *scanned, D, z = (numpy(x) for x in inputs)
    arguments = *scanned, np.cumsum([0, *LENGTHS])
    found = reference.selective_scan_vjp(*arguments, numpy(dy), D=D, z=z, dtype=dtype)
    return {"y": reference.selective_scan(*arguments, D=D, z=z, dtype=dtype), **found}


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("n", [1, 2])
def test_forward_and_backward_are_the_recurrence(where, n):
    inputs = drawn(where, n)
    found, dy = run(where, inputs)
    assert_within_budget(found, oracle(inputs, dy, "float64"), oracle(inputs, dy, working(where)), where.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_channels_may_need_many_programs_that_share_gradients(where, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.scan.selective.operators._WARP", 4)
    inputs = drawn(where, channels=7)
    found, dy = run(where, inputs)
    assert_within_budget(found, oracle(inputs, dy, "float64"), oracle(inputs, dy, working(where)), where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_no_document_moves_another_by_a_bit(where):
    assert_moved_alone(lambda *given: run(where, *given)[0], drawn(where), where.draw(TOKENS, 3, seed=6), 3, LENGTHS)


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_errors_say_what_is_wrong(where):
    x, dt, A, B, C, _, _ = drawn(where)
    with pytest.raises(LayoutError, match=r"takes u, g \[T, E\], .* B \[34, 1\]"):
        diagonal_scan(x, dt, A, B[:, :1], C, packed_on(where, LENGTHS))
    with pytest.raises(LayoutError, match="the segments cover 3 tokens and u holds 34"):
        diagonal_scan(x, dt, A, B, C, packed_on(where, (3,)))
    with pytest.raises(UnsupportedError, match="takes states of 1, 2, .* numbers, not 3"):
        diagonal_scan(
            x, dt, A.repeat(1, 3)[:, :3], B.repeat(1, 3)[:, :3], C.repeat(1, 3)[:, :3], packed_on(where, LENGTHS)
        )


def by_token(inputs, initial, douts, lengths, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The recurrence from the initial states, token by token; gradients of what comes out and of the last states."""
    given = [x.detach().cpu().to(dtype).requires_grad_() for x in (*inputs, initial)]
    x, dt, A, B, C, states = given
    out, final = [], []
    for n, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]))):
        state = states[n]
        for t in range(start, stop):
            state = state * (dt[t][:, None] * A).exp() + (dt[t] * x[t])[:, None] * B[t]
            out.append((state * C[t]).sum(1))
        final.append(state)
    results = torch.stack(out), torch.stack(final)
    gradients = torch.autograd.grad(results, given, [x.cpu().to(dtype) for x in douts])
    names = ("y", "final", *NAMES[:5], "initial")
    return {name: numpy(x) for name, x in zip(names, (*results, *gradients), strict=True)}


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_states_enter_and_leave_every_segment(where):
    *inputs, _, _ = drawn(where)
    entries = len(LENGTHS) + 1  # an empty segment passes its state on
    initial = where.draw(entries, 3, 2, seed=7).float().requires_grad_()
    y, final = selective_scan_with_states(*inputs, packed_on(where, LENGTHS), initial=initial)
    douts = where.draw(*y.shape, seed=8), where.draw(*final.shape, seed=9).float()
    found = torch.autograd.grad((y, final), (*inputs, initial), douts)
    found = {"y": y, "final": final, **dict(zip([*NAMES[:5], "initial"], found, strict=True))}
    exact, rounded = (by_token(inputs, initial, douts, (*LENGTHS, 0), x) for x in (torch.float64, where.dtype))
    assert_within_budget(found, exact, rounded, where.dtype)
    with pytest.raises(LayoutError, match=r"initial states are \[6, 3, 2\] \[S, E, N\] here, got \[3, 2\]"):
        selective_scan_with_states(*inputs, packed_on(where, LENGTHS), initial=initial[0])
