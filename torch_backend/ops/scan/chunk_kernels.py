"""The kernel side of scans over chunks of a row: tiles of rows and states, masks of a chunk, its inverse.

T tokens, chunks of C, H heads; x [T, H, WIDTH], states [chunks, H, V, K], all contiguous.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def rows(x, t, head, HEADS: tl.constexpr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, has):
    """x[t, head, first : first + BLOCK], 0 where ``has`` is false."""
    column = first + tl.arange(0, BLOCK)
    return tl.load(x + (t[:, None] * HEADS + head) * WIDTH + column[None, :], has[:, None], other=0.0)


@triton.jit
def columns(x, t, head, HEADS: tl.constexpr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, has):
    """The transpose of :func:`rows`."""
    column = first + tl.arange(0, BLOCK)
    return tl.load(x + (t[None, :] * HEADS + head) * WIDTH + column[:, None], has[None, :], other=0.0)


@triton.jit
def store_rows(x, value, t, head, HEADS: tl.constexpr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, has):
    """x[t, head, first : first + BLOCK] = value where ``has``."""
    column = first + tl.arange(0, BLOCK)
    place = x + (t[:, None] * HEADS + head) * WIDTH + column[None, :]
    tl.store(place, value.to(x.dtype.element_ty), has[:, None])


@triton.jit
def store_columns(x, value, t, head, HEADS: tl.constexpr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, has):
    """x[t, head, first : first + BLOCK] = the transpose of value where ``has``."""
    column = first + tl.arange(0, BLOCK)
    place = x + (t[None, :] * HEADS + head) * WIDTH + column[:, None]
    tl.store(place, value.to(x.dtype.element_ty), has[None, :])


@triton.jit
def state(x, chunk, head, HEADS: tl.constexpr, K: tl.constexpr, first, V: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of x[chunk, head, first : first + BLOCK]."""
    row, column = first + tl.arange(0, BLOCK), tl.arange(0, K)
    return x + (tl.cast(chunk, tl.int64) * HEADS + head) * K * V + row[:, None] * K + column[None, :]


@triton.jit
def chunk_of(segments, chunk, tokens, C: tl.constexpr, STATES: tl.constexpr):
    """Loads a chunk: its tokens, those that exist, the mask [C, C] of own tokens at or before, e, and x."""
    i = tl.arange(0, C)
    t = chunk.to(tl.int64) * C + i
    has = t < tokens
    segment = tl.load(segments + t, has, other=-1)
    before = tl.load(segments + chunk * C - 1, chunk > 0, other=-2)
    after = tl.load(segments + chunk * C + C, chunk * C + C < tokens, other=-2)
    visible = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])
    return t, has, visible, ((segment == before) | STATES) & has, ((segment == after) | STATES) & has


@triton.jit
def decays(c, visible):
    """P [C, C]."""
    return tl.where(visible, tl.exp(tl.where(visible, c[:, None] - c[None, :], 0.0)), 0.0)


@triton.jit
def inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [C, C], float32, C at most 64, by products alone.

    The diagonal blocks of 8 are nilpotent in 8 steps, so (I - a) (I + a^2) (I + a^4) inverts them; larger blocks would
    have powers that grow far beyond the inverse. With D their inverses and X = D (a outside of these blocks), which is
    nilpotent in C / 8 steps, the whole is (I - X) (I + X^2) (I + X^4) D.
    """
    i = tl.arange(0, C)
    own = (i[:, None] // 8) == (i[None, :] // 8)
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inside = tl.where(own, a, 0.0)
    square = tl.dot(inside, inside, input_precision=PRECISION)
    d = one - inside + square - tl.dot(inside, square, input_precision=PRECISION)
    d += tl.dot(d, tl.dot(square, square, input_precision=PRECISION), input_precision=PRECISION)
    x = tl.dot(d, tl.where(own, 0.0, a), input_precision=PRECISION)
    square = tl.dot(x, x, input_precision=PRECISION)
    if C > 32:
        d += tl.dot(tl.dot(square, square, input_precision=PRECISION), d, input_precision=PRECISION)
    d += tl.dot(square, d, input_precision=PRECISION)
    return d - tl.dot(x, d, input_precision=PRECISION)
