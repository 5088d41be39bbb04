"""Triton kernels of the gated delta rule and of scans with a decay per head, forward; launched by :mod:`.delta_rule`.

The row is cut into chunks of C tokens wherever documents begin: a chunk may hold the end of one document, several whole
ones and the start of another, so no chunk is partly empty however short documents are, and no table of chunks is
needed. Inside a chunk tokens of different documents are kept apart by a mask. A document that reaches into the next
chunk hands it a state, and only one document can.

With c the sum of g since the document or the chunk began, P[i, j] = exp(c_i - c_j) for a token j of the same document
at or before i, e and x masks of the tokens whose document reaches in from the chunk before and out into the next one,
and S [K, V] the state that enters (after Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.3):

    A = beta_i (k_i . k_j) P[i, j], j < i      T = (I + A)^-1
    N = T beta (v - e exp(c) k S)              O = scale (e exp(c) q S + (q k^T P) N)
    S' = exp(c_last) S + sum over j of x_j exp(c_last - c_j) k_j N_j^T

``prepare`` computes c and T for every chunk at once, ``carry`` walks each document through its chunks and keeps the
states, ``output`` computes O for every chunk. Without corrections (DELTA false) N is v, with GAIN beta v: linear
attention with a decay, which the scan of Mamba-2 is. Sums over tokens of a document are taken under the mask, so no
document moves another by a bit.

States are held transposed, [V, K]: the three products of a step of ``carry`` then follow each other in registers.

With STATES every document takes a state in and gives one out. Documents then begin where chunks do (the launcher pads
them), every token's document reaches in and out, and each has its initial and final state [segments, H, V, K].

Names: T tokens, H heads of v, Q heads of q and k (H is a multiple), K and V widths. q, k [T, Q, K], v [T, H, V],
g, beta [T, H], c and strength (beta) [H, T] in float32, inverses [T, H, C], states [chunks, H, V, K], all contiguous.
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
    """Of a chunk: its tokens, those that exist, the mask [C, C] of own tokens at or before, e, and x."""
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


@triton.jit
def prepare(
    k, g, beta, segments, c, strength, inverses, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, DELTA: tl.constexpr, GAIN: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c; with DELTA or GAIN also strength, with DELTA T. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    gate = tl.load(g + t * H + head, has, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(visible, gate[None, :], 0.0), 1)
    tl.store(c + head * tokens + t, total, has)
    if DELTA or GAIN:
        beta_rows = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
        tl.store(strength + head * tokens + t, beta_rows, has)
    if DELTA:
        i = tl.arange(0, C)
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
        scores = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        strict = visible & (i[:, None] > i[None, :])
        a = tl.where(strict, beta_rows[:, None] * scores * decays(total, visible), 0.0)
        store_rows(inverses, inverse(a, C, PRECISION), t, head, H, 0, C, C, has)


@triton.jit
def carry(
    k, v, c, strength, inverses, boundaries, initial, states, final, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, GAIN: tl.constexpr,
    STATES: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does, and the final ones. Grid: (segments, H, V / BLOCK_V)."""
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    s = tl.zeros([BLOCK_V, K], tl.float32)
    if STATES:
        s += tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
    i = tl.arange(0, C)
    for chunk in range(start // C, (stop - 1) // C + (1 if STATES else 0)):
        t = (chunk * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        new = columns(v, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + head * tokens + t, own, other=0.0)
        last = tl.load(c + head * tokens + chunk * C + C - 1)
        if DELTA:
            beta = tl.load(strength + head * tokens + t, own, other=0.0)
            solved = rows(inverses, t, head, H, 0, C, C, own)
            seen = tl.dot(s.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
            error = ((new - seen * tl.exp(decay)[None, :]) * beta[None, :]).to(keys.dtype)
            new = tl.dot(error, tl.trans(solved), input_precision=PRECISION)
        if GAIN:
            new = new * tl.load(strength + head * tokens + t, own, other=0.0)[None, :]
        added = (new * tl.exp(last - decay)[None, :]).to(keys.dtype)
        if STATES:
            tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        s = s * tl.exp(last) + tl.dot(added, keys, input_precision=PRECISION)
        if not STATES:
            tl.store(state(states, chunk + 1, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


@triton.jit
def output(
    q, k, v, c, strength, inverses, states, segments, out, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, GAIN: tl.constexpr,
    STATES: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + head * tokens + t, has, other=0.0)
    new = rows(v, t, head, H, first, V, BLOCK_V, has)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    s = tl.trans(s)
    reach = tl.where(enters, tl.exp(decay), 0.0)[:, None]
    if DELTA:
        beta = tl.load(strength + head * tokens + t, has, other=0.0)
        solved = rows(inverses, t, head, H, 0, C, C, has)
        error = (new - tl.dot(keys, s, input_precision=PRECISION) * reach) * beta[:, None]
        new = tl.dot(solved, error.to(keys.dtype), input_precision=PRECISION).to(keys.dtype)
    if GAIN:
        new = (new * tl.load(strength + head * tokens + t, has, other=0.0)[:, None]).to(keys.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible) * scale
    total = tl.dot(scores.to(new.dtype), new, input_precision=PRECISION)
    total += tl.dot(queries, s, input_precision=PRECISION) * (reach * scale)
    store_rows(out, total, t, head, H, first, V, BLOCK_V, has)
