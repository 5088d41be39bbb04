"""Triton kernels of the backward of :mod:`.any_width_kernels`, whose formulas and names these continue.

The states come from ``carry`` again, c is kept from the forward. With D the gradient of the state that leaves a chunk,
transposed as states are:

    dN = (scale q k^T P)^T dO + x exp(c_last - c) k D      dS = exp(c_last) D + (scale e exp(c) q)^T dO

``values_backward`` computes the first part of dN for every chunk at once, ``carry_backward`` walks each document from
its last chunk to its first, completes dN and keeps every D, ``chunk_backward`` computes the gradients of all inputs.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import chunk_of, columns, decays, rows, state, store_columns, store_rows


@triton.jit
def values_backward(
    q, k, c, segments, dout, dnew, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of dN [T, H, V] that comes from the chunk's own O. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible) * scale
    scores = tl.trans(scores.to(keys.dtype))
    for first in range(0, V, BLOCK_V):
        do = rows(dout, t, head, H, first, V, BLOCK_V, has)
        store_rows(dnew, tl.dot(scores, do, input_precision=PRECISION), t, head, H, first, V, BLOCK_V, has)


@triton.jit
def carry_backward(
    q, k, c, boundaries, dout, dnew, dfinal, dstates, dinitial, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D [chunks, H, V, K] of each chunk that a document leaves, and the rest of dN. Grid: (segments, H, V / BLOCK_V).

    A document inside one chunk has neither, but with STATES all have both, and the gradient of the initial state.
    """
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    opening, closing = start // C, tl.cdiv(stop, C) - 1
    ds = tl.zeros([BLOCK_V, K], tl.float32)
    if STATES:
        ds += tl.load(state(dfinal, segment, head, H, K, first, V, BLOCK_V))
    i = tl.arange(0, C)
    for n in range(closing - opening + (1 if STATES else 0)):
        chunk = closing - n
        t = (chunk * C + i).to(tl.int64)
        own = t < stop
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        queries = rows(q, t, head // (H // Q), Q, 0, K, K, own)
        do = columns(dout, t, head, H, first, V, BLOCK_V, own)
        dn = columns(dnew, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1, (n > 0) | STATES, other=0.0)
        tl.store(
            state(dstates, chunk, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty), (n > 0) | STATES
        )
        # In the closing chunk D is 0, and its last token may be of another document.
        dn += (
            tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
            * tl.exp(tl.minimum(last - decay, 0.0))[None, :]
        )
        store_columns(dnew, dn, t, head, H, first, V, BLOCK_V, own)
        reach = tl.exp(decay)
        ds = ds * tl.exp(last)
        ds += tl.dot((do * (reach * scale)[None, :]).to(keys.dtype), queries, input_precision=PRECISION)
    if STATES:
        tl.store(state(dinitial, segment, head, H, K, first, V, BLOCK_V), ds)
    elif closing > opening:
        t = (opening * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        dn = columns(dnew, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + opening * C + C - 1)
        tl.store(state(dstates, opening, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty))
        dn += tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION) * tl.exp(last - decay)[None, :]
        store_columns(dnew, dn, t, head, H, first, V, BLOCK_V, own)


@triton.jit
def chunk_backward(
    q, k, v, c, strength, segments, states, dstates, dout, dnew, dq, dk, dv, dg, dbeta, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GAIN: tl.constexpr,
    STATES: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of all inputs; dq, dk [T, H / GROUP, K], and dv with GAIN alone, else it is dN.

    A program takes GROUP heads of v that read the same head of q and k. Grid: (chunks, H / GROUP).
    """
    chunk, group = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, leaves = chunk_of(segments, chunk, tokens, C, STATES)
    i = tl.arange(0, C)
    any_enters, any_leaves = tl.max(enters.to(tl.int32), 0) > 0, tl.max(leaves.to(tl.int32), 0) > 0
    shared = group * GROUP // (H // Q)
    dq_sum = tl.zeros([C, K], tl.float32)
    dk_sum = tl.zeros([C, K], tl.float32)
    for head in range(group * GROUP, group * GROUP + GROUP):
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1, any_leaves, other=0.0)
        reach = tl.where(enters, tl.exp(decay), 0.0)
        out_reach = tl.where(leaves, tl.exp(tl.where(leaves, last - decay, 0.0)), 0.0)
        dscores = tl.zeros([C, C], tl.float32)
        through = tl.zeros([K], tl.float32)
        # What a head adds to dq and dk through the states, times q and k, goes to c: the sums after less those before.
        to_c = tl.zeros([C], tl.float32)
        from_state = tl.zeros([C], tl.float32)
        if GROUP > 1:
            to_c -= tl.sum(dq_sum * rows(q, t, shared, Q, 0, K, K, has), 1)
            from_state -= tl.sum(dk_sum * rows(k, t, shared, Q, 0, K, K, has), 1)
        dbeta_sum = tl.zeros([C], tl.float32)
        if GAIN:
            beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        for first in range(0, V, BLOCK_V):
            do = rows(dout, t, head, H, first, V, BLOCK_V, has)
            new = rows(v, t, head, H, first, V, BLOCK_V, has)
            s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), any_enters, other=0.0)
            if GAIN:
                dn = rows(dnew, t, head, H, first, V, BLOCK_V, has)
                store_rows(dv, dn * beta[:, None], t, head, H, first, V, BLOCK_V, has)
                dbeta_sum += tl.sum(dn.to(tl.float32) * new, 1)
                new = (new * beta[:, None]).to(do.dtype)
            dscores += tl.dot(do, tl.trans(new), input_precision=PRECISION)
            dq_sum += tl.dot((do * (reach * scale)[:, None]).to(do.dtype), s, input_precision=PRECISION)
            ds = tl.load(state(dstates, chunk, head, H, K, first, V, BLOCK_V), any_leaves, other=0.0)
            dk_sum += tl.dot((new * out_reach[:, None]).to(do.dtype), ds, input_precision=PRECISION)
            s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), any_enters, other=0.0)
            through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
        queries = rows(q, t, shared, Q, 0, K, K, has)
        keys = rows(k, t, shared, Q, 0, K, K, has)
        to_c += tl.sum(dq_sum * queries, 1)
        from_state += tl.sum(dk_sum * keys, 1)
        between = decays(decay, visible)
        dscores = dscores * between * scale
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        to_c += tl.sum(dscores * scores, 1) - tl.sum(dscores * scores, 0)
        if GAIN:
            tl.store(dbeta + t * H + head, dbeta_sum.to(dbeta.dtype.element_ty), has)
        from_state = tl.where(leaves, from_state, 0.0)
        # All that leaves is decayed by c_last: what the chunk adds, and what entered if its document leaves too.
        at_end = tl.sum(from_state, 0) + tl.where(enters, tl.exp(last) * tl.sum(through, 0), 0.0)
        to_c += tl.where((i == C - 1) & leaves, at_end, 0.0) - from_state
        # c_i is the sum over the tokens of the document up to i
        dgate = tl.sum(tl.where(visible, to_c[:, None], 0.0), 0)
        tl.store(dg + t * H + head, dgate.to(dg.dtype.element_ty), has)
        dscores = dscores.to(keys.dtype)
        dq_sum += tl.dot(dscores, keys, input_precision=PRECISION)
        dk_sum += tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    store_rows(dq, dq_sum, t, group, H // GROUP, 0, K, K, has)
    store_rows(dk, dk_sum, t, group, H // GROUP, 0, K, K, has)
