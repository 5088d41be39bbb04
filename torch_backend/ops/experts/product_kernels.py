"""Triton kernels of the products of routed experts, which add in float32. For places see :mod:`.place_kernels`."""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.experts.activation_kernels import activated, activation_backward
from torch_backend.ops.experts.place_kernels import at_places, lines_of, tile_of, weights_of


@triton.jit
def tile_and_columns(tiles, wide, GROUP: tl.constexpr):
    """The row tile and the column tile of a program: neighbours share a few row tiles and pass over the columns."""
    program = tl.program_id(0)
    group = program // (GROUP * wide)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    rest = program - group * GROUP * wide
    return group * GROUP + rest % height, rest // height


@triton.jit
def columns_of(tile, N: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a tile, and those to read, which wrap around at N so that no read needs a mask.

    Runs of 16 stay whole, which the compiler cannot see past the remainder, and without which it reads one by one.
    """
    n = tile * BLOCK + tl.arange(0, BLOCK)
    if N % BLOCK == 0:
        return n, n
    if N % 16 == 0:
        return n, tl.max_contiguous(tl.multiple_of(n % N, 16), 16)
    return n, n % N


@triton.jit
def products(
    a, lines, w, w_n, w_k, n, second, total, total_2,
    K: tl.constexpr, DOUBLE: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total + a[lines] @ w[n].T, and with DOUBLE total_2 + a[lines] @ w[second].T, a [.., K] without gaps."""
    k = tl.arange(0, BLOCK_K)
    a_at = a + lines[:, None] * K + k[None, :]
    w += k.to(tl.int64)[:, None] * w_k
    w_at, w2_at = w + n.to(tl.int64)[None, :] * w_n, w + second.to(tl.int64)[None, :] * w_n
    # A single block is unrolled, which takes no stages of its own.
    for first in tl.range(0, K, BLOCK_K, num_stages=1 if K <= BLOCK_K else None):
        if K % BLOCK_K == 0:
            x, y = tl.load(a_at), tl.load(w_at)
        else:
            x = tl.load(a_at, (first + k < K)[None, :], other=0.0)
            y = tl.load(w_at, (first + k < K)[:, None], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        if DOUBLE:
            if K % BLOCK_K == 0:
                y2 = tl.load(w2_at)
            else:
                y2 = tl.load(w2_at, (first + k < K)[:, None], other=0.0)
            total_2 = tl.dot(x, y2, total_2, input_precision=PRECISION)
            w2_at += BLOCK_K * w_k
        a_at += BLOCK_K
        w_at += BLOCK_K * w_k
    return total, total_2


@triton.jit
def places_of(
    offsets, tiles, wide, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The expert of a program's tile, its first place, all its places, which are the expert's, and its column tile.

    An expert of EXPERTS or more is none.
    """
    tile, column = tile_and_columns(tiles, wide, GROUP)
    expert, first, end = tile_of(offsets, tile, EXPERTS, PADDED, BLOCK)
    place = first + tl.arange(0, BLOCK)
    return expert, first, place, place < end, column


@triton.jit
def expert_products(
    a, w, t, b, order, place, inside, expert, scale, w_e, w_n, w_k, b_e, b_n, b_r, n, second, total, total_2,
    K: tl.constexpr, R: tl.constexpr, DOUBLE: tl.constexpr, GATHER: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`products` of an expert's weights w [E, N, K] and scale, and of its adapter, t [S, R] and b [E, N, R].

    Lines of a are of places, with GATHER of their tokens. K or R of 0 leaves out the one or the other.
    """
    e = expert.to(tl.int64)
    if K > 0:
        lines = lines_of(order, place, inside, GATHER, TOP_K)
        total, total_2 = products(
            a, lines, w + e * w_e, w_n, w_k, n, second, total, total_2, K, DOUBLE, BLOCK_K, PRECISION
        )
        total, total_2 = total * scale, total_2 * scale
    if R > 0:
        lines = lines_of(order, place, inside, False, TOP_K)
        total, total_2 = products(
            t, lines, b + e * b_e, b_n, b_r, n, second, total, total_2, R, DOUBLE, BLOCK_R, PRECISION
        )
    return total, total_2


@triton.jit
def rows(
    a, w, bias, t, b, order, offsets, y, tiles, scale, w_e, w_n, w_k, b_e, b_n, b_r,
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [S, N] = scale a W_e^T + t B_e^T + bias_e at each place; a [.., K], w [E, N, K].

    With R, t [S, R] and b [E, N, R] are an adapter. Grid: (row tiles * column tiles,).
    """
    expert, first, place, inside, column = places_of(
        offsets, tiles, tl.cdiv(N, BLOCK_N), EXPERTS, PADDED, BLOCK_M, GROUP
    )
    if expert >= EXPERTS:
        return
    n, known = columns_of(column, N, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total, _ = expert_products(
        a, w, t, b, order, place, inside, expert, scale, w_e, w_n, w_k, b_e, b_n, b_r, known, known, total, total,
        K, R, False, GATHER, TOP_K, BLOCK_K, BLOCK_R, PRECISION,
    )  # fmt: skip
    if BIAS:
        total += tl.load(bias + expert.to(tl.int64) * N + known).to(tl.float32)[None, :]
    tl.store(at_places(y, first, n, N, BLOCK_M), total.to(y.dtype.element_ty), inside[:, None] & (n < N)[None, :])


@triton.jit
def up(
    x, w, bias, t, b, order, offsets, z, h, tiles, alpha, limit, offset, w_e, w_n, w_k, b_e, b_n, b_r,
    INNER: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """z [S, O], the first product, and h [S, I], its activation, both at each place.

    Gates are the first half of z's columns and values the second, or both alternate. Grid: (row * column tiles,).
    """
    expert, first, place, inside, column = places_of(
        offsets, tiles, tl.cdiv(INNER, BLOCK_N), EXPERTS, PADDED, BLOCK_M, GROUP
    )
    if expert >= EXPERTS:
        return
    OUTER: tl.constexpr = 2 * INNER if GATED else INNER
    # Interleaved gates and values are one tile of neighbouring columns, otherwise two.
    WIDE: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    TWO: tl.constexpr = GATED and not INTERLEAVED
    n, known = columns_of(column, OUTER if INTERLEAVED else INNER, WIDE)
    first_half = tl.zeros([BLOCK_M, WIDE], tl.float32)
    second_half = tl.zeros([BLOCK_M, WIDE], tl.float32)
    second = known + INNER if TWO else known
    first_half, second_half = expert_products(
        x, w, t, b, order, place, inside, expert, 1.0, w_e, w_n, w_k, b_e, b_n, b_r, known, second,
        first_half, second_half, K, R, TWO, True, TOP_K, BLOCK_K, BLOCK_R, PRECISION,
    )  # fmt: skip
    if BIAS:
        e = expert.to(tl.int64)
        first_half += tl.load(bias + e * OUTER + known).to(tl.float32)[None, :]
        if TWO:
            second_half += tl.load(bias + e * OUTER + second).to(tl.float32)[None, :]
    kind = h.dtype.element_ty
    rounded, rounded_2 = first_half.to(kind), second_half.to(kind)
    at = at_places(z, first, n, OUTER, BLOCK_M)
    mask = inside[:, None] & (n < (OUTER if INTERLEAVED else INNER))[None, :]
    tl.store(at, rounded, mask)
    if TWO:
        tl.store(at + INNER, rounded_2, mask)
    if INTERLEAVED:
        gate, value = tl.split(tl.reshape(rounded, [BLOCK_M, BLOCK_N, 2]))
    else:
        gate, value = rounded, rounded_2
    result, _, _ = activated(gate.to(tl.float32), value.to(tl.float32), alpha, limit, offset, NAME, GATED, LIMIT)
    i = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_h = inside[:, None] & (i < INNER)[None, :]
    tl.store(at_places(h, first, i, INNER, BLOCK_M), result.to(kind), mask_h)


@triton.jit
def down_backward(
    dy, w, t, b, z, weights, order, offsets, dz, weighted, shares, tiles, alpha, limit, offset,
    w_e, w_n, w_k, b_e, b_n, b_r,
    INNER: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dz [S, O], weighted [S, I] = weight h, and shares [S, column tiles], whose sum is the gradient of the weight.

    The gradient of h before its weight is ``dy W_e + t b_e``, w being [E, I, D] here; with K of 0, ``dy W_e`` is where
    ``weighted`` will be. Grid: (row * column tiles,).
    """
    wide = tl.cdiv(INNER, BLOCK_N)
    expert, first, place, inside, column = places_of(offsets, tiles, wide, EXPERTS, PADDED, BLOCK_M, GROUP)
    if expert >= EXPERTS:
        return
    _, known = columns_of(column, INNER, BLOCK_N)
    dh = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dh, _ = expert_products(
        dy, w, t, b, order, place, inside, expert, 1.0, w_e, w_n, w_k, b_e, b_n, b_r, known, known, dh, dh,
        K, R, False, True, TOP_K, BLOCK_K, BLOCK_R, PRECISION,
    )  # fmt: skip
    weight = weights_of(weights, order, place, inside)
    if PARTS == 2:
        left, right = tl.split(tl.permute(tl.reshape(dh, [BLOCK_M, 2, BLOCK_N // 2]), [0, 2, 1]))
        share = activation_backward(
            left, z, weight, dz, weighted, first, inside, 2 * column, alpha, limit, offset, INNER, K == 0,
            NAME, GATED, LIMIT, INTERLEAVED, BLOCK_M, BLOCK_N // 2,
        )  # fmt: skip
        share += activation_backward(
            right, z, weight, dz, weighted, first, inside, 2 * column + 1, alpha, limit, offset, INNER, K == 0,
            NAME, GATED, LIMIT, INTERLEAVED, BLOCK_M, BLOCK_N // 2,
        )  # fmt: skip
    else:
        share = activation_backward(
            dh, z, weight, dz, weighted, first, inside, column, alpha, limit, offset, INNER, K == 0,
            NAME, GATED, LIMIT, INTERLEAVED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    tl.store(shares + place.to(tl.int64) * wide + column, share, inside)


@triton.jit
def outer(
    a, b, weights, order, offsets, out, o_e, o_m, o_n,
    M: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    WEIGHTS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [E, M, N] = the sum of a_s b_s^T over each expert's places; zero for an expert without.

    With WEIGHTS, b is weighted at each place. Grid: (tiles, E).
    """
    row, column = tile_and_columns(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    e = tl.program_id(1)
    start, end = tl.load(offsets + e), tl.load(offsets + e + 1)
    m, m_known = columns_of(row, M, BLOCK_M)
    n, n_known = columns_of(column, N, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_S):
        place = first + tl.arange(0, BLOCK_S)
        inside = place < end
        lines_a = lines_of(order, place, inside, GATHER_A, TOP_K)
        lines_b = lines_of(order, place, inside, GATHER_B, TOP_K)
        x = tl.load(a + lines_a[None, :] * M + m_known[:, None], inside[None, :], other=0.0)
        y = tl.load(b + lines_b[:, None] * N + n_known[None, :], inside[:, None], other=0.0)
        if WEIGHTS:
            y = (y.to(tl.float32) * weights_of(weights, order, place, inside)[:, None]).to(b.dtype.element_ty)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    at = out + e.to(tl.int64) * o_e + m.to(tl.int64)[:, None] * o_m + n.to(tl.int64)[None, :] * o_n
    tl.store(at, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
