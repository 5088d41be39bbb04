"""A document with numbers that are not finite: `chunked` attention keeps them inside it, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import segment_attention

TOKENS, BROKEN = 192, slice(60, 150)  # documents of 60, 90 and 40 tokens, in blocks of 128
IDS = np.repeat([[1, 2, 3, 0]], [60, 90, 40, 2], axis=1)
NAMES = ("q", "k", "v", "dout")


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    return {name: rng.standard_normal((1, TOKENS, heads[name], 8)).astype(np.float32) for name in NAMES}


@jax.jit
def attended(q: Any, k: Any, v: Any, dout: Any) -> tuple[jax.Array, ...]:
    """The output and the gradients of q, k and v."""
    out, pullback = jax.vjp(
        lambda q, k, v: segment_attention(q, k, v, jnp.asarray(IDS), softcap=3.0, implementation="chunked"), q, k, v
    )
    return out, *pullback(dout)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_document_changes_no_bit_of_the_others_and_stays_broken(name: str, value: float) -> None:
    arrays = operands()
    wanted = attended(**arrays)
    arrays[name][0, 100] = value
    found = attended(**arrays)
    for x, y in zip(found, wanted, strict=True):
        for others in (slice(0, BROKEN.start), slice(BROKEN.stop, None)):
            np.testing.assert_array_equal(x[0, others], y[0, others])
    assert any(not np.isfinite(x[0, BROKEN]).all() for x in found)
