"""The common ground of the Pallas kernels: tile sizes, packed rows, and the walk over the tiles that a tile can see.

A tile of queries packs the G query heads of one key/value head: its row r is token ``r // G``, member ``r % G``, so
that every key tile that is read serves the whole group, and a tile spans few tokens and seldom two segments.

Every walk is over one interval, the union of what the tile's rows may see, starting exactly at that interval's flat
edge: tiles are not aligned to anything, so a segment costs the tiles that its own length needs. Tiles that every row
sees in full are computed without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_backend.attention.request import LOG2E, Request
from jax_backend.hopper import has_large_shared_memory
from jax_backend.segments import Interval

_FAR = 2**30  # past every index
_PROGRAMS = 4 * 400  # of dkv, as many as its walks are divided into: four times what an H200 runs at a time
_MOST_PARTS = 4  # each writes float32 gradients of its own, which are added up


@dataclass(frozen=True)
class PallasTile:
    """One kernel's tile: packed query rows x keys, how the compiler runs it, and over how many programs a walk is
    divided (dkv alone)."""

    rows: int
    keys: int
    warps: int
    stages: int
    parts: int = 1

    def tokens(self, group: int) -> int:
        """Query tokens of a tile; a group that does not divide the rows leaves the last few unused."""
        return max(self.rows // group, 1)

    def packed_rows(self, group: int) -> int:
        """Rows of a tile, at least one token's group, a power of two."""
        return max(self.rows, pl.next_power_of_2(group))


@dataclass(frozen=True)
class PallasTiles:
    """The tiles of the three kernels."""

    forward: PallasTile
    dq: PallasTile
    dkv: PallasTile


