"""Triton kernels of the backward of :mod:`.kernels`, whose formulas and names these continue.

c, T and N are kept from the forward, and the states come from ``carry`` again. With D the gradient of the state that
leaves a chunk, transposed as states are, dN that of N, and R = beta (v - e exp(c) k S), so that N = T R:

    dN = (scale q k^T P)^T dO + x exp(c_last - c) k D      dR = T^T dN      dA = -dR N^T, j < i
    dS = exp(c_last) D + (scale e exp(c) q)^T dO - (beta e exp(c) k)^T dR

``scores_backward`` computes for every chunk the gradients of q k^T, and the part of dR (right) by the first part of dN;
``query_backward`` dq; ``carry_backward`` walks each document from its last chunk to its first, completes dR and keeps
every D; ``solve_backward`` computes dA and dv, ``key_backward`` dk, ``gates_backward`` dg and dbeta from their parts:
dc [1 + parts, H, T], the gradient of c where it is added up within a chunk, and dstrength, that of beta. They are small
and many because registers are few: what takes all of a thread's runs at a third of the memory's rate.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import chunk_of, columns, decays, rows, state, store_columns, store_rows


@triton.jit
def part(
    x, chunk, head, HEADS: tl.constexpr, first_k, K: tl.constexpr, BLOCK_K: tl.constexpr,
    first_v, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Addresses of the states x[chunk, head, first_v : first_v + BLOCK_V, first_k : first_k + BLOCK_K]."""
    row, column = first_v + tl.arange(0, BLOCK_V), first_k + tl.arange(0, BLOCK_K)
    return x + (tl.cast(chunk, tl.int64) * HEADS + head) * K * V + row[:, None] * K + column[None, :]


