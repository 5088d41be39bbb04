"""The attention oracle, held against its formula written out with loops, and its gradients against differences."""

import math
from itertools import pairwise

import numpy as np
import pytest

from packing_core.errors import LayoutError, PackingError
from packing_core.reference import attention, attention_lse, attention_vjp, index_loss, index_loss_vjp, select
from tests.packing_core.finite_differences import assert_gradients

# Three documents of 4, 1 and 3 tokens, and 2 tokens that belong to none:  aaaa b ccc ..
CU_SEQLENS = [0, 4, 5, 8]
TOKENS, HEADS, KV_HEADS, WIDTH, V_WIDTH = 10, 4, 2, 3, 2
SPANS = [-1, 0, 0, 0, 0, -1, 1, 1, 1, 1]  # which end where their documents do
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
OPTIONS = [
    {},
    {"causal": False},
    {"window": 1},
    {"window": 2},
    {"window": 2, "causal": False},
    {"softcap": 0.7},
    {"sinks": np.array([0.3, -1.0, 2.0, 0.0])},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES, "causal": False},
    {"scale": 1.7},
    {"spans": SPANS},
    {"spans": SPANS, "window": 2},
    {
        "window": 3,
        "softcap": 1.5,
        "sinks": np.array([0.3, -1.0, 2.0, 0.0]),
        "alibi_slopes": SLOPES,
        "scale": 0.9,
    },
    {"spans": SPANS, "window": 3, "softcap": 1.5, "alibi_slopes": SLOPES},
]


