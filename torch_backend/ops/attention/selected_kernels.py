"""Triton kernels of attention over selected keys; launched by ``attention.selected_triton``.

One program takes one query and the heads of a group that share a head of keys: these are the rows of its tile, and the
columns are the keys that the query selected, gathered BLOCK_N at a time. So tensor cores are full from 16 heads on, as
in DeepSeek's kernels (https://arxiv.org/abs/2512.02556), whose latent attention has one head of keys for all of them.

Keys and values lie in one tensor kv [L, K, W]: keys are its first HEAD_DIM channels, values the VALUE_DIM from channel
VALUES_AT on. With SHARED the values are the first BLOCK_D channels of the keys, as in latent attention, and are loaded
once. A width that is no power of two is one (BLOCK_D) and a rest (BLOCK_R; 0 for none): 576 = 512 + 64.

A launch takes some queries C of the document, from ``first_i`` on.

Names: i query and j key, counted from the document's first token; s place in the selection, which has SIZE keys of a
block each; c channel. Softmax runs in base 2.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.attention.triton_tiles import LOG2E, LOWEST


@triton.jit
def rows_of(KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The program's query among those of the launch, its head of keys, and its heads within the group."""
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    place = tl.program_id(0)
    query, group = place // (KV_HEADS * TILES), place // TILES % KV_HEADS
    return query.to(tl.int64), group, place % TILES * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def keys_of(selected, s, end, i, SIZE: tl.constexpr):
    """The keys at places s of a query's selection, and which of them it sees."""
    block = tl.load(selected + s // SIZE, s < end, other=-1)
    j = block * SIZE + s % SIZE
    seen = (block >= 0) & (j <= i)
    return tl.where(seen, j, 0).to(tl.int64), seen


@triton.jit(do_not_specialize=["first_i"])
def forward(
    q, kv, selected, ends, sinks, out, lse, first_i, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUES_AT: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    SINKS: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query and its heads: out [C, H, Dv] and the denominator's base-2 log, lse [C, H]. Grid: (C * K * tiles,)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    query, group, head = rows_of(KV_HEADS, GROUP, BLOCK_M)
    i, present = first_i + query, head < GROUP
    chosen = query * GROUPS + (group if GROUPS > 1 else 0)
    end = tl.load(ends + chosen) * SIZE
    selected += chosen * TOP
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    row = query * HEADS + group * GROUP + head
    q_rows = tl.load(q + row[:, None] * HEAD_DIM + d, present[:, None] & (d < HEAD_DIM), other=0.0)
    if BLOCK_R:
        r = BLOCK_D + tl.arange(0, BLOCK_R)[None, :]
        q_rest = tl.load(q + row[:, None] * HEAD_DIM + r, present[:, None] & (r < HEAD_DIM), other=0.0)
    kv += group * WIDTH
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m = tl.load(sinks + group * GROUP + head, present, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    base2 = scale * LOG2E
    for first in tl.range(0, end, BLOCK_N):
        j, seen = keys_of(selected, first + tl.arange(0, BLOCK_N), end, i, SIZE)
        place = kv + j[:, None] * (KV_HEADS * WIDTH)
        keys = tl.load(place + d, seen[:, None] & (d < HEAD_DIM), other=0.0)
        scores = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
        if BLOCK_R:
            rest = tl.load(place + r, seen[:, None] & (r < HEAD_DIM), other=0.0)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * base2, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(m - highest)
        total = total * shrink + tl.sum(p, 1)
        if SHARED:
            values = keys
        else:
            values = tl.load(place + VALUES_AT + e, seen[:, None] & (e < VALUE_DIM), other=0.0)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        m = highest
    total = tl.where(total > 0, total, 1.0)
    acc = (acc * (1 / total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * VALUE_DIM + e, acc, present[:, None] & (e < VALUE_DIM))
    tl.store(lse + row, m + tl.log2(total), present)


@triton.jit(do_not_specialize=["first_i"])
def backward(
    factors, kv, selected, ends, out, lse, dq, delta, weights, first_i, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUES_AT: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One query and its heads: dq [C, H, D], delta [C, H], the sum of out * dout, and weights [C, K, 2, H / K, S].

    Products of the weights, which are the scores' gradients and the softmax, with the factors [C, K, 2, H / K, W] are
    the gradients of the query's keys. The factors are the queries, at the places of keys in kv, and the gradients of
    the output, at those of values. Weights from the end of a selection on are left as they are.
    Grid: (C * K * tiles,).
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    query, group, head = rows_of(KV_HEADS, GROUP, BLOCK_M)
    i, present = first_i + query, head < GROUP
    chosen = query * GROUPS + (group if GROUPS > 1 else 0)
    end = tl.load(ends + chosen) * SIZE
    selected += chosen * TOP
    d, e = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_E)[None, :]
    row = query * HEADS + group * GROUP + head
    has_e = present[:, None] & (e < VALUE_DIM)
    factor = ((query * KV_HEADS + group) * (2 * GROUP) + head)[:, None]
    do_rows = tl.load(factors + (factor + GROUP) * WIDTH + VALUES_AT + e, has_e, other=0.0)
    out_rows = tl.load(out + row[:, None] * VALUE_DIM + e, has_e, other=0.0)
    delta_rows = tl.sum(out_rows.to(tl.float32) * do_rows.to(tl.float32), 1)
    tl.store(delta + row, delta_rows, present)
    lse_rows = tl.load(lse + row, present, other=0.0)
    q_rows = tl.load(factors + factor * WIDTH + d, present[:, None] & (d < HEAD_DIM), other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if BLOCK_R:
        r = BLOCK_D + tl.arange(0, BLOCK_R)[None, :]
        q_rest = tl.load(factors + factor * WIDTH + r, present[:, None] & (r < HEAD_DIM), other=0.0)
        acc_rest = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    kv += group * WIDTH
    weights += factor * (TOP * SIZE)
    base2 = scale * LOG2E
    for first in tl.range(0, end, BLOCK_N):
        s = first + tl.arange(0, BLOCK_N)
        j, seen = keys_of(selected, s, end, i, SIZE)
        place = kv + j[:, None] * (KV_HEADS * WIDTH)
        keys = tl.load(place + d, seen[:, None] & (d < HEAD_DIM), other=0.0)
        if SHARED:
            values = keys
        else:
            values = tl.load(place + VALUES_AT + e, seen[:, None] & (e < VALUE_DIM), other=0.0)
        scores = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
        if BLOCK_R:
            rest = tl.load(place + r, seen[:, None] & (r < HEAD_DIM), other=0.0)
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        dp = tl.dot(do_rows, tl.trans(values), input_precision="ieee")
        p = tl.where(seen[None, :], tl.exp2(scores * base2 - lse_rows[:, None]), 0.0)
        ds = (p * (dp - delta_rows[:, None]) * scale).to(keys.dtype)
        written = present[:, None] & (s < end)[None, :]
        tl.store(weights + s[None, :], ds, written)
        tl.store(weights + GROUP * (TOP * SIZE) + s[None, :], p.to(keys.dtype), written)
        acc = tl.dot(ds, keys, acc, input_precision="ieee")
        if BLOCK_R:
            acc_rest = tl.dot(ds, rest, acc_rest, input_precision="ieee")
    to = dq + row[:, None] * HEAD_DIM
    tl.store(to + d, acc.to(dq.dtype.element_ty), present[:, None] & (d < HEAD_DIM))
    if BLOCK_R:
        tl.store(to + r, acc_rest.to(dq.dtype.element_ty), present[:, None] & (r < HEAD_DIM))


@triton.jit
def add_shares(
    shares, order, starts, dkv, keys,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK_W: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Adds to one key's gradient, dkv [L, K, W] in float32, its shares [C, K, S, W] in order. Grid: (keys * K,).

    ``order`` holds the places [C, G, S] of the selection sorted by their keys; starts[g, 1 + j] is where those of key j
    begin.
    """
    j, group = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    starts += (group.to(tl.int64) * (keys + 1) if GROUPS > 1 else 0) + 1 + j
    first, end = tl.load(starts), tl.load(starts + 1)
    if first == end:
        return
    c = tl.arange(0, BLOCK_W)
    acc = tl.zeros([BLOCK_W], tl.float32)
    for at in tl.range(first, end, ROWS):
        n = at + tl.arange(0, ROWS)
        place = tl.load(order + n, n < end, other=0)
        row = (place // (GROUPS * PLACES) * KV_HEADS + group) * PLACES + place % PLACES
        share = tl.load(
            shares + row[:, None] * WIDTH + c[None, :], (n < end)[:, None] & (c < WIDTH)[None, :], other=0.0
        )
        acc += tl.sum(share.to(tl.float32), 0)
    dkv += (j.to(tl.int64) * KV_HEADS + group) * WIDTH + c
    tl.store(dkv, tl.load(dkv, c < WIDTH, other=0.0) + acc, c < WIDTH)


@triton.jit(do_not_specialize=["first_i"])
def probabilities(
    q, kv, selected, ends, sinks, sums, first_i, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUES_AT: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    SINKS: tl.constexpr, SHARED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax of one query, summed over the heads of a tile: sums [C, K, tiles, S]. Grid: (C * K * tiles,).

    The first pass over the keys finds the denominators. Sums from the end of a selection on are left as they are.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    query, group, head = rows_of(KV_HEADS, GROUP, BLOCK_M)
    i, present = first_i + query, head < GROUP
    chosen = query * GROUPS + (group if GROUPS > 1 else 0)
    end = tl.load(ends + chosen) * SIZE
    selected += chosen * TOP
    d = tl.arange(0, BLOCK_D)[None, :]
    row = query * HEADS + group * GROUP + head
    q_rows = tl.load(q + row[:, None] * HEAD_DIM + d, present[:, None] & (d < HEAD_DIM), other=0.0)
    if BLOCK_R:
        r = BLOCK_D + tl.arange(0, BLOCK_R)[None, :]
        q_rest = tl.load(q + row[:, None] * HEAD_DIM + r, present[:, None] & (r < HEAD_DIM), other=0.0)
    kv += group * WIDTH
    sums += tl.program_id(0).to(tl.int64) * (TOP * SIZE)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        m = tl.load(sinks + group * GROUP + head, present, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    for second in tl.static_range(2):
        for first in tl.range(0, end, BLOCK_N):
            s = first + tl.arange(0, BLOCK_N)
            j, seen = keys_of(selected, s, end, i, SIZE)
            place = kv + j[:, None] * (KV_HEADS * WIDTH)
            keys = tl.load(place + d, seen[:, None] & (d < HEAD_DIM), other=0.0)
            scores = tl.dot(q_rows, tl.trans(keys), input_precision="ieee")
            if BLOCK_R:
                rest = tl.load(place + r, seen[:, None] & (r < HEAD_DIM), other=0.0)
                scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
            scores = tl.where(seen[None, :], scores * (scale * LOG2E), float("-inf"))
            if second:
                p = tl.where(present[:, None], tl.exp2(scores - m[:, None]) / total[:, None], 0.0)
                tl.store(sums + s, tl.sum(p, 0), s < end)
            else:
                highest = tl.maximum(m, tl.max(scores, 1))
                total = total * tl.exp2(m - highest) + tl.sum(tl.exp2(scores - highest[:, None]), 1)
                m = highest


@triton.jit(do_not_specialize=["first_i", "queries"])
def index_scores(
    q, k, weights, scores, first_i, queries, keys,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of an indexer's scores [L, S] of queries from ``first_i`` on: the sum over its heads of w relu(q k^T).

    q [L, H, D], k [S, D], weights [H, L] in float32. A key stands for SIZE tokens; minus infinity where its last token
    is later. Grid: (tiles of L, of S).
    """
    first_row, first_j = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    row, j = first_row + tl.arange(0, BLOCK_M), first_j + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if (first_j + 1) * SIZE <= first_i + first_row + BLOCK_M:
        key_rows = tl.load(k + j[:, None] * HEAD_DIM + d, (j < keys)[:, None] & (d < HEAD_DIM), other=0.0)
        place = q + row[:, None].to(tl.int64) * (HEADS * HEAD_DIM) + d
        of_head = weights + row
        for head in tl.range(0, HEADS):
            q_rows = tl.load(place + head * HEAD_DIM, (row < queries)[:, None] & (d < HEAD_DIM), other=0.0)
            weight = tl.load(of_head, row < queries, other=0.0)
            products = tl.dot(q_rows, tl.trans(key_rows), input_precision="ieee")
            total += tl.maximum(products, 0.0) * weight[:, None]
            of_head += queries
    total = tl.where((j[None, :] + 1) * SIZE <= (first_i + row)[:, None] + 1, total, float("-inf"))
    to = scores + row[:, None].to(tl.int64) * keys + j[None, :]
    tl.store(to, total, (row < queries)[:, None] & (j < keys)[None, :])


@triton.jit(do_not_specialize=["first_i", "queries"])
def best_scores(
    q, k, scores, first_i, queries, keys,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest q k^T of a block of SIZE keys that are not later, for a tile of queries and a head of the indexer.

    q [L, H, D], k [S, D]; scores [L, H, blocks], minus infinity where all of a block is later.
    Grid: (tiles of L, blocks, H).
    """
    first_row, block, head = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if block * SIZE < first_i + first_row + BLOCK_M:
        place = q + (row[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + d
        q_rows = tl.load(place, (row < queries)[:, None] & (d < HEAD_DIM), other=0.0)
        for first in tl.range(0, SIZE, BLOCK_N):
            within = first + tl.arange(0, BLOCK_N)
            j = block * SIZE + within
            present = (within < SIZE) & (j < keys)
            key_rows = tl.load(k + j[:, None] * HEAD_DIM + d, present[:, None] & (d < HEAD_DIM), other=0.0)
            products = tl.dot(q_rows, tl.trans(key_rows), input_precision="ieee")
            seen = present[None, :] & (j[None, :] <= (first_i + row)[:, None])
            best = tl.maximum(best, tl.max(tl.where(seen, products, float("-inf")), 1))
    to = scores + (row.to(tl.int64) * HEADS + head) * tl.num_programs(1) + block
    tl.store(to, best, row < queries)
