"""Triton kernels of what stands between the two products of an expert: gates, their derivatives, and where both lie."""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import tanh
from torch_backend.ops.experts.place_kernels import at_places, tile_of


@triton.jit
def function(x, alpha, NAME: tl.constexpr):
    """An activation function and its derivative."""
    if NAME == "silu":
        s = tl.sigmoid(alpha * x)
        return x * s, s * (1 + alpha * x * (1 - s))
    elif NAME == "gelu_tanh":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        inner = 0.7978845608028654 * (1 + 0.134145 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
    else:
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2 * positive


@triton.jit
def activated(gate, value, alpha, limit, offset, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of an expert, and its derivatives by gate and value."""
    if LIMIT:
        free, free_value = gate <= limit, tl.abs(value) <= limit
        gate = tl.minimum(gate, limit)
        value = tl.minimum(tl.maximum(value, -limit), limit)
    f, slope = function(gate, alpha, NAME)
    if GATED:
        by_gate, by_value = (value + offset) * slope, f
        if LIMIT:
            by_gate, by_value = tl.where(free, by_gate, 0.0), tl.where(free_value, by_value, 0.0)
        return f * (value + offset), by_gate, by_value
    else:
        return f, slope, slope


@triton.jit
def halves_of(
    z, first, inside, column, INNER: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gates and values [BLOCK_M, BLOCK_N] of a tile of the first product, float32; without gates z itself twice."""
    OUTER: tl.constexpr = 2 * INNER if GATED else INNER
    WIDE: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    n = column * WIDE + tl.arange(0, WIDE)
    at = at_places(z, first, n, OUTER, BLOCK_M)
    mask = inside[:, None] & (n < (OUTER if INTERLEAVED else INNER))[None, :]
    found = tl.load(at, mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        gate, value = tl.split(tl.reshape(found, [BLOCK_M, BLOCK_N, 2]))
        return gate, value
    elif GATED:
        return found, tl.load(at + INNER, mask, other=0.0).to(tl.float32)
    else:
        return found, found


@triton.jit
def store_halves(
    z, gate, value, first, inside, column, INNER: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write what :func:`halves_of` reads."""
    OUTER: tl.constexpr = 2 * INNER if GATED else INNER
    WIDE: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    n = column * WIDE + tl.arange(0, WIDE)
    at = at_places(z, first, n, OUTER, BLOCK_M)
    mask = inside[:, None] & (n < (OUTER if INTERLEAVED else INNER))[None, :]
    kind = z.dtype.element_ty
    if INTERLEAVED:
        tl.store(at, tl.reshape(tl.join(gate, value), [BLOCK_M, WIDE]).to(kind), mask)
    else:
        tl.store(at, gate.to(kind), mask)
        if GATED:
            tl.store(at + INNER, value.to(kind), mask)


@triton.jit
def activation_backward(
    dh, z, weight, dz, weighted, first, inside, column, alpha, limit, offset,
    INNER: tl.constexpr, STORED: tl.constexpr, NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of dz and of ``weighted`` = weight h, from dh, the gradient of h before its weight.

    With STORED a part of dh is where ``weighted`` will be. Returns the tile's share [BLOCK_M] of the weight's gradient.
    """
    i = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (i < INNER)[None, :]
    at = at_places(weighted, first, i, INNER, BLOCK_M)
    if STORED:
        dh += tl.load(at, mask, other=0.0).to(tl.float32)
    gate, value = halves_of(z, first, inside, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    h, by_gate, by_value = activated(gate, value, alpha, limit, offset, NAME, GATED, LIMIT)
    share = tl.sum(tl.where(mask, dh * h, 0.0), 1)
    dh *= weight[:, None]
    store_halves(dz, dh * by_gate, dh * by_value, first, inside, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    tl.store(at, (h * weight[:, None]).to(weighted.dtype.element_ty), mask)
    return share


@triton.jit
def activate(
    z, bias, h, offsets, alpha, limit, offset,
    INNER: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BIAS: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h [S, I] of a finished product z [S, O], to which the bias is added in place. Grid: (row tiles, column tiles)."""
    expert, first, end = tile_of(offsets, tl.program_id(0), EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    column = tl.program_id(1)
    i = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (place < end)[:, None] & (i < INNER)[None, :]
    gate, value = halves_of(z, first, place < end, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    kind = h.dtype.element_ty
    if BIAS:
        line = bias + expert.to(tl.int64) * (2 * INNER if GATED else INNER)
        STEP: tl.constexpr = 2 if INTERLEAVED else 1
        SECOND: tl.constexpr = 1 if INTERLEAVED else INNER
        gate = (gate + tl.load(line + i * STEP, i < INNER, other=0.0).to(tl.float32)[None, :]).to(kind).to(tl.float32)
        if GATED:
            more = tl.load(line + SECOND + i * STEP, i < INNER, other=0.0).to(tl.float32)[None, :]
            value = (value + more).to(kind).to(tl.float32)
        store_halves(z, gate, value, first, place < end, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    result, _, _ = activated(gate, value, alpha, limit, offset, NAME, GATED, LIMIT)
    tl.store(at_places(h, first, i, INNER, BLOCK_M), result.to(kind), mask)
