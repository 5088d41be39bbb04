"""Triton kernels of scans with a decay per head, forward; launched by :mod:`.any_width`.

The row is cut into chunks of C tokens wherever documents begin: a chunk may hold the end of one document, several whole
ones and the start of another, so no chunk is partly empty however short documents are, and no table of chunks is
needed. Inside a chunk tokens of different documents are kept apart by a mask. A document that reaches into the next
chunk hands it a state, and only one document can.

With c the sum of g since the document or the chunk began, P[i, j] = exp(c_i - c_j) for a token j of the same document
at or before i, e and x masks of the tokens whose document reaches in from the chunk before and out into the next one,
S [K, V] the state that enters, and N = v, or beta v with GAIN (Dao and Gu 2024, https://arxiv.org/abs/2405.21060,
section 6):

    O = scale (e exp(c) q S + (q k^T P) N)         S' = exp(c_last) S + sum over j of x_j exp(c_last - c_j) k_j N_j^T

``prepare`` computes c for every chunk at once, ``carry`` walks each document through its chunks and keeps the states,
``output`` computes O for every chunk. Sums over tokens of a document are taken under the mask, so no document moves
another by a bit. States are held transposed, [V, K].

With STATES every document takes a state in and gives one out. Documents then begin where chunks do (the launcher pads
them), every token's document reaches in and out, and each has its initial and final state [segments, H, V, K].

Names: T tokens, H heads of v, Q heads of q and k (H is a multiple), K and V widths. q, k [T, Q, K], v [T, H, V],
g, beta [T, H], c and strength (beta) [H, T] in float32, states [chunks, H, V, K], all contiguous.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

from torch_backend.ops.scan.chunk_kernels import chunk_of, columns, decays, rows, state, store_rows


@triton.jit
def prepare(g, beta, segments, c, strength, tokens, H: tl.constexpr, GAIN: tl.constexpr, C: tl.constexpr):
    """c, and with GAIN strength. Grid: (chunks, H)."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, has, visible, _, _ = chunk_of(segments, chunk, tokens, C, False)
    gate = tl.load(g + t * H + head, has, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(visible, gate[None, :], 0.0), 1)
    tl.store(c + tl.cast(head, tl.int64) * tokens + t, total, has)
    if GAIN:
        tl.store(
            strength + tl.cast(head, tl.int64) * tokens + t,
            tl.load(beta + t * H + head, has, other=0.0).to(tl.float32),
            has,
        )


@triton.jit
def carry(
    k, v, c, strength, boundaries, initial, states, final, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GAIN: tl.constexpr,
    STATES: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state that enters each chunk, where one does, and the final ones. Grid: (segments, H, V / BLOCK_V)."""
    segment, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    start = tl.load(boundaries + segment)
    stop = tl.load(boundaries + segment + 1)
    s = tl.zeros([BLOCK_V, K], tl.float32)
    if STATES:
        s += tl.load(state(initial, segment, head, H, K, first, V, BLOCK_V))
    i = tl.arange(0, C)
    for chunk in range(start // C, tl.cdiv(stop, C) - (0 if STATES else 1)):
        t = (chunk * C + i).to(tl.int64)
        own = t >= start
        keys = rows(k, t, head // (H // Q), Q, 0, K, K, own)
        new = columns(v, t, head, H, first, V, BLOCK_V, own)
        decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)
        last = tl.load(c + tl.cast(head, tl.int64) * tokens + chunk * C + C - 1)
        if GAIN:
            new = new * tl.load(strength + tl.cast(head, tl.int64) * tokens + t, own, other=0.0)[None, :]
        added = (new * tl.exp(last - decay)[None, :]).to(keys.dtype)
        if STATES:
            tl.store(state(states, chunk, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
        s = s * tl.exp(last) + tl.dot(added, keys, input_precision=PRECISION)
        if not STATES:
            tl.store(state(states, chunk + 1, head, H, K, first, V, BLOCK_V), s.to(states.dtype.element_ty))
    if STATES:
        tl.store(state(final, segment, head, H, K, first, V, BLOCK_V), s)


@triton.jit
def output(
    q, k, v, c, strength, states, segments, out, scale, tokens,
    H: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GAIN: tl.constexpr,
    STATES: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [T, H, V]. Grid: (chunks, H, V / BLOCK_V)."""
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK_V
    t, has, visible, enters, _ = chunk_of(segments, chunk, tokens, C, STATES)
    queries = rows(q, t, head // (H // Q), Q, 0, K, K, has)
    keys = rows(k, t, head // (H // Q), Q, 0, K, K, has)
    decay = tl.load(c + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)
    new = rows(v, t, head, H, first, V, BLOCK_V, has)
    s = tl.load(state(states, chunk, head, H, K, first, V, BLOCK_V), tl.max(enters.to(tl.int32), 0) > 0, other=0.0)
    s = tl.trans(s)
    reach = tl.where(enters, tl.exp(decay), 0.0)[:, None]
    if GAIN:
        new = (new * tl.load(strength + tl.cast(head, tl.int64) * tokens + t, has, other=0.0)[:, None]).to(keys.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays(decay, visible) * scale
    total = tl.dot(scores.to(new.dtype), new, input_precision=PRECISION)
    total += tl.dot(queries, s, input_precision=PRECISION) * (reach * scale)
    store_rows(out, total, t, head, H, first, V, BLOCK_V, has)
