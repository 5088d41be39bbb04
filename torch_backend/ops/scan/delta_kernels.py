"""Triton kernels of the gated delta rule and of scans with a decay per head; launched by :mod:`.delta_rule`.

The row is cut into chunks of C tokens wherever documents begin: a chunk may hold the end of one document, several whole
ones and the start of another, so no chunk is partly empty however short documents are, and no table of chunks is
needed. Inside a chunk tokens of different documents are kept apart by a mask. A document that reaches into the next
chunk hands it a state, and only one document can.

With c the sum of g since the document or the chunk began, P[i, j] = exp(c_i - c_j) for a token j of the same document
at or before i, e and x masks of the tokens whose document reaches in from the chunk before and out into the next one,
and S [K, V] the state that enters (Yang et al. 2024, https://arxiv.org/abs/2412.06464, section 3.3):

    A = beta_i (k_i . k_j) P[i, j], j < i      T = (I + A)^-1
    W = T (beta e exp(c) k)                    U = T (beta v)
    N = U - W S                                O = scale (e exp(c) q S + (q k^T P) N)
    S' = exp(c_last) S + sum over j of x_j exp(c_last - c_j) k_j N_j^T

``prepare`` computes c, W, U and T for every chunk at once, ``carry`` walks each document through its chunks and keeps
the states, ``output`` computes O for every chunk. Without beta (DELTA false) T is I, W is 0 and U is v: linear
attention with a decay, which the scan of Mamba-2 is. The backward recomputes all of it; its kernels follow the same
split. Sums over tokens of a document are taken under the mask, so no document moves another by a bit.

Names: T tokens, H heads of v, Q heads of q and k (H is a multiple), K and V widths. q, k [T, Q, K], v [T, H, V],
g, beta, c [T, H], states [chunks, H, K, V], all contiguous.
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
def store_rows(x, value, t, head, HEADS: tl.constexpr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, has):
    """x[t, head, first : first + BLOCK] = value where ``has``."""
    column = first + tl.arange(0, BLOCK)
    place = x + (t[:, None] * HEADS + head) * WIDTH + column[None, :]
    tl.store(place, value.to(x.dtype.element_ty), has[:, None])


@triton.jit
def state(x, chunk, head, HEADS: tl.constexpr, K: tl.constexpr, first, V: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of x[chunk, head, :, first : first + BLOCK]."""
    row, column = tl.arange(0, K), first + tl.arange(0, BLOCK)
    return x + (chunk.to(tl.int64) * HEADS + head) * K * V + row[:, None] * V + column[None, :]


@triton.jit
def chunk_of(segments, chunk, tokens, C: tl.constexpr):
    """Of a chunk: its tokens, those that exist, the mask [C, C] of own tokens at or before, e, and x."""
    i = tl.arange(0, C)
    t = chunk.to(tl.int64) * C + i
    has = t < tokens
    segment = tl.load(segments + t, has, other=-1)
    before = tl.load(segments + chunk * C - 1, chunk > 0, other=-2)
    after = tl.load(segments + chunk * C + C, chunk * C + C < tokens, other=-2)
    visible = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])
    return t, has, visible, (segment == before) & has, (segment == after) & has


