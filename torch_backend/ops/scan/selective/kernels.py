"""Triton kernels of scans whose state is a vector per channel: Mamba's selective scan, RG-LRU; see :mod:`.operators`.

For each channel a state s [N], zero before each document: ``s_t = exp(g_t A) s_{t-1} + u_t B_t``, ``y_t = C_t . s_t``.
The row is cut into chunks of L tokens wherever documents begin, as in
:mod:`torch_backend.ops.scan.gated_delta.kernels`: ``ends`` walks every chunk from zero to its last state, ``carry``
walks each document through its chunks and keeps the states that enter them, ``output`` walks every chunk from there.
The backward is the same from the last token to the first, ``ds_t = C_t dy_t + exp(g_{t+1} A) ds_{t+1}``, where the
token after is of the same document. It needs s_t beside ds_t: ``chunk_backward`` walks a chunk forward first, keeps a
state every SUB tokens, and computes those in between again, in registers.

A program walks over the tokens of a chunk with the states of BLOCK channels [N, BLOCK] in registers. What a document's
first token would take of the state before is left out, not multiplied by 0.

With STATES every document takes a state in and gives one out, and begins where a chunk does.

Names: T tokens, E channels, u, g, y [T, E], A [N, E], B, C [T, N], states [chunks, N, E] and ``fading``, the sum of g
over each chunk [chunks, E], in float32, all contiguous. Arithmetic is float32.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def state(x, chunk, e, E: tl.constexpr, N: tl.constexpr):
    """Addresses of x[chunk, :, e] [N, BLOCK]."""
    return x + (tl.cast(chunk, tl.int64) * N + tl.arange(0, N)[:, None]) * E + e[None, :]


@triton.jit
def rates(A, e, E: tl.constexpr, N: tl.constexpr):
    """A[:, e] [N, BLOCK]."""
    return tl.load(state(A, 0, e, E, N), (e < E)[None, :], other=0.0).to(tl.float32)


@triton.jit
def channels(x, t, e, tokens, E: tl.constexpr):
    """x[t, e] [BLOCK], 0 after the row."""
    return tl.load(x + t * E + e, (t < tokens) & (e < E), other=0.0).to(tl.float32)


@triton.jit
def numbers(x, t, tokens, N: tl.constexpr):
    """x[t] [N, 1], 0 after the row."""
    n = tl.arange(0, N)
    return tl.load(x + t * N + n, (t < tokens) & (n < N), other=0.0).to(tl.float32)[:, None]


@triton.jit
def follows(segments, t, start, tokens):
    """Marks where token t takes the state before it: at the chunk's ``start`` it is 0 already where it should not."""
    inside = (t > start) & (t < tokens)
    segment = tl.load(segments + t, inside, other=-1)
    return (t == start) | (segment == tl.load(segments + t - 1, inside, other=-2))


@triton.jit
def step(s, rate, taken, gate, u, b):
    """The state after a token."""
    return tl.where(taken, s, 0.0) * tl.exp(rate * gate[None, :]) + u[None, :] * b


@triton.jit
def crosses(segments, start, tokens, STATES: tl.constexpr):
    """Returns whether a document reaches over the ``start`` of a chunk."""
    inside = (start > 0) & (start < tokens)
    before = tl.load(segments + start - 1, inside, other=-1)
    return (inside & (tl.load(segments + start, inside, other=-2) == before)) | STATES


