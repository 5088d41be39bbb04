"""The short convolution's kernels against the float64 oracle, their isolation, layouts and errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from packing_core import reference
from packing_core.errors import LayoutError
from tests.torch_backend.kernels import (
    ONE_DTYPE,
    Where,
    assert_compiles,
    assert_isolated,
    assert_within_budget,
    numpy,
    with_gradients,
)
from torch_backend.ops.conv import short_convolution
from torch_backend.segments import PackedMetadata

# shorter than the kernel is wide, one token, longer than a tile of tokens
LENGTHS = (5, 1, 40, 2, 20)
TOKENS = sum(LENGTHS)


def packed_on(where: Where, lengths=LENGTHS) -> PackedMetadata:
    return PackedMetadata.from_lengths(lengths, device=where.device, entries=len(lengths) + 1)


@pytest.mark.parametrize("silu", [False, True], ids=["linear", "silu"])
@pytest.mark.parametrize(("channels", "width", "biased"), [(24, 4, True), (136, 3, False), (8, 1, True), (8, 6, False)])
def test_forward_and_backward_are_the_oracle(where, channels, width, biased, silu):
    x, weight = where.draw(TOKENS, channels).requires_grad_(), where.draw(channels, width).requires_grad_()
    bias = where.draw(channels).requires_grad_() if biased else None
    dy = where.draw(TOKENS, channels, seed=1)
    inputs = {"x": x, "weight": weight} | ({"bias": bias} if biased else {})
    y = short_convolution(x, weight, packed_on(where), bias=bias, silu=silu)
    found = {"y": y, **dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), dy), strict=True))}

    def oracle(dtype: str) -> dict[str, np.ndarray]:
        arguments = numpy(x), numpy(weight), np.cumsum([0, *LENGTHS])
        options = {"bias": None if bias is None else numpy(bias), "silu": silu, "dtype": dtype}
        gradients = reference.short_convolution_vjp(*arguments, numpy(dy), **options)
        return {"y": reference.short_convolution(*arguments, **options), **gradients}

    assert_within_budget(found, oracle("float64"), oracle(str(where.dtype).removeprefix("torch.")), where.dtype)


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_any_strides_and_the_weight_of_a_conv1d_give_the_same_bits(where):
    x, weight, dy = where.draw(TOKENS, 24), where.draw(24, 4), where.draw(TOKENS, 24, seed=1)
    channels_first = x.t().contiguous().t()
    packed = packed_on(where)

    def run(x, weight, dy):
        x = x.detach().requires_grad_()
        y = short_convolution(x, weight, packed, silu=True)
        return y, *torch.autograd.grad(y, x, dy)

    expected = run(x, weight, dy)
    for found in (run(channels_first, weight, dy.t().contiguous().t()), run(x, weight[:, None], dy)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_no_segment_moves_another_by_a_bit(where):
    x, weight, dy = where.draw(TOKENS, 24), where.draw(24, 4), where.draw(TOKENS, 24, seed=1)
    convolve = partial(short_convolution, weight=weight, packed=packed_on(where), silu=True)
    assert_isolated(lambda: with_gradients(convolve, [x], dy), [x, dy], slice(sum(LENGTHS[:2]), sum(LENGTHS[:3])))


@pytest.mark.parametrize("where", ONE_DTYPE, indirect=True)
def test_compiles_into_one_graph(where):
    x, weight = where.draw(TOKENS, 24).requires_grad_(), where.draw(24, 4).requires_grad_()
    boundaries = packed_on(where).cu_seqlens

    def step(x, weight):
        return short_convolution(x * 2, weight, PackedMetadata(boundaries, TOKENS, TOKENS), silu=True).float().sum()

    assert_compiles(step, (x, weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, TOKENS, 6)}, r"x \[T, C\] and weight \[C, W\] or \[C, 1, W\], got x \[1, 68, 6\]"),
        ({"weight": torch.zeros(5, 4)}, r"weight \[5, 4\]"),
        ({"bias": torch.zeros(5)}, r"takes bias \[C\], got .* bias \[5\]"),
        ({"packed": PackedMetadata.from_lengths((3,))}, r"segments cover 3 tokens and x holds 68"),
    ],
)
def test_what_cannot_be_convolved_says_why(change, message):
    given = {"x": torch.zeros(TOKENS, 6), "weight": torch.zeros(6, 4), "packed": PackedMetadata.from_lengths(LENGTHS)}
    with pytest.raises(LayoutError, match=message):
        short_convolution(**given | change)
