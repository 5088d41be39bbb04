"""segment_attention(parents=...): the oracle of forests, its gradients, isolation and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import segment_attention
from packing_core import pack_tree, reference
from packing_core.errors import LayoutError, UnsupportedError

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


@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "jit"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_output_and_gradients_are_those_of_each_path_alone(options, jit):
    q, k, v, dout = inputs()
    assert BATCH.parents.max() > 0 and len(BATCH) == 2
    run = jax.jit(lambda *x: attend(*x, **options)) if jit else (lambda *x: attend(*x, **options))
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


def test_an_answer_moves_no_other_segment_by_a_bit():
    q, k, v, _ = inputs()
    before = np.asarray(attend(q, k, v))
    first = int(BATCH.flat_starts[2])
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x.reshape(-1, *x.shape[2:])[first : first + int(BATCH.lengths[2])] = 100.0
    moved = (np.asarray(attend(*changed)) != before).reshape(BATCH.input_ids.size, -1).any(1)
    assert moved[first : first + int(BATCH.lengths[2])].all() and moved.sum() == BATCH.lengths[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "chunked"}, "chunked has none: pass implementation='xla', or None"),
        ({"implementation": "pallas"}, "pallas has none"),
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
    with pytest.raises(LayoutError, match="parents of row 0 name a segment that does not stand before"):
        segment_attention(q, k, v, BATCH.segment_ids, parents=wrong)
    with pytest.raises(LayoutError, match=r"parents must have shape \[B, S\]"):
        segment_attention(q, k, v, BATCH.segment_ids, parents=wrong[:, :4])
    out = jax.jit(lambda parents: segment_attention(q, k, v, BATCH.segment_ids, parents=parents))(jnp.asarray(wrong))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
