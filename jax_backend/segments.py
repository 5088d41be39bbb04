"""Segment ids in, intervals out: everything the attention implementations know about a packed batch.

A segment is a contiguous run of one id that is not padding, so what a query may see is one interval of key indices, and
what may see a key is one interval of query indices. Data flows

    segment_ids [B, S] --find_segments--> Segments (once per batch, shared by all layers)
                       --visible_keys / seeing_queries--> intervals [B, S] under one layer's causal, window and offset

and every implementation masks by those intervals alone: the rule of what is visible is written here and nowhere else.
All shapes are static, so a new segmentation never recompiles. Shape letters: B rows, S queries of a row, T keys of a
row, M most segments of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from packing_core.errors import CapacityError, LayoutError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("key_begin", "key_end", "query_begin", "query_end", "count", "valid"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Segments:
    """Segment boundaries of every token; made by :func:`find_segments`, whatever the layers' windows are.

    Attributes:
        key_begin, key_end: int32 [B, S]; the keys of query i's segment are ``key_begin[i] <= j < key_end[i]``.
            Both are 0 for padding.
        query_begin, query_end: int32 [B, T]; the same seen from the keys. None when queries and keys are the same
            tokens, and so have the same intervals.
        count: int32 [B], segments of a row of queries.
        valid: bool [B]; False for a row whose ids are not contiguous runs in the keys, or that holds more segments than
            the stated cap: its attention is NaN. None when there is nothing that could be broken.
    """

    key_begin: jax.Array
    key_end: jax.Array
    query_begin: jax.Array | None
    query_end: jax.Array | None
    count: jax.Array
    valid: jax.Array | None

    @property
    def own_keys(self) -> bool:
        """Returns whether queries and keys are the same tokens."""
        return self.query_begin is None

    @property
    def queries_of_keys(self) -> tuple[jax.Array, jax.Array]:
        """``query_begin`` and ``query_end`` whichever way they are held."""
        if self.query_begin is None or self.query_end is None:
            return self.key_begin, self.key_end
        return self.query_begin, self.query_end


class Interval(NamedTuple):
    """Half-open intervals ``begin <= index < end``, one per token; empty where ``begin >= end``."""

    begin: jax.Array
    end: jax.Array


def find_segments(
    segment_ids: jax.Array, kv_segment_ids: jax.Array | None = None, *, max_segments: int | None = None
) -> Segments:
    """Locate the segments of packed rows.

    Args:
        segment_ids: integer [B, S]: contiguous runs of ids from 1 on, 0 for padding, which may stand anywhere. Traced
            ids, whose values cannot be checked, may also hold -1 for padding.
        kv_segment_ids: integer [B, T] ids of the keys, when these are not the queries' own tokens (context
            parallelism). An id must be one run in the whole row, of which these may be a part. None when queries and
            keys are the same tokens; then every run is a segment.
        max_segments: most segments a row may hold. None for no cap.

    Returns:
        The segments. For ids with concrete values a broken rule raises; for traced ids it makes the row ``valid =
        False``.

    Raises:
        LayoutError: ids are not integers or not two-dimensional, or (concrete values) they are negative, wider than
            JAX's integers, or not contiguous runs.
        CapacityError: (concrete values) a row holds more than ``max_segments`` segments.
    """
    ids = checked_ids("segment_ids", segment_ids)
    begin, end, count = _runs(ids)
    if kv_segment_ids is None:
        segments = Segments(begin, end, None, None, count, None)
    else:
        kv_ids = checked_ids("kv_segment_ids", kv_segment_ids)
        if kv_ids.shape[0] != ids.shape[0]:
            raise LayoutError(
                f"segment_ids has {ids.shape[0]} rows and kv_segment_ids has {kv_ids.shape[0]}: give both the same"
            )
        key_begin, key_end, keys_fit = locate_runs(ids, kv_ids)
        query_begin, query_end, queries_fit = locate_runs(kv_ids, ids)
        segments = Segments(key_begin, key_end, query_begin, query_end, count, keys_fit & queries_fit)
        if not _all(keys_fit & queries_fit):
            raise LayoutError(
                "an id occurs in two runs of one row, so kv_segment_ids does not say which of them a query belongs to: "
                "number the segments of a row 1, 2, 3 and so on"
            )
    return segments if max_segments is None else cap_segments(segments, max_segments)


def cap_segments(segments: Segments, max_segments: int) -> Segments:
    """The same segments with ``valid`` narrowed to rows of at most ``max_segments`` segments.

    Raises:
        CapacityError: (concrete values) a row holds more.
    """
    fits = segments.count <= max_segments
    if not _all(fits):
        count = np.asarray(segments.count)
        raise CapacityError(
            f"row {int(count.argmax())} holds {count.max()} segments and max_segments is {max_segments}: raise it, or "
            "pack with pack(..., max_segments=...)"
        )
    return replace(segments, valid=fits if segments.valid is None else segments.valid & fits)


def visible_keys(segments: Segments, *, causal: bool, window: int | None, q_offset: int | jax.Array = 0) -> Interval:
    """The keys that each query sees, int32 [B, S] and [B, S].

    Key j is visible to query i when both are of one segment, ``j <= i + q_offset`` if causal, and
    ``|i + q_offset - j| < window`` if there is a window.

    Args:
        q_offset: row position of query 0 minus row position of key 0.
    """
    at = jnp.arange(segments.key_begin.shape[1], dtype=jnp.int32)[None] + q_offset
    begin, end = segments.key_begin, segments.key_end
    if causal:
        end = jnp.minimum(end, at + 1)
    if window is not None:
        begin, end = jnp.maximum(begin, at - window + 1), jnp.minimum(end, at + window)
    return Interval(begin, end)


def keys_inside(
    segments: Segments, keys: int, *, causal: bool, window: int | None, q_offset: int | jax.Array = 0
) -> jax.Array:
    """bool [B, S, T]: whether each query sees each of ``keys`` keys, by :func:`visible_keys`."""
    begin, end = visible_keys(segments, causal=causal, window=window, q_offset=q_offset)
    key = jnp.arange(keys, dtype=jnp.int32)[None, None]
    return (begin[..., None] <= key) & (key < end[..., None])


def seeing_queries(segments: Segments, *, causal: bool, window: int | None, q_offset: int | jax.Array = 0) -> Interval:
    """The queries that see each key, int32 [B, T] and [B, T]: :func:`visible_keys` read from the other side."""
    begin, end = segments.queries_of_keys
    at = jnp.arange(begin.shape[1], dtype=jnp.int32)[None] - q_offset
    if causal:
        begin = jnp.maximum(begin, at)
    if window is not None:
        begin, end = jnp.maximum(begin, at - window + 1), jnp.minimum(end, at + window)
    return Interval(begin, end)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Position of each token within its segment, int32 [B, S]; 0 for padding.

    Raises:
        LayoutError: as for :func:`find_segments`.
    """
    segments = find_segments(segment_ids)
    at = jnp.arange(segments.key_begin.shape[1], dtype=jnp.int32)[None]
    return jnp.where(segments.key_end > 0, at - segments.key_begin, 0)


