"""Triton kernels of linear attention with a decay per head, forward, and of its states both ways; see :mod:`.wide`.

The row is cut into chunks of C tokens wherever documents begin, as in :mod:`.any_width_kernels`, and into spans of SPAN
chunks. With c the sum of g since the document or the chunk began, P[i, j] = exp(c_i - c_j) for a token j of the same
document at or before i, b the strengths, e and x masks of the tokens whose document reaches in from the chunk before
and out into the next one, and S [K, V] the state that enters a chunk (after Dao and Gu 2024,
https://arxiv.org/abs/2405.21060, section 6):

    O = scale ((q k^T P) b v + e exp(c) q S) + d v
    S' = f S + sum over j of x_j exp(c_last - c_j) b_j k_j v_j^T

where f is exp(c_last) if one document fills the chunk and reaches beyond both of its ends, else 0, and d, with SKIP, is
what a head's values pass on as they are.

``sums`` computes c, in binary logarithms. A program walks the chunks of a span for one head with the state in
registers, so states pass through memory once per span: ``ends`` finds what a span adds to a state, ``enter`` the state
that enters each span, ``output`` computes O. Programs walk the row, not its documents, so every segmentation takes the
same time.

The gradient D of the state that leaves a chunk is found from the last chunk to the first, with q, dO and scale e exp(c)
in the place of k, v and x exp(c_last - c) b. So ``ends``, ``enter`` and ``states``, which writes S or D of every chunk,
serve both (REVERSE).

Sums over tokens of a document are taken under the mask, so no document moves another by a bit.

Names: T tokens, H heads of v, Q heads of q and k (H is a multiple), K and V widths. A head of v of more than V channels
is SPLIT heads with the same gates. q, k [T, Q, K], v [T, H, V], g [T, H / SPLIT], c and strength [H / SPLIT, T] in
float32, d [H / SPLIT], states of chunks or spans [n, H, K, V], all contiguous.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def rows(x, chunk, i, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """x[t, head] of the tokens t = chunk * C + i."""
    start = x + (tl.cast(chunk, tl.int64) * C * HEADS + head) * WIDTH
    return tl.load(start + i[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :])


@triton.jit
def store_rows(x, value, chunk, head, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """x[t, head] = value for the tokens of a chunk that exist."""
    start, i = x + (tl.cast(chunk, tl.int64) * C * HEADS + head) * WIDTH, tl.arange(0, C)
    place = start + i[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    tl.store(place, value.to(x.dtype.element_ty), (i < tokens - chunk * C)[:, None])


@triton.jit
def state(x, n, head, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Addresses of x[n, head]."""
    return x + (tl.cast(n, tl.int64) * HEADS + head) * K * V + tl.arange(0, K)[:, None] * V + tl.arange(0, V)[None, :]


@triton.jit
def chunk_of(segments, chunk, tokens, C: tl.constexpr):
    """Locates a chunk: the places of its tokens, their segments, the segment before and the one after.

    Behind the end of the row the last token is repeated, in a segment of its own: loads need no mask.
    """
    i, rest = tl.arange(0, C), tokens - chunk * C
    segment = tl.load(segments + chunk * C + i, i < rest, other=-1)
    before = tl.load(segments + chunk * C - 1, chunk > 0, other=-2)
    after = tl.load(segments + chunk * C + C, rest > C, other=-3)
    return tl.minimum(i, rest - 1), segment, before, after


@triton.jit
def causal(segment, C: tl.constexpr):
    """Marks where token j [1, C] is of the document of token i [C, 1] and at or before it."""
    i = tl.arange(0, C)
    return (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])


