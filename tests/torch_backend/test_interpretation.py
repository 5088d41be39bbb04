"""Quick interpretation of kernels: the same bits, and no search through Triton's language at every call."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from tests.imports import ROOT
from tests.processes import run
from tests.torch_backend.kernels import ONE_DTYPE
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.segments import PackedMetadata

BITS = """
import hashlib, torch
from torch_backend.interpretation import interpret_quickly
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.segments import PackedMetadata

def bits():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 1, 16, generator=draw).requires_grad_() for _ in range(3))
    out = gated_delta_rule(q, k, v, -torch.rand(9, 1, generator=draw), None, PackedMetadata.from_lengths([2, 7]))
    found = out, *torch.autograd.grad(out.sum(), (q, k, v))
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in found)).hexdigest()

before = bits()
interpret_quickly()
print(before == bits() == bits())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
def test_it_changes_no_bit(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run([sys.executable, "-c", BITS], cwd=ROOT)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_the_language_is_searched_once(where, monkeypatch):
    q, k, v = (where.draw(3, 1, 16, seed=n) for n in range(3))

    def launch() -> torch.Tensor:
        return gated_delta_rule(q, k, v, torch.zeros(3, 1), None, PackedMetadata.from_lengths([3]))

    first = launch()

    def searched(*_: object) -> None:
        raise AssertionError("the members of triton.language were searched again")

    monkeypatch.setattr(inspect, "getmembers", searched)
    assert torch.equal(launch(), first)
