"""Triton kernels of routed experts; kernels only, launched by ``torch_backend.ops.experts.triton``.

Every (token, choice) that names an expert has a place in an order sorted by expert; ``offsets`` [E+1] holds where each
expert's places begin and ``order`` [S] which (token, choice) stands at a place, as ``token * K + choice``. Places are
divided into tiles of one expert each: tile t belongs to the expert that ``tile_of`` finds from the offsets, so the grid
depends on S and E alone and nothing is read by the host. Products accumulate in float32.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_kernels import tanh


@triton.jit
def count(indices, counts, entries, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """counts [E, blocks]: how many of a block's entries chose each expert. Grid: (blocks,)."""
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices + entry, entry < entries, other=-1).to(tl.int32)
    for first in tl.static_range(0, EXPERTS, PART):
        expert = first + tl.arange(0, PART)
        found = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + expert.to(tl.int64) * blocks + block, found, expert < EXPERTS)


@triton.jit
def place(
    indices, ends, order, places, offsets, entries, blocks,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """order [S], places [S] (-1 for no expert) and offsets [E+1] from ends, the running sum of counts [E, blocks].

    Entries of one expert keep their order. Grid: (blocks,).
    """
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    entry = block * BLOCK + within
    chosen = tl.load(indices + entry, entry < entries, other=-1).to(tl.int32)
    chosen = tl.where((chosen >= 0) & (chosen < EXPERTS), chosen, -1)
    same = chosen[:, None] == chosen[None, :]
    later = tl.sum((same & (within[None, :] >= within[:, None])).to(tl.int32), 1)
    routed = chosen >= 0
    end = tl.load(ends + chosen.to(tl.int64) * blocks + block, routed, other=0)
    at = end - later
    tl.store(order + at, entry, routed)
    tl.store(places + entry, tl.where(routed, at, -1), entry < entries)
    if block == 0:
        for first in tl.static_range(0, EXPERTS, PART):
            expert = first + tl.arange(0, PART)
            last = tl.load(ends + (expert.to(tl.int64) + 1) * blocks - 1, expert < EXPERTS, other=0)
            tl.store(offsets + expert + 1, last, expert < EXPERTS)
        tl.store(offsets, 0)


@triton.jit
def tile_of(offsets, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The expert of a tile, its first place and the end of the expert's places; an expert of E or more is none."""
    e = tl.arange(0, PADDED)
    start = tl.load(offsets + e, e < EXPERTS, other=0)
    end = tl.load(offsets + e + 1, e < EXPERTS, other=0)
    tiles = tl.cdiv(end - start, BLOCK)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first = tl.sum(tl.where(e == expert, start, 0), 0) + (tile - earlier) * BLOCK
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def tile_and_columns(tiles, wide, GROUP: tl.constexpr):
    """The row tile and the column tile of a program: neighbours share a few row tiles and pass over the columns."""
    program = tl.program_id(0)
    group = program // (GROUP * wide)
    height = tl.minimum(tiles - group * GROUP, GROUP)
    rest = program - group * GROUP * wide
    return group * GROUP + rest % height, rest // height


@triton.jit
def lines_of(order, place, inside, GATHER: tl.constexpr, TOP_K: tl.constexpr):
    """The line of an operand at each place: the token's with GATHER, else the place itself; 0 outside."""
    if GATHER:
        return (tl.load(order + place, inside, other=0) // TOP_K).to(tl.int64)
    return tl.where(inside, place, 0).to(tl.int64)


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
    w_at = w + n[None, :] * w_n + k[:, None] * w_k
    w2_at = w + second[None, :] * w_n + k[:, None] * w_k
    for first in range(0, K, BLOCK_K):
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
def at_places(x, first, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a tile of x [S, WIDTH] from place ``first`` on; offsets of 32 bits take half the registers of 64."""
    return x + first.to(tl.int64) * WIDTH + (tl.arange(0, BLOCK)[:, None] * WIDTH + columns[None, :])


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
def rows(
    a, w, bias, t, b, order, offsets, y, tiles, scale, w_e, w_n, w_k, b_e, b_n, b_r,
    N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [S, N] = scale a W_e^T + t B_e^T + bias_e at each place, plus y itself with ADD; a [.., K], w [E, N, K].

    With R, t [S, R] and b [E, N, R] are an adapter. Grid: (row tiles * column tiles,).
    """
    tile, column = tile_and_columns(tiles, tl.cdiv(N, BLOCK_N), GROUP)
    expert, first, end = tile_of(offsets, tile, EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    inside = place < end
    n, known = columns_of(column, N, BLOCK_N)
    e = expert.to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if K > 0:
        lines = lines_of(order, place, inside, GATHER, TOP_K)
        total, _ = products(a, lines, w + e * w_e, w_n, w_k, known, known, total, total, K, False, BLOCK_K, PRECISION)
        total *= scale
    if R > 0:
        lines = lines_of(order, place, inside, False, TOP_K)
        total, _ = products(t, lines, b + e * b_e, b_n, b_r, known, known, total, total, R, False, BLOCK_R, PRECISION)
    if BIAS:
        total += tl.load(bias + e * N + known).to(tl.float32)[None, :]
    at = at_places(y, first, n, N, BLOCK_M)
    mask = inside[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(at, mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(y.dtype.element_ty), mask)


@triton.jit
def up(
    x, w, bias, t, b, order, offsets, z, h, tiles, alpha, limit, offset, w_e, w_n, w_k, b_e, b_n, b_r,
    INNER: tl.constexpr, K: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
    NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """z [S, O], the first product, with SAVE, and h [S, I], its activation, both at each place.

    Gates are the first half of z's columns and values the second, or both alternate. Grid: (row * column tiles,).
    """
    tile, column = tile_and_columns(tiles, tl.cdiv(INNER, BLOCK_N), GROUP)
    expert, first, end = tile_of(offsets, tile, EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    inside = place < end
    e = expert.to(tl.int64)
    OUTER: tl.constexpr = 2 * INNER if GATED else INNER
    # Interleaved gates and values are one tile of neighbouring columns, otherwise two.
    WIDE: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N
    TWO: tl.constexpr = GATED and not INTERLEAVED
    n, known = columns_of(column, OUTER if INTERLEAVED else INNER, WIDE)
    lines = lines_of(order, place, inside, True, TOP_K)
    first_half = tl.zeros([BLOCK_M, WIDE], tl.float32)
    second_half = tl.zeros([BLOCK_M, WIDE], tl.float32)
    second = known + INNER if TWO else known
    first_half, second_half = products(
        x, lines, w + e * w_e, w_n, w_k, known, second, first_half, second_half, K, TWO, BLOCK_K, PRECISION
    )
    if R > 0:
        lines = lines_of(order, place, inside, False, TOP_K)
        first_half, second_half = products(
            t, lines, b + e * b_e, b_n, b_r, known, second, first_half, second_half, R, TWO, BLOCK_R, PRECISION
        )
    if BIAS:
        first_half += tl.load(bias + e * OUTER + known).to(tl.float32)[None, :]
        if TWO:
            second_half += tl.load(bias + e * OUTER + second).to(tl.float32)[None, :]
    kind = h.dtype.element_ty
    rounded, rounded_2 = first_half.to(kind), second_half.to(kind)
    if SAVE:
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
    NAME: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dz [S, O], weighted [S, I] = weight h, and shares [S, column tiles], whose sum is the gradient of the weight.

    The gradient of h before its weight is ``dy W_e + t b_e``, w being [E, I, D] here. Grid: (row * column tiles,).
    """
    wide = tl.cdiv(INNER, BLOCK_N)
    tile, column = tile_and_columns(tiles, wide, GROUP)
    expert, first, end = tile_of(offsets, tile, EXPERTS, PADDED, BLOCK_M)
    if expert >= EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    inside = place < end
    e = expert.to(tl.int64)
    i, known = columns_of(column, INNER, BLOCK_N)
    dh = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if K > 0:
        lines = lines_of(order, place, inside, True, TOP_K)
        dh, _ = products(dy, lines, w + e * w_e, w_n, w_k, known, known, dh, dh, K, False, BLOCK_K, PRECISION)
    if R > 0:
        lines = lines_of(order, place, inside, False, TOP_K)
        dh, _ = products(t, lines, b + e * b_e, b_n, b_r, known, known, dh, dh, R, False, BLOCK_R, PRECISION)
    mask = inside[:, None] & (i < INNER)[None, :]
    weighted_at = at_places(weighted, first, i, INNER, BLOCK_M)
    if K == 0:  # the product was made already, where ``weighted`` will be
        dh += tl.load(weighted_at, mask, other=0.0).to(tl.float32)
    gate, value = halves_of(z, first, inside, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    h, by_gate, by_value = activated(gate, value, alpha, limit, offset, NAME, GATED, LIMIT)
    entry = tl.load(order + place, inside, other=0)
    weight = tl.load(weights + entry, inside, other=0.0).to(tl.float32)[:, None]
    share = tl.sum(tl.where(mask, dh * h, 0.0), 1)
    tl.store(shares + place.to(tl.int64) * wide + column, share, inside)
    dh *= weight
    store_halves(dz, dh * by_gate, dh * by_value, first, inside, column, INNER, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
    tl.store(weighted_at, (h * weight).to(weighted.dtype.element_ty), mask)


@triton.jit
def outer(
    a, b, order, offsets, out, o_e, o_m, o_n,
    M: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [E, M, N] = the sum of a_s b_s^T over each expert's places; zero for an expert without. Grid: (tiles, E)."""
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
        total = tl.dot(x, y, total, input_precision=PRECISION)
    at = out + e.to(tl.int64) * o_e + m.to(tl.int64)[:, None] * o_m + n.to(tl.int64)[None, :] * o_n
    tl.store(at, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def sums(
    a, weights, order, offsets, out,
    N: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [E, N] float32 = the sum of a over each expert's places, times the weight of a place. Grid: (tiles, E)."""
    e = tl.program_id(1)
    start, end = tl.load(offsets + e), tl.load(offsets + e + 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_S):
        place = first + tl.arange(0, BLOCK_S)
        inside = place < end
        lines = lines_of(order, place, inside, GATHER, TOP_K)
        x = tl.load(a + lines[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if WEIGHTS:
            entry = tl.load(order + place, inside, other=0)
            x *= tl.load(weights + entry, inside, other=0.0).to(tl.float32)[:, None]
        total += x
    tl.store(out + e * N + n, tl.sum(total, 0), n < N)


@triton.jit
def bias_shares(
    dy, bias, places, indices, shares, entries, D: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """shares [S] by (token, choice), += the product of the token's dy with the bias of its expert. Grid: (blocks,)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    routed = (entry < entries) & (tl.load(places + entry, entry < entries, other=-1) >= 0)
    expert = tl.load(indices + entry, routed, other=0).to(tl.int64)
    token = (entry // TOP_K).to(tl.int64)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        mask = routed[:, None] & (d < D)[None, :]
        x = tl.load(dy + token[:, None] * D + d[None, :], mask, other=0.0).to(tl.float32)
        total += x * tl.load(bias + expert[:, None] * D + d[None, :], mask, other=0.0).to(tl.float32)
    found = tl.load(shares + entry, routed, other=0.0)
    tl.store(shares + entry, found + tl.sum(total, 1), routed)


@triton.jit
def combine(
    y, places, weights, out, tokens, D: tl.constexpr, TOP_K: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, D] = the sum of a token's choices in their order, weighted with WEIGHTS. Grid: (token, column tiles)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for choice in range(TOP_K):
        entry = token.to(tl.int64) * TOP_K + choice
        place = tl.load(places + entry, token < tokens, other=-1).to(tl.int64)
        mask = (place >= 0)[:, None] & (d < D)[None, :]
        x = tl.load(y + place[:, None] * D + d[None, :], mask, other=0.0).to(tl.float32)
        if WEIGHTS:
            x *= tl.load(weights + entry, token < tokens, other=0.0).to(tl.float32)[:, None]
        total += x
    at = out + token.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, total.to(out.dtype.element_ty), (token < tokens)[:, None] & (d < D)[None, :])


@triton.jit
def gather(
    x, order, offsets, out, D: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [S, D]: the token's x at each place. Grid: (place tiles, column tiles)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(offsets + EXPERTS)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lines = lines_of(order, place, inside, True, TOP_K)
    mask = inside[:, None] & (d < D)[None, :]
    value = tl.load(x + lines[:, None] * D + d[None, :], mask, other=0.0)
    tl.store(out + place.to(tl.int64)[:, None] * D + d[None, :], value, mask)


@triton.jit
def activate(
    z, bias, h, offsets, tiles, alpha, limit, offset,
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
