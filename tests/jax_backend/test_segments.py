"""The one rule of what is visible: intervals from segment ids, against a dense mask written from the definition."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import (
    causal_conv,
    gated_delta_rule,
    segment_attention,
    selective_scan,
    shift_labels,
    ssd,
)
from jax_backend.segments import (
    find_segments,
    packed_offsets,
    run_numbers,
    seeing_queries,
    segment_positions,
    visible_keys,
)
from packing_core.errors import CapacityError, LayoutError


def random_ids(seed: int, rows: int = 3, tokens: int = 24) -> np.ndarray:
    """Rows of random segments with padding anywhere."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((rows, tokens), np.int32)
    for row in ids:
        at, number = 0, 0
        while at < tokens:
            length = int(rng.integers(1, 8))
            if rng.random() < 0.7:
                number += 1
                row[at : at + length] = number
            at += length
    return ids


def dense(ids: np.ndarray, kv_ids: np.ndarray, causal: bool, window: int | None, offset: int) -> np.ndarray:
    """bool [B, S, T], from the definition."""
    seen = (ids[:, :, None] == kv_ids[:, None, :]) & (ids[:, :, None] != 0)
    ahead = np.arange(ids.shape[1])[:, None] + offset - np.arange(kv_ids.shape[1])
    if causal:
        seen &= ahead >= 0
    if window is not None:
        seen &= np.abs(ahead) < window
    return seen


def filled(begin: jax.Array, end: jax.Array, size: int) -> np.ndarray:
    """bool [B, S, size] of intervals [B, S]."""
    at = np.arange(size)
    return (np.asarray(begin)[..., None] <= at) & (at < np.asarray(end)[..., None])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_intervals_are_the_dense_mask_from_both_sides(causal: bool, window: int | None) -> None:
    ids = random_ids(0, rows=20)
    segments = find_segments(jnp.asarray(ids))
    want = dense(ids, ids, causal, window, 0)
    np.testing.assert_array_equal(filled(*visible_keys(segments, causal=causal, window=window), 24), want)
    seen_by = filled(*seeing_queries(segments, causal=causal, window=window), 24)
    np.testing.assert_array_equal(seen_by.swapaxes(1, 2), want)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("start", "stop", "kv_start"), [(8, 16, 0), (0, 8, 16), (16, 24, 8)])
def test_a_shard_of_queries_sees_its_keys_wherever_they_stand(
    start: int, stop: int, kv_start: int, window: int | None
) -> None:
    ids = random_ids(7)
    queries, keys = ids[:, start:stop], ids[:, kv_start:]
    offset = start - kv_start
    segments = find_segments(jnp.asarray(queries), jnp.asarray(keys))
    want = dense(queries, keys, True, window, offset)
    options = {"causal": True, "window": window, "q_offset": jnp.int32(offset)}
    np.testing.assert_array_equal(filled(*visible_keys(segments, **options), keys.shape[1]), want)
    np.testing.assert_array_equal(filled(*seeing_queries(segments, **options), stop - start).swapaxes(1, 2), want)


def test_a_run_is_a_segment_even_if_its_id_was_there_before() -> None:
    #           1 1 2 1 1
    segments = find_segments(jnp.array([[1, 1, 2, 1, 1]]))
    assert segments.key_begin.tolist() == [[0, 0, 2, 3, 3]]
    assert segments.count.tolist() == [3]


def test_positions_numbers_and_offsets() -> None:
    #                  . 1 1 . . 2 2 2 3 .
    ids = jnp.array([[0, 1, 1, 0, 0, 2, 2, 2, 3, 0]])
    assert segment_positions(ids).tolist() == [[0, 0, 1, 0, 0, 0, 1, 2, 0, 0]]
    segments = find_segments(ids)
    assert run_numbers(segments).tolist() == [[0, 2, 2, 0, 0, 6, 6, 6, 9, 0]]
    lengths, first = packed_offsets(segments, 4)
    assert lengths.tolist() == [[2, 3, 1, -1]]
    assert first.tolist() == [[1, 5, 8, -1, -1]]


