"""Triton kernels of rotary position embedding; kernels only, launched by ``torch_backend.ops.rope``.

A program holds a tile [tokens, heads, channels], so the cosines of a token are read once for many heads and every load
is 16 bytes a thread. Arithmetic is float32 and rounded once; tensors may have any strides. One launch turns q and k.

Names: t token, h head, c channel; ``x_t`` is the stride of x along t. HALF is R/2, half the rotated channels, and PAIRS
the power of two that holds it; REST holds the channels after R (0 where there are none to touch).
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def index(n, WIDE: tl.constexpr):
    """Indices of tokens or heads; WIDE where an offset in elements does not fit in 32 bits."""
    if WIDE:
        n = n.to(tl.int64)
    return n


@triton.jit
def load_pairs(x, rows, x_c, inside, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and second channel of each pair, float32 [tokens, heads, PAIRS], zero where ``inside`` is false."""
    if INTERLEAVED:
        c = tl.arange(0, 2 * PAIRS).to(rows.dtype)[None, None, :]
        both = tl.load(x + rows + c * x_c, inside & (c < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, [both.shape[0], both.shape[1], PAIRS, 2]))
    else:
        c = tl.arange(0, PAIRS).to(rows.dtype)[None, None, :]
        a = tl.load(x + rows + c * x_c, inside & (c < HALF), other=0.0)
        b = tl.load(x + rows + (c + HALF) * x_c, inside & (c < HALF), other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(x, rows, x_c, inside, a, b, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write what :func:`load_pairs` reads."""
    a, b = a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)
    if INTERLEAVED:
        c = tl.arange(0, 2 * PAIRS).to(rows.dtype)[None, None, :]
        both = tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1], 2 * PAIRS])
        tl.store(x + rows + c * x_c, both, inside & (c < 2 * HALF))
    else:
        c = tl.arange(0, PAIRS).to(rows.dtype)[None, None, :]
        tl.store(x + rows + c * x_c, a, inside & (c < HALF))
        tl.store(x + rows + (c + HALF) * x_c, b, inside & (c < HALF))


@triton.jit
def load_rest(x, rows, x_c, inside, FROM: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    """The channels that are not rotated, in their own dtype [tokens, heads, REST]."""
    c = FROM + tl.arange(0, REST).to(rows.dtype)[None, None, :]
    return tl.load(x + rows + c * x_c, inside & (c < HEAD_DIM), other=0.0)


@triton.jit
def store_rest(x, rows, x_c, inside, rest, FROM: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr):
    c = FROM + tl.arange(0, REST).to(rows.dtype)[None, None, :]
    tl.store(x + rows + c * x_c, rest.to(x.dtype.element_ty), inside & (c < HEAD_DIM))


@triton.jit
def load_angles(
    cos, sin, t, present, cos_t, cos_c, sin_t, sin_c, HALF: tl.constexpr, PAIRS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Cosines and sines of the tile's tokens, float32 [tokens, BLOCK_H, PAIRS].

    Every head's thread loads its own copy, from the first-level cache: spreading one copy over the heads would go
    through shared memory and its barriers, which costs more.
    """
    c = tl.arange(0, PAIRS).to(t.dtype)[None, None, :]
    shape: tl.constexpr = [t.shape[0], BLOCK_H, PAIRS]
    valid = tl.broadcast_to(present & (c < HALF), shape)
    cosines = tl.load(tl.broadcast_to(cos + t * cos_t + c * cos_c, shape), valid, other=0.0)
    sines = tl.load(tl.broadcast_to(sin + t * sin_t + c * sin_c, shape), valid, other=0.0)
    return cosines.to(tl.float32), sines.to(tl.float32)


@triton.jit
def sum_products(a, b, OVER_HEADS: tl.constexpr):
    """Sum of a b over a head's pairs [tokens, heads, 1], or over all heads too [tokens, 1, 1]."""
    total = tl.sum(a * b, 2, keep_dims=True)
    if OVER_HEADS:
        total = tl.sum(total, 1, keep_dims=True)
    return total


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    q, k, q_out, k_out, cos, sin, q_weight, k_weight, tokens,
    q_t, q_h, q_c, k_t, k_h, k_c, qo_t, qo_h, qo_c, ko_t, ko_h, ko_c, cos_t, cos_c, sin_t, sin_c, eps,
    H_Q: tl.constexpr, H_K: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, NORM: tl.constexpr,
    OVER_HEADS: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Normalise (if NORM) and rotate q and k, which have one dtype; CONJUGATE turns back: the backward without NORM.

    Grid: (token tiles * (head tiles of q + of k),), the heads of a token side by side, as they lie in memory. A program
    chooses its tensor first, so that there is one body: half the instructions to fetch where nothing is cached.
    """
    q_tiles: tl.constexpr = (H_Q + BLOCK_H - 1) // BLOCK_H
    tiles: tl.constexpr = q_tiles + (H_K + BLOCK_H - 1) // BLOCK_H
    tile = tl.program_id(0) % tiles
    of_q = tile < q_tiles
    x, out, weight = tl.where(of_q, q, k), tl.where(of_q, q_out, k_out), tl.where(of_q, q_weight, k_weight)
    x_t, x_h, x_c = tl.where(of_q, q_t, k_t), tl.where(of_q, q_h, k_h), tl.where(of_q, q_c, k_c)
    out_t, out_h, out_c = tl.where(of_q, qo_t, ko_t), tl.where(of_q, qo_h, ko_h), tl.where(of_q, qo_c, ko_c)
    heads = tl.where(of_q, H_Q, H_K)
    first = tl.where(of_q, tile, tile - q_tiles) * BLOCK_H
    t = index((tl.program_id(0) // tiles) * BLOCK_T + tl.arange(0, BLOCK_T), WIDE)[:, None, None]
    h = index(first + tl.arange(0, BLOCK_H), WIDE)[None, :, None]
    cosines, sines = load_angles(cos, sin, t, t < tokens, cos_t, cos_c, sin_t, sin_c, HALF, PAIRS, BLOCK_H)
    if CONJUGATE:
        sines = -sines
    inside = (t < tokens) & (h < heads)
    rows, out_rows = t * x_t + h * x_h, t * out_t + h * out_h
    a, b = load_pairs(x, rows, x_c, inside, HALF, PAIRS, INTERLEAVED)
    if REST > 0:
        rest = load_rest(x, rows, x_c, inside, 2 * HALF, HEAD_DIM, REST)
    if NORM:
        squares = sum_products(a, a, OVER_HEADS) + sum_products(b, b, OVER_HEADS)
        width = HEAD_DIM * heads if OVER_HEADS else HEAD_DIM
        weight_rows = h * (HEAD_DIM if OVER_HEADS else 0)
        weight_a, weight_b = load_pairs(weight, weight_rows, 1, h < heads, HALF, PAIRS, INTERLEAVED)
        if REST > 0:
            rest = rest.to(tl.float32)
            squares += sum_products(rest, rest, OVER_HEADS)
            rest *= load_rest(weight, weight_rows, 1, h < heads, 2 * HALF, HEAD_DIM, REST).to(tl.float32)
        inverse = tl.rsqrt(squares / width + eps)
        a, b = a * inverse * weight_a, b * inverse * weight_b
        if REST > 0:
            rest *= inverse
    store_pairs(
        out, out_rows, out_c, inside, a * cosines - b * sines, b * cosines + a * sines, HALF, PAIRS, INTERLEAVED
    )
    if REST > 0:
        store_rest(out, out_rows, out_c, inside, rest, 2 * HALF, HEAD_DIM, REST)


@triton.jit(do_not_specialize=["tokens"])
def normalize_backward(
    x, dout, dx, cos, sin, weight, dweight, tokens,
    x_t, x_h, x_c, do_t, do_h, do_c, dx_t, dx_h, dx_c, cos_t, cos_c, sin_t, sin_c, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, OVER_HEADS: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradients of ``rotate`` with NORM for q or for k.

    With n = x / rms(x), y = n * weight and g = dy * weight, dx = (g - n mean(g n)) / rms and dweight = sum of dy n.
    A program walks over token tiles and keeps the sum over its tokens; ``dweight`` is float32 [programs, H, D].
    Grid: (programs, head tiles).
    """
    h = index(tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), WIDE)[None, :, None]
    width: tl.constexpr = HEAD_DIM * HEADS if OVER_HEADS else HEAD_DIM
    weight_rows = h * (HEAD_DIM if OVER_HEADS else 0)
    weight_a, weight_b = load_pairs(weight, weight_rows, 1, h < HEADS, HALF, PAIRS, INTERLEAVED)
    dweight_a = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    dweight_b = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    if REST > 0:
        weight_r = load_rest(weight, weight_rows, 1, h < HEADS, 2 * HALF, HEAD_DIM, REST).to(tl.float32)
        dweight_r = tl.zeros([BLOCK_H, REST], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_T, tokens, tl.num_programs(0) * BLOCK_T):
        t = index(first + tl.arange(0, BLOCK_T), WIDE)[:, None, None]
        inside = (t < tokens) & (h < HEADS)
        cosines, sines = load_angles(cos, sin, t, t < tokens, cos_t, cos_c, sin_t, sin_c, HALF, PAIRS, BLOCK_H)
        a, b = load_pairs(x, t * x_t + h * x_h, x_c, inside, HALF, PAIRS, INTERLEAVED)
        do_a, do_b = load_pairs(dout, t * do_t + h * do_h, do_c, inside, HALF, PAIRS, INTERLEAVED)
        dy_a, dy_b = do_a * cosines + do_b * sines, do_b * cosines - do_a * sines
        g_a, g_b = dy_a * weight_a, dy_b * weight_b
        squares = sum_products(a, a, OVER_HEADS) + sum_products(b, b, OVER_HEADS)
        products = sum_products(a, g_a, OVER_HEADS) + sum_products(b, g_b, OVER_HEADS)
        if REST > 0:
            rest = load_rest(x, t * x_t + h * x_h, x_c, inside, 2 * HALF, HEAD_DIM, REST).to(tl.float32)
            dy_r = load_rest(dout, t * do_t + h * do_h, do_c, inside, 2 * HALF, HEAD_DIM, REST).to(tl.float32)
            g_r = dy_r * weight_r
            squares += sum_products(rest, rest, OVER_HEADS)
            products += sum_products(rest, g_r, OVER_HEADS)
        inverse = tl.rsqrt(squares / width + eps)
        slope = products * inverse * inverse / width
        rows = t * dx_t + h * dx_h
        store_pairs(
            dx, rows, dx_c, inside, (g_a - a * slope) * inverse, (g_b - b * slope) * inverse, HALF, PAIRS, INTERLEAVED
        )
        dweight_a += tl.sum(dy_a * a * inverse, 0)
        dweight_b += tl.sum(dy_b * b * inverse, 0)
        if REST > 0:
            store_rest(dx, rows, dx_c, inside, (g_r - rest * slope) * inverse, 2 * HALF, HEAD_DIM, REST)
            dweight_r += tl.sum(dy_r * rest * inverse, 0)
    rows = (tl.program_id(0) * HEADS + h) * HEAD_DIM
    store_pairs(dweight, rows, 1, h < HEADS, dweight_a[None], dweight_b[None], HALF, PAIRS, INTERLEAVED)
    if REST > 0:
        store_rest(dweight, rows, 1, h < HEADS, dweight_r[None], 2 * HALF, HEAD_DIM, REST)
