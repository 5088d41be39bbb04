"""Triton kernels of the gated delta rule, forward; launched by :mod:`.corrected`.

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
chunk. N is kept for the backward: from it ``carry`` makes the states again without solving anything. Sums over tokens
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

from torch_backend.ops.scan.delta_kernels import (
    chunk_of,
    columns,
    decays,
    inverse,
    rows,
    state,
    store_columns,
    store_rows,
)


@triton.jit
def half(k, g, beta, segments, c, strength, t, tokens, head, H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr):  # fmt: skip
    """Of tokens t [B]: k, beta, documents, their sums of g from the first of t on, and beta (k k^T) without decay."""
    has = t < tokens
    segment = tl.load(segments + t, has, other=-1)
    gate = tl.load(g + t * H + head, has, other=0.0).to(tl.float32)
    beta_rows = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
    tl.store(strength + head * tokens + t, beta_rows, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    return segment, gate, beta_rows, keys


@triton.jit
def system(keys, others, beta, c, c_others, visible, PRECISION: tl.constexpr):
    """A of the tokens of ``keys`` and ``others``, 0 where not visible."""
    scores = tl.dot(keys, tl.trans(others), input_precision=PRECISION)
    return tl.where(visible, beta[:, None] * scores * tl.exp(tl.where(visible, c[:, None] - c_others[None, :], 0.0)), 0.0)


@triton.jit
def prepare(
    k, v, g, beta, segments, c, strength, inverses, new, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c, strength and T; N of tokens whose document begins in the chunk. Grid: (chunks, H).

    A chunk of 64 is solved in halves: of its T, D0 and D1 on the diagonal are inverses, and below them is -D1 A10 D0.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    B: tl.constexpr = 32
    i = tl.arange(0, B)
    below = i[:, None] > i[None, :]
    t0 = chunk.to(tl.int64) * C + i
    has0 = t0 < tokens
    before = tl.load(segments + chunk * C - 1, chunk > 0, other=-2)
    segment0, gate0, beta0, keys0 = half(k, g, beta, segments, c, strength, t0, tokens, head, H, Q, K, PRECISION)
    same = segment0[:, None] == segment0[None, :]
    c0 = tl.sum(tl.where(same & (i[:, None] >= i[None, :]), gate0[None, :], 0.0), 1)
    tl.store(c + head * tokens + t0, c0, has0)
    d0 = inverse(system(keys0, keys0, beta0, c0, c0, same & below, PRECISION), B, PRECISION)
    store_rows(inverses, d0, t0, head, H, 0, C, B, has0)
    begins0 = (segment0 != before) & has0 & (not STATES)
    if C == 64:
        t1 = t0 + B
        has1 = t1 < tokens
        segment1, gate1, beta1, keys1 = half(k, g, beta, segments, c, strength, t1, tokens, head, H, Q, K, PRECISION)
        same = segment1[:, None] == segment1[None, :]
        across = segment1[:, None] == segment0[None, :]
        c1 = tl.sum(tl.where(same & (i[:, None] >= i[None, :]), gate1[None, :], 0.0), 1)
        c1 += tl.sum(tl.where(across, gate0[None, :], 0.0), 1)
        tl.store(c + head * tokens + t1, c1, has1)
        d1 = inverse(system(keys1, keys1, beta1, c1, c1, same & below, PRECISION), B, PRECISION)
        store_rows(inverses, d1, t1, head, H, B, C, B, has1)
        low = tl.dot(system(keys1, keys0, beta1, c1, c0, across, PRECISION), d0, input_precision=PRECISION)
        low = -tl.dot(d1, low, input_precision=PRECISION)
        store_rows(inverses, low, t1, head, H, 0, C, B, has1)
        store_rows(inverses, tl.zeros([B, B], tl.float32), t0, head, H, B, C, B, has0)
        begins1 = (segment1 != before) & has1 & (not STATES)
        some = tl.max(begins0.to(tl.int32) + begins1.to(tl.int32), 0) > 0
    else:
        some = tl.max(begins0.to(tl.int32), 0) > 0
    if some:
        # Products with v are of its dtype.
        upper = d0.to(keys0.dtype)
        for first in range(0, V, BLOCK_V):
            right0 = (rows(v, t0, head, H, first, V, BLOCK_V, has0) * beta0[:, None]).to(keys0.dtype)
            store_rows(new, tl.dot(upper, right0, input_precision=PRECISION), t0, head, H, first, V, BLOCK_V, begins0)
            if C == 64:
                right1 = (rows(v, t1, head, H, first, V, BLOCK_V, has1) * beta1[:, None]).to(keys0.dtype)
                n = tl.dot(low.to(keys0.dtype), right0, input_precision=PRECISION)
                n += tl.dot(d1.to(keys0.dtype), right1, input_precision=PRECISION)
                store_rows(new, n, t1, head, H, first, V, BLOCK_V, begins1)


@triton.jit
def carry(
    k, v, c, strength, inverses, boundaries, initial, new, states, final, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr, KNOWN: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does, and the final ones. Grid: (segments, H, V / BLOCK_V).

    Unless N is KNOWN throughout, N of the tokens whose documents enter their chunks too.
    """
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    opening, closing = start // C, tl.cdiv(stop, C) - 1
    i = tl.arange(0, C)
    s = tl.zeros([BLOCK_V, K], tl.float32)
    if STATES:
        s += tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
        begin = opening
    else:
        begin = opening + 1
        if closing > opening:
            t = (opening * C + i).to(tl.int64)
            own = t >= start
            keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
            decay = tl.load(c + head * tokens + t, own, other=0.0)
            last = tl.load(c + head * tokens + opening * C + C - 1)
            n = columns(new, t, head, H, first, V, BLOCK_V, own)
            s += tl.dot((n * tl.exp(last - decay)[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
    # In the closing chunk N alone is wanted, but with STATES the final state too.
    for chunk in range(begin, closing + 1 - (1 if KNOWN and not STATES else 0)):
        t = (chunk * C + i).to(tl.int64)
        own = t < stop
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        decay = tl.load(c + head * tokens + t, own, other=0.0)
        last = tl.load(c + head * tokens + chunk * C + C - 1, chunk * C + C <= stop, other=0.0)
        tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        if KNOWN:
            n = columns(new, t, head, H, first, V, BLOCK_V, own).to(tl.float32)
        else:
            values = columns(v, t, head, H, first, V, BLOCK_V, own)
            beta = tl.load(strength + head * tokens + t, own, other=0.0)
            solved = rows(inverses, t, head, H, 0, C, C, own)
            seen = tl.dot(s.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
            right = ((values - seen * tl.exp(decay)[None, :]) * beta[None, :]).to(keys.dtype)
            n = tl.dot(right, tl.trans(solved), input_precision=PRECISION)
            store_columns(new, n, t, head, H, first, V, BLOCK_V, own)
        added = (n * tl.exp(tl.minimum(last - decay, 0.0))[None, :]).to(keys.dtype)
        s = s * tl.exp(last) + tl.dot(added, keys, input_precision=PRECISION)
    if KNOWN and not STATES:
        if closing > opening:
            tl.store(state(states, closing, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


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
    decay = tl.load(c + head * tokens + t, has, other=0.0)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    total = tl.dot(queries, tl.trans(s), input_precision=PRECISION)
    total *= tl.where(enters, tl.exp(decay), 0.0)[:, None]
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible)
    n = rows(new, t, head, H, first, V, BLOCK_V, has)
    total += tl.dot(scores.to(n.dtype), n, input_precision=PRECISION)
    store_rows(out, total * scale, t, head, H, first, V, BLOCK_V, has)
