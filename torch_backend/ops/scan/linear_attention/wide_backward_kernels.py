"""Triton kernels of the backward of :mod:`.wide_kernels`, whose formulas and names these continue.

With W = scale (q k^T) P and G = dO v^T b (b of column j), the gradients are

    dN = W^T dO + x exp(c_last - c) k D
    dv = b dN + d dO      db = sum over channels of dN v      dd = sum over tokens and channels of dO v
    dq = M k + sum over heads of scale e exp(c) dO S^T,  M = scale (sum over heads of G P)
    dk = M^T q + sum over heads of x exp(c_last - c) b v D^T

for N = b v. So heads that share q and k share the products with M. c_i receives what token i reads less what it writes:
the sum of G W over its row, and over channels of dO scale e exp(c) q S, less b db. The diagonal of G W is in both and
cancels, since both take W as rounded for the products. What leaves a chunk is decayed by c_last, which receives the
sums of x exp(c_last - c) b v k D and of f S D.

``values_backward`` computes dv, db and M, ``queries_backward`` dq, ``keys_backward`` dk, ``gates_backward`` dg. The
programs of the first three take a chunk and GROUP heads: they read q, k and make their products once for these. One
kernel for all of it would read v, dO and states once, but its sums leave too few registers: it took twice as long.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.linear_attention.wide_kernels import (
    between,
    causal,
    chunk_of,
    gates,
    rows,
    state,
    store_rows,
    written,
)


@triton.jit
def square(x, chunk, group, GROUPS: tl.constexpr, C: tl.constexpr):
    """Addresses of x[chunk, group] of [chunks, GROUPS, C, C]."""
    i = tl.arange(0, C)
    return x + (tl.cast(chunk, tl.int64) * GROUPS + group) * C * C + i[:, None] * C + i[None, :]


@triton.jit
def store_gates(x, value, chunk, head, tokens, C: tl.constexpr):
    """x[head, t] = value for the tokens of a chunk that exist; x [H, T]."""
    i = tl.arange(0, C)
    tl.store(x + tl.cast(head, tl.int64) * tokens + chunk * C + i, value, i < tokens - chunk * C)


@triton.jit
def values_backward(
    q, k, v, c, strength, skip, segments, dkept, dout, dscores, dv, dc, dstrength, dskip, scale, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, GAIN: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, with GAIN db as dstrength, with SKIP dd of each chunk as dskip [chunks, H], and their part of dc [H, T].

    M as dscores [chunks, H / GROUP, C, C]. Grid: (chunks, H / GROUP).
    """
    chunk, group = tl.program_id(0), tl.program_id(1)
    i, segment, _, after = chunk_of(segments, chunk, tokens, C)
    leaves = segment == after
    j = tl.arange(0, C)
    closes, diagonal = leaves & (j == C - 1), (j[:, None] == j[None, :]) & (j < tokens - chunk * C)[:, None]
    shared = group * GROUP // (H // Q)
    queries, keys = rows(q, chunk, i, shared, Q, K, C), rows(k, chunk, i, shared, Q, K, C)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(causal(segment, C), scores, 0.0)
    total = tl.zeros([C, C], tl.float32)
    for head in tl.range(group * GROUP, group * GROUP + GROUP, num_stages=STAGES):
        decay, strong, last = gates(c, strength, head, chunk, i, tokens, C, SPLIT, GAIN)
        values, do = rows(v, chunk, i, head, H, V, C), rows(dout, chunk, i, head, H, V, C)
        ds = tl.load(state(dkept, chunk, head, H, K, V))
        fading = between(decay)
        weights = (scores * fading).to(values.dtype)
        found = tl.dot(do, tl.trans(values), input_precision=PRECISION)
        if SKIP:
            tl.store(dskip + chunk * H + head, tl.sum(tl.where(diagonal, found, 0.0)))
        found *= strong[None, :]
        total += found * fading
        to_c = tl.sum(found * weights, 1)
        dn = tl.dot(keys, ds, input_precision=PRECISION) * written(decay, last, leaves)[:, None]
        left = tl.sum(tl.sum(values * dn, 1) * strong, 0)
        dn = tl.dot(tl.trans(weights), do, dn, input_precision=PRECISION)
        dstrong = tl.sum(values * dn, 1)
        dn *= strong[:, None]
        if SKIP:
            dn += do * tl.load(skip + head // SPLIT).to(tl.float32)
        store_rows(dv, dn, chunk, head, tokens, H, V, C)
        if GAIN:
            store_gates(dstrength, dstrong, chunk, head, tokens, C)
        store_gates(dc, to_c - dstrong * strong + tl.where(closes, left, 0.0), chunk, head, tokens, C)
    total = tl.where(causal(segment, C), total * scale, 0.0)
    tl.store(square(dscores, chunk, group, H // GROUP, C), total.to(dscores.dtype.element_ty))


@triton.jit
def queries_backward(
    q, k, c, segments, kept, dout, dscores, dq, dc, scale, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [T, H / GROUP, K], and what c receives of the states read [H, T]. Grid: (chunks, H / GROUP)."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    i, segment, before, _ = chunk_of(segments, chunk, tokens, C)
    shared = group * GROUP // (H // Q)
    queries = rows(q, chunk, i, shared, Q, K, C)
    total = tl.zeros([C, K], tl.float32)
    for head in tl.range(group * GROUP, group * GROUP + GROUP, num_stages=STAGES):
        decay = tl.load(c + tl.cast(head // SPLIT, tl.int64) * tokens + chunk * C + i)
        do, s = rows(dout, chunk, i, head, H, V, C), tl.load(state(kept, chunk, head, H, K, V))
        reach = tl.where(segment == before, tl.exp2(decay), 0.0) * scale
        read = tl.sum(do * tl.dot(queries, s, input_precision=PRECISION), 1) * reach
        store_gates(dc, read, chunk, head, tokens, C)
        total = tl.dot((do * reach[:, None]).to(do.dtype), tl.trans(s), total, input_precision=PRECISION)
    m = tl.load(square(dscores, chunk, group, H // GROUP, C))
    total = tl.dot(m, rows(k, chunk, i, shared, Q, K, C), total, input_precision=PRECISION)
    store_rows(dq, total, chunk, group, tokens, H // GROUP, K, C)


@triton.jit
def keys_backward(
    q, v, c, strength, segments, kept, dkept, dscores, dk, dc, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, GAIN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [T, H / GROUP, K], and what c receives of states that pass through [H, T]. Grid: (chunks, H / GROUP)."""
    chunk, group = tl.program_id(0), tl.program_id(1)
    i, segment, before, after = chunk_of(segments, chunk, tokens, C)
    closes = tl.arange(0, C) == C - 1
    shared = group * GROUP // (H // Q)
    total = tl.zeros([C, K], tl.float32)
    for head in tl.range(group * GROUP, group * GROUP + GROUP, num_stages=STAGES):
        decay, strong, last = gates(c, strength, head, chunk, i, tokens, C, SPLIT, GAIN)
        values = rows(v, chunk, i, head, H, V, C)
        s, ds = tl.load(state(kept, chunk, head, H, K, V)), tl.load(state(dkept, chunk, head, H, K, V))
        passed = tl.sum(s.to(tl.float32) * ds.to(tl.float32)) * tl.where(before == after, tl.exp2(last), 0.0)
        store_gates(dc, tl.where(closes, passed, 0.0), chunk, head, tokens, C)
        weight = written(decay, last, segment == after) * strong
        total = tl.dot((values * weight[:, None]).to(values.dtype), tl.trans(ds), total, input_precision=PRECISION)
    m = tl.trans(tl.load(square(dscores, chunk, group, H // GROUP, C)))
    total = tl.dot(m, rows(q, chunk, i, shared, Q, K, C), total, input_precision=PRECISION)
    store_rows(dk, total, chunk, group, tokens, H // GROUP, K, C)


@triton.jit
def gates_backward(
    dc, dstrength, segments, dg, dbeta, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, GAIN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dg of the three parts of dc [3, H, T], and with GAIN dbeta [T, H / SPLIT]. Grid: (chunks, H / SPLIT / BLOCK)."""
    chunk, head = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, segment, _, _ = chunk_of(segments, chunk, tokens, C)
    t = tl.cast(chunk, tl.int64) * C + tl.arange(0, C)
    mask = (t < tokens)[:, None] & (head < H // SPLIT)[None, :]
    place = t[:, None] * (H // SPLIT) + head[None, :]
    gradient = tl.zeros([C, BLOCK], tl.float32)
    strong = tl.zeros([C, BLOCK], tl.float32)
    for n in range(SPLIT):
        source = tl.cast(head * SPLIT + n, tl.int64)[None, :] * tokens + t[:, None]
        for part in tl.static_range(3):
            gradient += tl.load(dc + tl.cast(part * H, tl.int64) * tokens + source, mask, other=0.0)
        if GAIN:
            strong += tl.load(dstrength + source, mask, other=0.0)
    after = tl.trans(causal(segment, C)).to(tl.float32)  # c_i is the sum of g up to i
    gradient = tl.dot(after, gradient, input_precision="ieee")
    tl.store(dg + place, gradient.to(dg.dtype.element_ty), mask)
    if GAIN:
        tl.store(dbeta + place, strong.to(dbeta.dtype.element_ty), mask)
