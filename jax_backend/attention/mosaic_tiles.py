"""The common ground of the Mosaic kernels for Hopper: whom they serve, how tokens become rows, what is walked and how
it is copied.

They are written for Pallas' Mosaic GPU lowering: one warpgroup copies tiles ahead (TMA), two others multiply them
(wgmma). Data flows intervals per token --plan_keys, plan_queries--> bounds and walks per tile -> a kernel.

A warpgroup's 64 rows are P query heads of one key/value head for 64 / P tokens, member by member: row r is member
``r // (64 / P)``, token ``r % (64 / P)``. So every key that is read serves P heads, a tile spans few tokens and seldom
two segments, and each member's tokens are one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_backend.attention.request import Request
from jax_backend.hopper import COPIED, ROWS, compiles_for_hopper
from jax_backend.segments import Interval

GROUPS = 2  # warpgroups that compute
TILE = GROUPS * ROWS
MOST_PACKED = ROWS // COPIED  # query heads whose rows share a warpgroup's tile
KEYS = 128  # keys of a step
STAGES = 2  # steps in shared memory
WIDTHS = (64, 128)  # of heads; wider ones do not fit
_FAR = 2**30  # past every index


def lowers(request: Request) -> bool:
    """Returns whether these kernels can run: a Hopper GPU, half precision and shapes that whole copies cover."""
    return (
        request.platform == "gpu"
        and request.dtype != jnp.float32
        and request.head_dim == request.value_dim
        and request.head_dim in WIDTHS
        and request.queries % COPIED == 0
        and request.keys % COPIED == 0
        and request.softcap is None
        and compiles_for_hopper()
    )


def wins_forward(request: Request) -> bool:
    """Returns whether the forward was measured to win over the one on the Triton lowering.

    Heads that share no tile (7 to a key/value head, say) walk more keys here, and win at this width all the same.
    """
    return request.head_dim == 128


def wins_backward(request: Request) -> bool:
    """Returns whether the backward was measured to win: always, but where narrow heads leave their gradients in several
    blocks."""
    return request.head_dim == 128 or packed_heads(request) == request.group


def packed_heads(request: Request) -> int:
    """P, the query heads whose rows share a tile: the most that divide the group and leave whole copies of tokens."""
    return math.gcd(request.group, MOST_PACKED)


# -- what is walked ----------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Lists what a kernel's tiles visit.

    Attributes:
        begin, end: int32 [B, tiles, TILE], the keys that each row sees.
        walk: int32 [B, tiles, 4]: the first key that is walked, a multiple of 8, and of the steps from there on, how
            many at first need a mask, up to which none does, and how many there are.
    """

    begin: jax.Array
    end: jax.Array
    walk: jax.Array


