"""The order in which the tiles of a kernel start, and how the work of dkv is divided."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.jax_rows import Documents, make_row, request_of
from jax_backend import find_segments
from jax_backend.attention.pallas_backward import grad_keys
from jax_backend.attention.pallas_tiles import Tiles, heaviest_first
from jax_backend.segments import seeing_queries


@pytest.mark.parametrize("window", [None, 9])
def test_the_tiles_that_walk_longest_come_first(window: int | None) -> None:
    lengths = ((40, 3, 17), (5, 30, 8))  # 60 tokens in 8 tiles of 8, padding at the end of the second row
    ids = np.array([np.repeat(range(5), [0, *row, 60 - sum(row)]) % 4 for row in lengths])
    interval = seeing_queries(find_segments(jnp.asarray(ids)), causal=True, window=window)
    order = np.asarray(heaviest_first(interval, 8))

    begin, end = (np.asarray(x) for x in interval)
    for row, tiles in enumerate(order):
        spans = []
        for tile in tiles:
            seen = {q for t in range(tile * 8, min(tile * 8 + 8, 60)) for q in range(begin[row, t], end[row, t])}
            spans.append(max(seen) + 1 - min(seen) if seen else 0)
        assert sorted(tiles) == list(range(8))
        assert spans == sorted(spans, reverse=True), (tiles, spans)
        assert spans[0] > spans[-1]


@pytest.mark.parametrize("split", [2, 6])
def test_heads_that_are_divided_over_programs_add_up_to_the_same_gradients(split: int) -> None:
    row = make_row(Documents([20, 3, 17], 12, 2, 16))
    queries = seeing_queries(find_segments(row.ids), causal=True, window=None)
    lse, delta = (jax.random.normal(jax.random.key(i), (1, 40, 12)) for i in range(2))

    def gradients(split: int) -> tuple[jax.Array, ...]:
        tiles = Tiles(16, 16, 4, 2, split)
        return grad_keys(row.q, row.k, row.v, row.dout, lse, delta, queries, request_of(row), tiles, interpret=True)

    for found, whole, like in zip(gradients(split), gradients(1), (row.k, row.v), strict=True):
        assert found.shape == like.shape and found.dtype == like.dtype
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (found, whole)), rtol=1e-2, atol=1e-2)
