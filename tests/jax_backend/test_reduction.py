"""jax_backend.reduce and spread equal the numpy reference of the same batch, with gradients, under jit."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

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
    chosen = spread(jnp.asarray(values[:, 0] > 0), batch)
    np.testing.assert_array_equal(~chosen, ~source.spread(values[:, 0] > 0))


@pytest.mark.parametrize("how", HOW)
def test_a_document_has_the_same_bits_wherever_it_is_packed_and_whatever_is_beside_it(how):
    rng = np.random.default_rng(2)
    documents = [np.arange(1, n + 1) for n in (5, 1, 13, 3)]
    values = [rng.normal(size=(len(x), 2)).astype(np.float32) for x in documents]
    found = []
    for capacity, seed, split in ((8, 3, "split"), (8, 5, "split"), (16, 1, "error")):
        batch = to_batch(packing_core.pack(documents, capacity, overflow=split, seed=seed))
        ids, positions = np.asarray(batch["document_ids"]), np.asarray(batch["document_positions"])
        at_tokens = np.full((*ids.shape, 2), np.nan, np.float32)
        for number, own in enumerate(values):
            at_tokens[ids == number] = own[positions[ids == number]] if number != seed else np.inf
        mine = np.asarray(reduced(at_tokens, batch, how, DOCUMENTS)[0])
        assert seed >= DOCUMENTS or np.isinf(mine[seed]).all()
        found.append({number: mine[number].tobytes() for number in range(DOCUMENTS) if number != seed})
    for number in range(DOCUMENTS):
        assert len({bits[number] for bits in found if number in bits}) == 1


def test_a_sum_of_many_is_as_exact_as_float32_allows():
    values = np.random.default_rng(4).uniform(1, 2, size=20_000).astype(np.float32)
    batch = to_batch(packing_core.pack([np.ones(9_000, int), np.ones(11_000, int)], 20_000, seed=None))
    found = reduced(values[None], batch, "sum", 2)[0]
    source = np.asarray(batch["document_ids"])[0]
    truth = [values[source == number].sum(dtype=np.float64) for number in (0, 1)]
    np.testing.assert_allclose(found, truth, rtol=2**-23)


def test_derivatives_forward_and_of_the_second_order_and_over_a_batch_of_values():
    source = packed(8)
    values, direction = np.random.default_rng(5).normal(size=(2, *source.input_ids.shape)).astype(np.float32)

    @jax.jit
    def derivatives(values, direction, batch):
        def mean(x):
            return reduce(x, batch, "mean", documents=DOCUMENTS)

        def cubes(x):
            return (spread(mean(x), batch) ** 3).sum()

        forward = jax.jvp(mean, (values,), (direction,))[1]
        return forward, jax.jvp(jax.grad(cubes), (values,), (direction,))[1], jax.vmap(mean)(values[None])

    forward, second, many = derivatives(values, direction, to_batch(source))
    means, moved = source.reduce(values, "mean"), source.reduce(direction, "mean")
    np.testing.assert_allclose(forward, moved, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, source.spread(6 * means * moved), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(many[0], means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", [*HOW, "spread"])
def test_on_a_gpu_no_two_numbers_are_added_at_one_place(what):
    """A scatter adds with atomics there, in another order every time, unless every place is written once."""
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
    batch = {name: jax.ShapeDtypeStruct((2, 64), jnp.int32) for name in ("document_ids", "document_positions")}

    def run(values, batch):
        return spread(values, batch) if what == "spread" else reduce(values, batch, what, documents=DOCUMENTS)

    def both(values, cotangent, batch):
        found, back = jax.vjp(lambda x: run(x, batch), values)
        return found, back(cotangent)

    values = jax.ShapeDtypeStruct((DOCUMENTS, 3) if what == "spread" else (2, 64, 3), jnp.float32)
    cotangent = jax.eval_shape(run, values, batch)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        text = jax.jit(both).trace(values, cotangent, batch).lower(lowering_platforms=("cuda",)).as_text()
    scatters = re.findall(r"\"?stablehlo.scatter\"?\(.*?unique_indices = (\w+)", text)
    assert text.count('stablehlo.scatter"(') == len(scatters)
    assert set(scatters) <= {"true"}


@pytest.mark.parametrize("how", HOW)
def test_no_tokens_are_no_documents(how):
    empty = {"document_ids": jnp.zeros((2, 0), jnp.int32), "document_positions": jnp.zeros((2, 0), jnp.int32)}
    found = reduce(jnp.zeros((2, 0, 3), jnp.bfloat16), empty, how, documents=4)
    assert found.shape == (4, 3) and not found.any()
    assert found.dtype == (jnp.float32 if how in ("sum", "mean") else jnp.bfloat16)
    assert spread(jnp.ones(4), empty).shape == (2, 0)


def test_what_cannot_be_reduced_is_refused():
    batch = to_batch(packed(3))
    with pytest.raises(LayoutError, match=r"values must be \[3, 8, \.\.\.\] or \[24, \.\.\.\]"):
        reduce(jnp.zeros(5), batch, "sum", documents=4)
    with pytest.raises(PackingError, match="how must be one of"):
        reduce(jnp.zeros((3, 8)), batch, "median", documents=4)
    with pytest.raises(PackingError, match="documents must be at least 1"):
        reduce(jnp.zeros((3, 8)), batch, "sum", documents=0)
    twice = to_batch(packing_core.pack([[1], [2, 3]], 4, seed=None)[[0, 0]])
    with pytest.raises(LayoutError, match="if a document is in it twice, make a batch of its own"):
        reduce(jnp.zeros((2, 4)), twice, "sum", documents=2)