def ids(options: dict) -> str:
    return "+".join(options) or "plain"


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, HEADS, WIDTH), (TOKENS, KV_HEADS, WIDTH), (TOKENS, KV_HEADS, V_WIDTH)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def by_loops(
    q,
    k,
    v,
    cu_seqlens,
    *,
    causal=True,
    window=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    scale=None,
    spans=None,
):
    """Attention one query, head and key at a time: the definition, with no array operation in it."""
    out, lse = np.zeros((len(q), HEADS, V_WIDTH)), np.full((len(q), HEADS), -np.inf)
    scale = WIDTH**-0.5 if scale is None else scale
    for first, last in pairwise(cu_seqlens):
        for i in range(first, last):
            for head in range(HEADS):
                group = head * KV_HEADS // HEADS
                weights = {}
                for j in range(first, last):
                    together = spans is not None and spans[i] == spans[j] >= 0
                    if causal and j > i and not together:
                        continue
                    if window is not None and (i - j if together else abs(i - j)) >= window:
                        continue
                    score = scale * sum(a * b for a, b in zip(q[i, head], k[j, group]))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if alibi_slopes is not None:
                        score -= alibi_slopes[head] * abs(i - j)
                    weights[j] = math.exp(score)
                lse[i, head] = math.log(sum(weights.values()))
                total = sum(weights.values()) + (0 if sinks is None else math.exp(sinks[head]))
                for j, weight in weights.items():
                    out[i, head] += weight / total * v[j, group]
    return out, lse


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_attention_is_its_definition(options):
    q, k, v = inputs()
    out, lse = by_loops(q, k, v, CU_SEQLENS, **options)
    np.testing.assert_allclose(attention(q, k, v, CU_SEQLENS, **options), out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(attention_lse(q, k, CU_SEQLENS, **options), lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_gradients_are_the_slopes_of_the_forward_pass(options):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((TOKENS, HEADS, V_WIDTH))
    dlse = rng.standard_normal((TOKENS, HEADS))
    tensors = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in options.items() if name not in tensors}
    inside = slice(0, CU_SEQLENS[-1])

    def scalar(q, k, v, **tensors):
        out = attention(q, k, v, CU_SEQLENS, **tensors, **numbers)
        lse = attention_lse(q, k, CU_SEQLENS, **tensors, **numbers)
        return (out * dout).sum() + (lse * dlse)[inside].sum()

    found = attention_vjp(q, k, v, CU_SEQLENS, dout, dlse=dlse, **options)
    assert_gradients(scalar, {"q": q, "k": k, "v": v, **tensors}, found)


def test_a_document_is_the_same_alone_and_packed_to_the_bit():
    q, k, v = inputs()
    dout = np.random.default_rng(1).standard_normal((TOKENS, HEADS, V_WIDTH))
    packed = attention(q, k, v, CU_SEQLENS)
    packed_vjp = attention_vjp(q, k, v, CU_SEQLENS, dout)
    for first, last in pairwise(CU_SEQLENS):
        one = slice(first, last)
        np.testing.assert_array_equal(packed[one], attention(q[one], k[one], v[one], [0, last - first]))
        alone_vjp = attention_vjp(q[one], k[one], v[one], [0, last - first], dout[one])
        for name, gradient in alone_vjp.items():
            np.testing.assert_array_equal(packed_vjp[name][one], gradient)


def test_tokens_of_no_segment_give_and_get_nothing():
    q, k, v = inputs()
    dout = np.ones((TOKENS, HEADS, V_WIDTH))
    outside = slice(CU_SEQLENS[-1], None)
    for x in (q, k, v):
        x[outside] = np.nan
    out = attention(q, k, v, CU_SEQLENS)
    assert not out[outside].any() and np.isfinite(out).all()
    assert np.isneginf(attention_lse(q, k, CU_SEQLENS)[outside]).all()
    for gradient in attention_vjp(q, k, v, CU_SEQLENS, dout).values():
        assert not gradient[outside].any() and np.isfinite(gradient).all()


def test_an_empty_segment_changes_nothing():
    q, k, v = inputs()
    np.testing.assert_array_equal(attention(q, k, v, [0, 4, 4, 5, 8]), attention(q, k, v, CU_SEQLENS))


def test_large_scores_do_not_overflow():
    q, k, v = inputs()
    out = attention(1e4 * q, 1e4 * k, v, CU_SEQLENS, sinks=np.array([1e5, -1e5, 0.0, 1e300]))
    assert np.isfinite(out).all() and np.isfinite(attention_lse(1e4 * q, 1e4 * k, CU_SEQLENS)[: CU_SEQLENS[-1]]).all()
    assert not out[:, 3].any()  # that sink takes the whole softmax


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens": [0, 5, 4, 8]}, LayoutError, "cu_seqlens falls from 5 to 4 at index 2"),
        ({"cu_seqlens": [1, 8]}, LayoutError, "must start at 0"),
        ({"cu_seqlens": [0, 11]}, LayoutError, "runs from 0 to 11 over 10 tokens"),
        ({"cu_seqlens": [0.0, 8.0]}, LayoutError, "must be integers"),
        ({"cu_seqlens": []}, LayoutError, "must be integers"),
        ({"q": np.zeros((10, 3, 3))}, LayoutError, "q has 3 heads and k has 2"),
        ({"k": np.zeros((9, 2, 3))}, LayoutError, r"k must have shape \[T, K, D\] = \(10, \*, 3\), got \(9, 2, 3\)"),
        ({"v": np.zeros((10, 4, 3))}, LayoutError, "v must have shape"),
        ({"sinks": np.zeros(2)}, LayoutError, r"sinks must have shape \[H\] = \(4\)"),
        ({"alibi_slopes": np.zeros((2, 4))}, LayoutError, "alibi_slopes must have shape"),
        ({"spans": SPANS[1:]}, LayoutError, "spans must have shape"),
        ({"spans": SPANS, "causal": False}, PackingError, "spans need causal attention"),
        ({"spans": SPANS, "parents": [-1, 0, -1]}, PackingError, "pass spans or parents"),
        ({"window": 0}, PackingError, "window is 0"),
        ({"softcap": 0.0}, PackingError, "softcap is 0.0"),
        ({"dtype": "float8"}, PackingError, "working dtype 'float8' is unknown"),
        ({"windows": 2}, TypeError, "windows"),
    ],
)
def test_bad_input_is_named(change, error, message):
    q, k, v = inputs()
    with pytest.raises(error, match=message):
        attention(**{"q": q, "k": k, "v": v, "cu_seqlens": CU_SEQLENS, **change})


