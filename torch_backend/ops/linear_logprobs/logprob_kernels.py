"""The Triton kernels of chunked log-probabilities; launched by ``torch_backend.ops.linear_logprobs``.

``statistics`` reads each row of logits once: the softmax's denominator and the sum that its entropy needs are kept
relative to the highest logit so far (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). ``gradient``
writes the part of the logits' gradient that does not depend on which ids were asked for.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import LOG2E
from torch_backend.ops.linear_cross_entropy.loss_kernels import LN2, scaled


@triton.jit
def statistics(
    logits, lses, entropies, columns, stride, scale, softcap,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lses [rows] and with ENTROPY entropies [rows], float32, of logits [rows, columns]. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)  # of powers and logits
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        x, _ = scaled(tl.load(logits + row * stride + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
        x = tl.where(inside, x, -1.0e30)
        smaller = tl.exp2(-tl.abs(x - highest))
        rises = x > highest
        total = tl.where(rises, total * smaller + 1, total + smaller)
        if ENTROPY:
            product = tl.where(rises, product * smaller + x, product + smaller * x)
        highest = tl.maximum(highest, x)
    peak = tl.max(highest, 0)
    relative = tl.exp2(highest - peak)
    total = tl.sum(total * relative, 0)
    lse = peak + tl.log2(total)
    tl.store(lses + row, lse * LN2)
    if ENTROPY:
        tl.store(entropies + row, (lse - tl.sum(product * relative, 0) / total) * LN2)


@triton.jit
def gradient(
    logits, out, lses, entropies, totals, dentropies, columns, stride, out_stride, scale, softcap,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = -p (total + dentropy (log p + entropy)) times the slope of scale and softcap.

    Grid: (rows,). The columns may be any of a row's: the lses and entropies are those of the whole row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    lse, total = tl.load(lses + row) * LOG2E, tl.load(totals + row)
    if ENTROPY:
        entropy, dentropy = tl.load(entropies + row), tl.load(dentropies + row)
    for first in range(0, columns, BLOCK):
        inside = first + column < columns
        x, slope = scaled(tl.load(logits + row * stride + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
        factor = -total
        if ENTROPY:
            factor -= dentropy * ((x - lse) * LN2 + entropy)
        dlogits = tl.exp2(x - lse) * factor * slope
        tl.store(out + row * out_stride + first + column, dlogits.to(out.dtype.element_ty), inside)
