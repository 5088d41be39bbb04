"""The kernels of the gated and of Kimi's delta rule against the float64 recurrence, their isolation, and errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from packing_core.errors import LayoutError, UnsupportedError
from tests.torch_backend.kernels import EVERYWHERE, ONE_DTYPE, Where, assert_within_budget
from tests.torch_backend.scans import (
    LENGTHS,
    NAMES,
    assert_continues,
    assert_moved_alone,
    oracle,
    packed_on,
    quadratic,
    working,
)
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule, gated_delta_rule_with_states
from torch_backend.ops.scan.gated_delta.operators import chunk_length
from torch_backend.ops.scan.kimi_delta.operators import kimi_delta_rule, kimi_delta_rule_with_states
from torch_backend.segments import PackedMetadata

HALF = EVERYWHERE[1:4]
FEWER = (1, 30, 20, 70, 11)  # for Kimi's kernels, which take longer to interpret


def drawn(where: Where, tokens: int = sum(LENGTHS), heads: int = 2, shared: int = 1, width: int = 16, values: int = 32):
    q, k = (torch.nn.functional.normalize(where.draw(tokens, heads // shared, width, seed=n), dim=-1) for n in (1, 2))
    g = -0.2 * torch.rand(tokens, heads, generator=torch.Generator().manual_seed(3)).to(where.device)
    beta = torch.sigmoid(where.draw(tokens, heads, seed=4))
    found = q, k, where.draw(tokens, heads, values, seed=5), g, beta
    return tuple(x.detach().requires_grad_() for x in found)


def drawn_kimi(where: Where, tokens: int, fastest: float = 6.0):
    """Some channels fade within a token, by exp(-6), beside others that hardly do."""
    q, k, v, _, beta = drawn(where, tokens)
    g = -fastest * torch.rand(tokens, 2, 16, generator=torch.Generator().manual_seed(3)) ** 4
    return q, k, v, g.to(where.device).requires_grad_(), beta


def run_kimi(where: Where, inputs, dout=None):
    out = kimi_delta_rule(*inputs, packed_on(where, FEWER))
    dout = where.draw(*out.shape, seed=6) if dout is None else dout
    return {"out": out, **dict(zip(NAMES, torch.autograd.grad(out, inputs, dout), strict=True))}, dout


def run(where: Where, inputs, packed, delta: bool = True, dout=None):
    q, k, v, g, beta = inputs
    out = gated_delta_rule(q, k, v, g, beta if delta else None, packed)
    wanted = inputs if delta else inputs[:4]
    dout = where.draw(*out.shape, seed=6) if dout is None else dout
    return {"out": out, **dict(zip(NAMES, torch.autograd.grad(out, wanted, dout)))}, dout


def test_forward_and_backward_are_the_recurrence(where):
    inputs = drawn(where, shared=2)
    found, dout = run(where, inputs, packed_on(where))
    assert_within_budget(found, oracle(inputs, dout, "float64"), oracle(inputs, dout, working(where)), where.dtype)


@pytest.mark.parametrize("where", EVERYWHERE, indirect=True)
def test_kimis_forward_and_backward_are_the_recurrence(where):
    inputs = drawn_kimi(where, sum(FEWER))
    found, dout = run_kimi(where, inputs)
    exact, rounded = (oracle(inputs, dout, dtype, FEWER) for dtype in ("float64", working(where)))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("width", [pytest.param(64, marks=pytest.mark.gpu), 128])
@pytest.mark.parametrize("where", HALF, indirect=True)
def test_wide_heads_in_half_precision_are_the_recurrence_in_longer_chunks(where, width):
    lengths = (1, 75, 20)  # the second spans two chunks
    inputs = drawn(where, sum(lengths), shared=2, width=width, values=64)
    found, dout = run(where, inputs, packed_on(where, lengths))
    assert chunk_length(inputs[0], inputs[2]) == 64
    exact, rounded = (oracle(inputs, dout, dtype, lengths) for dtype in ("float64", working(where)))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("chunk", [32, 64])  # the longer ones are for wider heads in half precision
def test_without_corrections_it_is_linear_attention_with_a_decay(where, chunk, monkeypatch):
    monkeypatch.setattr("torch_backend.ops.scan.linear_attention.any_width.chunk_length", lambda *arguments: chunk)
    inputs = drawn(where)
    found, dout = run(where, inputs, packed_on(where), delta=False)
    exact, rounded = (quadratic((*inputs[:4], None, None), dout, dtype) for dtype in (torch.float64, where.dtype))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_values_may_be_written_with_a_strength_and_without_corrections(where):
    q, k, v, g, beta = drawn(where)
    out = gated_delta_rule(q, k, v, g, beta, packed_on(where), corrects=False)
    dout = where.draw(*out.shape, seed=6)
    found = {"out": out, **dict(zip(NAMES, torch.autograd.grad(out, (q, k, v, g, beta), dout)))}
    exact, rounded = (quadratic((q, k, v, g, beta, None), dout, dtype) for dtype in (torch.float64, where.dtype))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("kimi", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gated", "kimi"])
def test_no_document_moves_another_by_a_bit(where, kimi):
    lengths, long = (FEWER, 3) if kimi else ((20, 70, 22), 1)  # the document that spans several chunks

    def ran(changed, dout):
        return (run_kimi(where, changed, dout) if kimi else run(where, changed, packed_on(where, lengths), dout=dout))[
            0
        ]

    inputs = drawn_kimi(where, sum(lengths)) if kimi else drawn(where, sum(lengths))
    assert_moved_alone(ran, inputs, where.draw(*inputs[2].shape, seed=6), long, lengths)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_keys_that_are_all_alike_do_not_blow_up(where):
    q, k, v, g, beta = (x.detach() for x in drawn(where, tokens=100))
    # The powers of the matrix that is inverted grow like binomial coefficients here; its inverse does not.
    inputs = tuple(x.requires_grad_() for x in (q, k[:1].repeat(100, 1, 1), v, 0 * g, 0 * beta + 1))
    found, dout = run(where, inputs, packed_on(where, (100,)))
    exact, rounded = (oracle(inputs, dout, dtype, (100,)) for dtype in ("float64", working(where)))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
@pytest.mark.parametrize("delta", [True, False], ids=["corrected", "linear"])
def test_states_enter_and_leave_every_segment(where, delta):
    lengths = (0, 1, 40, 64, 7)
    inputs = drawn(where, sum(lengths))[: 5 if delta else 4]
    entries = len(lengths) + 2  # empty segments pass their states on
    initial = (0.3 * where.draw(entries, 2, 16, 32, seed=7).float()).requires_grad_()
    boundaries = torch.tensor(np.cumsum([0, *lengths, 0, 0]), dtype=torch.int32, device=where.device)
    packed = PackedMetadata(boundaries, max(lengths), sum(lengths))
    results = gated_delta_rule_with_states(*inputs, *([] if delta else [None]), packed, initial=initial)
    assert_continues(where, results, inputs, initial, (*lengths, 0, 0))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_kimis_states_enter_and_leave_every_segment(where):
    lengths = (1, 40, 64, 7)
    inputs = drawn_kimi(where, sum(lengths), fastest=0.4)
    entries = len(lengths) + 1  # an empty segment passes its state on
    initial = (0.3 * where.draw(entries, 2, 16, 32, seed=7).float()).requires_grad_()
    packed = PackedMetadata.from_lengths(lengths, device=where.device, entries=entries)
    results = kimi_delta_rule_with_states(*inputs, packed, initial=initial)
    assert_continues(where, results, inputs, initial, (*lengths, 0))


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_a_document_goes_on_in_another_row(where):
    inputs = [x.detach() for x in drawn(where, 90)]
    whole = gated_delta_rule(*inputs, packed_on(where, (90,)))
    first, state = gated_delta_rule_with_states(*(x[:50] for x in inputs), packed_on(where, (50,)))
    rest, _ = gated_delta_rule_with_states(*(x[50:] for x in inputs), packed_on(where, (40,)), initial=state)
    assert (torch.cat([first, rest]) - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_errors_say_what_is_wrong(where):
    q, k, v, g, beta = drawn(where)
    with pytest.raises(LayoutError, match=r"H a multiple of Q, got q \[242, 2, 16\]"):
        gated_delta_rule(q, k, v[:, :1], g, beta, packed_on(where))
    with pytest.raises(LayoutError, match=r"beta must be \[242, 2\]"):
        gated_delta_rule(q, k, v, g, beta[:, :1], packed_on(where))
    with pytest.raises(LayoutError, match="the segments cover 3 tokens and q holds 242"):
        gated_delta_rule(q, k, v, g, beta, packed_on(where, (3,)))
    with pytest.raises(UnsupportedError, match="takes heads of 16, .* channels, not 12"):
        gated_delta_rule(q[..., :12], k[..., :12], v, g, beta, packed_on(where))
    with pytest.raises(LayoutError, match=r"takes q, k, g \[T, H, K\], .* g \[242, 2\]"):
        kimi_delta_rule(q, k, v, g, beta, packed_on(where))
    with pytest.raises(LayoutError, match="the segments cover 3 tokens and q holds 242"):
        kimi_delta_rule(q, k, v, g[..., None].expand_as(q), beta, packed_on(where, (3,)))
