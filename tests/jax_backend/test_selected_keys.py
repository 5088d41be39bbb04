"""Keys that an indexer selects: JAX against the float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend.attention import segment_attention
from jax_backend.attention.selection import select_keys
from packing_core import reference
from packing_core.errors import LayoutError, PackingError, UnsupportedError

# Two rows of 12: | 5 | 1 | 4 | 2 of padding | and | 12 |
IDS = np.array([[1] * 5 + [2] + [3] * 4 + [0] * 2, [1] * 12])
BOUNDS = [[0, 5, 6, 10], [0, 12]]


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.standard_normal((2, 12, *shape)), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("top_k", [1, 4, 20])
def test_the_best_keys_and_attention_over_them_are_those_of_the_oracle(top_k: int) -> None:
    index_q, index_k, weights = arrays((3, 5), (5,), (3,))
    q, k, v = arrays((4, 8), (2, 8), (2, 6))
    selected = select_keys(index_q, index_k, weights, jnp.asarray(IDS), top_k=top_k)
    out = segment_attention(q, k, v, jnp.asarray(IDS), selected=selected)
    for row, bounds in enumerate(BOUNDS):
        real = bounds[-1]
        index = (np.asarray(x)[row, :real] for x in (index_q, index_k, weights))
        want = reference.select(*index, bounds, top_k=top_k)
        np.testing.assert_array_equal(selected[row, :real, :real], want)
        operands = (np.asarray(x)[row, :real] for x in (q, k, v))
        exact = reference.attention(*operands, bounds, selected=want)
        np.testing.assert_allclose(out[row, :real], exact, rtol=1e-5, atol=1e-5)
        assert not selected[row, real:].any()


def test_what_cannot_be_selected_is_refused() -> None:
    q, k, v = arrays((4, 8), (2, 8), (2, 6))
    ids, every = jnp.asarray(IDS), jnp.ones((2, 12, 12), bool)
    with pytest.raises(LayoutError, match=r"selected must be bool \[2, 12, 12\], got \(2, 12, 11\)"):
        segment_attention(q, k, v, ids, selected=every[..., 1:])
    with pytest.raises(UnsupportedError, match="selected keys runs by implementation='xla' on one device"):
        segment_attention(q, k, v, ids, selected=every, implementation="chunked")
    with pytest.raises(PackingError, match="top_k is 0"):
        select_keys(q, k[:, :, 0], q[..., 0], ids, top_k=0)
