"""jax_backend.reduce and spread equal the numpy reference of the same batch, with gradients, under jit."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import packing_core
from jax_backend import reduce, spread, to_batch
from packing_core import LayoutError, PackingError

HOW = ("sum", "mean", "first", "last")
DOCUMENTS = 4


def packed(seed: int) -> packing_core.PackedBatch:
    """Four documents, of which the third is split over rows."""
    documents = [np.arange(1, n + 1) for n in (5, 1, 13, 3)]
    return packing_core.pack(documents, 8, overflow="split", prompt_lengths=[2, 1, 4, 0], seed=seed)


@partial(jax.jit, static_argnames=("how", "documents"))
def reduced(values, batch, how, documents, where=None, cotangent=None):
    found, back = jax.vjp(lambda x: reduce(x, batch, how, documents=documents, where=where), values)
    return found, back(jnp.ones_like(found) if cotangent is None else cotangent)[0]


@pytest.mark.parametrize("how", HOW)
def test_reduction_equals_the_reference(how):
    rng = np.random.default_rng(0)
    for seed in (3, 8):
        source = packed(seed)
        batch = to_batch(source)
        trained = source.targets != -100
        for shape in (source.input_ids.shape, (*source.input_ids.shape, 3)):
            values, direction = rng.normal(size=(2, *shape)).astype(np.float32)
            for where in (None, trained):
                cotangent = rng.normal(size=(DOCUMENTS, *shape[2:])).astype(np.float32)
                found, gradient = reduced(values, batch, how, DOCUMENTS, where, cotangent)
                np.testing.assert_allclose(found, source.reduce(values, how, where=where), rtol=1e-5, atol=1e-6)
                moved = (cotangent * source.reduce(direction, how, where=where)).sum()
                assert float((gradient * direction).sum()) == pytest.approx(moved, rel=1e-4, abs=1e-5)


def test_documents_that_a_batch_does_not_have_are_zero_and_more_than_stated_are_nan():
    source = packed(3)
    values = np.ones(source.input_ids.shape, np.float32)
    assert reduced(values, to_batch(source), "sum", 6)[0].tolist() == [5, 1, 13, 3, 0, 0]
    assert np.isnan(reduced(values, to_batch(source), "mean", 3)[0]).all()


def test_spread_is_the_adjoint_of_the_sum():
    source = packed(8)
    batch = to_batch(source)
    values = np.random.default_rng(1).normal(size=(DOCUMENTS, 2)).astype(np.float32)
    at_tokens = spread(jnp.asarray(values), batch)
    np.testing.assert_array_equal(at_tokens, source.spread(values))
    np.testing.assert_allclose(reduce(at_tokens, batch, "mean", documents=DOCUMENTS), values, rtol=1e-6)


def test_what_cannot_be_reduced_is_refused():
    batch = to_batch(packed(3))
    with pytest.raises(LayoutError, match=r"values must be \[3, 8, \.\.\.\] or \[24, \.\.\.\]"):
        reduce(jnp.zeros(5), batch, "sum", documents=4)
    with pytest.raises(PackingError, match="how must be one of"):
        reduce(jnp.zeros((3, 8)), batch, "median", documents=4)
    with pytest.raises(PackingError, match="documents must be at least 1"):
        reduce(jnp.zeros((3, 8)), batch, "sum", documents=0)
    twice = to_batch(packing_core.pack([[1], [2, 3]], 4, seed=None)[[0, 0]])
    with pytest.raises(LayoutError, match="a batch that holds a document twice cannot say so"):
        reduce(jnp.zeros((2, 4)), twice, "sum", documents=2)
