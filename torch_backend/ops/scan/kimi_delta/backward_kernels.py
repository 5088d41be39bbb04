"""Triton kernels of the backward of :mod:`.kernels`, split as the backward of the gated delta rule is.

With D the gradient of the state that leaves a chunk, transposed as states are, and dR = T^T dN:

    dN = scale B^T dO + leaving D      dA = -dR N^T, j < i      dB = scale dO N^T, j <= i
    dS = exp(c_last) D + scale asking^T dO - (beta entering)^T dR

What reaches q and k as they stand in a product with a decay reaches c as that gradient times q or k.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import chunk_of, columns, rows, state, store_columns, store_rows
from torch_backend.ops.scan.kimi_delta.kernels import between, last_of, level_of


@triton.jit
def values_backward(
    scores, segments, dout, dnew, scale, tokens,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of dN [T, H, V] that comes from the chunk's own O. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, _, _, _ = chunk_of(segments, chunk, tokens, C, False)
    turned = tl.trans(rows(scores, t, head, H, 0, C, C, has))
    for first in range(0, V, BLOCK_V):
        do = rows(dout, t, head, H, first, V, BLOCK_V, has)
        store_rows(dnew, tl.dot(turned, do, input_precision=PRECISION) * scale, t, head, H, first, V, BLOCK_V, has)


@triton.jit
def carry_backward(
    strength, c, entering, asking, leaving, inverses, boundaries, dout, dnew, dfinal, dstates, dinitial,
    scale, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
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
        # In the closing chunk D is 0, and what leaves it is of another document.
        keys = rows(leaving, t, head, H, 0, K, K, own)
        do = columns(dout, t, head, H, first, V, BLOCK_V, own)
        dn = columns(dnew, t, head, H, first, V, BLOCK_V, own)
        leaves = (n > 0) | STATES
        kept = tl.exp(last_of(c, chunk, tokens, head, H, K, C))
        tl.store(state(dstates, chunk, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty), leaves)
        dn += tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        store_columns(dnew, dn, t, head, H, first, V, BLOCK_V, own)
        queries = rows(asking, t, head, H, 0, K, K, own)
        ds = ds * kept
        ds += tl.dot((do * scale).to(keys.dtype), queries, input_precision=PRECISION)
        beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        solved = rows(inverses, t, head, H, 0, C, C, own)
        dr = tl.dot(dn.to(keys.dtype), solved, input_precision=PRECISION)
        keys = rows(entering, t, head, H, 0, K, K, own)
        ds -= tl.dot((dr * beta[None, :]).to(keys.dtype), keys, input_precision=PRECISION)
    if STATES:
        tl.store(state(dinitial, segment, head, H, K, first, V, BLOCK_V), ds)
    elif closing > opening:
        t = (opening * C + i).to(tl.int64)
        own = t >= start
        keys = rows(leaving, t, head, H, 0, K, K, own)
        tl.store(state(dstates, opening, head, H, K, first, V, BLOCK_V), ds.to(dstates.dtype.element_ty))
        dn = columns(dnew, t, head, H, first, V, BLOCK_V, own)
        dn += tl.dot(ds.to(keys.dtype), tl.trans(keys), input_precision=PRECISION)
        store_columns(dnew, dn, t, head, H, first, V, BLOCK_V, own)


@triton.jit
def chunk_backward(
    q, k, v, c, strength, entering, inverses, segments, states, dstates, dout, dnew,
    dq, dk, dv, dg, dbeta, scale, tokens,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STATES: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of all inputs. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, enters, leaves = chunk_of(segments, chunk, tokens, C, STATES)
    i = tl.arange(0, C)
    any_enters, any_leaves = tl.max(enters.to(tl.int32), 0) > 0, tl.max(leaves.to(tl.int32), 0) > 0
    beta = tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    solved = rows(inverses, t, head, H, 0, C, C, has)
    dq_sum = tl.zeros([C, K], tl.float32)
    dk_in = tl.zeros([C, K], tl.float32)
    dk_out = tl.zeros([C, K], tl.float32)
    dscores = tl.zeros([C, C], tl.float32)
    da = tl.zeros([C, C], tl.float32)
    dbeta_sum = tl.zeros([C], tl.float32)
    kept = tl.zeros([K], tl.float32)
    for first in range(0, V, BLOCK_V):
        do = rows(dout, t, head, H, first, V, BLOCK_V, has)
        dn = rows(dnew, t, head, H, first, V, BLOCK_V, has)
        s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), any_enters, other=0.0)
        ds = tl.load(state(dstates, chunk, head, H, K, first, V, BLOCK_V), any_leaves, other=0.0)
        keys = rows(entering, t, head, H, 0, K, K, has)
        seen = tl.dot(keys, tl.trans(s), input_precision=PRECISION)
        error = rows(v, t, head, H, first, V, BLOCK_V, has) - seen
        new = tl.dot(solved, (error * beta[:, None]).to(keys.dtype), input_precision=PRECISION).to(keys.dtype)
        dr = tl.dot(tl.trans(solved), dn, input_precision=PRECISION)
        dvalues = dr * beta[:, None]
        store_rows(dv, dvalues, t, head, H, first, V, BLOCK_V, has)
        dbeta_sum += tl.sum(dr * error, 1)
        da -= tl.dot(dr.to(keys.dtype), tl.trans(new), input_precision=PRECISION)
        dscores += tl.dot(do, tl.trans(new), input_precision=PRECISION)
        dk_in -= tl.dot(dvalues.to(keys.dtype), s, input_precision=PRECISION)
        dq_sum += tl.dot(do, s, input_precision=PRECISION)
        dk_out += tl.dot(new, ds, input_precision=PRECISION)
        kept += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 0)
    total = rows(c, t, head, H, 0, K, K, has)
    last = last_of(c, chunk, tokens, head, H, K, C)
    reach = tl.where(enters[:, None], tl.exp(total), 0.0)
    dq_sum *= reach * scale
    dk_in *= reach
    dk_out *= tl.where(leaves[:, None], between(total, last), 0.0)
    queries = rows(q, t, head, H, 0, K, K, has)
    keys = rows(k, t, head, H, 0, K, K, has)
    # All that leaves is decayed by c_last: what the chunk adds, and what entered if its document leaves too.
    at_end = tl.sum(keys * dk_out, 0)[None, :] + tl.where(enters[:, None], tl.exp(last) * kept[None, :], 0.0)
    dc = tl.where(((i == C - 1) & leaves)[:, None], at_end, 0.0)
    dscores *= scale
    for level in range(LEVELS):
        decay, pairs = level_of(c, total, segments, t, has, tokens, head, level, H, K, C)
        of_b = tl.where(pairs, dscores, 0.0).to(keys.dtype)
        of_a = tl.where(pairs, da, 0.0)
        moved = (keys * decay).to(keys.dtype)
        asked = (queries * decay).to(keys.dtype)
        dq_sum += decay * tl.dot(of_b, moved, input_precision=PRECISION)
        corrected = decay * tl.dot(of_a.to(keys.dtype), moved, input_precision=PRECISION)
        dbeta_sum += tl.sum(corrected * keys, 1)
        dk_in += corrected * beta[:, None]
        of_a = tl.trans((of_a * beta[:, None]).to(keys.dtype))
        added = tl.dot(tl.trans(of_b), asked, input_precision=PRECISION)
        dk_out += decay * (added + tl.dot(of_a, moved, input_precision=PRECISION))
    tl.store(dbeta + t * H + head, dbeta_sum.to(dbeta.dtype.element_ty), has)
    dc += queries * dq_sum + keys * (dk_in - dk_out)
    # A token's own score has no decay.
    own = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1)[:, None]
    store_rows(dq, dq_sum + own * keys, t, head, H, 0, K, K, has)
    store_rows(dk, dk_in + dk_out + own * queries, t, head, H, 0, K, K, has)
    # c_i is the sum over the tokens of the document up to i
    dgate = tl.dot(tl.trans(tl.where(visible, 1.0, 0.0)), dc, input_precision=PRECISION)
    store_rows(dg, dgate, t, head, H, 0, K, K, has)
