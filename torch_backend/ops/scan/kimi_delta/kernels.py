"""Triton kernels of Kimi delta attention, the delta rule with a decay per channel of k; launched by :mod:`.operators`.

As :mod:`torch_backend.ops.scan.gated_delta.kernels`, whose chunks, masks and names these share, with c [T, H, K] the
sums of g and E[i, j] = exp(c_i - c_j), a vector over the channels of k, for a token j of the same document at or before
i (Kimi Team 2025, https://arxiv.org/abs/2510.26692, section 3):

    B[i, j] = sum over channels of q_i k_j E[i, j]     A = beta_i sum of k_i k_j E[i, j], j < i     T = (I + A)^-1
    N = T beta (v - e (exp(c) k) S)                    O = scale (e (exp(c) q) S + B N)
    S' = exp(c_last) S + sum over j of x_j (exp(c_last - c_j) k_j) N_j^T

E is not a product of a part of i and one of j that both stay finite over a whole chunk. But each pair of tokens lies,
for one level l, in two neighbouring blocks of 2^l tokens, and with m the first token of the right one E[i, j] =
exp(c_i - c_m) exp(c_m - c_j), two decays that are at most 1. So for each level B and A are products of matrices, from
which the pairs of this level are taken.

``decay`` computes c [T, H, K] in float32, and q and k with their decays, in the dtype of k: entering = e exp(c) k,
asking = e exp(c) q and leaving = x exp(c_last - c) k, [T, H, K]. ``score`` computes A in float32 and B, ``solve`` T of
A. All heads are H.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import chunk_of, columns, inverse, rows, state, store_rows


@triton.jit
def between(early, late):
    """exp of the gates after one token up to a later one, of their c [C, K] or [1, K]; 1 where the order is another."""
    return tl.exp(tl.minimum(late - early, 0.0))


@triton.jit
def level_of(c, total, segments, t, has, tokens, head, level, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """The decay between each token and where its pair of blocks of 2^level meets [C, K], and the pairs (right, left).

    ``total`` is c of the chunk, whose rows are loaded again in another order.
    """
    i = tl.arange(0, C)
    block = i >> level
    right = (block & 1) == 1
    middle = t - i + ((block | 1) << level)
    meeting = rows(c, middle, head, H, 0, K, K, middle < tokens)
    decay = between(tl.where(right[:, None], meeting, total), tl.where(right[:, None], total, meeting))
    segment = tl.load(segments + t, has, other=-1)
    same = (segment[:, None] == segment[None, :]) & ((block >> 1)[:, None] == (block >> 1)[None, :])
    return decay, same & ((block & 1)[:, None] > (block & 1)[None, :])


@triton.jit
def decay(
    q, k, g, beta, segments, strength, c, entering, asking, leaving, tokens,
    H: tl.constexpr, K: tl.constexpr, STATES: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c, strength, and keys and queries with their decays. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, leaves = chunk_of(segments, chunk, tokens, C, STATES)
    gate = rows(g, t, head, H, 0, K, K, has).to(tl.float32)
    # Sums of multiples of 2^-14 are exact up to 1,024, so a sum is rounded once; exp makes its error a relative one.
    before, coarse = tl.where(visible, 1.0, 0.0), tl.floor(gate * 16384.0) / 16384.0
    total = tl.dot(before, coarse, input_precision=PRECISION) + tl.dot(before, gate - coarse, input_precision=PRECISION)
    store_rows(c, total, t, head, H, 0, K, K, has)
    beta_rows = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
    tl.store(strength + tl.cast(head, tl.int64) * tokens + t, beta_rows, has)
    queries = rows(q, t, head, H, 0, K, K, has)
    keys = rows(k, t, head, H, 0, K, K, has)
    reach = tl.where(enters[:, None], tl.exp(total), 0.0)
    store_rows(entering, keys * reach, t, head, H, 0, K, K, has)
    store_rows(asking, queries * reach, t, head, H, 0, K, K, has)
    last = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], total, 0.0), 0)[None, :]
    rest = tl.where(leaves[:, None], between(total, last), 0.0)
    store_rows(leaving, keys * rest, t, head, H, 0, K, K, has)


@triton.jit
def score(
    q, k, c, segments, strength, system, scores, tokens,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A and B [T, H, C]. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, _, _, _ = chunk_of(segments, chunk, tokens, C, False)
    i = tl.arange(0, C)
    total = rows(c, t, head, H, 0, K, K, has)
    queries = rows(q, t, head, H, 0, K, K, has)
    keys = rows(k, t, head, H, 0, K, K, has)
    a = tl.zeros([C, C], tl.float32)
    own = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    b = tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
    for level in range(LEVELS):
        fading, pairs = level_of(c, total, segments, t, has, tokens, head, level, H, K, C)
        moved = (keys * fading).to(keys.dtype)
        turned = tl.trans(moved)
        asked = (queries * fading).to(keys.dtype)
        a += tl.where(pairs, tl.dot(moved, turned, input_precision=PRECISION), 0.0)
        b += tl.where(pairs, tl.dot(asked, turned, input_precision=PRECISION), 0.0)
    beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    store_rows(system, a * beta[:, None], t, head, H, 0, C, C, has)
    store_rows(scores, b, t, head, H, 0, C, C, has)


@triton.jit
def solve(
    system, inverses, tokens,
    H: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T [T, H, C] of A. Apart from :func:`score`, because its products are so small. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t = chunk.to(tl.int64) * C + tl.arange(0, C)
    has = t < tokens
    a = rows(system, t, head, H, 0, C, C, has)
    store_rows(inverses, inverse(a, C, PRECISION), t, head, H, 0, C, C, has)


@triton.jit
def last_of(c, chunk, tokens, head, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """c of the last token of a chunk [1, K], 0 where the row ends before."""
    t = tl.cast(chunk, tl.int64) * C + C - 1
    return tl.load(c + (t * H + head) * K + tl.arange(0, K), t < tokens, other=0.0)[None, :]


@triton.jit
def carry(
    v, c, strength, entering, leaving, inverses, boundaries, initial, states, final, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does, and the final ones. Grid: (segments, H, V / BLOCK_V)."""
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    s = tl.zeros([BLOCK_V, K], tl.float32)
    if STATES:
        s += tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
    i = tl.arange(0, C)
    for chunk in range(start // C, tl.cdiv(stop, C) - (0 if STATES else 1)):
        t = (chunk * C + i).to(tl.int64)
        own = t >= start
        keys = rows(entering, t, head, H, 0, K, K, own)
        values = columns(v, t, head, H, first, V, BLOCK_V, own)
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        kept = tl.exp(last_of(c, chunk, tokens, head, H, K, C))
        seen = tl.dot(s.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        error = ((values - seen) * beta[None, :]).to(keys.dtype)
        new = tl.dot(error, tl.trans(solved), input_precision=PRECISION).to(keys.dtype)
        keys = rows(leaving, t, head, H, 0, K, K, own)
        if STATES:
            tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        s = s * kept + tl.dot(new, keys, input_precision=PRECISION)
        if not STATES:
            tl.store(state(states, chunk + 1, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


@triton.jit
def output(
    v, strength, entering, asking, inverses, scores, states, segments, out, scale, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, _, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    s = tl.trans(s)
    keys = rows(entering, t, head, H, 0, K, K, has)
    beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    error = rows(v, t, head, H, first, V, BLOCK_V, has) - tl.dot(keys, s, input_precision=PRECISION)
    solved = rows(inverses, t, head, H, 0, C, C, has)
    new = tl.dot(solved, (error * beta[:, None]).to(keys.dtype), input_precision=PRECISION).to(keys.dtype)
    total = tl.dot(rows(scores, t, head, H, 0, C, C, has), new, input_precision=PRECISION)
    total += tl.dot(rows(asking, t, head, H, 0, K, K, has), s, input_precision=PRECISION)
    store_rows(out, total * scale, t, head, H, first, V, BLOCK_V, has)
