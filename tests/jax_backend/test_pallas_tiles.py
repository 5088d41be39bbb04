"""The order in which the tiles of a kernel start."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import find_segments
from jax_backend.attention.pallas_tiles import heaviest_first
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
