"""Triton kernels of Kimi delta attention, the delta rule with a decay per channel of k; launched by :mod:`.kimi_delta`.

As :mod:`.delta_kernels`, whose chunks, masks and names these share, with c [T, H, K] in float32 and E[i, j] =
exp(c_i - c_j), a vector over the channels of k, for a token j of the same document at or before i (Kimi Team 2025,
https://arxiv.org/abs/2510.26692, section 3):

    B[i, j] = sum over channels of q_i k_j E[i, j]     A = beta_i sum of k_i k_j E[i, j], j < i     T = (I + A)^-1
    N = T beta (v - e (exp(c) k) S)                    O = scale (e (exp(c) q) S + B N)
    S' = exp(c_last) S + sum over j of x_j (exp(c_last - c_j) k_j) N_j^T

E is not a product of a part of i and one of j that both stay finite, so B and A are sums over channels, not products
of matrices. All heads of q, k and v are H.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.delta_kernels import chunk_of, columns, inverse, rows, state, store_rows


@triton.jit
def row_of(x, here):
    """The row of x [C, K] where ``here`` [C]."""
    return tl.sum(tl.where(here[:, None], x, 0.0), 0)


@triton.jit
def column_of(x, here):
    """The column of x [C, C] where ``here`` [C]."""
    return tl.sum(tl.where(here[None, :], x, 0.0), 1)


@triton.jit
def prepare(
    q, k, g, beta, segments, c, strength, inverses, scores, tokens,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c, strength, T and B, [T, H, C] both. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    i = tl.arange(0, C)
    gate = rows(g, t, head, H, 0, K, K, has).to(tl.float32)
    total = tl.dot(tl.where(visible, 1.0, 0.0), gate, input_precision=PRECISION)
    store_rows(c, total, t, head, H, 0, K, K, has)
    beta_rows = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
    tl.store(strength + head * tokens + t, beta_rows, has)
    queries = rows(q, t, head, H, 0, K, K, has).to(tl.float32)
    keys = rows(k, t, head, H, 0, K, K, has).to(tl.float32)
    a = tl.zeros([C, C], tl.float32)
    b = tl.zeros([C, C], tl.float32)
    for j in range(C):
        here = i == j
        seen = column_of(tl.where(visible, 1.0, 0.0), here)
        moved = row_of(keys, here)[None, :] * tl.exp(tl.minimum(total - row_of(total, here)[None, :], 0.0))
        a += tl.where(here[None, :], (seen * tl.sum(keys * moved, 1))[:, None], 0.0)
        b += tl.where(here[None, :], (seen * tl.sum(queries * moved, 1))[:, None], 0.0)
    a = tl.where(i[:, None] > i[None, :], beta_rows[:, None] * a, 0.0)
    store_rows(inverses, inverse(a, C, PRECISION), t, head, H, 0, C, C, has)
    store_rows(scores, b, t, head, H, 0, C, C, has)


@triton.jit
def carry(
    k, v, c, strength, inverses, boundaries, initial, states, final, tokens,
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
    i, channel = tl.arange(0, C), tl.arange(0, K)
    for chunk in range(start // C, (stop - 1) // C + (1 if STATES else 0)):
        t = (chunk * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head, H, 0, K, K, own)
        values = columns(v, t, head, H, first, V, BLOCK_V, own)
        total = rows(c, t, head, H, 0, K, K, own)
        last = tl.load(c + (tl.cast(chunk * C + C - 1, tl.int64) * H + head) * K + channel)[None, :]
        beta = tl.load(strength + head * tokens + t, own, other=0.0)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        entering = (keys * tl.exp(total)).to(keys.dtype)
        seen = tl.dot(s.to(keys.dtype), tl.trans(entering), input_precision=PRECISION)
        error = ((values - seen) * beta[None, :]).to(keys.dtype)
        new = tl.dot(error, tl.trans(solved), input_precision=PRECISION).to(keys.dtype)
        leaving = (keys * tl.exp(last - total)).to(keys.dtype)
        if STATES:
            tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        s = s * tl.exp(last) + tl.dot(new, leaving, input_precision=PRECISION)
        if not STATES:
            tl.store(state(states, chunk + 1, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


@triton.jit
def output(
    q, k, v, c, strength, inverses, scores, states, segments, out, scale, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, _, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    reach = tl.where(enters[:, None], tl.exp(rows(c, t, head, H, 0, K, K, has)), 0.0)
    keys = rows(k, t, head, H, 0, K, K, has)
    queries = rows(q, t, head, H, 0, K, K, has)
    entering = (keys * reach).to(keys.dtype)
    asking = (queries * reach).to(keys.dtype)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    s = tl.trans(s)
    beta = tl.load(strength + head * tokens + t, has, other=0.0)
    error = rows(v, t, head, H, first, V, BLOCK_V, has) - tl.dot(entering, s, input_precision=PRECISION)
    solved = rows(inverses, t, head, H, 0, C, C, has)
    new = tl.dot(solved, (error * beta[:, None]).to(keys.dtype), input_precision=PRECISION).to(keys.dtype)
    total = tl.dot(rows(scores, t, head, H, 0, C, C, has), new, input_precision=PRECISION)
    total += tl.dot(asking, s, input_precision=PRECISION)
    store_rows(out, total * scale, t, head, H, first, V, BLOCK_V, has)