@triton.jit
def gates(c, strength, head, chunk, i, tokens, C: tl.constexpr, SPLIT: tl.constexpr, GAIN: tl.constexpr):
    """c and strengths of a chunk, and the last c."""
    start = tl.cast(head // SPLIT, tl.int64) * tokens + chunk * C
    decay = tl.load(c + start + i)
    last = tl.load(c + start + C - 1, tokens - chunk * C >= C, other=0.0)
    strong = tl.full([C], 1.0, tl.float32)
    if GAIN:
        strong = tl.load(strength + start + i)
    return decay, strong, last


@triton.jit
def between(decay):
    """P, without its mask."""
    return tl.exp2(tl.minimum(decay[:, None] - decay[None, :], 0.0))


@triton.jit
def written(decay, last, leaves):
    """x exp(c_last - c)."""
    return tl.where(leaves, tl.exp2(tl.where(leaves, last - decay, 0.0)), 0.0)


@triton.jit
def faded(s, f):
    """f S, but 0 where f is: what has overflowed must end with its document too."""
    return tl.where(f != 0.0, s * f, 0.0)


@triton.jit
def sums(
    g, beta, segments, c, strength, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, GAIN: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """c and, with GAIN, beta as strength. Grid: (chunks, H / SPLIT / BLOCK)."""
    chunk, head = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, segment, _, _ = chunk_of(segments, chunk, tokens, C)
    t = tl.cast(chunk, tl.int64) * C + tl.arange(0, C)
    mask = (t < tokens)[:, None] & (head < H // SPLIT)[None, :]
    source, target = t[:, None] * (H // SPLIT) + head[None, :], tl.cast(head, tl.int64)[None, :] * tokens + t[:, None]
    gate = tl.load(g + source, mask, other=0.0).to(tl.float32) * 1.4426950408889634
    tl.store(c + target, tl.dot(causal(segment, C).to(tl.float32), gate, input_precision="ieee"), mask)
    if GAIN:
        tl.store(strength + target, tl.load(beta + source, mask, other=0.0).to(tl.float32), mask)


@triton.jit
def step(
    s, k, v, c, strength, segments, chunk, head, scale, tokens,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    GAIN: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after a chunk from the one before it, or the other way, and f."""
    i, segment, before, after = chunk_of(segments, chunk, tokens, C)
    keys, values = rows(k, chunk, i, head // (H // Q), Q, K, C), rows(v, chunk, i, head, H, V, C)
    decay, strong, last = gates(c, strength, head, chunk, i, tokens, C, SPLIT, GAIN and not REVERSE)
    if REVERSE:
        weight = tl.where(segment == before, tl.exp2(decay), 0.0) * scale
    else:
        weight = written(decay, last, segment == after) * strong
    fade = tl.where(before == after, tl.exp2(last), 0.0)
    added = faded(values, weight[:, None]).to(values.dtype)
    return tl.dot(tl.trans(keys), added, faded(s, fade), input_precision=PRECISION), fade


@triton.jit
def ends(
    k, v, c, strength, segments, local, fading, scale, tokens, chunks,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, GAIN: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what a span adds to a state, and the product of its f, float32 [spans, H]. Grid: (spans, H)."""
    span, head = tl.program_id(0), tl.program_id(1)
    first, stop = span * SPAN, tl.minimum(span * SPAN + SPAN, chunks)
    s = tl.zeros([K, V], tl.float32)
    product = tl.full([], 1.0, tl.float32)
    for n in tl.range(0, stop - first, num_stages=STAGES):
        chunk = stop - 1 - n if REVERSE else first + n
        s, fade = step(
            s, k, v, c, strength, segments, chunk, head, scale, tokens,
            H, SPLIT, Q, K, V, C, GAIN, REVERSE, PRECISION,
        )  # fmt: skip
        product *= fade
    tl.store(state(local, span, head, H, K, V), s.to(local.dtype.element_ty))
    tl.store(fading + span * H + head, product)


@triton.jit
def enter(
    local, fading, entering, spans,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state that enters each span. Grid: (H, K * V / BLOCK)."""
    head, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK], tl.float32)
    for n in range(spans):
        span = spans - 1 - n if REVERSE else n
        at = (tl.cast(span, tl.int64) * H + head) * K * V + place
        tl.store(entering + at, s.to(entering.dtype.element_ty))
        s = faded(s, tl.load(fading + span * H + head)) + tl.load(local + at).to(tl.float32)


@triton.jit
def states(
    k, v, c, strength, segments, entering, kept, scale, tokens, chunks,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, GAIN: tl.constexpr, REVERSE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S that enters each chunk, or D of what leaves it. Grid: (spans, H)."""
    span, head = tl.program_id(0), tl.program_id(1)
    first, stop = span * SPAN, tl.minimum(span * SPAN + SPAN, chunks)
    s = tl.load(state(entering, span, head, H, K, V)).to(tl.float32)
    for n in tl.range(0, stop - first, num_stages=STAGES):
        chunk = stop - 1 - n if REVERSE else first + n
        tl.store(state(kept, chunk, head, H, K, V), s.to(kept.dtype.element_ty))
        s, _ = step(
            s, k, v, c, strength, segments, chunk, head, scale, tokens,
            H, SPLIT, Q, K, V, C, GAIN, REVERSE, PRECISION,
        )  # fmt: skip


@triton.jit
def output(
    q, k, v, c, strength, skip, segments, entering, out, scale, tokens, chunks,
    H: tl.constexpr, SPLIT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, GAIN: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (spans, H)."""
    span, head = tl.program_id(0), tl.program_id(1)
    s = tl.load(state(entering, span, head, H, K, V)).to(tl.float32)
    for chunk in tl.range(span * SPAN, tl.minimum(span * SPAN + SPAN, chunks), num_stages=STAGES):
        i, segment, before, after = chunk_of(segments, chunk, tokens, C)
        queries, keys = rows(q, chunk, i, head // (H // Q), Q, K, C), rows(k, chunk, i, head // (H // Q), Q, K, C)
        values = rows(v, chunk, i, head, H, V, C)
        decay, strong, last = gates(c, strength, head, chunk, i, tokens, C, SPLIT, GAIN)
        reach = tl.where(segment == before, tl.exp2(decay), 0.0) * scale
        total = tl.dot(queries, s.to(queries.dtype), input_precision=PRECISION) * reach[:, None]
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores *= between(decay) * (strong * scale)[None, :]
        scores = tl.where(causal(segment, C), scores, 0.0).to(values.dtype)
        total = tl.dot(scores, values, total, input_precision=PRECISION)
        if SKIP:
            total += values * tl.load(skip + head // SPLIT).to(tl.float32)
        store_rows(out, total, chunk, head, tokens, H, V, C)
        weight = written(decay, last, segment == after) * strong
        added = faded(values, weight[:, None]).to(values.dtype)
        s = faded(s, tl.where(before == after, tl.exp2(last), 0.0))
        s = tl.dot(tl.trans(keys), added, s, input_precision=PRECISION)