def tiles_for(request: Request) -> PallasTiles:
    """The tiles for a request's platform, dtype and head width: the fastest of a sweep on an H200, where they fit.

    Where dkv has few programs, the one that walks a long document's queries for its first keys decides how long the
    kernel takes: its walks are divided.
    """
    tiles = _undivided(request)
    programs = request.rows * request.kv_heads * pl.cdiv(request.keys, tiles.dkv.keys)
    parts = 1 if request.platform == "cpu" else min(max(_PROGRAMS // programs, 1), _MOST_PARTS)
    return replace(tiles, dkv=replace(tiles.dkv, parts=parts))


def _undivided(request: Request) -> PallasTiles:
    if request.platform == "cpu":  # interpreted: small, so that small tests cross the borders of tiles
        small = PallasTile(32, 32, 4, 2)
        return PallasTiles(small, small, small)
    width = padded(max(request.head_dim, request.value_dim))
    if width > 128 and not has_large_shared_memory():  # compiled for sm_86: at most 96 of 99 KB
        if request.dtype == jnp.float32:
            return PallasTiles(PallasTile(32, 32, 8, 1), PallasTile(32, 16, 8, 1), PallasTile(16, 16, 8, 1))
        return PallasTiles(PallasTile(64, 32, 4, 2), PallasTile(64, 32, 8, 1), PallasTile(32, 32, 4, 2))
    if request.dtype == jnp.float32:
        if width > 128:
            return PallasTiles(PallasTile(32, 32, 8, 1), PallasTile(32, 32, 8, 1), PallasTile(32, 32, 8, 1))
        return PallasTiles(PallasTile(32, 32, 4, 2), PallasTile(32, 32, 4, 2), PallasTile(32, 32, 4, 1))
    if width > 128:
        return PallasTiles(PallasTile(128, 64, 8, 2), PallasTile(128, 32, 8, 2), PallasTile(32, 32, 4, 2))
    if width <= 64:
        return PallasTiles(PallasTile(64, 64, 4, 3), PallasTile(64, 64, 4, 3), PallasTile(64, 64, 4, 3))
    return PallasTiles(PallasTile(128, 32, 8, 3), PallasTile(64, 32, 4, 2), PallasTile(32, 64, 4, 4))


def padded(width: int) -> int:
    """The power of two, at least 16, that a matrix unit's operand of this width is padded to."""
    return max(16, pl.next_power_of_2(width))


def pack_rows(first_token: jax.Array, tokens: int, group: int, rows: int, limit: int) -> tuple[jax.Array, ...]:
    """Token and group member of each packed row, int32 [rows], and whether the row stands for a token of 0 .. limit."""
    row = jnp.arange(rows, dtype=jnp.int32)
    token, member = first_token + lax.div(row, group), lax.rem(row, group)
    inside = (row < tokens * group) & (token >= 0) & (token < limit)
    return token, member, inside


def row_ref(ref: Any, token: jax.Array, member: jax.Array) -> Any:
    """Packed rows [rows, padded width] of a [S, G, padded width] reference."""
    shape = (token.shape[0], ref.shape[-1])
    channel = jnp.arange(shape[1], dtype=jnp.int32)
    return ref.at[*(jnp.broadcast_to(x, shape) for x in (token[:, None], member[:, None], channel[None, :]))]


def inside_tile(inside: jax.Array, channels: int, width: int) -> jax.Array:
    """Marks the real elements of a tile [rows, channels]: the rows inside, the channels up to the true width."""
    mask = jnp.broadcast_to(inside[:, None], (inside.shape[0], channels))
    return mask if channels == width else mask & (jnp.arange(channels) < width)[None, :]


def load_rows(ref: Any, token: jax.Array, member: jax.Array, inside: jax.Array | None, width: int) -> jax.Array:
    """Packed rows [rows, padded width]; zero where not ``inside`` [rows], None for all inside."""
    rows, channels = row_ref(ref, token, member), ref.shape[-1]
    if inside is None and channels == width:
        return plgpu.load(rows)
    everyone = jnp.ones(token.shape, bool) if inside is None else inside
    return plgpu.load(rows, mask=inside_tile(everyone, channels, width), other=0)


def load_scalars(ref: Any, token: jax.Array, member: jax.Array, inside: jax.Array | None) -> jax.Array:
    """One number per packed row of a [S, G] reference; zero where not ``inside`` [rows], None for all inside."""
    numbers = ref.at[token, member]
    return plgpu.load(numbers) if inside is None else plgpu.load(numbers, mask=inside, other=0.0)


def load_numbers(ref: Any, first: jax.Array, size: int, inside: jax.Array | None) -> jax.Array:
    """Numbers ``first .. first + size`` of a [S * G] reference; zero where not ``inside`` [size], None for all
    inside."""
    numbers = ref.at[first + jnp.arange(size, dtype=jnp.int32)]
    return plgpu.load(numbers) if inside is None else plgpu.load(numbers, mask=inside, other=0.0)


def store_rows(ref: Any, value: jax.Array, token: jax.Array, member: jax.Array, inside: jax.Array, width: int) -> None:
    """Write packed rows back, in the reference's dtype."""
    mask = inside_tile(inside, ref.shape[-1], width)
    plgpu.store(row_ref(ref, token, member), value.astype(ref.dtype), mask=mask)


def load_span(ref: Any, first: jax.Array, size: int, width: int, *, inside: jax.Array | None = None) -> jax.Array:
    """Tokens ``first .. first + size`` of a [T, padded width] reference; zero where not ``inside`` [size], None for all
    inside."""
    span, channels = ref.at[pl.ds(first, size)], ref.shape[1]
    if inside is None and channels == width and size <= ref.shape[0]:
        return span[...]
    everyone = jnp.ones((size,), bool) if inside is None else inside
    return plgpu.load(span, mask=inside_tile(everyone, channels, width), other=0)


def store_span(ref: Any, value: jax.Array, first: jax.Array, inside: jax.Array, width: int) -> None:
    """Write tokens from ``first`` on back, in the reference's dtype."""
    mask = inside_tile(inside, ref.shape[1], width)
    plgpu.store(ref.at[pl.ds(first, value.shape[0])], value.astype(ref.dtype), mask=mask)


def heaviest_first(interval: Interval, tile: int) -> jax.Array:
    """The tiles of ``tile`` tokens by the length of their walks, longest first, int32 [B, tiles].

    A GPU starts a kernel's programs in the order of its grid, and what starts last decides when it ends. An index read
    from memory slows a kernel down: on an H200 dkv, whose walks differ most, gains from it; forward and dq lose.

    Args:
        interval: per token, int32 [B, S] and [B, S].
    """
    begin, end = interval
    padding = (0, 0), (0, -begin.shape[1] % tile)
    some = begin < end
    first = jnp.pad(jnp.where(some, begin, _FAR), padding, constant_values=_FAR)
    last = jnp.pad(jnp.where(some, end, 0), padding)
    first, last = (x.reshape(x.shape[0], -1, tile) for x in (first, last))
    span = jnp.maximum(last.max(axis=2) - first.min(axis=2), 0)
    return jnp.argsort(span, axis=1, descending=True).astype(jnp.int32)


def load_interval(begin_ref: Any, end_ref: Any, token: jax.Array, inside: jax.Array) -> Interval:
    """The interval of each row's token; empty, begin 0 and end 0, for rows that are not inside."""
    begin = plgpu.load(begin_ref.at[token], mask=inside, other=0)
    end = plgpu.load(end_ref.at[token], mask=inside, other=0)
    return Interval(begin, end)


@dataclass(frozen=True)
class Walk:
    """The steps of one tile's loop: ``lead`` masked ones, then unmasked ones up to ``full``, then masked ones up to
    ``total``."""

    first: jax.Array
    last: jax.Array
    lead: jax.Array | int
    full: jax.Array
    total: jax.Array

    def run(self, step: Callable[..., Any], carry: Any, part: jax.Array | int = 0, parts: int = 1) -> Any:
        """``carry = step(index, carry, masked=...)`` over all steps, or those of one of several even ``parts``."""
        begin, end = (lax.div(self.total * (part + i), parts) if parts > 1 else (0, self.total)[i] for i in range(2))

        def loop(first: Any, last: Any, carry: Any, *, masked: bool) -> Any:
            if parts > 1:
                first, last = jnp.maximum(first, begin), jnp.minimum(last, end)
            return lax.fori_loop(first, last, lambda i, c: step(i, c, masked=masked), carry)

        if not isinstance(self.lead, int):
            carry = loop(0, self.lead, carry, masked=True)
        carry = loop(self.lead, self.full, carry, masked=False)
        return loop(self.full, self.total, carry, masked=True)


def plan_walk(interval: Interval, used: jax.Array, size: int, *, upward: bool, window: bool) -> Walk:
    """Plan the steps of ``size`` that cover the union of the used rows' intervals.

    Args:
        interval: per row [rows]; rows that are not ``used`` are ignored.
        used: bool [rows].
        upward: walk from the union's begin up, or from its end down. Take the side where the rows of one segment agree:
            keys of causal queries share their begin, queries of causal keys share their end.
        window: whether rows of one segment disagree on that side too, so that the first steps need a mask.
    """
    begin, end = interval
    some = used & (begin < end)
    first = jnp.min(jnp.where(some, begin, _FAR))
    last = jnp.max(jnp.where(some, end, 0))
    latest_begin = jnp.max(jnp.where(used, begin, 0))
    earliest_end = jnp.min(jnp.where(used, jnp.where(some, end, 0), _FAR))  # an empty row leaves no step in full
    gap, reach = (latest_begin - first, earliest_end - first) if upward else (last - earliest_end, last - latest_begin)
    total = lax.div(jnp.maximum(last - first, 0) + size - 1, size)
    everyone_in = (earliest_end > 0) & (first < last)
    full = jnp.where(everyone_in, lax.div(jnp.maximum(reach, 0), size), 0)
    if not window:
        return Walk(first, last, 0, jnp.where(gap == 0, full, 0), total)
    lead = jnp.where(everyone_in, lax.div(gap + size - 1, size), 0)
    lead = jnp.minimum(lead, total)
    return Walk(first, last, lead, jnp.maximum(full, lead), total)


def dot(x: jax.Array, y: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """Matrix product over one axis of each, float32; float32 operands are multiplied in full, not in tf32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, y, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def base2_logits(product: jax.Array, request: Request) -> tuple[jax.Array, float]:
    """Logits as ``raw * factor``, in base 2: raw is the product itself, or its tanh under a softcap."""
    if request.softcap is None:
        return product, request.scale * LOG2E
    return jnp.tanh(product * (request.scale / request.softcap)), request.softcap * LOG2E


def exp2(x: jax.Array, request: Request) -> jax.Array:
    """2 to the power of x, float32; on a GPU the chip's one instruction, which takes results below 2^-126 for 0.

    XLA's own ``exp2`` keeps those at three further instructions per element, a quarter of what a step of these kernels
    issues at width 64.
    """
    if request.platform == "cpu":
        return jnp.exp2(x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    code, constraints = "ex2.approx.ftz.f32 $0, $1;", "=f,f"
    return plgpu.elementwise_inline_asm(code, args=[x], constraints=constraints, pack=1, result_shape_dtypes=[like])[0]
