"""The Triton kernels of the chunked cross-entropy; launched by ``torch_backend.ops.linear_cross_entropy``.

``softmax_loss`` turns rows of logits into their losses and gradients, in place. It reads a row twice, first for the
softmax's denominator (online, Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867), then for the gradient.

The others make no logits at all. With the logit ``x_t`` of the target as the base, a row's loss is ``log(1 + S)`` and
its gradient ``2^(x_j - x_t) / (1 + S)``, at the target ``-S / (1 + S)``, where ``S`` sums the powers of other columns.
``target_logits`` makes the bases, ``powers`` multiplies hidden states with the output layer and writes powers where a
plain product would write logits, and ``finish`` makes losses of their sums and leaves the division, which is one
factor per row, to the products that follow.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import LOG2E, tanh

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# A power is at most 2^100, so that no product with it overflows; rows whose sum is larger than 2^80 (a loss of 55) are
# made again from their logits.
HIGHEST: tl.constexpr = tl.constexpr(100.0)
LARGEST: tl.constexpr = tl.constexpr(2.0**80)


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
def softmax_row(
    logits, target, weight, columns, scale, softcap, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """The loss of one row of logits, which with GRADIENT becomes the gradient.

    The last block stands apart, so that the others need no mask. What is read first is asked to stay in the
    second-level cache, from where it is read again.
    """
    column = tl.arange(0, BLOCK)
    whole = columns // BLOCK * BLOCK
    inside = whole + column < columns
    at_target, slope_there = scaled(tl.load(logits + target), scale, softcap, SOFTCAP)
    highest = tl.full([BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, whole, BLOCK):
        x = tl.load(logits + first + column, eviction_policy="evict_last")
        x, _ = scaled(x, scale, softcap, SOFTCAP)
        highest, total = add_exponentials(x, highest, total)
    x = tl.load(logits + whole + column, inside, other=0.0, eviction_policy="evict_last")
    x, _ = scaled(x, scale, softcap, SOFTCAP)
    highest, total = add_exponentials(tl.where(inside, x, -1.0e30), highest, total)
    peak = tl.max(highest, 0)
    log_total = peak + tl.log2(tl.sum(total * tl.exp2(highest - peak), 0))
    if GRADIENT:
        for first in range(0, whole, BLOCK):
            x = tl.load(logits + first + column, eviction_policy="evict_first")
            x, slope = scaled(x, scale, softcap, SOFTCAP)
            gradient = (tl.exp2(x - log_total) * (slope * weight)).to(logits.dtype.element_ty)
            tl.store(logits + first + column, gradient, eviction_policy="evict_first")
        x = tl.load(logits + whole + column, inside, other=0.0, eviction_policy="evict_first")
        x, slope = scaled(x, scale, softcap, SOFTCAP)
        gradient = (tl.exp2(x - log_total) * (slope * weight)).to(logits.dtype.element_ty)
        tl.store(logits + whole + column, gradient, inside, eviction_policy="evict_first")
        tl.debug_barrier()  # the target's own gradient goes over what was stored for it
        gradient = (tl.exp2(at_target - log_total) - 1) * (slope_there * weight)
        tl.store(logits + target, gradient.to(logits.dtype.element_ty))
    return weight * (log_total - at_target) * LN2


@triton.jit
def softmax_loss(
    logits, targets, weights, losses, rows, columns, stride, ignore_index, scale, softcap,
    WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses [rows] float32; with GRADIENT the logits [rows, columns] become the gradient. Grid: (programs,).

    Programs take one row after the other, so that the rows that are read at one time fit the second-level cache.
    """
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + row * tl.cast(stride, tl.int64)
        target = tl.load(targets + row)
        if target == ignore_index:
            tl.store(losses + row, 0.0)
            if GRADIENT:
                zeros = tl.zeros([BLOCK], tl.float32).to(logits.dtype.element_ty)
                for first in range(0, columns, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    tl.store(line + column, zeros, column < columns)
        else:
            weight = 1.0
            if WEIGHTS:
                weight = tl.load(weights + row).to(tl.float32)
            loss = softmax_row(line, target, weight, columns, scale, softcap, SOFTCAP, GRADIENT, BLOCK)
            tl.store(losses + row, loss)


@triton.jit
def target_logits(
    hidden, weight, targets, bases, width, stride, weight_stride, ignore_index, scale, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bases [rows] float32: each target's logit in base 2; where it is ignored, one that all powers vanish beside.

    Grid: (rows,).
    """
    row = tl.program_id(0)
    target = tl.load(targets + row)
    base = 1.0e30
    if target != ignore_index:
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            d = first + tl.arange(0, BLOCK)
            h = tl.load(hidden + row * tl.cast(stride, tl.int64) + d, d < width, other=0.0).to(tl.float32)
            w = tl.load(weight + target * tl.cast(weight_stride, tl.int64) + d, d < width, other=0.0).to(tl.float32)
            total += h * w
        base, _ = scaled(tl.sum(total, 0), scale, softcap, SOFTCAP)
    tl.store(bases + row, base)


@triton.jit
def powers(
    hidden, weight, out, targets, bases, sums, rows, columns, scale, softcap,
    WIDTH: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = slope * 2^(logit - base), 0 at the target; sums [rows, tiles] of it without the slope.

    hidden [rows, WIDTH], weight [columns, WIDTH] and out are tensor descriptors. Grid: (programs,); those that run at
    the same time share their columns of the weight.
    """
    tall, wide = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=True):
        first_row, block = tile % tall * BLOCK_M, tile // tall
        first_column = block * BLOCK_N
        logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, WIDTH, BLOCK_K):
            logits = tl.dot(hidden.load([first_row, k]), weight.load([first_column, k]).T, logits)
        row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        target = tl.load(targets + row, row < rows, other=-1)
        base = tl.load(bases + row, row < rows, other=0.0)
        x, slope = scaled(logits, scale, softcap, SOFTCAP)
        counted = (column[None, :] < columns) & (column[None, :] != target[:, None])
        power = tl.where(counted, tl.exp2(tl.minimum(x - base[:, None], HIGHEST)), 0.0)
        tl.store(sums + row.to(tl.int64) * wide + block, tl.sum(power, 1), row < rows)
        if GRADIENT:
            if SOFTCAP:
                power *= slope * (1 / scale)
            # halves, for which half as much shared memory is set aside
            left, right = tl.split(tl.permute(tl.reshape(power, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
            out.store([first_row, first_column], left.to(out.dtype))
            out.store([first_row, first_column + BLOCK_N // 2], right.to(out.dtype))


@triton.jit
def finish(
    hidden, weight, out, targets, weights, bases, sums, losses, factors, divided, width, stride, weight_stride, columns,
    tiles, ignore_index, scale, softcap,
    WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """losses and factors [rows] float32 from the sums of a chunk's powers; divided = hidden * factors. Grid: (rows,).

    The gradient of the logits is ``factors * out`` after ``-S`` has been written at each row's target. Where powers
    overflow, the row's logits are made here, slowly, and turned into their gradient, of factor 1.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    line = out + row * columns
    factor, loss = 0.0, 0.0
    if target != ignore_index:
        factor = scale
        if WEIGHTS:
            factor *= tl.load(weights + row).to(tl.float32)
        tile = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, tiles, BLOCK):
            total += tl.load(sums + row * tiles + first + tile, first + tile < tiles, other=0.0)
        others = tl.sum(total, 0)
        if others < LARGEST:
            loss = factor / scale * tl.log2(1 + others) * LN2
            factor /= 1 + others
            if GRADIENT:
                at_target = -others
                if SOFTCAP:
                    capped = tl.load(bases + row) / (softcap * LOG2E)
                    at_target *= 1 - capped * capped
                tl.store(line + target, at_target.to(out.dtype.element_ty))
        else:
            column, d = tl.arange(0, BLOCK_N).to(tl.int64), tl.arange(0, BLOCK_K)
            for first in range(0, columns, BLOCK_N):
                logits = tl.zeros([BLOCK_N], tl.float32)
                for k in range(0, width, BLOCK_K):
                    h = tl.load(hidden + row * stride + k + d, k + d < width, other=0.0).to(tl.float32)
                    inside = (first + column[:, None] < columns) & (k + d[None, :] < width)
                    w = tl.load(weight + (first + column[:, None]) * weight_stride + k + d[None, :], inside, other=0.0)
                    logits += tl.sum(w.to(tl.float32) * h[None, :], 1)
                tl.store(line + first + column, logits.to(out.dtype.element_ty), first + column < columns)
            tl.debug_barrier()
            loss = softmax_row(line, target, factor / scale, columns, scale, softcap, SOFTCAP, GRADIENT, BLOCK)
            factor = 1.0
    tl.store(losses + row, loss)
    if GRADIENT:
        tl.store(factors + row, factor)
        for first in range(0, width, BLOCK_K):
            d = first + tl.arange(0, BLOCK_K)
            h = tl.load(hidden + row * stride + d, d < width, other=0.0).to(tl.float32)
            tl.store(divided + row * width + d, (h * factor).to(divided.dtype.element_ty), d < width)


@triton.jit
def scale_rows(x, factors, out, width, stride, BLOCK: tl.constexpr):
    """out = x * factors, both [rows, width] without gaps; one factor for all rows if ``stride`` is 0. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row * stride).to(tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(x + row * width + column, column < width).to(tl.float32) * factor
        tl.store(out + row * width + column, values.to(out.dtype.element_ty), column < width)
