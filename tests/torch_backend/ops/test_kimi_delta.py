"""The kernels of Kimi delta attention against the float64 recurrence, their isolation, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError
from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, Where, assert_within_budget
from tests.torch_backend.scans import NAMES, assert_continues, assert_moved_alone, oracle, packed_on, working
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule, kimi_delta_rule_with_states
from torch_backend.segments import PackedMetadata

LENGTHS = (1, 30, 20, 70, 11)  # as of the gated delta rule, whose kernels are quicker to interpret; in half the tokens


def drawn(where: Where, tokens: int = sum(LENGTHS), fastest: float = 6.0):
    """Some channels fade within a token, by exp(-6), beside others that hardly do."""
    q, k = (torch.nn.functional.normalize(where.draw(tokens, 2, 16, seed=n), dim=-1) for n in (1, 2))
    g = -fastest * torch.rand(tokens, 2, 16, generator=torch.Generator().manual_seed(3)) ** 4
    beta = torch.sigmoid(where.draw(tokens, 2, seed=4))
    found = q, k, where.draw(tokens, 2, 32, seed=5), g.to(where.device), beta
    return tuple(x.detach().requires_grad_() for x in found)


def run(where: Where, inputs, dout=None):
    out = kimi_delta_rule(*inputs, packed_on(where, LENGTHS))
    dout = where.draw(*out.shape, seed=6) if dout is None else dout
    return {"out": out, **dict(zip(NAMES, torch.autograd.grad(out, inputs, dout), strict=True))}, dout


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
def test_forward_and_backward_are_the_recurrence(where):
    inputs = drawn(where)
    found, dout = run(where, inputs)
    exact, rounded = (oracle(inputs, dout, dtype, LENGTHS) for dtype in ("float64", working(where)))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_no_document_moves_another_by_a_bit(where):
    inputs = drawn(where)
    before, dout = run(where, inputs)
    start, stop = np.cumsum([0, *LENGTHS])[[3, 4]]  # the document that spans several chunks
    changed = [x.detach().clone() for x in (*inputs, dout)]
    for x in changed:
        x[start:stop] = -0.5 * x[start:stop] - 0.05
    changed[3].clamp_(max=0)
    after, _ = run(where, [x.requires_grad_() for x in changed[:5]], changed[5])
    assert_moved_alone(before, after, start, stop)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_states_enter_and_leave_every_segment(where):
    lengths = (1, 40, 64, 7)
    inputs = drawn(where, sum(lengths), fastest=0.4)
    entries = len(lengths) + 1  # an empty segment passes its state on
    initial = (0.3 * where.draw(entries, 2, 16, 32, seed=7).float()).requires_grad_()
    packed = PackedMetadata.from_lengths(lengths, device=where.device, entries=entries)
    results = kimi_delta_rule_with_states(*inputs, packed, initial=initial)
    assert_continues(where, results, inputs, initial, (*lengths, 0))


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_errors_say_what_is_wrong(where):
    q, k, v, g, beta = drawn(where)
    with pytest.raises(LayoutError, match=r"takes q, k, g \[T, H, K\], .* g \[132, 2\]"):
        kimi_delta_rule(q, k, v, g[..., 0], beta, packed_on(where, LENGTHS))
    with pytest.raises(LayoutError, match="the segments cover 3 tokens and q holds 132"):
        kimi_delta_rule(q, k, v, g, beta, packed_on(where, (3,)))
