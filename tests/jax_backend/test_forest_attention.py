"""segment_attention(parents=...): the oracle of forests, its gradients, isolation and refusals."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import segment_attention
from packing_core import pack_tree, reference
from packing_core.errors import CapacityError, LayoutError, UnsupportedError

# two prompts of one system prompt, each with two answers, and a document of its own, in two rows with padding
PROMPTS = [[1] * 6 + [2] * 5, [1] * 6 + [3] * 4]
DOCUMENTS = [[*PROMPTS[0], 5, 6], [*PROMPTS[0], 7], [*PROMPTS[1], 8, 9, 9], [*PROMPTS[1], 4], [9] * 20]
BATCH = pack_tree(DOCUMENTS, 32, prompt_lengths=[11, 11, 10, 10, 2], shortest=3, seed=None)
HEADS, KV_HEADS, WIDTH = 4, 2, 8
OPTIONS = [{}, {"window": 3}, {"window": 9, "softcap": 1.5, "scale": 0.4}, {"sinks": np.linspace(-1, 1, HEADS)}]


def inputs():
    rng = np.random.default_rng(0)
    shape = BATCH.input_ids.shape
    q, k, v, dout = (rng.standard_normal((*shape, heads, WIDTH)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    return [x.astype(np.float32) for x in (q, k, v, np.where(BATCH.attention_mask[..., None, None], dout, 0))]


def attend(q, k, v, **options):
    return segment_attention(q, k, v, BATCH.segment_ids, parents=BATCH.parent_ids, **options)


ALL = {"softcap": 1.5, "scale": 0.4, "sinks": np.linspace(-1, 1, HEADS)}
QUICK = [("xla", options, True) for options in OPTIONS]
QUICK += [("chunked", ALL, True), ("pallas", ALL, True)]
CASES = [*QUICK, ("xla", OPTIONS[2], False), (None, {}, False), ("chunked", {}, False), ("pallas", {}, True)]


@pytest.mark.parametrize(
    ("implementation", "options", "jit"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'+'.join(case[1]) or 'plain'}-{'jit' if case[2] else 'eager'}",
            marks=[] if number < len(QUICK) else [pytest.mark.slow],
        )
        for number, case in enumerate(CASES)
    ],
)
def test_output_and_gradients_are_those_of_each_path_alone(implementation, options, jit):
    q, k, v, dout = inputs()
    assert BATCH.parents.max() > 0 and len(BATCH) == 2
    given = {**options, "implementation": implementation}
    if jit:  # where the parents are traced too
        traced = partial(segment_attention, max_ancestors=2, **given)
        ids, parents = jnp.asarray(BATCH.segment_ids), jnp.asarray(BATCH.parent_ids)
        compiled = jax.jit(lambda ids, parents, *x: traced(*x, ids, parents=parents))
        run = partial(compiled, ids, parents)
    else:
        run = partial(attend, **given)
    out, back = jax.vjp(run, q, k, v)
    found = dict(zip("qkv", back(dout), strict=True))
    for row in range(len(BATCH)):
        part, end = BATCH[row], int(BATCH[row].lengths.sum())
        arrays = [x[row, :end].astype(np.float64) for x in (q, k, v)]
        where = {"cu_seqlens": part.cu_seqlens, "parents": part.parents, **options}
        np.testing.assert_allclose(out[row, :end], reference.attention(*arrays, **where), rtol=2e-5, atol=2e-5)
        right = reference.attention_vjp(*arrays, dout=dout[row, :end].astype(np.float64), **where)
        for name in "qkv":
            np.testing.assert_allclose(found[name][row, :end], right[name], rtol=5e-5, atol=5e-5)
        assert not np.asarray(out[row, end:]).any()


@pytest.mark.parametrize("implementation", ["xla", "chunked", pytest.param("pallas", marks=pytest.mark.slow)])
def test_an_answer_moves_no_other_segment_by_a_bit(implementation):
    q, k, v, _ = inputs()
    before = np.asarray(attend(q, k, v, implementation=implementation))
    first = int(BATCH.flat_starts[2])
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x.reshape(-1, *x.shape[2:])[first : first + int(BATCH.lengths[2])] = 100.0
    moved = (
        (np.asarray(attend(*changed, implementation=implementation)) != before).reshape(BATCH.input_ids.size, -1).any(1)
    )
    assert moved[first : first + int(BATCH.lengths[2])].all() and moved.sum() == BATCH.lengths[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "pallas", "window": 3}, "windows count along the path of a segment: leave window out, or"),
        ({"causal": False}, "attention must be causal"),
        ({"kv_segment_ids": BATCH.segment_ids}, "leave kv_segment_ids out"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(options, message):
    with pytest.raises(UnsupportedError, match=r"segment_attention with parents \(shared prefixes\): .*" + message):
        attend(*inputs()[:3], **options)


def test_parents_that_do_not_stand_before_their_children_are_refused_or_poison_their_row():
    q, k, v, _ = inputs()
    wrong = BATCH.parent_ids.copy()
    wrong[0, :3] = 2
    with pytest.raises(LayoutError, match="row 0 has parents that do not stand, as one segment, before the segments"):
        segment_attention(q, k, v, BATCH.segment_ids, parents=wrong)
    with pytest.raises(LayoutError, match=r"parents must have shape \[B, S\]"):
        segment_attention(q, k, v, BATCH.segment_ids, parents=wrong[:, :4])
    out = jax.jit(lambda parents: segment_attention(q, k, v, BATCH.segment_ids, parents=parents))(jnp.asarray(wrong))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_traced_parents_run_by_xla_or_by_the_depth_that_is_given():
    q, k, v, _ = inputs()

    def run(parents, **options):
        return segment_attention(q, k, v, BATCH.segment_ids, parents=parents, **options)

    with pytest.raises(UnsupportedError, match=r"parents are traced: pass max_ancestors, or pass implementation='xla'"):
        jax.jit(partial(run, implementation="chunked"))(BATCH.parent_ids)
    right = jax.jit(partial(run, implementation="xla"))(BATCH.parent_ids)
    np.testing.assert_array_equal(jax.jit(run)(BATCH.parent_ids), right)
    deep = [row for row in range(2) if BATCH[row].parents.max() > 0]  # a prompt below a system prompt
    shallow = jax.jit(partial(run, implementation="chunked", max_ancestors=1))(BATCH.parent_ids)
    assert [row for row in range(2) if np.isnan(shallow[row]).all()] == deep != []
    with pytest.raises(LayoutError, match="holds segments that continue more than 1 others.*raise max_ancestors"):
        run(BATCH.parent_ids, implementation="chunked", max_ancestors=1)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_segment_whose_tokens_have_different_parents_is_refused_or_poisons_its_row(implementation):
    ids, parents = np.repeat([[1, 2, 3]], 4, axis=1), np.array([[0] * 4 + [0] * 4 + [1, 1, 2, 2]])
    ids, parents = np.concatenate([ids, ids]), np.concatenate([parents, 0 * parents])
    q = np.random.default_rng(0).standard_normal((2, 12, 2, 8)).astype(np.float32)
    options = {"implementation": implementation, "max_ancestors": 1}
    with pytest.raises(LayoutError, match="row 0 has tokens of one segment with different parents"):
        segment_attention(q, q, q, ids, parents=parents, **options)
    out = jax.jit(lambda parents: segment_attention(q, q, q, ids, parents=parents, **options))(parents)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("cap", [{"max_ancestors": 1}, {"max_segments": 3}], ids=str)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_a_traced_row_beyond_a_cap_is_nan(implementation, cap):
    q, k, v, _ = inputs()
    options = {"max_ancestors": 2, "implementation": implementation, **cap}

    def run(ids, parents):
        return segment_attention(q, k, v, ids, parents=parents, **options)

    beyond = [len(BATCH[row].lengths) > 3 if "max_segments" in cap else row == 0 for row in range(2)]
    deep = [BATCH[row].parents.max() > 0 for row in range(2)]
    wanted = beyond if "max_segments" in cap else deep
    out = jax.jit(run)(jnp.asarray(BATCH.segment_ids), jnp.asarray(BATCH.parent_ids))
    assert [bool(np.isnan(row).all()) for row in out] == wanted and any(wanted)
    with pytest.raises((LayoutError, CapacityError), match=next(iter(cap))):
        run(BATCH.segment_ids, BATCH.parent_ids)


def test_segments_in_another_order_run_by_xla_alone():
    ids = np.array([[1, 1, 2, 2, 3, 3, 4, 4]])  # 2 and 4 continue 1, and 3 is between
    parents = np.array([[0, 0, 1, 1, 0, 0, 1, 1]])
    q = np.random.default_rng(0).standard_normal((1, 8, 2, 8)).astype(np.float32)
    options = {"parents": parents}
    found = segment_attention(q, q, q, ids, **options)
    np.testing.assert_array_equal(found, segment_attention(q, q, q, ids, implementation="xla", **options))
    with pytest.raises(UnsupportedError, match="padding or another segment stands between one and what continues it"):
        segment_attention(q, q, q, ids, implementation="chunked", **options)
    with pytest.raises(LayoutError, match="row 0 holds padding or another segment between one and what continues it"):
        segment_attention(q, q, q, ids, implementation="chunked", max_ancestors=1, **options)
