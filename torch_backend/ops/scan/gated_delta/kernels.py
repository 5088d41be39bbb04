"""Triton kernels of the gated delta rule, forward; launched by :mod:`.operators`.

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

``prepare`` computes c and T for every chunk at once, and N of the documents that begin there; ``carry`` walks each
document that has several chunks through them, and makes the states and the rest of N; ``output`` computes O for every
chunk. N is kept for the backward: from it ``restore`` makes the states again without solving anything. Sums over tokens
of a document are taken under the mask, so no document moves another by a bit.

States are held transposed, [V, K]: the three products of a step of ``carry`` then follow each other in registers.

With STATES every document takes a state in and gives one out. Documents then begin where chunks do (the launcher pads
them), every token's document reaches in and out, and each has its initial and final state [segments, H, V, K].

Names: T tokens, H heads of v, Q heads of q and k (H is a multiple), K and V widths. q, k [T, Q, K], v, new (N)
[T, H, V], g, beta [T, H], c and strength (beta) [H, T] in float32, inverses [T, H, C], states [chunks, H, V, K], all
contiguous.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import (
    chunk_of,
    columns,
    decays,
    rows,
    state,
    store_columns,
    store_rows,
)


@triton.jit
def inverses_of(a, B: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of each strictly lower triangular a[n] [B, B], float32, B = 32, by products alone.

    The diagonal blocks of 8 are nilpotent in 8 steps, so (I - a) (I + a^2) (I + a^4) inverts them; larger blocks would
    have powers that grow far beyond the inverse. With D their inverses and X = D (a outside of these blocks), which is
    nilpotent in 4 steps, the whole is (I - X) (I + X^2) D.
    """
    i = tl.arange(0, B)
    own = ((i[:, None] // 8) == (i[None, :] // 8))[None, :, :]
    inside = tl.where(own, a, 0.0)
    square = tl.dot(inside, inside, input_precision=PRECISION)
    d = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] - inside + square
    d -= tl.dot(inside, square, input_precision=PRECISION)
    d += tl.dot(d, tl.dot(square, square, input_precision=PRECISION), input_precision=PRECISION)
    x = tl.dot(d, tl.where(own, 0.0, a), input_precision=PRECISION)
    d += tl.dot(tl.dot(x, x, input_precision=PRECISION), d, input_precision=PRECISION)
    return d - tl.dot(x, d, input_precision=PRECISION)


@triton.jit
def one_of(x, n, N: tl.constexpr):
    """x[n] of x [N, ...], a matrix or vectors."""
    number = tl.arange(0, N)
    if len(x.shape) == 3:
        found = tl.sum(tl.where(number[:, None, None] == n, x, 0.0), 0)
    else:
        found = tl.sum(tl.where(number[:, None] == n, x, 0.0), 0)
    return found


@triton.jit
def prepare(
    k, v, g, beta, segments, c, strength, inverses, new, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, INVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c, strength and T; N of tokens whose document begins in the chunk. Grid: (chunks, H).

    The diagonal blocks of 32 of T are inverses, D0 and D1; in chunks of 64 -D1 A10 D0 is below them.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    B: tl.constexpr = 32
    N: tl.constexpr = C // B
    i, n = tl.arange(0, B), tl.arange(0, N)
    shared = head // (H // Q)
    t = chunk.to(tl.int64) * C + n[:, None] * B + i[None, :]
    has = t < tokens
    segment = tl.load(segments + t, has, other=-1)
    gate = tl.load(g + t * H + head, has, other=0.0).to(tl.float32)
    betas = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
    same = segment[:, :, None] == segment[:, None, :]
    total = tl.sum(tl.where(same & (i[:, None] >= i[None, :])[None, :, :], gate[:, None, :], 0.0), 2)
    t0 = chunk.to(tl.int64) * C + i
    has0 = t0 < tokens
    segment0 = tl.load(segments + t0, has0, other=-1)
    if N == 2:
        gate0 = tl.load(g + t0 * H + head, has0, other=0.0).to(tl.float32)
        earlier = (segment[:, :, None] == segment0[None, None, :]) & (n == 1)[:, None, None]
        total += tl.sum(tl.where(earlier, gate0[None, None, :], 0.0), 2)
    tl.store(c + tl.cast(head, tl.int64) * tokens + t, total, has)
    tl.store(strength + tl.cast(head, tl.int64) * tokens + t, betas, has)
    channel = tl.arange(0, K)
    place = k + (t * Q + shared) * K
    keys = tl.load(place[:, :, None] + channel[None, None, :], has[:, :, None], other=0.0)
    others = tl.load(place[:, None, :] + channel[None, :, None], has[:, None, :], other=0.0)
    scores = tl.dot(keys, others, input_precision=PRECISION)
    strict = same & (i[:, None] > i[None, :])[None, :, :]
    decay = tl.exp(tl.where(strict, total[:, :, None] - total[:, None, :], 0.0))
    d = inverses_of(tl.where(strict, betas[:, :, None] * scores * decay, 0.0), B, INVERSE)
    place = inverses + (t * H + head) * C
    tl.store(
        place[:, :, None] + n[:, None, None] * B + i[None, None, :], d.to(inverses.dtype.element_ty), has[:, :, None]
    )
    before = tl.load(segments + chunk * C - 1, chunk > 0, other=-2)
    last = tl.load(segments + tl.minimum(chunk * C + C, tokens) - 1)
    d0 = one_of(d, 0, N)
    if N == 2:
        t1 = t0 + B
        has1 = t1 < tokens
        segment1 = tl.load(segments + t1, has1, other=-1)
        beta1 = tl.load(beta + t1 * H + head, has1, other=0.0).to(tl.float32)
        scores = tl.dot(
            rows(k, t1, shared, Q, 0, K, K, has1), columns(k, t0, shared, Q, 0, K, K, has0), input_precision=PRECISION
        )
        across = segment1[:, None] == segment0[None, :]
        decay = tl.exp(tl.where(across, one_of(total, 1, N)[:, None] - one_of(total, 0, N)[None, :], 0.0))
        a = tl.where(across, beta1[:, None] * scores * decay, 0.0)
        d1 = one_of(d, 1, N)
        low = -tl.dot(d1, tl.dot(a, d0, input_precision=INVERSE), input_precision=INVERSE)
        store_rows(inverses, low, t1, head, H, 0, C, B, has1)
        store_rows(inverses, tl.zeros([B, B], tl.float32), t0, head, H, B, C, B, has0)
    if (last != before) & (not STATES):  # a document begins here
        beta0 = tl.load(beta + t0 * H + head, has0, other=0.0).to(tl.float32)
        begins0 = (segment0 != before) & has0
        for first in range(0, V, BLOCK_V):
            right0 = (rows(v, t0, head, H, first, V, BLOCK_V, has0) * beta0[:, None]).to(v.dtype.element_ty)
            value = tl.dot(d0.to(right0.dtype), right0, input_precision=PRECISION)
            store_rows(new, value, t0, head, H, first, V, BLOCK_V, begins0)
            if N == 2:
                right1 = (rows(v, t1, head, H, first, V, BLOCK_V, has1) * beta1[:, None]).to(v.dtype.element_ty)
                value = tl.dot(low.to(right0.dtype), right0, input_precision=PRECISION)
                value += tl.dot(d1.to(right0.dtype), right1, input_precision=PRECISION)
                store_rows(new, value, t1, head, H, first, V, BLOCK_V, (segment1 != before) & has1)


@triton.jit
def opened(
    k, c, new, start, closing, head, first, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that a document leaves in its first chunk, where its N is known; 0 if it ends there."""
    chunk = start // C
    s = tl.zeros([BLOCK_V, K], tl.float32)
    if closing > chunk:
        t = chunk.to(tl.int64) * C + tl.arange(0, C)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1)
        n = columns(new, t, head, H, first, V, BLOCK_V, own)
        s += tl.dot((n * tl.exp(last - decay)[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
    return s


@triton.jit
def carry(
    k, v, c, strength, inverses, boundaries, initial, new, states, final, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """States that enter chunks, final ones, and N of tokens whose documents enter. Grid: (segments, H, V / BLOCK_V)."""
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    closing = tl.cdiv(stop, C) - 1
    if STATES:
        s = tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
    else:
        s = opened(k, c, new, start, closing, head, first, tokens, H, Q, K, V, C, BLOCK_V, PRECISION)
    i = tl.arange(0, C)
    for chunk in range(start // C + (0 if STATES else 1), closing + 1):
        t = (chunk * C + i).to(tl.int64)
        own = t < stop
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        values = columns(v, t, head, H, first, V, BLOCK_V, own)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        # What a closing chunk that is not full makes of s is used by nobody.
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1, chunk * C + C <= stop, other=0.0)
        tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        seen = tl.dot(s.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        right = ((values - seen * tl.exp(decay)[None, :]) * beta[None, :]).to(keys.dtype)
        n = tl.dot(right, tl.trans(solved), input_precision=PRECISION)
        store_columns(new, n, t, head, H, first, V, BLOCK_V, own)
        added = (n * tl.exp(tl.minimum(last - decay, 0.0))[None, :]).to(keys.dtype)
        s = s * tl.exp(last) + tl.dot(added, keys, input_precision=PRECISION)
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


@triton.jit
def restore(
    k, c, boundaries, initial, new, states, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The states that ``carry`` made, again: N is known, and nothing has to be solved. Grid as there."""
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    closing = tl.cdiv(tl.load(boundaries + segment + 1), C) - 1
    opening = start // C
    if STATES:
        s = tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
        begin = opening
    else:
        s = opened(k, c, new, start, closing, head, first, tokens, H, Q, K, V, C, BLOCK_V, PRECISION)
        begin = opening + 1
    i = tl.arange(0, C)
    for chunk in range(begin, closing):
        t = (chunk * C + i).to(tl.int64)
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, t < tokens)
        n = columns(new, t, head, H, first, V, BLOCK_V, t < tokens)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1)
        tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        added = (n * tl.exp(last - decay)[None, :]).to(keys.dtype)
        s = s * tl.exp(last) + tl.dot(added, keys, input_precision=PRECISION)
    if closing >= begin:
        tl.store(state(states, closing, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))


@triton.jit
def output(
    q, k, c, segments, new, states, out, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    total = tl.dot(queries, tl.trans(s), input_precision=PRECISION)
    total *= tl.where(enters, tl.exp(decay), 0.0)[:, None]
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible)
    n = rows(new, t, head, H, first, V, BLOCK_V, has)
    total += tl.dot(scores.to(n.dtype), n, input_precision=PRECISION)
    store_rows(out, total * scale, t, head, H, first, V, BLOCK_V, has)
