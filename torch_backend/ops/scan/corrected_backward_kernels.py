"""Triton kernels of the backward of :mod:`.corrected_kernels`, whose formulas and names these continue.

c, T and N are kept from the forward, and the states come from ``carry`` again. With D the gradient of the state that
leaves a chunk, transposed as states are, dN that of N, and R = beta (v - e exp(c) k S), so that N = T R:

    dN = (scale q k^T P)^T dO + x exp(c_last - c) k D      dR = T^T dN      dA = -dR N^T, j < i
    dS = exp(c_last) D + (scale e exp(c) q)^T dO - (beta e exp(c) k)^T dR

``query_backward`` computes for every chunk what O = scale (e exp(c) q S + (q k^T P) N) tells: dq, the parts of dk and
of the gradient of c, and that of dR (right) by the first part of dN; ``carry_backward`` walks each document from its
last chunk to its first, completes dR and keeps every D; ``key_backward`` computes all the rest.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.delta_kernels import chunk_of, columns, decays, rows, state, store_columns, store_rows


@triton.jit
def part(x, chunk, head, HEADS: tl.constexpr, K: tl.constexpr, first, V: tl.constexpr, BLOCK: tl.constexpr, column):
    """Addresses of x[chunk, head, first : first + BLOCK, column] of states."""
    row = first + tl.arange(0, BLOCK)
    return x + (tl.cast(chunk, tl.int64) * HEADS + head) * K * V + row[:, None] * K + column[None, :]


@triton.jit
def query_backward(
    q, k, c, inverses, segments, new, states, dout, dright, dq, dk, dc, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and a part of dk, in float32, [T, H / GROUP, K]; dc [H, T] of each program's channels; dR, a part too.

    A program takes BLOCK_K channels of q and k, as large a part of those of v, and GROUP heads of v that read the same
    head of q and k. Grid: (chunks, H / GROUP, K / BLOCK_K).
    """
    chunk, group, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    any_enters = tl.max(enters.to(tl.int32), 0) > 0
    shared = group * GROUP // (H // Q)
    scores = tl.dot(
        rows(q, t, shared, Q, 0, K, K, has), columns(k, t, shared, Q, 0, K, K, has), input_precision=PRECISION
    )
    first_k = z * BLOCK_K
    column = first_k + tl.arange(0, BLOCK_K)
    queries = rows(q, t, shared, Q, first_k, K, BLOCK_K, has)
    dq_sum = tl.zeros([C, BLOCK_K], tl.float32)
    dscores_sum = tl.zeros([C, C], tl.float32)
    OWN: tl.constexpr = V // (K // BLOCK_K)
    for head in range(group * GROUP, group * GROUP + GROUP):
        decay = tl.load(c + head * tokens + t, has, other=0.0)
        between = decays(decay, visible) * scale
        own = rows(dout, t, head, H, z * OWN, V, OWN, has)
        dn = tl.dot(tl.trans((scores * between).to(own.dtype)), own, input_precision=PRECISION).to(own.dtype)
        dr = tl.dot(columns(inverses, t, head, H, 0, C, C, has), dn, input_precision=PRECISION)
        store_rows(dright, dr, t, head, H, z * OWN, V, OWN, has)
        dscores = tl.zeros([C, C], tl.float32)
        asked = tl.zeros([C, BLOCK_K], tl.float32)
        for first in range(0, V, BLOCK_V):
            do = rows(dout, t, head, H, first, V, BLOCK_V, has)
            dscores += tl.dot(do, columns(new, t, head, H, first, V, BLOCK_V, has), input_precision=PRECISION)
            s = tl.load(part(states, chunk, head, H, K, first, V, BLOCK_V, column), any_enters, other=0.0)
            asked += tl.dot(do, s, input_precision=PRECISION)
        dscores *= between
        asked *= tl.where(enters, tl.exp(decay), 0.0)[:, None] * scale
        to_c = tl.sum(asked * queries, 1)
        if z == 0:
            moved = dscores * scores
            to_c += tl.sum(moved, 1) - tl.sum(moved, 0)
        tl.store(dc + (z * H + head) * tokens + t, to_c, has)
        dq_sum += asked
        dscores_sum += dscores
    dscores = dscores_sum.to(queries.dtype)
    keys = rows(k, t, shared, Q, first_k, K, BLOCK_K, has)
    dq_sum += tl.dot(dscores, keys, input_precision=PRECISION)
    store_rows(dq, dq_sum, t, group, H // GROUP, first_k, K, BLOCK_K, has)
    dk_sum = tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    store_rows(dk, dk_sum, t, group, H // GROUP, first_k, K, BLOCK_K, has)


@triton.jit
def carry_backward(
    q, k, c, strength, inverses, boundaries, dout, dright, dfinal, dstates, dinitial, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D [chunks, H, V, K] of each chunk that a document leaves, and the rest of dR. Grid: (segments, H, V / BLOCK_V).

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
        leaves = (n > 0) | STATES
        t = (chunk * C + i).to(tl.int64)
        own = t < stop
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        queries = rows(q, t, head // (H // Q), Q, 0, K, K, own)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        do = columns(dout, t, head, H, first, V, BLOCK_V, own)
        dr = columns(dright, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + head * tokens + t, own, other=0.0)
        beta = tl.load(strength + head * tokens + t, own, other=0.0)
        last = tl.load(c + head * tokens + chunk * C + C - 1, leaves, other=0.0)
        # In the closing chunk D is 0, and its last token may be of another document.
        tl.store(state(dstates, chunk, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty), leaves)
        dn = tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        dn *= tl.exp(tl.minimum(last - decay, 0.0))[None, :]
        dr += tl.dot(dn.to(keys.dtype), solved, input_precision=PRECISION)
        store_columns(dright, dr, t, head, H, first, V, BLOCK_V, own)
        reach = tl.exp(decay)
        ds = ds * tl.exp(last)
        ds += tl.dot((do * (reach * scale)[None, :]).to(keys.dtype), queries, input_precision=PRECISION)
        ds -= tl.dot((dr * (beta * reach)[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
    if STATES:
        tl.store(state(dinitial, segment, head, H, K, first, V, BLOCK_V), ds)
    elif closing > opening:
        t = (opening * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        dr = columns(dright, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + head * tokens + t, own, other=0.0)
        last = tl.load(c + head * tokens + opening * C + C - 1)
        tl.store(state(dstates, opening, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty))
        dn = tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION) * tl.exp(last - decay)[None, :]
        dr += tl.dot(dn.to(keys.dtype), solved, input_precision=PRECISION)
        store_columns(dright, dr, t, head, H, first, V, BLOCK_V, own)


@triton.jit
def key_backward(
    k, v, c, strength, segments, new, states, dstates, dright, dk_part, dk, dv, dc, dstrength, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [T, H / GROUP, K] from its part, dv, and dc and dstrength [H, T] of each program's channels.

    Programs as in :func:`query_backward`, whose dc are before those of here. Grid: (chunks, H / GROUP, K / BLOCK_K).
    """
    chunk, group, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, has, visible, enters, leaves = chunk_of(segments, chunk, tokens, C, STATES)
    i = tl.arange(0, C)
    strict = visible & (i[:, None] > i[None, :])
    any_enters, any_leaves = tl.max(enters.to(tl.int32), 0) > 0, tl.max(leaves.to(tl.int32), 0) > 0
    shared = group * GROUP // (H // Q)
    alike = tl.dot(
        rows(k, t, shared, Q, 0, K, K, has), columns(k, t, shared, Q, 0, K, K, has), input_precision=PRECISION
    )
    first_k = z * BLOCK_K
    column = first_k + tl.arange(0, BLOCK_K)
    keys = rows(k, t, shared, Q, first_k, K, BLOCK_K, has)
    dk_sum = tl.zeros([C, BLOCK_K], tl.float32)
    da_sum = tl.zeros([C, C], tl.float32)
    OWN: tl.constexpr = V // (K // BLOCK_K)
    for head in range(group * GROUP, group * GROUP + GROUP):
        decay = tl.load(c + head * tokens + t, has, other=0.0)
        beta = tl.load(strength + head * tokens + t, has, other=0.0)
        last = tl.load(c + head * tokens + chunk * C + C - 1, any_leaves, other=0.0)
        own = rows(dright, t, head, H, z * OWN, V, OWN, has).to(tl.float32)
        store_rows(dv, own * beta[:, None], t, head, H, z * OWN, V, OWN, has)
        dbeta = tl.sum(own * rows(v, t, head, H, z * OWN, V, OWN, has).to(tl.float32), 1)
        da = tl.zeros([C, C], tl.float32)
        taken = tl.zeros([C, BLOCK_K], tl.float32)
        added = tl.zeros([C, BLOCK_K], tl.float32)
        through = 0.0
        for first in range(0, V, BLOCK_V):
            dr = rows(dright, t, head, H, first, V, BLOCK_V, has)
            s = tl.load(part(states, chunk, head, H, K, first, V, BLOCK_V, column), any_enters, other=0.0)
            taken += tl.dot(dr, s, input_precision=PRECISION)
            n = rows(new, t, head, H, first, V, BLOCK_V, has)
            da -= tl.dot(dr, tl.trans(n), input_precision=PRECISION)
            ds = tl.load(part(dstates, chunk, head, H, K, first, V, BLOCK_V, column), any_leaves, other=0.0)
            added += tl.dot(n, ds, input_precision=PRECISION)
            through += tl.sum(tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1), 0)
        # What the state held for k, by what it did to the right side
        reach = tl.where(enters, tl.exp(decay), 0.0)
        seen = -reach * tl.sum(taken * keys, 1)
        added *= tl.where(leaves, tl.exp(tl.where(leaves, last - decay, 0.0)), 0.0)[:, None]
        dk_sum += added - taken * (beta * reach)[:, None]
        from_state = tl.sum(added * keys, 1)
        da = tl.where(strict, da * decays(decay, visible), 0.0)
        dbeta += seen
        to_c = beta * seen - from_state
        if z == 0:
            moved = da * alike
            within = tl.sum(moved, 1)
            dbeta += within
            to_c += within * beta - tl.sum(moved * beta[:, None], 0)
        da_sum += da * beta[:, None]
        # All that leaves is decayed by c_last: what the chunk adds, and what entered if its document leaves too.
        at_end = tl.sum(from_state, 0) + tl.where(enters, tl.exp(last) * through, 0.0)
        to_c += tl.where((i == C - 1) & leaves, at_end, 0.0)
        tl.store(dstrength + (z * H + head) * tokens + t, dbeta, has)
        tl.store(dc + ((K // BLOCK_K + z) * H + head) * tokens + t, to_c, has)
    dk_sum += rows(dk_part, t, group, H // GROUP, first_k, K, BLOCK_K, has)
    dk_sum += tl.dot((da_sum + tl.trans(da_sum)).to(keys.dtype), keys, input_precision=PRECISION)
    store_rows(dk, dk_sum, t, group, H // GROUP, first_k, K, BLOCK_K, has)


@triton.jit
def gates_backward(
    segments, dc, dstrength, dg, dbeta, tokens, H: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr
):
    """dg and dbeta [T, H] from 2 PARTS of dc and PARTS of dstrength, [H, T] each. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    to_c = tl.zeros([C], tl.float32)
    to_beta = tl.zeros([C], tl.float32)
    for n in range(PARTS):
        to_beta += tl.load(dstrength + (n * H + head) * tokens + t, has, other=0.0)
        to_c += tl.load(dc + (n * H + head) * tokens + t, has, other=0.0)
        to_c += tl.load(dc + ((PARTS + n) * H + head) * tokens + t, has, other=0.0)
    tl.store(dbeta + t * H + head, to_beta.to(dbeta.dtype.element_ty), has)
    # c_i is the sum over the tokens of the document up to i
    dgate = tl.sum(tl.where(visible, to_c[:, None], 0.0), 0)
    tl.store(dg + t * H + head, dgate.to(dg.dtype.element_ty), has)
