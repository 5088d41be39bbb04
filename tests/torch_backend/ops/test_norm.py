"""The norms in one pass: rows of norm 1, RMSNorm with a gate, and RMSNorm of a tile, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, assert_within_budget, numpy
from torch_backend.ops import norm
from torch_backend.ops.norm import gated_rms_norm, unit_rows
from torch_backend.ops.tiles import Norm

EPS = 1e-3  # so large that leaving it out would show


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def gated(x, weight, gate, silu):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (F.silu if silu else F.sigmoid)(gate)


def check(where, kernel, formula, inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = kernel(*inputs)
    dy = where.draw(*y.shape, seed=9)
    names = ("y", "x", "weight", "gate")
    found = dict(zip(names, (y, *torch.autograd.grad(y, inputs, dy))))

    def truth(dtype):
        wide = [x.detach().cpu().to(dtype).requires_grad_() for x in inputs]
        out = formula(*wide)
        return dict(zip(names, map(numpy, (out, *torch.autograd.grad(out, wide, dy.cpu().to(dtype))))))

    assert y.is_contiguous() and y.dtype == inputs[0].dtype
    assert_within_budget(found, truth(torch.float64), truth(where.dtype), where.dtype)


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
def test_rows_have_norm_one(where):
    check(where, lambda x: unit_rows(x, eps=EPS), unit, [where.draw(130, 3, 20)])


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_rows_of_a_part_of_a_tensor(where):
    part = where.draw(130, 96)[:, 20:60].view(130, 2, 20)
    check(where, lambda x: unit_rows(x, eps=EPS), unit, [part])


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("shape", [(-1, 20), (1, -1, 20), (2, -1, 20), (-1, 3, 20)], ids=str)
def test_any_number_of_rows_takes_the_same_kernel(where, shape, monkeypatch):
    sizes, seen = norm._sizes, []
    monkeypatch.setattr(norm, "_sizes", lambda *given: seen.append(sizes(*given)) or seen[-1])
    for tokens in (72, 90):
        x, gate = where.draw(tokens * 20).view(shape).requires_grad_(), where.draw(tokens * 20, seed=2).view(shape)
        gated_rms_norm(x, where.draw(20, seed=1), gate, eps=EPS, silu=True).sum().backward()
    assert len(seen) == 4
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "sigmoid"])
def test_a_gate_follows_the_norm(where, silu, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.norm._ELEMENTS", 32 * 8)
    monkeypatch.setattr("torch_backend.ops.norm._TILES", 4)  # several programs share the weight's gradient
    inputs = [where.draw(70, 20), where.draw(20, seed=1), where.draw(70, 20, seed=2)]
    check(where, lambda *x: gated_rms_norm(*x, eps=EPS, silu=silu), lambda *x: gated(*x, silu), inputs)


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_tile_is_normalised_by_a_kernel(where, offset, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.norm._ELEMENTS", 32 * 8)
    monkeypatch.setattr("torch_backend.ops.norm._TILES", 4)  # several programs share the weight's gradient
    monkeypatch.delattr(Norm, "_unit")  # what computes it otherwise
    x, weight, dy = where.draw(150, 20)[40:110], where.draw(20, seed=1), where.draw(70, 20, seed=9)
    of_tile = Norm(weight, EPS, offset)
    found = dict(zip(("y", "x", "weight"), (of_tile(x, where.dtype), *of_tile.gradients(dy, x)), strict=True))
    assert found["weight"].dtype == torch.float32

    def truth(dtype):
        wide = [t.cpu().to(dtype).requires_grad_() for t in (x, weight)]
        y = F.rms_norm(wide[0], (20,), eps=EPS) * (wide[1] + offset)
        return dict(zip(("y", "x", "weight"), map(numpy, (y, *torch.autograd.grad(y, wide, dy.cpu().to(dtype))))))

    assert_within_budget(found, truth(torch.float64), truth(where.dtype), where.dtype)
