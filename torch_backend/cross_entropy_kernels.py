"""The Triton kernel of the chunked cross-entropy: a row of logits in, its loss and its gradient out, in place.

Launched by ``torch_backend.cross_entropy``. A program takes one row and reads it twice, first for the softmax's
denominator (online, Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), then for the gradient.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.attention.triton_kernels import tanh


@triton.jit
def scaled(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """Logits after scale and softcap, and their derivative by what was multiplied."""
    x = logits.to(tl.float32) * scale
    slope = scale
    if SOFTCAP:
        capped = tanh(x / softcap)
        x = softcap * capped
        slope = scale * (1 - capped * capped)
    return x, slope


@triton.jit
def softmax_loss(
    logits, targets, weights, losses, columns, stride, ignore_index, scale, softcap,
    WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses [rows] float32; with GRADIENT the row of logits becomes the gradient of its loss. Grid: (rows,)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    column = tl.arange(0, BLOCK)
    weight = 1.0
    if WEIGHTS:
        weight = tl.load(weights + row).to(tl.float32)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, columns, BLOCK):
                zeros = tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty)
                tl.store(logits + first + column, zeros, first + column < columns)
    else:
        at_target = scaled(tl.load(logits + target), scale, softcap, SOFTCAP)[0]
        highest = tl.full([BLOCK], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            inside = first + column < columns
            x = scaled(tl.load(logits + first + column, inside, other=0.0), scale, softcap, SOFTCAP)[0]
            x = tl.where(inside, x, -1.0e30)
            smaller = tl.exp(-tl.abs(x - highest))
            total = tl.where(x > highest, total * smaller + 1, total + smaller)
            highest = tl.maximum(highest, x)
        peak = tl.max(highest, 0)
        log_total = peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0))
        tl.store(losses + row, weight * (log_total - at_target))
        if GRADIENT:
            for first in range(0, columns, BLOCK):
                inside = first + column < columns
                x, slope = scaled(tl.load(logits + first + column, inside, other=0.0), scale, softcap, SOFTCAP)
                gradient = tl.exp(x - log_total) - tl.where(first + column == target, 1.0, 0.0)
                gradient = (gradient * slope * weight).to(logits.dtype.element_ty)
                tl.store(logits + first + column, gradient, inside)
