"""The norms of hybrid layers: rows of norm 1, and RMSNorm with a gate, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, assert_within_budget, numpy
from torch_backend.ops.norm import gated_rms_norm, unit_rows

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


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "sigmoid"])
def test_a_gate_follows_the_norm(where, silu, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.norm._ELEMENTS", 32 * 8)
    monkeypatch.setattr("torch_backend.ops.norm._TILES", 4)  # several programs share the weight's gradient
    inputs = [where.draw(70, 20), where.draw(20, seed=1), where.draw(70, 20, seed=2)]
    check(where, lambda *x: gated_rms_norm(*x, eps=EPS, silu=silu), lambda *x: gated(*x, silu), inputs)