@triton.jit
def scores_backward(
    q, k, c, inverses, segments, new, dout, dright, dscores, dc, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of dR by dN from the chunk's own O; dscores [T, H / GROUP, C], those of q k^T, summed; dc[0].

    A program takes GROUP heads of v that read the same head of q and k. Grid: (chunks, H / GROUP).
    """
    chunk, group = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    shared = group * GROUP // (H // Q)
    scores = tl.dot(
        rows(q, t, shared, Q, 0, K, K, has), columns(k, t, shared, Q, 0, K, K, has), input_precision=PRECISION
    )
    total = tl.zeros([C, C], tl.float32)
    for head in range(group * GROUP, group * GROUP + GROUP):
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        between = decays(decay, visible) * scale
        weights = tl.trans((scores * between).to(dscores.dtype.element_ty))
        solved = columns(inverses, t, head, H, 0, C, C, has)
        dscore = tl.zeros([C, C], tl.float32)
        for first in range(0, V, BLOCK_V):
            do = rows(dout, t, head, H, first, V, BLOCK_V, has)
            dn = tl.dot(weights, do, input_precision=PRECISION).to(do.dtype)
            dr = tl.dot(solved, dn, input_precision=PRECISION)
            store_rows(dright, dr, t, head, H, first, V, BLOCK_V, has)
            n = columns(new, t, head, H, first, V, BLOCK_V, has)
            dscore += tl.dot(do, n, input_precision=PRECISION)
        dscore *= between
        total += dscore
        moved = dscore * scores
        tl.store(dc + tl.cast(head, tl.int64) * tokens + t, tl.sum(moved, 1) - tl.sum(moved, 0), has)
    store_rows(dscores, total, t, group, H // GROUP, 0, C, C, has)


@triton.jit
def query_backward(
    q, k, c, segments, states, dout, dscores, dq, dc, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [T, H / GROUP, K]; dc[1 + z] of its channels. Grid: (chunks, H / GROUP, K / BLOCK_K)."""
    chunk, group, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, has, _, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    any_enters = tl.max(enters.to(tl.int32), 0) > 0
    shared = group * GROUP // (H // Q)
    queries = rows(q, t, shared, Q, z * BLOCK_K, K, BLOCK_K, has)
    keys = rows(k, t, shared, Q, z * BLOCK_K, K, BLOCK_K, has)
    dq_sum = tl.dot(rows(dscores, t, group, H // GROUP, 0, C, C, has), keys, input_precision=PRECISION)
    for head in range(group * GROUP, group * GROUP + GROUP):
        asked = tl.zeros([C, BLOCK_K], tl.float32)
        for first in range(0, V, BLOCK_V):
            do = rows(dout, t, head, H, first, V, BLOCK_V, has)
            s = part(states, chunk, head, H, z * BLOCK_K, K, BLOCK_K, first, V, BLOCK_V)
            asked += tl.dot(do, tl.load(s, any_enters, other=0.0), input_precision=PRECISION)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        asked *= tl.where(enters, tl.exp(decay), 0.0)[:, None] * scale
        tl.store(dc + tl.cast((1 + z) * H + head, tl.int64) * tokens + t, tl.sum(asked * queries, 1), has)
        dq_sum += asked
    store_rows(dq, dq_sum, t, group, H // GROUP, z * BLOCK_K, K, BLOCK_K, has)


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
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1, leaves, other=0.0)
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
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + opening * C + C - 1)
        tl.store(state(dstates, opening, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty))
        dn = tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION) * tl.exp(last - decay)[None, :]
        dr += tl.dot(dn.to(keys.dtype), solved, input_precision=PRECISION)
        store_columns(dright, dr, t, head, H, first, V, BLOCK_V, own)


@triton.jit
def solve_backward(
    k, v, c, strength, segments, new, dright, da, dv, dc, dstrength, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv; da [T, H / GROUP, C], the gradients of k k^T below its diagonal, summed; dstrength[0], and dc[0] completed.

    Grid: (chunks, H / GROUP).
    """
    chunk, group = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    i = tl.arange(0, C)
    strict = visible & (i[:, None] > i[None, :])
    shared = group * GROUP // (H // Q)
    alike = tl.dot(
        rows(k, t, shared, Q, 0, K, K, has), columns(k, t, shared, Q, 0, K, K, has), input_precision=PRECISION
    )
    total = tl.zeros([C, C], tl.float32)
    for head in range(group * GROUP, group * GROUP + GROUP):
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        mixed = tl.zeros([C, C], tl.float32)
        dbeta = tl.zeros([C], tl.float32)
        for first in range(0, V, BLOCK_V):
            dr = rows(dright, t, head, H, first, V, BLOCK_V, has)
            n = columns(new, t, head, H, first, V, BLOCK_V, has)
            mixed -= tl.dot(dr, n, input_precision=PRECISION)
            dr = dr.to(tl.float32)
            dbeta += tl.sum(dr * rows(v, t, head, H, first, V, BLOCK_V, has).to(tl.float32), 1)
            store_rows(dv, dr * beta[:, None], t, head, H, first, V, BLOCK_V, has)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        mixed = tl.where(strict, mixed * decays(decay, visible), 0.0)
        moved = mixed * alike
        within = tl.sum(moved, 1)
        tl.store(dstrength + tl.cast(head, tl.int64) * tokens + t, dbeta + within, has)
        to_c = tl.load(dc + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        tl.store(
            dc + tl.cast(head, tl.int64) * tokens + t, to_c + within * beta - tl.sum(moved * beta[:, None], 0), has
        )
        total += mixed * beta[:, None]
    store_rows(da, total, t, group, H // GROUP, 0, C, C, has)


@triton.jit
def key_backward(
    q, k, c, strength, segments, new, states, dstates, dright, dscores, da, dk, dc, dstrength, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk [T, H / GROUP, K]; dstrength[1 + z] of its channels, and dc[1 + z] completed.

    Grid: (chunks, H / GROUP, K / BLOCK_K).
    """
    chunk, group, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, has, _, enters, leaves = chunk_of(segments, chunk, tokens, C, STATES)
    i = tl.arange(0, C)
    any_enters, any_leaves = tl.max(enters.to(tl.int32), 0) > 0, tl.max(leaves.to(tl.int32), 0) > 0
    shared = group * GROUP // (H // Q)
    queries = rows(q, t, shared, Q, z * BLOCK_K, K, BLOCK_K, has)
    keys = rows(k, t, shared, Q, z * BLOCK_K, K, BLOCK_K, has)
    dk_sum = tl.dot(columns(dscores, t, group, H // GROUP, 0, C, C, has), queries, input_precision=PRECISION)
    dk_sum += tl.dot(rows(da, t, group, H // GROUP, 0, C, C, has), keys, input_precision=PRECISION)
    dk_sum += tl.dot(columns(da, t, group, H // GROUP, 0, C, C, has), keys, input_precision=PRECISION)
    for head in range(group * GROUP, group * GROUP + GROUP):
        taken = tl.zeros([C, BLOCK_K], tl.float32)
        added = tl.zeros([C, BLOCK_K], tl.float32)
        through = tl.zeros([BLOCK_K], tl.float32)
        for first in range(0, V, BLOCK_V):
            dr = rows(dright, t, head, H, first, V, BLOCK_V, has)
            s = part(states, chunk, head, H, z * BLOCK_K, K, BLOCK_K, first, V, BLOCK_V)
            s = tl.load(s, any_enters, other=0.0)
            taken += tl.dot(dr, s, input_precision=PRECISION)
            n = rows(new, t, head, H, first, V, BLOCK_V, has)
            ds = part(dstates, chunk, head, H, z * BLOCK_K, K, BLOCK_K, first, V, BLOCK_V)
            ds = tl.load(ds, any_leaves, other=0.0)
            added += tl.dot(n, ds, input_precision=PRECISION)
            through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1, any_leaves, other=0.0)
        reach = tl.where(enters, tl.exp(decay), 0.0)
        # What the state held for k, by what it did to the right side
        seen = -reach * tl.sum(taken * keys, 1)
        added *= tl.where(leaves, tl.exp(tl.where(leaves, last - decay, 0.0)), 0.0)[:, None]
        dk_sum += added - taken * (beta * reach)[:, None]
        from_state = tl.sum(added * keys, 1)
        # All that leaves is decayed by c_last: what the chunk adds, and what entered if its document leaves too.
        at_end = tl.sum(from_state, 0) + tl.where(enters, tl.exp(last) * tl.sum(through, 0), 0.0)
        to_c = (
            tl.load(dc + tl.cast((1 + z) * H + head, tl.int64) * tokens + t, has, other=0.0) + beta * seen - from_state
        )
        tl.store(
            dc + tl.cast((1 + z) * H + head, tl.int64) * tokens + t,
            to_c + tl.where((i == C - 1) & leaves, at_end, 0.0),
            has,
        )
        tl.store(dstrength + tl.cast((1 + z) * H + head, tl.int64) * tokens + t, seen, has)
    store_rows(dk, dk_sum, t, group, H // GROUP, z * BLOCK_K, K, BLOCK_K, has)


@triton.jit
def gates_backward(segments, dc, dstrength, dg, dbeta, tokens, H: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr):
    """dg and dbeta [T, H] from the 1 + PARTS parts of dc and of dstrength, [H, T] each. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    to_c = tl.zeros([C], tl.float32)
    to_beta = tl.zeros([C], tl.float32)
    for n in range(1 + PARTS):
        to_beta += tl.load(dstrength + tl.cast(n * H + head, tl.int64) * tokens + t, has, other=0.0)
        to_c += tl.load(dc + tl.cast(n * H + head, tl.int64) * tokens + t, has, other=0.0)
    tl.store(dbeta + t * H + head, to_beta.to(dbeta.dtype.element_ty), has)
    # c_i is the sum over the tokens of the document up to i
    dgate = tl.sum(tl.where(visible, to_c[:, None], 0.0), 0)
    tl.store(dg + t * H + head, dgate.to(dg.dtype.element_ty), has)