def test_a_cap_raises_for_values_and_marks_the_row_when_traced() -> None:
    ids = jnp.array([[1, 1, 2, 2], [1, 2, 3, 0]])
    with pytest.raises(
        CapacityError, match=re.escape("row 1 holds 3 segments and max_segments is 2: raise it, or pack")
    ):
        find_segments(ids, max_segments=2)
    assert jax.jit(lambda ids: find_segments(ids, max_segments=2).valid)(ids).tolist() == [True, False]


def test_an_id_in_two_runs_is_ambiguous_among_other_keys() -> None:
    ids, keys = jnp.array([[1, 1], [1, 1]]), jnp.array([[1, 2, 1], [1, 1, 2]])
    with pytest.raises(LayoutError, match="an id occurs in two runs of one row"):
        find_segments(ids, keys)
    assert jax.jit(lambda a, b: find_segments(a, b).valid)(ids, keys).tolist() == [False, True]


def test_a_new_segmentation_of_a_shape_is_not_traced_again() -> None:
    traces = []

    @jax.jit
    def intervals(ids: jax.Array) -> object:
        traces.append(ids.shape)
        return visible_keys(find_segments(ids, max_segments=24), causal=True, window=None)

    for seed in range(5):
        intervals(jnp.asarray(random_ids(seed)))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(4, np.int32), r"segment_ids must be integers of shape \[B, S\], got int32 \(4,\)"),
        (np.zeros((1, 4), np.float32), r"got float32 \(1, 4\)"),
        ([[1, 1]], "got list"),
        (np.array([[1, -1]]), "segment_ids holds -1: ids count from 1 and 0 is padding"),
        (
            np.array([[1, 2**32 + 1]]),
            "segment_ids holds 4294967297, which JAX would wrap to int32: number the segments",
        ),
        (np.array([[2**32, 2**33]]), "segment_ids holds 8589934592, which JAX would wrap to int32"),
        (np.array([[2**63]], np.uint64), "which JAX would wrap to uint32"),
    ],
)
def test_what_is_not_segment_ids_raises(ids: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        find_segments(ids)  # type: ignore[arg-type]


def test_rows_of_keys_and_queries_must_agree() -> None:
    with pytest.raises(LayoutError, match="segment_ids has 1 rows and kv_segment_ids has 2"):
        find_segments(np.ones((1, 4), np.int32), np.ones((2, 4), np.int32))


OPERATIONS = {
    "attention": lambda ids, x: segment_attention(x, x, x, ids),
    "delta rule": lambda ids, x: gated_delta_rule(x, x, x, -(x[..., 0] ** 2), x[..., 0], ids),
    "ssd": lambda ids, x: ssd(x, x[..., 0] ** 2, -jnp.ones(2), x, x, ids),
    "selective scan": lambda ids, x: selective_scan(
        x[:, :, 0], x[:, :, 1] ** 2, -jnp.ones((4, 4)), x[:, :, 0], x[:, :, 1], ids
    ),
    "convolution": lambda ids, x: causal_conv(x[:, :, 0], jnp.ones((4, 3)), ids),
    "targets": lambda ids, x: shift_labels(jnp.arange(ids.size).reshape(ids.shape), ids),
}


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("delta rule", "ssd") else []) for name in OPERATIONS],
)
def test_every_operation_reads_ids_by_the_same_rules(operation: str) -> None:
    run, x = OPERATIONS[operation], jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 4)), jnp.float32)
    #                 . 1 1 2 2 2 . .
    ids = np.array([[0, 1, 1, 2, 2, 2, 0, 0]])
    wanted = np.asarray(run(jnp.asarray(ids), x))
    traced = jax.jit(run)
    np.testing.assert_array_equal(traced(np.where(ids == 0, -1, ids).astype(np.int32), x), traced(ids, x))
    np.testing.assert_array_equal(run(ids.astype(np.uint8) + 253 * (ids == 2).astype(np.uint8), x), wanted)
    with pytest.raises(LayoutError, match="which JAX would wrap to int32"):
        run(np.where(ids == 2, 2**32 + 1, ids), x)
    with pytest.raises(LayoutError, match="which JAX would wrap to int32"):
        jax.jit(lambda x: run(np.where(ids == 2, 2**32, ids), x))(x)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.where(ids == 2, 2**32 + 1, ids))
        np.testing.assert_allclose(run(wide, x), wanted, rtol=1e-5, atol=1e-6)