def test_the_gradients_shape_is_checked():
    q, k, v = inputs()
    with pytest.raises(LayoutError, match="dout must have shape"):
        attention_vjp(q, k, v, CU_SEQLENS, np.zeros((TOKENS, HEADS, V_WIDTH + 1)))
    with pytest.raises(LayoutError, match="dlse must have shape"):
        attention_vjp(q, k, v, CU_SEQLENS, np.zeros((TOKENS, HEADS, V_WIDTH)), dlse=np.zeros(TOKENS))


def test_a_query_sees_the_keys_that_score_highest_in_its_document() -> None:
    """| 4 | 2 |: the second document has the best keys of all, and the first one's last key is the best of its own."""
    k = np.array([[1.0], [3.0], [2.0], [4.0], [9.0], [8.0]])
    q, weights = np.ones((6, 1, 1)), np.ones((6, 1))
    seen = select(q, k, weights, [0, 4, 6], top_k=2)
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [1, 2], [1, 3], [4], [4, 5]]
    # a negative weight turns the order around, and equal scores go to the earlier key
    seen = select(q, k, -weights, [0, 4, 6], top_k=1)
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0], [0], [0], [4], [5]]
    assert np.flatnonzero(select(-q, k, weights, [0, 6], top_k=3)[5]).tolist() == [0, 1, 2]
    with pytest.raises(PackingError, match="top_k is 0 in blocks of 1: a query sees at least one key"):
        select(q, k, weights, [0, 6], top_k=0)


def test_attention_over_selected_keys_is_that_of_the_keys_alone() -> None:
    q, k, v = (np.random.default_rng(i).standard_normal((5, 2, 4)) for i in range(3))
    selected = np.eye(5, dtype=bool)
    selected[4] = [False, True, False, True, False]
    out = attention(q, k, v, [0, 5], selected=selected)
    np.testing.assert_allclose(out[:4], v[:4])
    alone = attention(q[[1, 3, 4]], k[[1, 3, 4]], v[[1, 3, 4]], [0, 3], selected=[[1, 1, 0]] * 3)
    np.testing.assert_allclose(out[4], alone[2])


def test_the_loss_of_an_indexer_is_its_divergence_in_each_document_and_its_gradients_are_slopes() -> None:
    """Written out for one query: of a document's three tokens, the last one chooses among two keys of three."""
    rng = np.random.default_rng(4)
    index = {"index_q": rng.standard_normal((5, 2, 3)), "index_k": rng.standard_normal((5, 3))}
    index["index_weights"] = rng.standard_normal((5, 2))
    q, k = rng.standard_normal((5, 4, 3)), rng.standard_normal((5, 2, 3))
    selected = select(*index.values(), [0, 2, 5], top_k=2)
    losses = index_loss(**index, q=q, k=k, cu_seqlens=[0, 2, 5], selected=selected)
    keys = np.flatnonzero(selected[4])
    assert len(keys) == 2 and keys.min() >= 2
    scores = [
        sum(w * max(a @ index["index_k"][j], 0) for w, a in zip(index["index_weights"][4], index["index_q"][4]))
        for j in keys
    ]
    choice = np.exp(scores) / np.exp(scores).sum()
    by_head = [np.exp([q[4, h] @ k[j, h // 2] / math.sqrt(3) for j in keys]) for h in range(4)]
    target = sum(weights / weights.sum() for weights in by_head) / 4
    last = (target * np.log(target / choice)).sum()
    without = index_loss(**index, q=q, k=k, cu_seqlens=[0, 2, 4], selected=selected)  # of the first two of the three
    np.testing.assert_allclose(losses[1], (2 * without[1] + last) / 3, rtol=1e-12)
    dout = np.array([0.7, -1.3])
    options = {"q": q, "k": k, "cu_seqlens": [0, 2, 5], "selected": selected}
    found = index_loss_vjp(**index, **options, dout=dout)
    assert_gradients(lambda **moved: (index_loss(**moved, **options) * dout).sum(), index, found)