def plan_keys(keys: Interval, heads: int, step: int = KEYS) -> Plan:
    """Plan the walks of query tiles of ``heads`` packed heads over ``step`` keys at a time.

    Args:
        keys: the keys that each query sees, int32 [B, S] and [B, S].
    """
    begin, end = (by_tile(x, heads) for x in keys)
    used = by_tile(jnp.ones(keys.begin.shape, bool), heads)
    some = used & (begin < end)
    first = jnp.min(jnp.where(some, begin, _FAR), axis=-1) // COPIED * COPIED
    last = jnp.max(jnp.where(some, end, 0), axis=-1)
    latest_begin = jnp.max(jnp.where(used, begin, 0), axis=-1)
    earliest_end = jnp.min(jnp.where(used, jnp.where(some, end, 0), _FAR), axis=-1)
    total = -(-jnp.maximum(last - first, 0) // step)
    lead = jnp.minimum(-(-(latest_begin - first) // step), total)
    full = jnp.maximum((earliest_end - first) // step, lead)  # none is free of masks where a row sees nothing
    return Plan(begin, end, jnp.stack([first, lead, full, total], axis=-1).astype(jnp.int32))


class QueryPlan(NamedTuple):
    """Lists the queries that the backward's blocks of keys visit, in steps of a fixed number of queries.

    Attributes:
        begin, end: int32 [B, blocks * block], the queries that see each key.
        walk: int32 [B, blocks, 4]: the last step of a block, with which it begins, how many it visits, and from which
            up to which no mask is needed.
        leader: int32 [B, steps], the first block that visits each step.
        visited: bool [B, steps].
    """

    begin: jax.Array
    end: jax.Array
    walk: jax.Array
    leader: jax.Array
    visited: jax.Array


def plan_queries(queries: Interval, size: int, tokens: int, block: int) -> QueryPlan:
    """Plan the walks of blocks of ``block`` keys over steps of ``tokens`` queries of ``size``.

    The blocks that visit a step follow each other without a gap, so that each knows how many come before it. Where the
    intervals do not move on with the keys, some are made longer for that: what is not visible is masked.

    Args:
        queries: the queries that see each key, int32 [B, T] and [B, T].
    """
    begin, end = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))) for x in queries)
    low, high = (x.reshape(x.shape[0], -1, block) for x in (begin, end))
    some = low < high
    first = jnp.min(jnp.where(some, low, _FAR), axis=-1) // tokens
    after = -(-jnp.max(jnp.where(some, high, 0), axis=-1) // tokens)
    first, after = lax.cummin(first, axis=1, reverse=True), lax.cummax(after, axis=1)
    clear = -(-jnp.max(low, axis=-1) // tokens)
    masked = jnp.min(jnp.where(some, high, 0), axis=-1) // tokens
    walk = jnp.stack([after - 1, jnp.maximum(after - first, 0), clear, masked], axis=-1).astype(jnp.int32)
    step = jnp.arange(-(-size // tokens), dtype=jnp.int32)[None, :, None]
    leader, following = (jnp.sum(x[:, None] <= step, axis=-1, dtype=jnp.int32) for x in (after, first))
    return QueryPlan(begin, end, walk, leader, leader < following)


def by_tile(x: jax.Array, heads: int) -> jax.Array:
    """Numbers per token [B, S] as numbers per row [B, tiles, TILE]; 0 or False past the last token."""
    rows, size = x.shape
    tokens = ROWS // heads
    tiles = -(-size // (GROUPS * tokens))
    x = jnp.pad(x, ((0, 0), (0, tiles * GROUPS * tokens - size)))
    x = x.reshape(rows, tiles, GROUPS, 1, tokens)
    return jnp.broadcast_to(x, (rows, tiles, GROUPS, heads, tokens)).reshape(rows, tiles, TILE)


def by_token(x: jax.Array, heads: int, size: int) -> jax.Array:
    """Numbers per row [B, N / P, tiles, TILE] as numbers per token [B, S, N]."""
    rows, parts, tiles, _ = x.shape
    x = x.reshape(rows, parts, tiles * GROUPS, heads, ROWS // heads).transpose(0, 2, 4, 1, 3)
    return x.reshape(rows, -1, parts * heads)[:, :size]


def by_step(x: jax.Array, heads: int, size: int) -> jax.Array:
    """Numbers per token [B, S, N] as numbers per row of a step [B, N / P, steps, size]; 0 past the last token."""
    rows, _, every = x.shape
    tokens = size // heads
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % tokens), (0, 0)))
    x = x.reshape(rows, -1, tokens, every // heads, heads).transpose(0, 3, 1, 4, 2)
    return x.reshape(rows, every // heads, -1, size)


# -- inside a kernel ---------------------------------------------------------------------------------------------------


def load_rows(ref: Any, smem: Any, barrier: Any, row: Any, token: Any, part: Any, heads: int) -> None:
    """Start filling ``smem`` with the rows of as many tokens from ``token`` on, one copy per packed head."""
    tokens = smem.shape[0] // heads
    for member in range(heads):
        source = ref.at[row, pl.ds(token, tokens), part * heads + member]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(member * tokens, tokens)], barrier)


def store_rows(smem: Any, ref: Any, row: Any, token: Any, part: Any, heads: int) -> None:
    """Start writing a warpgroup's rows back to its tokens; those past the last are left out."""
    tokens = ROWS // heads
    for member in range(heads):
        target = ref.at[row, pl.ds(token, tokens), part * heads + member]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(member * tokens, tokens)], target)


class Stream(NamedTuple):
    """Tiles on their way: source, the slots [STAGES, KEYS, width] in shared memory, and what says which are filled or
    free."""

    ref: Any
    smem: Any
    filled: Any
    freed: Any


def stream_keys(streams: Sequence[Stream], row: Any, first: Any, total: Any, kv_head: Any) -> None:
    """Copy the keys and values of ``total`` steps into their slots as these become free."""

    def step(index: jax.Array, _: None) -> None:
        slot = lax.rem(index, jnp.int32(STAGES))
        span = pl.ds(pl.multiple_of(first + index * KEYS, COPIED), KEYS)
        for ref, smem, filled, freed in streams:
            pl.when(index >= STAGES)(partial(plgpu.barrier_wait, freed.at[slot]))
            plgpu.copy_gmem_to_smem(ref.at[row, span, kv_head], smem.at[slot], filled.at[slot])

    lax.fori_loop(0, total, step, None)
