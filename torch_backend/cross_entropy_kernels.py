"""The Triton kernel of the chunked cross-entropy: a row of logits in, its loss and its gradient out, in place.

Launched by ``torch_backend.cross_entropy``. A program takes one row and reads it twice, first for the softmax's
denominator (online, Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), then for the gradient.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.attention.triton_kernels import LN2, LOG2E, tanh


@triton.jit
def scaled(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits after scale and softcap in base 2, and the derivative of what precedes the base by what was multiplied."""
    slope = scale
    if SOFTCAP:
        capped = tanh(logits.to(tl.float32) * (scale / softcap))
        slope = scale * (1 - capped * capped)
        return capped * (softcap * LOG2E), slope
    return logits.to(tl.float32) * (scale * LOG2E), slope


@triton.jit
def add_exponentials(x, highest, total):
    """The online softmax of each place of a block: the highest value so far and the sum of powers relative to it."""
    smaller = tl.exp2(-tl.abs(x - highest))
    total = tl.where(x > highest, total * smaller + 1, total + smaller)
    return tl.maximum(highest, x), total


@triton.jit
def softmax_loss(
    logits, targets, weights, losses, columns, stride, ignore_index, scale, softcap,
    WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses [rows] float32; with GRADIENT the row of logits becomes the gradient of its loss. Grid: (rows,).

    The last block stands apart, so that the others need no mask.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    whole = columns // BLOCK * BLOCK
    inside = whole + column < columns
    weight = 1.0
    if WEIGHTS:
        weight = tl.load(weights + row).to(tl.float32)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty)
            for first in range(0, whole, BLOCK):
                tl.store(logits + first + column, zeros)
            tl.store(logits + whole + column, zeros, inside)
    else:
        at_target, slope_there = scaled(tl.load(logits + target), scale, softcap, SOFTCAP)
        highest = tl.full([BLOCK], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, whole, BLOCK):
            x, _ = scaled(tl.load(logits + first + column), scale, softcap, SOFTCAP)
            highest, total = add_exponentials(x, highest, total)
        x, _ = scaled(tl.load(logits + whole + column, inside, other=0.0), scale, softcap, SOFTCAP)
        highest, total = add_exponentials(tl.where(inside, x, -1.0e30), highest, total)
        peak = tl.max(highest, 0)
        log_total = peak + tl.log2(tl.sum(total * tl.exp2(highest - peak), 0))
        tl.store(losses + row, weight * (log_total - at_target) * LN2)
        if GRADIENT:
            for first in range(0, whole, BLOCK):
                x, slope = scaled(tl.load(logits + first + column), scale, softcap, SOFTCAP)
                gradient = tl.exp2(x - log_total) * (slope * weight)
                tl.store(logits + first + column, gradient.to(logits.dtype.element_ty))
            x, slope = scaled(tl.load(logits + whole + column, inside, other=0.0), scale, softcap, SOFTCAP)
            gradient = tl.exp2(x - log_total) * (slope * weight)
            tl.store(logits + whole + column, gradient.to(logits.dtype.element_ty), inside)
            tl.debug_barrier()  # the target's own gradient goes over what was stored for it
            gradient = (tl.exp2(at_target - log_total) - 1) * (slope_there * weight)
            tl.store(logits + target, gradient.to(logits.dtype.element_ty))
