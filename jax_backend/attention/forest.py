"""Segments that continue others, for attention: as a dense mask, or as one call of a kernel for each level.

    segment_ids and parents [B, S] -> the last token of each token's parent
        -> the ancestors of all tokens, twice as many generations in every round -> bool [B, S, S]
        -> the ancestor of each token on every level -> Segments whose queries are all below one ancestor

What is below a segment, at any distance, is one run of tokens in rows of ``pack_tree``. So attention to the ancestors
on one level is that of queries in such runs to the keys of a segment, which kernels have, and the outputs over a
token's own segment and over each level are merged by their log-sums. All shapes are static.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.segments import Segments, checked_ids, is_concrete, locate_runs
from packing_core.errors import LayoutError

Attend = Callable[..., tuple[jax.Array, jax.Array]]


def depth_of(segment_ids: jax.Array, parents: jax.Array) -> int | None:
    """The most segments that one continues, one after the other; None where the ids are traced, or a segment does not
    stand behind what it continues or behind another one that does."""
    if not (is_concrete(segment_ids) and is_concrete(parents)) or segment_ids.shape != parents.shape:
        return None
    deepest = 0
    for ids, above in zip(np.asarray(segment_ids), np.asarray(parents), strict=True):
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1))
        path: list[int] = []  # the ids from a root down to the segment before
        for own, parent in zip(ids[starts].tolist(), above[starts].tolist(), strict=True):
            while path and (parent <= 0 or path[-1] != parent):
                path.pop()
            if parent > 0 and own > 0 and not path:
                return None
            path = [*path, own] if own > 0 else []
            deepest = max(deepest, len(path) - 1)
    return deepest


def levels_above(
    segments: Segments, segment_ids: jax.Array, parents: jax.Array, depth: int
) -> tuple[list[Segments], jax.Array]:
    """The segments above each token, level by level.

    Args:
        segments: of ``segment_ids``, integer [B, S].
        parents: integer [B, S], at each token the id of the segment that its segment continues; 0 for none.
        depth: the most segments that one continues.

    Returns:
        For each level from the roots on the Segments that say which keys, those of one segment of the level, the
        queries below it see; and bool [B]: whether every parent stands before its children, no segment continues more
        than ``depth``, and what is below a segment is one run.

    Raises:
        LayoutError: (concrete values) shapes differ, or one of these does not hold.
    """
    ids = jnp.asarray(segment_ids)
    last, valid = _last_of_parent(segments, ids, parents)
    above, at = [], last  # of each token, the last token of the segment so many generations up; -1 for none
    for _ in range(depth):
        above.append(at)
        at = jnp.where(at >= 0, _at(last, at), -1)
    valid &= _shallow(jnp.all(at < 0, axis=1), depth)
    count = sum((place >= 0).astype(jnp.int32) for place in above)
    levels = []
    for level in range(depth):
        place = jnp.full_like(last, -1)
        for generation, of_generation in enumerate(above):
            place = jnp.where(count - 1 - level == generation, of_generation, place)
        of_level = jnp.where(place >= 0, _at(ids, place), 0)
        key_begin, key_end, keys_fit = locate_runs(of_level, ids)
        query_begin, query_end, queries_fit = locate_runs(ids, of_level)
        _check(
            queries_fit,
            "holds padding or another segment between one and what continues it, which kernels do not serve: order "
            "segments as pack_tree does, or pass implementation='xla'",
        )
        valid &= keys_fit & queries_fit
        levels.append(Segments(key_begin, key_end, query_begin, query_end, segments.count, None))
    return levels, valid


def over_levels(own: Attend, above: Attend, levels: list[Segments], merge: Attend) -> Attend:
    """Attention to a token's own segment and to those above it, each by an implementation's ``attend``."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments, offset: jax.Array) -> Any:
        out, lse = own(q, k, v, segments, offset)
        found = out.astype(jnp.float32), lse
        for level in levels:
            found = merge(found, above(q, k, v, level, offset))
        return found[0].astype(q.dtype), found[1]

    return attend


