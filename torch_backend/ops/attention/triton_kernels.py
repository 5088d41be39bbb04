"""Triton kernels of packed attention: forward, gradient of q, gradient of k and v; launched by ``attention.triton``.

The queries of all heads that share a key head are rows of one tile: row r is token ``r // G`` of the tile and head
``r % G`` of the group, so one load of K and V serves the group, and a tile of many rows spans few tokens, which is what
keeps the tiles of short documents full. Each program takes one item of a work list, ``(segment's first token, segment's
length, the tile's first token in the segment)`` int32, so no program visits keys of another segment and none is empty.
With LAST, queries are the last tokens of longer key segments, and the item has the other segment too; with FOREST it
says which ``parts`` the tile meets (:mod:`.triton_work`).
``add_shares`` adds the shares of a long walk in their order, in float32: results do not depend on that of programs.

Names: i query, j key, both within the segment; r row; d channel of q and k, e of v. Strides along tokens and heads
(``Q_T``, ``Q_H``) are compile-time constants: the rows of a tile are immediate offsets of one address; along channels
they are 1. A causal query sees the keys up to ``sees``, its own or with SPANS the last of its span; a key is seen from
query ``seen_from`` on. Neither falls along a segment, so its first and last token bound a tile. Softmax runs in base 2
(``exponent``). Algorithm: Dao 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import (
    LOG2E,
    LOWEST,
    exponent,
    item_of,
    keys_of,
    logits,
    queries_of,
    rows_of,
    store_keys,
    visible,
)


@triton.jit
def over_keys(
    m, total, acc, q_rows, i, first_i, last_i, sees, first_sees, last_sees, k_group, v_group, start, length,
    slope, scale, softcap, window, base2,
    K_T: tl.constexpr, V_T: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FOREST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds to a tile's softmax the keys of the segment at ``start``, from whose first token the queries are counted."""
    d, e, n = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_N)
    low, high, all_low, all_high = keys_of(
        first_i, last_i, first_sees, last_sees, length, window, CAUSAL, WINDOW, BLOCK_N
    )
    k_block = k_group + (start + low) * K_T
    v_block = v_group + (start + low) * V_T
    for first_j in tl.range(low, high, BLOCK_N):
        j = first_j + n
        inside = (j < length)[:, None]
        keys = tl.load(k_block + n[:, None] * K_T + d, inside & (d < HEAD_DIM), other=0.0)
        s = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
        s, _ = logits(s, i[:, None], j[None, :], slope, scale, softcap, SOFTCAP, ALIBI)
        if (first_j < all_low) | (first_j + BLOCK_N > all_high):
            seen = visible(
                i[:, None], j[None, :], sees[:, None], j[None, :], length, window, CAUSAL, WINDOW, BEFORE=FOREST
            )
            s = tl.where(seen, s, float("-inf"))
        highest = tl.maximum(m, tl.max(s, 1) * base2)
        p = tl.exp2(s * base2 - highest[:, None])
        shrink = tl.exp2(m - highest)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        values = tl.load(v_block + n[:, None] * V_T + e, inside & (e < VALUE_DIM), other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
        m = highest
        k_block += BLOCK_N * K_T
        v_block += BLOCK_N * V_T
    return m, total, acc


@triton.jit(do_not_specialize=["tokens", "window"])
def forward(
    q, k, v, sinks, slopes, out, lse, work, parts, ends, tokens, scale, softcap, window,
    Q_T: tl.constexpr, Q_H: tl.constexpr, K_T: tl.constexpr, K_H: tl.constexpr, V_T: tl.constexpr, V_H: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    FOREST: tl.constexpr, LAST: tl.constexpr, SPANS: tl.constexpr, BY_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries: out [T, H, Dv] and the denominator's base-2 log, lse [K, T, H / K]. Grid: (items * K,)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    number, group = item_of(KV_HEADS, BY_HEADS)
    item = work + number * (5 if FOREST else 6 if LAST else 3)
    start, length, first_i = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    if length == 0:
        return
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    r = tl.arange(0, BLOCK_M)
    token, head, rows = rows_of(first_i, length, GROUP, BLOCK_M)
    i, present = first_i + token, r < rows
    last_i = tl.minimum(first_i + BLOCK_M // GROUP, length) - 1
    sees, first_sees, last_sees = i, first_i, last_i
    first_key, keys, gap = start, length, 0
    if LAST:
        first_key, keys, gap = tl.load(item + 3).to(tl.int64), tl.load(item + 4), tl.load(item + 5)
        sees, first_sees, last_sees = i + gap, first_i + gap, last_i + gap
    if SPANS:
        sees = (tl.load(ends + start + i, present, other=0) - start - 1).to(tl.int32)
        first_sees = (tl.load(ends + start + first_i) - start - 1).to(tl.int32)
        last_sees = (tl.load(ends + start + last_i) - start - 1).to(tl.int32)

    # 64 bits for the tile's first token: tokens times stride passes 2^31 in long batches
    q_tile = q + (start + first_i) * Q_T + group * (GROUP * Q_H)
    q_rows = tl.load(q_tile + (token * Q_T + head * Q_H)[:, None] + d, present[:, None] & (d < HEAD_DIM), other=0.0)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m = tl.load(sinks + group * GROUP + head).to(tl.float32) * LOG2E
        total += 1.0
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + group * GROUP + head).to(tl.float32)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    base2 = exponent(scale, SOFTCAP, ALIBI)

    k_group, v_group = k + group * K_H, v + group * V_H
    if FOREST:
        for part in tl.range(tl.load(item + 3), tl.load(item + 4)):
            first_key, keys = tl.load(parts + 3 * part).to(tl.int64), tl.load(parts + 3 * part + 1)
            gap = tl.load(parts + 3 * part + 2)
            m, total, acc = over_keys(
                m, total, acc, q_rows, i + gap, first_i + gap, last_i + gap, i + gap, first_i + gap, last_i + gap,
                k_group, v_group, first_key, keys, slope, scale, softcap, window, base2,
                K_T, V_T, HEAD_DIM, VALUE_DIM,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, FOREST, BLOCK_D, BLOCK_E, BLOCK_N,
            )  # fmt: skip
    else:
        m, total, acc = over_keys(
            m, total, acc, q_rows, i + gap, first_i + gap, last_i + gap, sees, first_sees, last_sees,
            k_group, v_group, first_key, keys, slope, scale, softcap, window, base2, K_T, V_T, HEAD_DIM, VALUE_DIM,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, FOREST, BLOCK_D, BLOCK_E, BLOCK_N,
        )  # fmt: skip

    row = (token * HEADS + head)[:, None]
    total = tl.where(present, total, 1.0)  # the rows past the segment may have seen no key
    acc = (acc * (1 / total)[:, None]).to(out.dtype.element_ty)
    out += ((start + first_i) * HEADS + group * GROUP) * VALUE_DIM
    tl.store(out + row * VALUE_DIM + e, acc, present[:, None] & (e < VALUE_DIM))
    lse += (group.to(tl.int64) * tokens + start + first_i) * GROUP
    tl.store(lse + r, m + tl.log2(total), present)


@triton.jit
def over_keys_again(
    acc, q_rows, do_rows, lse_rows, delta_rows, i, first_i, last_i, sees, first_sees, last_sees,
    k_group, v_group, start, length, slope, scale, softcap, window, base2,
    K_T: tl.constexpr, V_T: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FOREST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds to a tile's gradient of queries what the keys of the segment at ``start`` give; see :func:`over_keys`."""
    d, e, n = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_N)
    low, high, all_low, all_high = keys_of(
        first_i, last_i, first_sees, last_sees, length, window, CAUSAL, WINDOW, BLOCK_N
    )
    k_block = k_group + (start + low) * K_T
    v_block = v_group + (start + low) * V_T
    for first_j in tl.range(low, high, BLOCK_N):
        j = first_j + n
        inside = (j < length)[:, None]
        keys = tl.load(k_block + n[:, None] * K_T + d, inside & (d < HEAD_DIM), other=0.0)
        values = tl.load(v_block + n[:, None] * V_T + e, inside & (e < VALUE_DIM), other=0.0)
        s = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
        dp = tl.dot(do_rows, tl.trans(values), input_precision="ieee")
        s, steep = logits(s, i[:, None], j[None, :], slope, scale, softcap, SOFTCAP, ALIBI)
        p = tl.exp2(s * base2 - lse_rows[:, None])
        if (first_j < all_low) | (first_j + BLOCK_N > all_high):
            seen = visible(
                i[:, None], j[None, :], sees[:, None], j[None, :], length, window, CAUSAL, WINDOW, BEFORE=FOREST
            )
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta_rows[:, None]) * steep
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")
        k_block += BLOCK_N * K_T
        v_block += BLOCK_N * V_T
    return acc


@triton.jit(do_not_specialize=["tokens", "window"])
def backward_queries(
    q, k, v, out, dout, lse, slopes, dq, stats, work, parts, ends, tokens, scale, softcap, window,
    Q_T: tl.constexpr, Q_H: tl.constexpr, K_T: tl.constexpr, K_H: tl.constexpr, V_T: tl.constexpr, V_H: tl.constexpr,
    DO_T: tl.constexpr, DO_H: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FOREST: tl.constexpr,
    LAST: tl.constexpr, SPANS: tl.constexpr, BY_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries: dq [T, H, D], and for backward_keys stats [K, T, H / K, 2]. Grid: (items * K,).

    The two are lse and delta, the sum of out * dout.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    number, group = item_of(KV_HEADS, BY_HEADS)
    item = work + number * (5 if FOREST else 6 if LAST else 3)
    start, length, first_i = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    if length == 0:
        return
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    r = tl.arange(0, BLOCK_M)
    token, head, rows = rows_of(first_i, length, GROUP, BLOCK_M)
    i, present = first_i + token, r < rows
    last_i = tl.minimum(first_i + BLOCK_M // GROUP, length) - 1
    sees, first_sees, last_sees = i, first_i, last_i
    first_key, keys, gap = start, length, 0
    if LAST:
        first_key, keys, gap = tl.load(item + 3).to(tl.int64), tl.load(item + 4), tl.load(item + 5)
        sees, first_sees, last_sees = i + gap, first_i + gap, last_i + gap
    if SPANS:
        sees = (tl.load(ends + start + i, present, other=0) - start - 1).to(tl.int32)
        first_sees = (tl.load(ends + start + first_i) - start - 1).to(tl.int32)
        last_sees = (tl.load(ends + start + last_i) - start - 1).to(tl.int32)

    row = (token * HEADS + head)[:, None]
    first = (start + first_i) * HEADS + group * GROUP
    lse += (group.to(tl.int64) * tokens + start + first_i) * GROUP
    stats += (group.to(tl.int64) * tokens + start + first_i) * (2 * GROUP)
    has_e = present[:, None] & (e < VALUE_DIM)
    do_tile = dout + (start + first_i) * DO_T + group * (GROUP * DO_H)
    do_rows = tl.load(do_tile + (token * DO_T + head * DO_H)[:, None] + e, has_e, other=0.0)
    out_rows = tl.load(out + first * VALUE_DIM + row * VALUE_DIM + e, has_e, other=0.0)
    delta_rows = tl.sum(out_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    q_tile = q + (start + first_i) * Q_T + group * (GROUP * Q_H)
    q_rows = tl.load(q_tile + (token * Q_T + head * Q_H)[:, None] + d, present[:, None] & (d < HEAD_DIM), other=0.0)
    lse_rows = tl.load(lse + r, present, other=0.0)
    tl.store(stats + 2 * r, lse_rows, present)
    tl.store(stats + 2 * r + 1, delta_rows, present)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + group * GROUP + head).to(tl.float32)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    base2 = exponent(scale, SOFTCAP, ALIBI)

    k_group, v_group = k + group * K_H, v + group * V_H
    if FOREST:
        for part in tl.range(tl.load(item + 3), tl.load(item + 4)):
            first_key, keys = tl.load(parts + 3 * part).to(tl.int64), tl.load(parts + 3 * part + 1)
            gap = tl.load(parts + 3 * part + 2)
            acc = over_keys_again(
                acc, q_rows, do_rows, lse_rows, delta_rows, i + gap, first_i + gap, last_i + gap,
                i + gap, first_i + gap, last_i + gap, k_group, v_group, first_key, keys,
                slope, scale, softcap, window, base2, K_T, V_T, HEAD_DIM, VALUE_DIM,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, FOREST, BLOCK_D, BLOCK_E, BLOCK_N,
            )  # fmt: skip
    else:
        acc = over_keys_again(
            acc, q_rows, do_rows, lse_rows, delta_rows, i + gap, first_i + gap, last_i + gap,
            sees, first_sees, last_sees, k_group, v_group, first_key, keys,
            slope, scale, softcap, window, base2, K_T, V_T, HEAD_DIM, VALUE_DIM,
            CAUSAL, WINDOW, SOFTCAP, ALIBI, FOREST, BLOCK_D, BLOCK_E, BLOCK_N,
        )  # fmt: skip
    acc = (acc * scale).to(dq.dtype.element_ty)
    tl.store(dq + first * HEAD_DIM + row * HEAD_DIM + d, acc, present[:, None] & (d < HEAD_DIM))


@triton.jit
def over_queries(
    dk_acc, dv_acc, keys, values, j, first_j, last_j, seen_from, first_from, last_from,
    q_group, do_group, stats_group, slopes_group, start, length, scale, softcap, window, base2,
    Q_T: tl.constexpr, Q_H: tl.constexpr, DO_T: tl.constexpr, DO_H: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FOREST: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds to the gradients of a block of keys what the queries of the segment at ``start`` give.

    The keys are counted from that segment's first token, so those of an ancestor have negative numbers.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    r, both = tl.arange(0, BLOCK_M), tl.arange(0, 2 * BLOCK_M)
    low, high, all_low, all_high = queries_of(first_j, last_j, first_from, last_from, length, window, CAUSAL, WINDOW)
    if FOREST:
        low = tl.maximum(low, 0)
    q_tile = q_group + (start + low) * Q_T
    do_tile = do_group + (start + low) * DO_T
    stats_tile = stats_group + (start + low) * (2 * GROUP)
    for first_i in tl.range(low, high, TOKENS):
        token, head, rows = rows_of(first_i, length, GROUP, BLOCK_M)
        i, present = first_i + token, r < rows
        # rows past the segment are zeros, which add nothing
        place = (token * Q_T + head * Q_H)[:, None] + d
        q_rows = tl.load(q_tile + place, present[:, None] & (d < HEAD_DIM), other=0.0)
        place = (token * DO_T + head * DO_H)[:, None] + e
        do_rows = tl.load(do_tile + place, present[:, None] & (e < VALUE_DIM), other=0.0)
        # loaded as one, or each thread would copy every number that it needs by itself
        lse_rows, delta_rows = tl.split(tl.load(stats_tile + both, both < 2 * rows, other=0.0).reshape(BLOCK_M, 2))
        s = tl.dot(keys, tl.trans(q_rows), input_precision="ieee")
        dp = tl.dot(values, tl.trans(do_rows), input_precision="ieee")  # runs while p is computed
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_group + head).to(tl.float32)[None, :]
        s, steep = logits(s, i[None, :], j[:, None], slope, scale, softcap, SOFTCAP, ALIBI)
        p = tl.exp2(s * base2 - lse_rows[None, :])
        masked = first_i < all_low
        if WINDOW:
            masked = masked | (first_i + TOKENS > all_high)
        if masked:
            # rows are compared, not their tokens: constants, where tokens would take a register each
            ahead, ahead_from = (j[:, None] - first_i) * GROUP, (seen_from[:, None] - first_i) * GROUP
            seen = visible(
                r[None, :], ahead, r[None, :], ahead_from, (length - first_i) * GROUP, window * GROUP,
                CAUSAL, WINDOW, GROUP,
            )  # fmt: skip
            p = tl.where(seen, p, 0.0)
        dv_acc = tl.dot(p.to(do_rows.dtype), do_rows, dv_acc, input_precision="ieee")
        ds = p * (dp - delta_rows[None, :]) * steep
        dk_acc = tl.dot(ds.to(q_rows.dtype), q_rows, dk_acc, input_precision="ieee")
        q_tile += TOKENS * Q_T
        do_tile += TOKENS * DO_T
        stats_tile += TOKENS * (2 * GROUP)
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=["tokens", "window"])
def backward_keys(
    q, k, v, dout, stats, slopes, dk, dv, shares, work, parts, begins, tokens, scale, softcap, window,
    Q_T: tl.constexpr, Q_H: tl.constexpr, K_T: tl.constexpr, K_H: tl.constexpr, V_T: tl.constexpr, V_H: tl.constexpr,
    DO_T: tl.constexpr, DO_H: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, FOREST: tl.constexpr,
    LAST: tl.constexpr, SPANS: tl.constexpr, BY_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of keys over the queries that see it: dk [T, K, D] and dv [T, K, Dv]. Grid: (items * K,).

    A share of a block's walk goes to shares [S, K, BLOCK_N, D + Dv] instead, in float32.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    number, group = item_of(KV_HEADS, BY_HEADS)
    item = work + number * (8 if FOREST else 6 if LAST else 3)
    start, length, first_j = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    if length == 0:
        return
    d, e, n = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_N)
    j = first_j + n
    last_j = tl.minimum(first_j + BLOCK_N, length) - 1
    seen_from, first_from, last_from = j, first_j, last_j
    first_query, queries, gap = start, length, 0
    if LAST:
        first_query, queries, gap = tl.load(item + 3).to(tl.int64), tl.load(item + 4), tl.load(item + 5)
        seen_from, first_from, last_from = j - gap, first_j - gap, last_j - gap
    if SPANS:
        seen_from = (tl.load(begins + start + j, j < length, other=0) - start).to(tl.int32)
        first_from = (tl.load(begins + start + first_j) - start).to(tl.int32)
        last_from = (tl.load(begins + start + last_j) - start).to(tl.int32)
    has_d, has_e = (j < length)[:, None] & (d < HEAD_DIM), (j < length)[:, None] & (e < VALUE_DIM)
    keys = tl.load(k + (start + first_j) * K_T + group * K_H + n[:, None] * K_T + d, has_d, other=0.0)
    values = tl.load(v + (start + first_j) * V_T + group * V_H + n[:, None] * V_T + e, has_e, other=0.0)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    base2 = exponent(scale, SOFTCAP, ALIBI)

    q_group, do_group = q + group * (GROUP * Q_H), dout + group * (GROUP * DO_H)
    stats_group = stats + group.to(tl.int64) * tokens * (2 * GROUP)
    slopes_group = stats_group  # any pointer: without ALiBi nothing is read from it
    if ALIBI:
        slopes_group = slopes + group * GROUP
    if FOREST:
        begin, end = tl.load(item + 5), tl.load(item + 6)  # of the queries of all parts, counted from this part's first
        for part in tl.range(tl.load(item + 3), tl.load(item + 4)):
            skipped, queries = tl.maximum(begin, 0), tl.load(parts + 3 * part + 1)
            first_i, gap = tl.load(parts + 3 * part) + skipped, tl.load(parts + 3 * part + 2) + skipped
            dk_acc, dv_acc = over_queries(
                dk_acc, dv_acc, keys, values, j - gap, first_j - gap, last_j - gap,
                j - gap, first_j - gap, last_j - gap, q_group, do_group, stats_group, slopes_group,
                first_i.to(tl.int64), tl.minimum(queries, end) - skipped, scale, softcap, window, base2,
                Q_T, Q_H, DO_T, DO_H, GROUP, HEAD_DIM, VALUE_DIM, CAUSAL, WINDOW, SOFTCAP, ALIBI, FOREST,
                BLOCK_D, BLOCK_E, BLOCK_M,
            )  # fmt: skip
            begin, end = begin - queries, end - queries
    else:
        dk_acc, dv_acc = over_queries(
            dk_acc, dv_acc, keys, values, j - gap, first_j - gap, last_j - gap, seen_from, first_from, last_from,
            q_group, do_group, stats_group, slopes_group, first_query, queries, scale, softcap, window, base2,
            Q_T, Q_H, DO_T, DO_H, GROUP, HEAD_DIM, VALUE_DIM, CAUSAL, WINDOW, SOFTCAP, ALIBI, LAST,
            BLOCK_D, BLOCK_E, BLOCK_M,
        )  # fmt: skip

    dk_acc *= scale
    if FOREST:
        place = tl.load(item + 7)
        if place >= 0:
            share = shares + ((place.to(tl.int64) * KV_HEADS + group) * BLOCK_N + n[:, None]) * (HEAD_DIM + VALUE_DIM)
            tl.store(share + d, dk_acc, has_d)
            tl.store(share + HEAD_DIM + e, dv_acc, has_e)
            return
    store_keys(dk, dk_acc, start + first_j, group, has_d, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_N)
    store_keys(dv, dv_acc, start + first_j, group, has_e, KV_HEADS, VALUE_DIM, BLOCK_E, BLOCK_N)


@triton.jit
def add_shares(
    shares, dk, dv, sums, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the blocks of keys whose walk was cut: their shares added one after the other. Grid: (S * K,)."""
    place, group = tl.program_id(0).to(tl.int64) // KV_HEADS, tl.program_id(0) % KV_HEADS
    item = sums + place * 4
    start, length, first_j, count = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if count == 0:
        return
    n, d, e = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    has_d, has_e = (first_j + n < length) & (d < HEAD_DIM), (first_j + n < length) & (e < VALUE_DIM)
    share = shares + ((place * KV_HEADS + group) * BLOCK_N + n) * (HEAD_DIM + VALUE_DIM)
    dk_acc, dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for _ in tl.range(count):
        dk_acc += tl.load(share + d, has_d, other=0.0)
        dv_acc += tl.load(share + HEAD_DIM + e, has_e, other=0.0)
        share += KV_HEADS * BLOCK_N * (HEAD_DIM + VALUE_DIM)
    store_keys(dk, dk_acc, start + first_j, group, has_d, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_N)
    store_keys(dv, dv_acc, start + first_j, group, has_e, KV_HEADS, VALUE_DIM, BLOCK_E, BLOCK_N)
