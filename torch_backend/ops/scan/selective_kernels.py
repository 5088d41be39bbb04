"""Triton kernels of scans whose state is a vector per channel: Mamba's selective scan, RG-LRU; see :mod:`.selective`.

For each channel a state s [N], zero before each document: ``s_t = exp(g_t A) s_{t-1} + u_t B_t``, ``y_t = C_t . s_t``.
Chunks of L tokens are cut from the row wherever documents begin, as in :mod:`.delta_kernels`: ``ends`` scans every
chunk from zero to its last state, ``carry`` walks each document through its chunks and keeps the states that enter
them, ``output`` scans every chunk from there. The backward is the same scan from the last token to the first,
``ds_t = C_t dy_t + exp(g_{t+1} A) ds_{t+1}``, where the token after is of the same document.

A document's first token takes no state: its decay is 0, and the scan leaves out what a decay of 0 multiplies.

Names: T tokens, E channels, u, g, y [T, E], A [E, N], B, C [T, N], states [chunks, E, N] in float32, all contiguous.
Arithmetic is float32.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def combine(a_left, b_left, a_right, b_right):
    """s -> a s + b, the left one first."""
    return a_left * a_right, tl.where(a_right == 0, b_right, a_right * b_left + b_right)


@triton.jit
def tile(x, t, e, has, E: tl.constexpr):
    """x[t, e] [L, BLOCK], 0 where ``has`` is false or the channel is none."""
    return tl.load(x + t[:, None] * E + e[None, :], has[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def shared(x, t, has, N: tl.constexpr):
    """x[t] [L, 1, N]."""
    n = tl.arange(0, N)
    return tl.load(x + t[:, None] * N + n[None, :], has[:, None], other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def rates(A, e, E: tl.constexpr, N: tl.constexpr):
    """A[e] [BLOCK, N]."""
    n = tl.arange(0, N)
    return tl.load(A + e[:, None] * N + n[None, :], (e < E)[:, None], other=0.0).to(tl.float32)


@triton.jit
def state(x, chunk, e, E: tl.constexpr, N: tl.constexpr):
    """Addresses of x[chunk, e] [BLOCK, N]."""
    return x + (tl.cast(chunk, tl.int64) * E + e[:, None]) * N + tl.arange(0, N)[None, :]


@triton.jit
def decays(g, a, t, e, segments, tokens, E: tl.constexpr):
    """exp(g_t A) [L, BLOCK, N], 0 at the first token of a document and outside of the row."""
    has = (t >= 0) & (t < tokens)
    segment = tl.load(segments + t, has, other=-1)
    follows = has & (segment == tl.load(segments + t - 1, has & (t > 0), other=-2))
    return tl.where(follows[:, None, None], tl.exp(tile(g, t, e, has, E)[:, :, None] * a[None, :, :]), 0.0)


@triton.jit
def last_of(x, L: tl.constexpr):
    """x[L - 1] of x [L, BLOCK, N]."""
    return tl.sum(tl.where((tl.arange(0, L) == L - 1)[:, None, None], x, 0.0), 0)


@triton.jit
def first_of(x, L: tl.constexpr):
    """x[0] of x [L, BLOCK, N]."""
    return tl.sum(tl.where((tl.arange(0, L) == 0)[:, None, None], x, 0.0), 0)


@triton.jit
def ends(
    u, g, A, B, segments, local, through, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last state of each chunk that starts from zero, and the decay from before it to there. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = chunk.to(tl.int64) * L + tl.arange(0, L)
    has = t < tokens
    a = decays(g, rates(A, e, E, N), t, e, segments, tokens, E)
    b = tile(u, t, e, has, E)[:, :, None] * shared(B, t, has, N)
    decay, s = tl.associative_scan((a, b), 0, combine)
    known = (e < E)[:, None]
    tl.store(state(local, chunk, e, E, N), last_of(s, L), known)
    tl.store(state(through, chunk, e, E, N), last_of(decay, L), known)


@triton.jit
def carry(
    local, through, boundaries, entering,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does. Grid: (segments, E)."""
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(boundaries + tl.program_id(0))
    stop = tl.load(boundaries + tl.program_id(0) + 1)
    known = (e < E)[:, None]
    s = tl.zeros([BLOCK, N], tl.float32)
    for chunk in range(start // L, (stop - 1) // L):
        decay = tl.load(state(through, chunk, e, E, N), known & (chunk > start // L), other=0.0)
        s = s * decay + tl.load(state(local, chunk, e, E, N), known, other=0.0)
        tl.store(state(entering, chunk + 1, e, E, N), s, known)


@triton.jit
def output(
    u, g, A, B, C, segments, entering, y, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [T, E]. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = chunk.to(tl.int64) * L + tl.arange(0, L)
    has = t < tokens
    s = states(u, g, rates(A, e, E, N), B, segments, entering, chunk, t, e, has, tokens, E, N)
    total = tl.sum(s * shared(C, t, has, N), 2)
    tl.store(y + t[:, None] * E + e[None, :], total.to(y.dtype.element_ty), has[:, None] & (e < E)[None, :])


@triton.jit
def states(u, g, a_rates, B, segments, entering, chunk, t, e, has, tokens, E: tl.constexpr, N: tl.constexpr):
    """The state after each token of a chunk [L, BLOCK, N]."""
    a = decays(g, a_rates, t, e, segments, tokens, E)
    b = tile(u, t, e, has, E)[:, :, None] * shared(B, t, has, N)
    decay, s = tl.associative_scan((a, b), 0, combine)
    first = chunk * t.shape[0]
    enters = (first > 0) & (tl.load(segments + first) == tl.load(segments + first - 1, first > 0, other=-2))
    before = tl.load(state(entering, chunk, e, E, N), (e < E)[:, None] & enters, other=0.0)
    return s + decay * before[None, :, :]


@triton.jit
def ends_backward(
    g, A, C, dy, segments, local, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the state that enters each chunk, but for what leaves it. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    t = chunk.to(tl.int64) * L + tl.arange(0, L)
    has = t < tokens
    a = rates(A, e, E, N)
    after = tl.where((tl.arange(0, L) < L - 1)[:, None, None], decays(g, a, t + 1, e, segments, tokens, E), 0.0)
    b = tile(dy, t, e, has, E)[:, :, None] * shared(C, t, has, N)
    _, ds = tl.associative_scan((after, b), 0, combine, reverse=True)
    entered = first_of(ds * decays(g, a, t, e, segments, tokens, E), L)
    tl.store(state(local, chunk, e, E, N), entered, (e < E)[:, None])


@triton.jit
def carry_backward(
    local, through, boundaries, leaving,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the state that leaves each chunk, where one does. Grid: (segments, E)."""
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(boundaries + tl.program_id(0))
    stop = tl.load(boundaries + tl.program_id(0) + 1)
    opening, closing = start // L, (stop - 1) // L
    known = (e < E)[:, None]
    ds = tl.zeros([BLOCK, N], tl.float32)
    for n in range(closing - opening):
        chunk = closing - n
        # The closing chunk is left by nobody of this document.
        decay = tl.load(state(through, chunk, e, E, N), known & (n > 0), other=0.0)
        ds = ds * decay + tl.load(state(local, chunk, e, E, N), known, other=0.0)
        tl.store(state(leaving, chunk - 1, e, E, N), ds, known)


@triton.jit
def chunk_backward(
    u, g, A, B, C, dy, segments, entering, leaving, du, dg, dA, dB, dC, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """du, dg [T, E], and shares of dA [chunks, E, N], dB and dC [programs of a chunk, T, N]. Grid: (chunks, E).

    A program takes BLOCKS times BLOCK channels one after another.
    """
    chunk, part = tl.program_id(0), tl.program_id(1)
    t = chunk.to(tl.int64) * L + tl.arange(0, L)
    has = t < tokens
    n = tl.arange(0, N)
    dB_sum = tl.zeros([L, N], tl.float32)
    dC_sum = tl.zeros([L, N], tl.float32)
    end = chunk * L + L
    inside = end < tokens
    leaves = inside & (tl.load(segments + end, inside, other=-2) == tl.load(segments + end - 1, inside, other=-1))
    for block in range(BLOCKS):
        e = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        known = has[:, None] & (e < E)[None, :]
        a = rates(A, e, E, N)
        s = states(u, g, a, B, segments, entering, chunk, t, e, has, tokens, E, N)
        after = decays(g, a, t + 1, e, segments, tokens, E)
        from_y = tile(dy, t, e, has, E)[:, :, None]
        D = tl.load(state(leaving, chunk, e, E, N), (e < E)[:, None] & leaves, other=0.0)
        # The state that leaves counts as what follows the last token.
        behind = tl.where((tl.arange(0, L) == L - 1)[:, None, None], D[None, :, :], 0.0)
        within = tl.where((tl.arange(0, L) < L - 1)[:, None, None], after, 0.0)
        _, ds = tl.associative_scan((within, from_y * shared(C, t, has, N) + behind), 0, combine, reverse=True)
        added = tile(u, t, e, has, E)[:, :, None] * shared(B, t, has, N)
        dexponent = ds * (s - added)
        tl.store(du + t[:, None] * E + e[None, :], tl.sum(ds * shared(B, t, has, N), 2).to(du.dtype.element_ty), known)
        dg_sum = tl.sum(dexponent * a[None, :, :], 2)
        tl.store(dg + t[:, None] * E + e[None, :], dg_sum.to(dg.dtype.element_ty), known)
        dA_sum = tl.sum(dexponent * tile(g, t, e, has, E)[:, :, None], 0)
        tl.store(state(dA, chunk, e, E, N), dA_sum, (e < E)[:, None])
        dB_sum += tl.sum(ds * tile(u, t, e, has, E)[:, :, None], 1)
        dC_sum += tl.sum(s * from_y, 1)
    place = (part.to(tl.int64) * tokens + t[:, None]) * N + n[None, :]
    tl.store(dB + place, dB_sum, has[:, None])
    tl.store(dC + place, dC_sum, has[:, None])