@triton.jit
def ends(
    u, g, A, B, segments, local, fading, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last state of each chunk that starts from zero, and the sum of its gates. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = chunk.to(tl.int64) * L
    rate = rates(A, e, E, N)
    s = tl.zeros([N, BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, L, SUB):
        us, gates = (), ()
        for i in tl.static_range(SUB):
            us += (channels(u, start + first + i, e, tokens, E),)  # type: ignore[assignment]
            gates += (channels(g, start + first + i, e, tokens, E),)  # type: ignore[assignment]
        for i in tl.static_range(SUB):
            t = start + first + i
            s = step(s, rate, follows(segments, t, start, tokens), gates[i], us[i], numbers(B, t, tokens, N))
            total += gates[i]
    tl.store(state(local, chunk, e, E, N), s, (e < E)[None, :])
    tl.store(fading + tl.cast(chunk, tl.int64) * E + e, total, e < E)


@triton.jit
def carry(
    local, fading, A, boundaries, initial, entering, final,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does, and the final ones. Grid: (segments, E)."""
    segment, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    known = (e < E)[None, :]
    rate = rates(A, e, E, N)
    s = tl.zeros([N, BLOCK], tl.float32)
    if STATES:
        s += tl.load(state(initial, segment, e, E, N), known, other=0.0)
    for chunk in range(start // L, tl.cdiv(stop, L) - (0 if STATES else 1)):
        # In an opening chunk that other documents begin, s is 0 without a gate.
        gate = tl.load(fading + tl.cast(chunk, tl.int64) * E + e, (e < E) & (chunk * L >= start), other=0.0)
        added = tl.load(state(local, chunk, e, E, N), known, other=0.0)
        if STATES:
            tl.store(state(entering, chunk, e, E, N), s, known)
        s = s * tl.exp(rate * gate[None, :]) + added
        if not STATES:
            tl.store(state(entering, chunk + 1, e, E, N), s, known)
    if STATES:
        tl.store(state(final, segment, e, E, N), s, known)


@triton.jit
def output(
    u, g, A, B, C, segments, entering, y, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """y [T, E]. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = chunk.to(tl.int64) * L
    rate = rates(A, e, E, N)
    enters = crosses(segments, start, tokens, STATES)
    s = tl.load(state(entering, chunk, e, E, N), (e < E)[None, :] & enters, other=0.0)
    for first in range(0, L, SUB):
        us, gates = (), ()
        for i in tl.static_range(SUB):
            us += (channels(u, start + first + i, e, tokens, E),)  # type: ignore[assignment]
            gates += (channels(g, start + first + i, e, tokens, E),)  # type: ignore[assignment]
        for i in tl.static_range(SUB):
            t = start + first + i
            s = step(s, rate, follows(segments, t, start, tokens), gates[i], us[i], numbers(B, t, tokens, N))
            total = tl.sum(s * numbers(C, t, tokens, N), 0)
            tl.store(y + t * E + e, total.to(y.dtype.element_ty), (t < tokens) & (e < E))


@triton.jit
def ends_backward(
    g, A, C, dy, segments, local, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the state that enters each chunk, but for what leaves it. Grid: (chunks, E)."""
    chunk, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = chunk.to(tl.int64) * L
    rate = rates(A, e, E, N)
    flow = tl.zeros([N, BLOCK], tl.float32)
    for done in range(0, L, SUB):
        dys, gates = (), ()
        for i in tl.static_range(SUB):
            dys += (channels(dy, start + L - 1 - done - i, e, tokens, E),)  # type: ignore[assignment]
            gates += (channels(g, start + L - 1 - done - i, e, tokens, E),)  # type: ignore[assignment]
        for i in tl.static_range(SUB):
            t = start + L - 1 - done - i
            ds = flow + dys[i][None, :] * numbers(C, t, tokens, N)
            flow = tl.where(follows(segments, t, start, tokens), ds * tl.exp(rate * gates[i][None, :]), 0.0)
    tl.store(state(local, chunk, e, E, N), flow, (e < E)[None, :])


@triton.jit
def carry_backward(
    local, fading, A, boundaries, dfinal, leaving, dinitial,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """The gradient of the state that leaves each chunk, where one does, and of initial ones. Grid: (segments, E)."""
    segment, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    opening, closing = start // L, tl.cdiv(stop, L) - 1
    known = (e < E)[None, :]
    rate = rates(A, e, E, N)
    ds = tl.zeros([N, BLOCK], tl.float32)
    if STATES:
        ds += tl.load(state(dfinal, segment, e, E, N), known, other=0.0)
    for n in range(closing - opening + (1 if STATES else 0)):
        chunk = closing - n
        # In the closing chunk, where another document may begin, ds is 0 without STATES.
        gate = tl.load(fading + tl.cast(chunk, tl.int64) * E + e, (e < E) & ((n > 0) | STATES), other=0.0)
        added = tl.load(state(local, chunk, e, E, N), known, other=0.0)
        if STATES:
            tl.store(state(leaving, chunk, e, E, N), ds, known)
        ds = ds * tl.exp(rate * gate[None, :]) + added
        if not STATES:
            tl.store(state(leaving, chunk - 1, e, E, N), ds, known)
    if STATES:
        tl.store(state(dinitial, segment, e, E, N), ds, known)


@triton.jit
def chunk_backward(
    u, g, A, B, C, dy, segments, entering, leaving, kept, du, dg, dA, dB, dC, tokens,
    E: tl.constexpr, N: tl.constexpr, L: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """du, dg [T, E], and shares of dA [chunks, N, E], dB and dC [programs of a chunk, T, N]. Grid: (chunks, E).

    ``kept`` [chunks * L / SUB, N, E] is memory to work in.
    """
    chunk, part = tl.program_id(0), tl.program_id(1)
    e = part * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N)
    known = (e < E)[None, :]
    start = chunk.to(tl.int64) * L
    rate = rates(A, e, E, N)
    s = tl.load(state(entering, chunk, e, E, N), known & crosses(segments, start, tokens, STATES), other=0.0)
    for block in range(L // SUB):
        tl.store(state(kept, chunk * (L // SUB) + block, e, E, N), s, known)
        us, gates = (), ()
        for i in tl.static_range(SUB):
            us += (channels(u, start + block * SUB + i, e, tokens, E),)  # type: ignore[assignment]
            gates += (channels(g, start + block * SUB + i, e, tokens, E),)  # type: ignore[assignment]
        for i in tl.static_range(SUB):
            t = start + block * SUB + i
            s = step(s, rate, follows(segments, t, start, tokens), gates[i], us[i], numbers(B, t, tokens, N))
    tl.debug_barrier()
    flow = tl.load(state(leaving, chunk, e, E, N), known & crosses(segments, start + L, tokens, STATES), other=0.0)
    dA_sum = tl.zeros([N, BLOCK], tl.float32)
    for done in range(L // SUB):
        block = L // SUB - 1 - done
        states = (tl.load(state(kept, chunk * (L // SUB) + block, e, E, N), known, other=0.0),)
        us, gates, dys, taken = (), (), (), ()
        for i in tl.static_range(SUB):
            t = start + block * SUB + i
            us += (channels(u, t, e, tokens, E),)  # type: ignore[assignment]
            gates += (channels(g, t, e, tokens, E),)  # type: ignore[assignment]
            dys += (channels(dy, t, e, tokens, E),)  # type: ignore[assignment]
            taken += (follows(segments, t, start, tokens),)  # type: ignore[assignment]
        for i in tl.static_range(SUB):
            b = numbers(B, start + block * SUB + i, tokens, N)
            states += (step(states[i], rate, taken[i], gates[i], us[i], b),)  # type: ignore[assignment]
        for i in tl.static_range(SUB - 1, -1, -1):
            t = start + block * SUB + i
            has = (t < tokens) & (e < E)
            ds = flow + dys[i][None, :] * numbers(C, t, tokens, N)
            tl.store(du + t * E + e, tl.sum(ds * numbers(B, t, tokens, N), 0).to(du.dtype.element_ty), has)
            place = (part.to(tl.int64) * tokens + t) * N + n
            tl.store(dB + place, tl.sum(ds * us[i][None, :], 1), t < tokens)
            tl.store(dC + place, tl.sum(states[i + 1] * dys[i][None, :], 1), t < tokens)
            flow = tl.where(taken[i], ds * tl.exp(rate * gates[i][None, :]), 0.0)
            dexponent = tl.where(taken[i], flow * states[i], 0.0)
            tl.store(dg + t * E + e, tl.sum(dexponent * rate, 0).to(dg.dtype.element_ty), has)
            dA_sum += dexponent * gates[i][None, :]
    tl.store(state(dA, chunk, e, E, N), dA_sum, known)