@triton.jit
def last_of(c, C: tl.constexpr):
    """The last entry of a vector [C]."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, c, 0.0), 0)


@triton.jit
def decays(c, visible):
    """P [C, C]."""
    return tl.where(visible, tl.exp(tl.where(visible, c[:, None] - c[None, :], 0.0)), 0.0)


@triton.jit
def inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [C, C], float32.

    Diagonal blocks of 16 by substitution. With D their inverses and X = D (a outside of these blocks), which is
    nilpotent in C / 16 steps (at most 4), the whole is (I - X) (I + X^2) D.
    """
    B: tl.constexpr = C // 16
    block, i = tl.arange(0, B), tl.arange(0, 16)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    diagonal = tl.sum(tl.where(own, tl.reshape(a, [B, 16, B, 16]), 0.0), 2)
    d = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros([B, 16, 16], tl.float32)
    for n in range(1, 16):
        here = (i == n)[None, :, None]
        coefficients = tl.sum(tl.where(here, diagonal, 0.0), 1)
        row = tl.sum(coefficients[:, :, None] * d, 1)
        d -= tl.where(here, row[:, None, :], 0.0)
    d = tl.reshape(tl.where(own, d[:, :, None, :], 0.0), [C, C])
    token = tl.arange(0, C)
    outside = tl.where((token[:, None] // 16) == (token[None, :] // 16), 0.0, a)
    x = tl.dot(d, outside, input_precision=PRECISION)
    square = tl.dot(x, x, input_precision=PRECISION)
    right = d + tl.dot(square, d, input_precision=PRECISION)
    return right - tl.dot(x, right, input_precision=PRECISION)


@triton.jit
def prepare(
    k, v, g, beta, segments, c_out, w_out, u_out, inverse_out, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr, INVERSE: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """c [T, H]; with DELTA also W [T, H, K], U [T, H, V] and, with INVERSE, T [T, H, C]. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C)
    gate = tl.load(g + t * H + head, has, other=0.0).to(tl.float32)
    c = tl.sum(tl.where(visible, gate[None, :], 0.0), 1)
    tl.store(c_out + t * H + head, c, has)
    if DELTA:
        i = tl.arange(0, C)
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
        strength = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
        scores = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        strict = visible & (i[:, None] > i[None, :])
        a = tl.where(strict, strength[:, None] * scores * decays(c, visible), 0.0)
        solved = inverse(a, C, PRECISION).to(keys.dtype)
        if INVERSE:
            tl.store(inverse_out + (t[:, None] * H + head) * C + i[None, :], solved, has[:, None])
        entering = tl.where(enters, strength * tl.exp(c), 0.0)
        w = tl.dot(solved, (keys * entering[:, None]).to(keys.dtype), input_precision=PRECISION)
        store_rows(w_out, w, t, head, H, 0, K, K, has)
        for first in range(0, V, BLOCK_V):
            values = rows(v, t, head, H, first, V, BLOCK_V, has)
            u = tl.dot(solved, (values * strength[:, None]).to(keys.dtype), input_precision=PRECISION)
            store_rows(u_out, u, t, head, H, first, V, BLOCK_V, has)


@triton.jit
def carry(
    k, w, u, c, boundaries, states,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does. Grid: (segments, H, V / BLOCK_V)."""
    head, first = tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + tl.program_id(0))
    stop = tl.load(boundaries + tl.program_id(0) + 1)
    opening = start // C
    s = tl.zeros([K, BLOCK_V], tl.float32)
    i = tl.arange(0, C)
    for chunk in range(opening, (stop - 1) // C):
        t = (chunk * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        new = rows(u, t, head, H, first, V, BLOCK_V, own)
        if DELTA:
            taken = rows(w, t, head, H, 0, K, K, own & (chunk > opening))
            new = (new - tl.dot(taken, s.to(taken.dtype), input_precision=PRECISION)).to(keys.dtype)
        decay = tl.load(c + t * H + head, own, other=0.0)
        last = last_of(decay, C)
        keys = (keys * tl.exp(last - decay)[:, None]).to(new.dtype)
        s = s * tl.exp(last) + tl.dot(tl.trans(keys), new, input_precision=PRECISION)
        place = state(states, tl.cast(chunk + 1, tl.int64), head, H, K, first, V, BLOCK_V)
        tl.store(place, s.to(states.dtype.element_ty))


@triton.jit
def output(
    q, k, w, u, c, states, segments, out, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + t * H + head, has, other=0.0)
    new = rows(u, t, head, H, first, V, BLOCK_V, has)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    if DELTA:
        taken = rows(w, t, head, H, 0, K, K, has)
        new = (new - tl.dot(taken, s, input_precision=PRECISION)).to(keys.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible) * scale
    total = tl.dot(scores.to(new.dtype), new, input_precision=PRECISION)
    reach = tl.where(enters, tl.exp(decay) * scale, 0.0)
    total += tl.dot(queries, s, input_precision=PRECISION) * reach[:, None]
    store_rows(out, total, t, head, H, first, V, BLOCK_V, has)


@triton.jit
def values_backward(
    q, k, c, segments, dout, dnew, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of N's gradient that comes from the chunk's own O. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + t * H + head, has, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible) * scale
    scores = tl.trans(scores.to(keys.dtype))
    for first in range(0, V, BLOCK_V):
        do = rows(dout, t, head, H, first, V, BLOCK_V, has)
        store_rows(dnew, tl.dot(scores, do, input_precision=PRECISION), t, head, H, first, V, BLOCK_V, has)


@triton.jit
def carry_backward(
    q, k, w, c, boundaries, dout, dnew, dstates, scale,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state that enters each chunk, from a document's last chunk to its first.

    It adds to N's gradient what comes from the state that leaves. Grid: (segments, H, V / BLOCK_V).
    """
    head, first = tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + tl.program_id(0))
    stop = tl.load(boundaries + tl.program_id(0) + 1)
    opening, closing = start // C, (stop - 1) // C
    ds = tl.zeros([K, BLOCK_V], tl.float32)
    i = tl.arange(0, C)
    for n in range(closing - opening + 1):
        chunk = closing - n
        t = (chunk * C + i).to(tl.int64)
        own = (t >= start) & (t < stop)
        dn = rows(dnew, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + t * H + head, own, other=0.0)
        last = last_of(decay, C)
        if n > 0:
            keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
            keys = (keys * tl.exp(last - decay)[:, None]).to(dn.dtype)
            dn = (dn + tl.dot(keys, ds.to(keys.dtype), input_precision=PRECISION)).to(dn.dtype)
            store_rows(dnew, dn, t, head, H, first, V, BLOCK_V, own)
        if chunk > opening:
            queries = rows(q, t, head // (H // Q), Q, 0, K, K, own)
            queries = (queries * (tl.exp(decay) * scale)[:, None]).to(dn.dtype)
            do = rows(dout, t, head, H, first, V, BLOCK_V, own)
            ds = ds * tl.exp(last) + tl.dot(tl.trans(queries), do, input_precision=PRECISION)
            if DELTA:
                taken = rows(w, t, head, H, 0, K, K, own)
                ds -= tl.dot(tl.trans(taken), dn, input_precision=PRECISION)
            place = state(dstates, tl.cast(chunk, tl.int64), head, H, K, first, V, BLOCK_V)
            tl.store(place, ds.to(dstates.dtype.element_ty))


@triton.jit
def scores_backward(
    q, k, w, u, c, segments, states, dstates, dout, dnew, dq, dk, dw, dc, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of q, of k and c but for what goes through W and U, and of W; dq, dk [T, H, K]. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, leaves = chunk_of(segments, chunk, tokens, C)
    decay = tl.load(c + t * H + head, has, other=0.0)
    any_enters, any_leaves = tl.max(enters.to(tl.int32), 0) > 0, tl.max(leaves.to(tl.int32), 0) > 0
    dscores = tl.zeros([C, C], tl.float32)
    dq_state = tl.zeros([C, K], tl.float32)
    dk_state = tl.zeros([C, K], tl.float32)
    dw_sum = tl.zeros([C, K], tl.float32)
    through = tl.zeros([K], tl.float32)
    for first in range(0, V, BLOCK_V):
        do = rows(dout, t, head, H, first, V, BLOCK_V, has)
        dn = rows(dnew, t, head, H, first, V, BLOCK_V, has)
        new = rows(u, t, head, H, first, V, BLOCK_V, has)
        s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), any_enters, other=0.0)
        ds = tl.load(state(dstates, chunk + 1, head, H, K, first, V, BLOCK_V), any_leaves, other=0.0)
        if DELTA:
            taken = rows(w, t, head, H, 0, K, K, has)
            new = (new - tl.dot(taken, s, input_precision=PRECISION)).to(do.dtype)
            dw_sum -= tl.dot(dn, tl.trans(s), input_precision=PRECISION)
        dscores += tl.dot(do, tl.trans(new), input_precision=PRECISION)
        dq_state += tl.dot(do, tl.trans(s), input_precision=PRECISION)
        dk_state += tl.dot(new, tl.trans(ds), input_precision=PRECISION)
        through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    last = last_of(decay, C)

    dq_state *= tl.where(enters, tl.exp(decay) * scale, 0.0)[:, None]
    dk_state *= tl.where(leaves, tl.exp(tl.where(leaves, last - decay, 0.0)), 0.0)[:, None]
    from_state = tl.sum(dk_state * keys, 1)
    dscores = dscores * decays(decay, visible) * scale
    moved = dscores * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    dc_sum = tl.sum(dq_state * queries, 1) - from_state + tl.sum(moved, 1) - tl.sum(moved, 0)
    # All that leaves is decayed by c_last: what the chunk adds, and what entered if its document leaves too.
    at_end = tl.sum(from_state, 0) + tl.where(enters, tl.exp(last) * tl.sum(through, 0), 0.0)
    dc_sum += tl.where((tl.arange(0, C) == C - 1) & leaves, at_end, 0.0)
    dscores = dscores.to(keys.dtype)
    dq_sum = dq_state + tl.dot(dscores, keys, input_precision=PRECISION)
    dk_sum = dk_state + tl.dot(tl.trans(dscores), queries, input_precision=PRECISION)
    store_rows(dq, dq_sum, t, head, H, 0, K, K, has)
    store_rows(dk, dk_sum, t, head, H, 0, K, K, has)
    if DELTA:
        store_rows(dw, dw_sum, t, head, H, 0, K, K, has)
    tl.store(dc + t * H + head, dc_sum, has)


@triton.jit
def prepare_backward(
    k, v, beta, w, u, c, inverses, segments, dnew, dw, dc, dk, dv, dg, dbeta, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of v, beta and g, and the rest of k's, which is added to dk. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C)
    dc_sum = tl.load(dc + t * H + head, has, other=0.0)
    if DELTA:
        i = tl.arange(0, C)
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
        strength = tl.load(beta + t * H + head, has, other=0.0).to(tl.float32)
        decay = tl.load(c + t * H + head, has, other=0.0)
        solved = tl.load(inverses + (t[:, None] * H + head) * C + i[None, :], has[:, None], other=0.0)
        solved = tl.trans(solved)
        # W = T (b k) and U = T (beta v): gradients of both right sides, and -(d(b k) W^T + d(beta v) U^T) of A
        dscaled = tl.dot(solved, rows(dw, t, head, H, 0, K, K, has), input_precision=PRECISION)
        taken = rows(w, t, head, H, 0, K, K, has)
        da = -tl.dot(dscaled.to(taken.dtype), tl.trans(taken), input_precision=PRECISION)
        dstrength = tl.zeros([C], tl.float32)
        for first in range(0, V, BLOCK_V):
            dn = rows(dnew, t, head, H, first, V, BLOCK_V, has)
            dvalues = tl.dot(solved, dn, input_precision=PRECISION)
            values = rows(v, t, head, H, first, V, BLOCK_V, has)
            store_rows(dv, dvalues * strength[:, None], t, head, H, first, V, BLOCK_V, has)
            dstrength += tl.sum(dvalues * values, 1)
            u_rows = rows(u, t, head, H, first, V, BLOCK_V, has)
            da -= tl.dot(dvalues.to(u_rows.dtype), tl.trans(u_rows), input_precision=PRECISION)
        reach = tl.where(enters, tl.exp(decay), 0.0)
        along = tl.sum(dscaled * keys, 1) * reach
        strict = visible & (i[:, None] > i[None, :])
        da = tl.where(strict, da * decays(decay, visible), 0.0)
        scores = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        dstrength += along + tl.sum(da * scores, 1)
        da *= strength[:, None]
        moved = da * scores
        dc_sum += along * strength + tl.sum(moved, 1) - tl.sum(moved, 0)
        da = da.to(keys.dtype)
        dk_sum = rows(dk, t, head, H, 0, K, K, has) + dscaled * (reach * strength)[:, None]
        dk_sum += tl.dot(da, keys, input_precision=PRECISION)
        dk_sum += tl.dot(tl.trans(da), keys, input_precision=PRECISION)
        store_rows(dk, dk_sum, t, head, H, 0, K, K, has)
        tl.store(dbeta + t * H + head, dstrength.to(dbeta.dtype.element_ty), has)
    # c_i is the sum over the tokens of the document up to i
    found = tl.sum(tl.where(visible, dc_sum[:, None], 0.0), 0)
    tl.store(dg + t * H + head, found.to(dg.dtype.element_ty), has)
