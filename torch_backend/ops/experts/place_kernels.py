"""Triton kernels of the places of routed experts: sorting tokens by expert, and gathering and adding up by place.

Every (token, choice) that names an expert has a place in an order sorted by expert; ``offsets`` [E+1] holds where each
expert's places begin and ``order`` [S] which (token, choice) stands at a place, as ``token * K + choice``. Places are
divided into tiles of one expert each: tile t belongs to the expert that ``tile_of`` finds from the offsets, so the grid
depends on S and E alone and nothing is read by the host.
"""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl


@triton.jit
def count(indices, counts, entries, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """counts [E, blocks]: how many of a block's entries chose each expert. Grid: (blocks,)."""
    block = tl.program_id(0)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(indices + entry, entry < entries, other=-1).to(tl.int32)
    for first in tl.static_range(0, EXPERTS, PART):
        expert = first + tl.arange(0, PART)
        found = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + expert.to(tl.int64) * blocks + block, found, expert < EXPERTS)


@triton.jit
def place(
    indices, ends, order, places, offsets, entries, blocks,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """order [S], places [S] (-1 for no expert) and offsets [E+1] from ends, the running sum of counts [E, blocks].

    Entries of one expert keep their order. Grid: (blocks,).
    """
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    entry = block * BLOCK + within
    chosen = tl.load(indices + entry, entry < entries, other=-1).to(tl.int32)
    chosen = tl.where((chosen >= 0) & (chosen < EXPERTS), chosen, -1)
    same = chosen[:, None] == chosen[None, :]
    later = tl.sum((same & (within[None, :] >= within[:, None])).to(tl.int32), 1)
    routed = chosen >= 0
    end = tl.load(ends + chosen.to(tl.int64) * blocks + block, routed, other=0)
    at = end - later
    tl.store(order + at, entry, routed)
    tl.store(places + entry, tl.where(routed, at, -1), entry < entries)
    if block == 0:
        for first in tl.static_range(0, EXPERTS, PART):
            expert = first + tl.arange(0, PART)
            last = tl.load(ends + (expert.to(tl.int64) + 1) * blocks - 1, expert < EXPERTS, other=0)
            tl.store(offsets + expert + 1, last, expert < EXPERTS)
        tl.store(offsets, 0)


@triton.jit
def tile_of(offsets, tile, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """The expert of a tile, its first place and the end of the expert's places; an expert of E or more is none."""
    e = tl.arange(0, PADDED)
    start = tl.load(offsets + e, e < EXPERTS, other=0)
    end = tl.load(offsets + e + 1, e < EXPERTS, other=0)
    tiles = tl.cdiv(end - start, BLOCK)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    earlier = tl.sum(tl.where(e < expert, tiles, 0), 0)
    first = tl.sum(tl.where(e == expert, start, 0), 0) + (tile - earlier) * BLOCK
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def lines_of(order, place, inside, GATHER: tl.constexpr, TOP_K: tl.constexpr):
    """The line of an operand at each place: the token's with GATHER, else the place itself; 0 outside."""
    if GATHER:
        return (tl.load(order + place, inside, other=0) // TOP_K).to(tl.int64)
    return tl.where(inside, place, 0).to(tl.int64)


@triton.jit
def weights_of(weights, order, place, inside):
    """The weight of each place, float32; 0 outside."""
    return tl.load(weights + tl.load(order + place, inside, other=0), inside, other=0.0).to(tl.float32)


@triton.jit
def at_places(x, first, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to a tile of x [S, WIDTH] from place ``first`` on; offsets of 32 bits take half the registers of 64."""
    return x + first.to(tl.int64) * WIDTH + (tl.arange(0, BLOCK)[:, None] * WIDTH + columns[None, :])


@triton.jit
def gather(
    x, order, offsets, out, D: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [S, D]: the token's x at each place. Grid: (place tiles, column tiles)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < tl.load(offsets + EXPERTS)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lines = lines_of(order, place, inside, True, TOP_K)
    mask = inside[:, None] & (d < D)[None, :]
    value = tl.load(x + lines[:, None] * D + d[None, :], mask, other=0.0)
    tl.store(out + place.to(tl.int64)[:, None] * D + d[None, :], value, mask)


@triton.jit
def combine(
    y, places, weights, out, tokens, D: tl.constexpr, TOP_K: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, D] = the sum of a token's choices in their order, weighted with WEIGHTS. Grid: (token, column tiles)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for choice in range(TOP_K):
        entry = token.to(tl.int64) * TOP_K + choice
        place = tl.load(places + entry, token < tokens, other=-1).to(tl.int64)
        mask = (place >= 0)[:, None] & (d < D)[None, :]
        x = tl.load(y + place[:, None] * D + d[None, :], mask, other=0.0).to(tl.float32)
        if WEIGHTS:
            x *= tl.load(weights + entry, token < tokens, other=0.0).to(tl.float32)[:, None]
        total += x
    at = out + token.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, total.to(out.dtype.element_ty), (token < tokens)[:, None] & (d < D)[None, :])


@triton.jit
def sums(
    a, weights, order, offsets, out,
    N: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [E, N] float32 = the sum of a over each expert's places, times the weight of a place. Grid: (tiles, E)."""
    e = tl.program_id(1)
    start, end = tl.load(offsets + e), tl.load(offsets + e + 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_S, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_S):
        place = first + tl.arange(0, BLOCK_S)
        inside = place < end
        lines = lines_of(order, place, inside, GATHER, TOP_K)
        x = tl.load(a + lines[:, None] * N + n[None, :], inside[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if WEIGHTS:
            x *= weights_of(weights, order, place, inside)[:, None]
        total += x
    tl.store(out + e * N + n, tl.sum(total, 0), n < N)


@triton.jit
def add_shares(
    shares, dy, bias, places, indices, out, entries,
    WIDE: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out [T, K] = the gradient of each weight, 0 for no expert: the sum of shares [S, WIDE] at its place.

    With BIAS, and the product of the token's dy with the bias of its expert. Grid: (blocks,).
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + entry, entry < entries, other=-1)
    routed, column = place >= 0, tl.arange(0, PADDED)
    mask = routed[:, None] & (column < WIDE)[None, :]
    found = tl.sum(tl.load(shares + place.to(tl.int64)[:, None] * WIDE + column[None, :], mask, other=0.0), 1)
    if BIAS:
        expert = tl.load(indices + entry, routed, other=0).to(tl.int64)
        token = (entry // TOP_K).to(tl.int64)
        total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for first in range(0, D, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            mask_d = routed[:, None] & (d < D)[None, :]
            x = tl.load(dy + token[:, None] * D + d[None, :], mask_d, other=0.0).to(tl.float32)
            total += x * tl.load(bias + expert[:, None] * D + d[None, :], mask_d, other=0.0).to(tl.float32)
        found += tl.sum(total, 1)
    tl.store(out + entry, found, entry < entries)
