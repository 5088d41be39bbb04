"""Triton kernels of the backward of :mod:`.linear_kernels`, whose formulas and names these continue.

With W = scale (q k^T) P, the gradients of b v are dN = W^T dO + x exp(c_last - c) k D, and with G = dO v^T b (P b is of
column j) those of q and k are

    dq = scale ((sum over heads of G P) k + sum over heads of e exp(c) dO S^T)
    dk = scale (sum over heads of G P)^T q + sum over heads of x exp(c_last - c) b v D^T

so the products with q and k of a chunk's own scores are made once for all heads of a program. c_i receives what token i
reads less what it writes: the sum of G W over its row and over its channels of dO scale e exp(c) q S, less b dN v. The
diagonal of G W is in both and cancels exactly, since both are of W as rounded for the products.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.linear_kernels import causal, chunk_of, gates, rows, state, store_rows, written


@triton.jit
def chunk_backward(
    q, k, v, c, strength, segments, kept, dkept, dout, dq, dk, dv, dc, dstrength, scale, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    GROUP: tl.constexpr, GAIN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk [T, H / GROUP, K], dv, and gradients of c and, with GAIN, of strength [H, T].

    A program takes GROUP heads of v that read the same head of q and k. Grid: (chunks, H / GROUP).
    """
    chunk, group = tl.program_id(0), tl.program_id(1)
    t, has, segment, before, after = chunk_of(segments, chunk, tokens, C)
    enters, leaves, visible = segment == before, segment == after, causal(segment, C)
    closes = leaves & (tl.arange(0, C) == C - 1)
    shared = group * GROUP // (H // Q)
    queries, keys = rows(q, t, shared, Q, K, has), rows(k, t, shared, Q, K, has)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = tl.where(visible, scores * scale, 0.0)
    dscores_sum = tl.zeros([C, C], tl.float32)
    dq_sum = tl.zeros([C, K], tl.float32)
    dk_sum = tl.zeros([C, K], tl.float32)
    for head in tl.range(group * GROUP, group * GROUP + GROUP, num_stages=STAGES):
        decay, strong, last = gates(c, strength, head, t, has, chunk, tokens, C, SPLIT, GAIN)
        values, do = rows(v, t, head, H, V, has), rows(dout, t, head, H, V, has)
        s, ds = tl.load(state(kept, chunk, head, H, K, V)), tl.load(state(dkept, chunk, head, H, K, V))
        reach = tl.where(enters, tl.exp(decay), 0.0) * scale
        away = written(decay, last, leaves)
        between = tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0))
        weights = (scores * between).to(values.dtype)
        dn = tl.dot(keys, ds, input_precision=PRECISION) * away[:, None]
        left = tl.sum(values * dn, 1)
        dn = tl.dot(tl.trans(weights), do, dn, input_precision=PRECISION)
        dstrong = tl.sum(values * dn, 1)
        store_rows(dv, dn * strong[:, None], t, head, H, V, has)
        if GAIN:
            tl.store(dstrength + head * tokens + t, dstrong, has)
        to_c = tl.sum(do * tl.dot(queries, s, input_precision=PRECISION), 1) * reach - dstrong * strong
        dscores = tl.dot(do, tl.trans(values), input_precision=PRECISION) * strong[None, :]
        to_c += tl.sum(dscores * weights, 1)
        dscores_sum += dscores * between
        # All that leaves is decayed by c_last: what the chunk writes, and the state if one document fills the chunk.
        through = tl.sum(tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1), 0)
        at_end = tl.sum(left * strong, 0) + tl.where(before == after, tl.exp(last) * through, 0.0)
        tl.store(dc + head * tokens + t, to_c + tl.where(closes, at_end, 0.0), has)
        dq_sum = tl.dot((do * reach[:, None]).to(do.dtype), tl.trans(s), dq_sum, input_precision=PRECISION)
        added = (values * (away * strong)[:, None]).to(do.dtype)
        dk_sum = tl.dot(added, tl.trans(ds), dk_sum, input_precision=PRECISION)
    dscores = tl.where(visible, dscores_sum * scale, 0.0).to(keys.dtype)
    dq_sum = tl.dot(dscores, keys, dq_sum, input_precision=PRECISION)
    dk_sum = tl.dot(tl.trans(dscores), queries, dk_sum, input_precision=PRECISION)
    store_rows(dq, dq_sum, t, group, H // GROUP, K, has)
    store_rows(dk, dk_sum, t, group, H // GROUP, K, has)


@triton.jit
def gates_backward(
    dc, dstrength, segments, dg, dbeta, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, GAIN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dg and, with GAIN, dbeta [T, H / SPLIT]. Grid: (chunks, H / SPLIT / BLOCK)."""
    chunk, head = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t, has, segment, _, _ = chunk_of(segments, chunk, tokens, C)
    mask = has[:, None] & (head < H // SPLIT)[None, :]
    place = t[:, None] * (H // SPLIT) + head[None, :]
    gradient = tl.zeros([C, BLOCK], tl.float32)
    strong = tl.zeros([C, BLOCK], tl.float32)
    for part in range(SPLIT):
        source = (head * SPLIT + part)[None, :] * tokens + t[:, None]
        gradient += tl.load(dc + source, mask, other=0.0)
        if GAIN:
            strong += tl.load(dstrength + source, mask, other=0.0)
    after = tl.trans(causal(segment, C)).to(tl.float32)  # c_i is the sum of g up to i
    gradient = tl.dot(after, gradient, input_precision="ieee")
    tl.store(dg + place, gradient.to(dg.dtype.element_ty), mask)
    if GAIN:
        tl.store(dbeta + place, strong.to(dbeta.dtype.element_ty), mask)
