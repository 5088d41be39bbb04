"""Triton kernels of norms over the last axis, with a weight and a gate; launched by ``torch_backend.ops.norm``.

With r = 1 / sqrt(sum of x^2 / COUNT + eps), y = w x r act(z): COUNT is 1 for rows of norm 1, and D for RMSNorm. A
program holds ROWS rows of D channels. Arithmetic is float32. x, z and dy [T, HEADS, D] have unit stride along D and any
along T and HEADS; a row is one of the R = T * HEADS.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def rows_of(x, row, token, head, rows, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """x[row] [ROWS, BLOCK] in float32, 0 outside; ``token`` and ``head`` are its strides."""
    column = tl.arange(0, BLOCK)
    known = (row < rows)[:, None] & (column < D)[None, :]
    place = (row // HEADS) * token + (row % HEADS) * head
    return tl.load(x + place[:, None] + column[None, :], known, other=0.0).to(tl.float32)


@triton.jit
def store(x, value, row, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """x[row] = value, x contiguous."""
    column = tl.arange(0, BLOCK)
    known = (row < rows)[:, None] & (column < D)[None, :]
    tl.store(x + row[:, None] * D + column[None, :], value.to(x.dtype.element_ty), known)


@triton.jit
def weight_of(w, WEIGHT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """w [1, BLOCK] in float32; 1 where there is none."""
    column = tl.arange(0, BLOCK)
    one = tl.where(column < D, 1.0, 0.0)
    if WEIGHT:
        one = tl.load(w + column, column < D, other=0.0).to(tl.float32)
    return one[None, :]


@triton.jit
def forward(
    x, w, z, y, eps, rows, x_t, x_h, z_t, z_h,
    HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
    WEIGHT: tl.constexpr, GATE: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [R, D]. Grid: (R / ROWS)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value = rows_of(x, row, x_t, x_h, rows, HEADS, D, BLOCK)
    value *= tl.rsqrt(tl.sum(value * value, 1) / COUNT + eps)[:, None] * weight_of(w, WEIGHT, D, BLOCK)
    if GATE:
        gate = rows_of(z, row, z_t, z_h, rows, HEADS, D, BLOCK)
        value *= tl.sigmoid(gate)
        if SILU:
            value *= gate
    store(y, value, row, rows, D, BLOCK)


@triton.jit
def backward(
    x, w, z, dy, dx, dw, dz, eps, rows, x_t, x_h, z_t, z_h, dy_t, dy_h,
    HEADS: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr,
    WEIGHT: tl.constexpr, GATE: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx, dz [R, D], and this program's share of dw [programs, D] in float32. Grid: (programs); each takes TILES tiles.

    With n = x r and m the gradient of n, dx = r (m - n sum(m n) / COUNT).
    """
    weight = weight_of(w, WEIGHT, D, BLOCK)
    dw_sum = tl.zeros([BLOCK], tl.float32)
    for place in range(TILES):
        row = (tl.program_id(0).to(tl.int64) * TILES + place) * ROWS + tl.arange(0, ROWS)
        value = rows_of(x, row, x_t, x_h, rows, HEADS, D, BLOCK)
        root = tl.rsqrt(tl.sum(value * value, 1) / COUNT + eps)[:, None]
        value *= root
        m = rows_of(dy, row, dy_t, dy_h, rows, HEADS, D, BLOCK)
        if GATE:
            gate = rows_of(z, row, z_t, z_h, rows, HEADS, D, BLOCK)
            opened = tl.sigmoid(gate)
            slope = opened * (1 - opened)
            if SILU:
                slope = opened + gate * slope
                opened *= gate
            store(dz, m * value * weight * slope, row, rows, D, BLOCK)
            m *= opened
        if WEIGHT:
            dw_sum += tl.sum(m * value, 0)
        m *= weight
        store(dx, root * (m - value * (tl.sum(m * value, 1) / COUNT)[:, None]), row, rows, D, BLOCK)
    if WEIGHT:
        column = tl.arange(0, BLOCK)
        tl.store(dw + tl.program_id(0) * D + column, dw_sum, column < D)