def check_positions(segment_ids: Any, position_ids: Any) -> None:
    """Looks for positions that begin again inside a segment, which a 0/1 attention mask given as ids has.

    Args:
        segment_ids, position_ids: [..., S]; nothing is read of traced arrays.

    Raises:
        LayoutError: there are some.
    """
    if not (is_concrete(segment_ids) and is_concrete(position_ids)):
        return
    ids, positions = np.asarray(segment_ids), np.asarray(position_ids)
    again = (positions[..., 1:] == 0) & (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != 0)
    if again.any():
        *row, before = (int(i) for i in np.argwhere(again)[0])
        raise LayoutError(
            f"position_ids begin again at token {before + 1} of row {row[-1]}, inside a segment: segment_ids number "
            "the documents of a row 1, 2, 3 and so on, and a 0/1 attention mask makes one document of all of them"
        )


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """True at the first token of each run, padding runs included, bool [B, S]."""
    first = jnp.ones_like(segment_ids[:, :1], bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def broken_segments(segments: Segments, *arrays: jax.Array, first: jax.Array | None = None) -> jax.Array:
    """Marks the tokens of segments that hold a number which is not finite, bool [B, S]; never padding.

    Args:
        arrays: [B, S, ...].
        first: [B, ...], what the row's first segment goes on from.
    """
    broken = jnp.zeros(segments.key_begin.shape, bool)
    for array in arrays:
        broken |= ~jnp.isfinite(array).all(axis=tuple(range(2, array.ndim)))
    if first is not None:
        broken = broken.at[:, 0].set(broken[:, 0] | ~jnp.isfinite(first).all(axis=tuple(range(1, first.ndim))))
    return any_inside(broken, segments.key_begin, segments.key_end)


def any_inside(flags: jax.Array, begin: jax.Array, end: jax.Array) -> jax.Array:
    """Returns for intervals [B, S] whether a flag [B, T] inside is set."""
    before = jnp.pad(jnp.cumsum(flags, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    size = flags.shape[1]
    first, last = (jnp.take_along_axis(before, jnp.clip(at, 0, size), axis=1) for at in (begin, end))
    return last > first


def run_numbers(segments: Segments) -> jax.Array:
    """One number per query, int32 [B, S]: equal inside a segment, different between segments, 0 for padding."""
    return jnp.where(segments.key_end > 0, segments.key_begin + 1, 0)


def packed_offsets(segments: Segments, max_segments: int) -> tuple[jax.Array, jax.Array]:
    """Lengths int32 [B, M] and first tokens int32 [B, M + 1] of each row's segments in order, unused entries -1.

    Padding may lie between segments. Meant for rows whose queries are their keys.
    """
    first = (segments.key_end > 0) & (jnp.arange(segments.key_begin.shape[1])[None] == segments.key_begin)

    def row(first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        (starts,) = jnp.nonzero(first, size=max_segments, fill_value=-1)
        lengths = jnp.where(starts < 0, -1, end[starts] - starts)
        return lengths.astype(jnp.int32), jnp.append(starts, -1).astype(jnp.int32)

    return jax.vmap(row)(first, segments.key_end)


@jax.jit
def _runs(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Begin and end of the run that each token stands in, [B, S] each, 0 for padding, and the runs of a row, [B]."""
    size = ids.shape[1]
    at = jnp.arange(size, dtype=jnp.int32)[None]
    opens = segment_starts(ids)
    closes = jnp.concatenate([opens[:, 1:], jnp.ones_like(opens[:, :1])], axis=1)
    begin = jax.lax.cummax(jnp.where(opens, at, 0), axis=1)
    end = jax.lax.cummin(jnp.where(closes, at + 1, size), axis=1, reverse=True)
    real = is_real(ids)
    count = jnp.sum(opens & real, axis=1, dtype=jnp.int32)
    return jnp.where(real, begin, 0), jnp.where(real, end, 0), count


@jax.jit
@jax.vmap
def locate_runs(ids: jax.Array, among: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Begin and end of the run of each of ``ids`` [B, S] in ``among`` [B, T], empty where it is not there, and bool [B]
    whether each is one run."""
    order = jnp.argsort(among, stable=True)
    ordered = among[order]
    left = jnp.searchsorted(ordered, ids, side="left")
    size = jnp.where(is_real(ids), jnp.searchsorted(ordered, ids, side="right") - left, 0)
    begin = order[jnp.minimum(left, among.size - 1)]
    last = order[jnp.maximum(left + size - 1, 0)]
    one_run = jnp.all((size == 0) | (last - begin + 1 == size))
    begin = jnp.where(size == 0, 0, begin).astype(jnp.int32)
    return begin, (begin + size).astype(jnp.int32), one_run


def is_real(segment_ids: jax.Array) -> jax.Array:
    """Marks the tokens that are not padding, bool of the ids' shape: padding is 0, and -1 where ids are traced."""
    real = segment_ids != 0
    return real if jnp.issubdtype(segment_ids.dtype, jnp.unsignedinteger) else real & (segment_ids != -1)


def checked_ids(name: str, ids: jax.Array | np.ndarray, shape: tuple[int, ...] | None = None) -> jax.Array:
    """Returns segment ids as a JAX array [B, S] with the values that they have.

    Raises:
        LayoutError: they are not integers or not of ``shape``, or (concrete values) one is negative, or JAX would wrap
            it to fewer bits.
    """
    if getattr(ids, "ndim", None) != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        found = f"{ids.dtype} {ids.shape}" if hasattr(ids, "dtype") else type(ids).__name__
        raise LayoutError(f"{name} must be integers of shape [B, S], got {found}: batch.segment_ids has that shape")
    if shape is not None and ids.shape != shape:
        raise LayoutError(f"{name} must have shape [B, S] = {shape}, got {ids.shape}")
    if is_concrete(ids) and ids.size:
        values = np.asarray(ids)
        if (least := int(values.min())) < 0:
            raise LayoutError(f"{name} holds {least}: ids count from 1 and 0 is padding")
        kept = jax.dtypes.canonicalize_dtype(ids.dtype)
        if (most := int(values.max())) > jnp.iinfo(kept).max:
            raise LayoutError(
                f"{name} holds {most}, which JAX would wrap to {kept}: number the segments of a row 1, 2, 3 and so on"
            )
    return jnp.asarray(ids)


def is_concrete(x: Any) -> bool:
    """Returns whether this process can read the values now: ``x`` is neither traced nor partly on another host."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def _all(flags: jax.Array) -> bool:
    """Returns whether no flag is known to be False: a traced array's values are not known."""
    return not is_concrete(flags) or bool(np.all(flags))