def seen_keys(
    segments: Segments, segment_ids: jax.Array, parents: jax.Array, *, window: int | None, deepest: int | None
) -> tuple[jax.Array, jax.Array]:
    """The keys that each query sees in causal attention, its ancestors' among them.

    Args:
        segments: of ``segment_ids``, integer [B, S].
        parents: integer [B, S], at each token the id of the segment that its segment continues; 0 for none.
        window: keys visible to a query, its own included, counted along its path; None for no limit.
        deepest: the most segments that one may continue, one after the other; None for no limit.

    Returns:
        bool [B, S, S], and bool [B]: whether every parent stands before its children and none is too deep.

    Raises:
        LayoutError: (concrete values) shapes differ, or a parent does not stand before its children, or is too deep.
    """
    last, valid = _last_of_parent(segments, segment_ids, parents)
    place = jnp.arange(last.shape[1], dtype=jnp.int32)[None]
    begin, real = segments.key_begin, segments.key_end > segments.key_begin
    own = (begin[..., None] <= place[:, None]) & (place[:, None] <= place[..., None]) & real[..., None]
    state = own, last, place - begin, jnp.zeros_like(last)

    def reaches(state: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[1] >= 0)

    def twice(
        state: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        seen, above, depth, count = state
        has, at = above >= 0, jnp.maximum(above, 0)
        seen = seen | (has[..., None] & jnp.take_along_axis(seen, at[..., None], axis=1))
        depth, count = (x + jnp.where(has, jnp.take_along_axis(x, at, axis=1) + 1, 0) for x in (depth, count))
        return seen, jnp.where(has, jnp.take_along_axis(above, at, axis=1), -1), depth, count

    seen, _, depth, count = jax.lax.while_loop(reaches, twice, state)
    if deepest is not None:
        valid &= _shallow(jnp.all(count <= deepest, axis=1), deepest)
    if window is not None:
        seen = seen & (depth[:, :, None] - depth[:, None, :] < window)
    return seen, valid


def _last_of_parent(segments: Segments, segment_ids: jax.Array, parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 [B, S]: the last token of each token's parent, -1 for none; bool [B]: whether parents stand before."""
    ids, above_ids = jnp.asarray(segment_ids), checked_ids("parents", parents)
    if above_ids.shape != ids.shape:
        raise LayoutError(f"parents must have shape [B, S] = {ids.shape} as segment_ids, got {above_ids.shape}")
    begin, real = segments.key_begin, segments.key_end > segments.key_begin
    _, end, one_run = locate_runs(above_ids, ids)
    stands = (end > 0) & (end <= begin)
    valid = one_run & jnp.all((above_ids <= 0) | stands | ~real, axis=1)
    _check(valid, "has parents that do not stand, as one segment, before the segments that continue them")
    one_parent = jnp.all((above_ids == _at(above_ids, begin)) | ~real, axis=1)
    _check(one_parent, "has tokens of one segment with different parents: a segment continues one other as a whole")
    valid &= one_parent
    return jnp.where(stands & real, end - 1, -1), valid


def _shallow(shallow: jax.Array, most: int) -> jax.Array:
    _check(shallow, f"holds segments that continue more than {most} others, one after the other: raise max_ancestors")
    return shallow


def _check(valid: jax.Array, otherwise: str) -> None:
    """Raise for concrete values if a row is not valid; traced ones make it NaN.

    Raises:
        LayoutError
    """
    if is_concrete(valid) and not bool(valid.all()):
        raise LayoutError(f"row {int(jnp.argmin(valid))} {otherwise}")


def _at(x: jax.Array, place: jax.Array) -> jax.Array:
    """x [B, S] at places of its rows; anything where they are negative."""
    return jnp.take_along_axis(x, jnp.maximum(place, 0), axis=1)
