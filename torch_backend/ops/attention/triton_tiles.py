"""Parts of the Triton attention kernels: scores, which keys a tile's queries see, writing. Names as in the kernels."""

# Triton reads annotations as values: their evaluation is not postponed here.
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # finite, so that a row that has seen no key yet makes no NaN


@triton.jit
def tanh(x):
    """Hyperbolic tangent to float32 accuracy; near 0 by its series, where the exponentials cancel."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def logits(products, i, j, slopes, scale, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores of q k^T products, which times ``exponent`` are base-2 logarithms, and the slope of the softcap there."""
    steep = 1.0
    if SOFTCAP:
        capped = tanh(products * (scale / softcap))
        steep = 1 - capped * capped
        products = softcap * capped
    elif ALIBI:
        products *= scale
    if ALIBI:
        products -= slopes * tl.abs(i - j).to(tl.float32)
    return products, steep


@triton.jit
def exponent(scale, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    return LOG2E if SOFTCAP or ALIBI else scale * LOG2E


@triton.jit
def visible(
    i, j, sees, seen_from, length, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, UNIT: tl.constexpr = 1, BEFORE: tl.constexpr = False,
):  # fmt: skip
    """Marks the keys that a query of the segment sees, all counted from anywhere in units of 1 / UNIT.

    A query stands at any of the UNIT places of its token, a key at the first. In causal attention key ``seen_from`` is
    visible up to query ``sees``: one of the two is the key's or the query's own place. With BEFORE, the queries may
    come after the end of the keys.
    """
    if CAUSAL:
        seen = sees >= seen_from
        if BEFORE:
            seen = seen & (j < length)
    else:
        seen = j < length
    if WINDOW:
        seen = seen & (i < j + window)
        if not CAUSAL:
            seen = seen & (i >= j - window + UNIT)
    return seen


@triton.jit
def keys_of(
    first_i, last_i, first_sees, last_sees, length, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys that queries first_i..last_i see, ``low <= j < high``, and those that every one sees, ``all_low..all_high``.

    ``low`` is a multiple of the block: which keys share a block, and so the rounding, depends on the segment alone.
    """
    low, high = 0, length
    all_low, all_high = 0, length
    if CAUSAL:
        high = tl.minimum(length, last_sees + 1)
        all_high = tl.minimum(length, first_sees + 1)
    if WINDOW:
        low = tl.maximum(0, first_i - window + 1) // BLOCK_N * BLOCK_N
        all_low = last_i - window + 1
        if not CAUSAL:
            high = tl.minimum(length, last_i + window)
            all_high = tl.minimum(length, first_i + window)
    return low, high, all_low, all_high


@triton.jit
def queries_of(first_j, last_j, first_from, last_from, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Queries that see keys first_j..last_j, and those that see every one of them, as :func:`keys_of`."""
    low, high = 0, length
    all_low, all_high = 0, length
    if CAUSAL:
        low, all_low = first_from, last_from
    if WINDOW:
        high = tl.minimum(length, last_j + window)
        all_high = tl.minimum(length, first_j + window)
        if not CAUSAL:
            low = tl.maximum(0, first_j - window + 1)
            all_low = last_j - window + 1
    return low, high, all_low, all_high


@triton.jit
def item_of(KV_HEADS: tl.constexpr, BY_HEADS: tl.constexpr):
    """The program's item and head of keys: all heads of an item follow each other, with BY_HEADS all items of a head.

    Programs of one head that run at the same time read the same keys, or queries, from the cache.
    """
    place, items = tl.program_id(0), tl.num_programs(0) // KV_HEADS
    if BY_HEADS:
        return place % items, place // items
    return place // KV_HEADS, place % KV_HEADS


@triton.jit
def rows_of(first_i, length, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a tile: token within the tile, head within the group, and how many rows there are."""
    r = tl.arange(0, BLOCK_M)
    return r // GROUP, r % GROUP, tl.minimum(BLOCK_M // GROUP, length - first_i) * GROUP


@triton.jit
def store_keys(
    to, rows, first, group, present, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes a block of keys' gradients [BLOCK_N, BLOCK] to [T, K, WIDTH], from token ``first`` on."""
    place = (tl.arange(0, BLOCK_N) * (KV_HEADS * WIDTH))[:, None] + tl.arange(0, BLOCK)[None, :]
    tl.store(to + (first * KV_HEADS + group) * WIDTH + place, rows.to(to.dtype.element_ty), present)
