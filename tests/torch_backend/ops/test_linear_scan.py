"""The kernels of linear attention with a decay against a score matrix per document in float64, and their isolation."""

from __future__ import annotations

import pytest
import torch

from packing_core.errors import LayoutError
from tests.torch_backend.kernels import ONE_DTYPE, Where, assert_within_budget
from tests.torch_backend.scans import LENGTHS, assert_moved_alone, names_of, packed_on, quadratic
from torch_backend.ops.scan.gated_delta.delta_rule import gated_delta_rule
from torch_backend.ops.scan.linear_attention import wide as linear
from torch_backend.ops.scan.linear_attention.halves import HALVES
from torch_backend.segments import PackedMetadata

# Documents that reach over chunk ends and meet between them: a state enters a chunk and another one leaves it.
MEETING = (1, 30, 20, 130, 60, 23)


def drawn(where: Where, lengths=LENGTHS, heads: int = 2, shared: int = 1, width: int = 64, values: int = 64):
    """q, k, v, g, strengths that may exceed 1, as steps of Mamba-2 may, and skips."""
    tokens = sum(lengths)
    q, k = (torch.nn.functional.normalize(where.draw(tokens, shared, width, seed=n), dim=-1) for n in (1, 2))
    g = -0.2 * torch.rand(tokens, heads, generator=torch.Generator().manual_seed(3)).to(where.device)
    strength = torch.nn.functional.softplus(where.draw(tokens, heads, seed=4).float())
    found = q, k, where.draw(tokens, heads, values, seed=5), g, strength, where.draw(heads, seed=7)
    return tuple(x.detach().requires_grad_() for x in found)


def run(where: Where, inputs, packed, dout):
    given = [x for x in inputs if x is not None]
    out = linear.linear_attention(*inputs, packed)
    return {"out": out, **dict(zip(names_of(inputs), torch.autograd.grad(out, given, dout)))}


@pytest.fixture
def short_spans(monkeypatch):
    """Spans of two chunks, so that short rows have several."""
    monkeypatch.setattr(linear, "_SPAN", 2)


# Heads of k that two programs share, or that nobody shares; heads of v as wide as a program takes, or divided.
@pytest.mark.parametrize(
    ("lengths", "strong", "heads", "shared", "values", "programs"),
    [(MEETING, True, 4, 1, 64, 10), (LENGTHS, False, 2, 2, 128, 1)],
    ids=["strengths", "none, wide"],
)
def test_it_is_linear_attention_with_a_decay(
    where, lengths, strong, heads, shared, values, programs, short_spans, monkeypatch
):
    monkeypatch.setattr(linear, "_PROGRAMS", programs)
    inputs = drawn(where, lengths, heads=heads, shared=shared, values=values)
    inputs = inputs if strong else (*inputs[:4], None, None)
    dout = where.draw(*inputs[2].shape, seed=6)
    found = run(where, inputs, packed_on(where, lengths), dout)
    exact, rounded = (quadratic(inputs, dout, dtype, lengths) for dtype in (torch.float64, where.dtype))
    assert_within_budget(found, exact, rounded, where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_no_document_moves_another_by_a_bit(where, short_spans):
    inputs = drawn(where)
    dout = where.draw(*inputs[2].shape, seed=6)
    # the document that spans three chunks
    assert_moved_alone(lambda changed, dout: run(where, changed, packed_on(where), dout), inputs, dout, 3, LENGTHS)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_what_overflows_spreads_no_further_than_chunks_that_its_document_touches(where, short_spans):
    lengths = (64, 70, 58, 20)  # the second document touches the chunks of itself and of the third
    inputs = [x.detach() for x in drawn(where, lengths)]
    dout = where.draw(*inputs[2].shape, seed=6)
    for x in (inputs[2], dout):
        x[70] = torch.inf
    found = run(where, [x.requires_grad_() for x in inputs], packed_on(where, lengths), dout)
    del found["skip"]  # of all documents
    for name, x in found.items():
        assert x[:64].isfinite().all() and x[192:].isfinite().all(), name
        assert not x[64:134].isfinite().all(), name


@pytest.mark.parametrize("where", ONE_DTYPE[:1], indirect=True)
def test_narrow_heads_skip_the_state_too(where):
    q, k, v, g, strength, skip = (x.detach() for x in drawn(where, (3, 2), width=16, values=16))
    assert not linear.serves(q, v)
    packed = packed_on(where, (3, 2))
    found = gated_delta_rule(q, k, v, g, strength, packed, corrects=False, skip=skip)
    alone = gated_delta_rule(q, k, v, g, strength, packed, corrects=False)
    assert torch.equal(found, alone + skip[:, None] * v)
    with pytest.raises(LayoutError, match=r"skip must be \[2\], a number for each head of v, got \[1\]"):
        gated_delta_rule(q, k, v, g, strength, packed, corrects=False, skip=skip[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(2_000,), (700, 1, 63, 64, 65, 1_107)], ids=["one", "several"])
@pytest.mark.parametrize("width", [64, 128])
def test_long_documents_at_real_widths(lengths, width):
    where = Where(torch.device("cuda"), torch.bfloat16)
    inputs = drawn(where, lengths, heads=8, shared=2, width=width)
    assert linear.serves(inputs[0], inputs[2])
    dout = where.draw(*inputs[2].shape, seed=6)
    found = run(where, inputs, PackedMetadata.from_lengths(lengths, device=where.device), dout)
    exact, rounded = (quadratic(inputs, dout, dtype, lengths) for dtype in (torch.float64, where.dtype))
    assert_within_budget(found, exact, rounded, where.dtype)


def test_a_scan_in_halves_runs_segments_from_zero_as_the_whole_one(where):
    """By the kernels of :mod:`wide` in half precision, by those for any width in float32."""
    *inputs, _, _ = drawn(where)
    packed, given = packed_on(where), [x.detach() for x in inputs]
    out = gated_delta_rule(*inputs, None, packed, scale=1.0)
    dout = where.draw(*out.shape, seed=6)
    found, kept = HALVES.forward(given, packed)
    assert torch.equal(found, out)
    gradients = HALVES.backward(given, packed, kept, dout)
    for gradient, expected in zip(gradients, torch.autograd.grad(out, inputs, dout), strict=True):
        assert torch.equal(gradient, expected)
