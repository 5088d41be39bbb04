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


@pytest.mark.parametrize("implementation", [None, "xla", "chunked"])
@pytest.mark.parametrize("top_k", [1, 4, 20])
def test_the_best_keys_and_attention_over_them_are_those_of_the_oracle(top_k: int, implementation: str | None) -> None:
    index_q, index_k, weights = arrays((3, 5), (5,), (3,))
    q, k, v = arrays((4, 8), (2, 8), (2, 6))
    selected = select_keys(index_q, index_k, weights, jnp.asarray(IDS), top_k=top_k)
    out = segment_attention(q, k, v, jnp.asarray(IDS), selected=selected, implementation=implementation)
    for row, bounds in enumerate(BOUNDS):
        real = bounds[-1]
        index = (np.asarray(x)[row, :real] for x in (index_q, index_k, weights))
        want = reference.select(*index, bounds, top_k=top_k)
        np.testing.assert_array_equal(selected[row, :real, :real], want)
        operands = (np.asarray(x)[row, :real] for x in (q, k, v))
        exact = reference.attention(*operands, bounds, selected=want)
        np.testing.assert_allclose(out[row, :real], exact, rtol=1e-5, atol=1e-5)
        assert not selected[row, real:].any()


def test_blocks_of_selected_keys_have_the_gradients_of_the_dense_mask() -> None:
    """A row of three blocks and a piece; the segments end inside of blocks."""
    draw = np.random.default_rng(1)
    shapes = ((1, 400, 4, 8), (1, 400, 2, 8), (1, 400, 2, 6), (1, 400, 4, 6))
    q, k, v, dout = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes)
    index_q, index_k, weights = (
        jnp.asarray(draw.standard_normal((1, 400, *s)), jnp.float32) for s in ((3, 5), (5,), (3,))
    )
    ids = jnp.asarray([[1] * 190 + [2] * 200 + [0] * 10])
    selected = select_keys(index_q, index_k, weights, ids, top_k=24)
    assert int(selected.sum(-1).max()) == 24 and int(selected[0, 189].sum()) == 24

    def gradients(implementation: str) -> tuple[jax.Array, ...]:
        def loss(*operands: jax.Array) -> jax.Array:
            return (segment_attention(*operands, ids, selected=selected, implementation=implementation) * dout).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for chunked, dense in zip(gradients("chunked"), gradients("xla"), strict=True):
        np.testing.assert_allclose(chunked, dense, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_selected_is_refused() -> None:
    q, k, v = arrays((4, 8), (2, 8), (2, 6))
    ids, every = jnp.asarray(IDS), jnp.ones((2, 12, 12), bool)
    with pytest.raises(LayoutError, match=r"selected must be bool \[2, 12, 12\], got \(2, 12, 11\)"):
        segment_attention(q, k, v, ids, selected=every[..., 1:])
    with pytest.raises(UnsupportedError, match="selected keys runs by chunked or xla on one device"):
        segment_attention(q, k, v, ids, selected=every, implementation="pallas")
    with pytest.raises(UnsupportedError, match="selected keys runs by xla on one device"):
        segment_attention(q, k, v, ids, selected=every, parents=jnp.zeros_like(ids), implementation="chunked")
    with pytest.raises(PackingError, match="top_k is 0"):
        select_keys(q, k[:, :, 0], q[..., 0], ids, top_k=0)
