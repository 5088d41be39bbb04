"""The oracle of forests: every path is a document of its own, and gradients of what paths share add up."""

import numpy as np
import pytest

from packing_core.errors import LayoutError, PackingError
from packing_core.reference import attention, attention_lse, attention_vjp
from tests.packing_core.finite_differences import assert_gradients
from tests.packing_core.test_reference_attention import OPTIONS, SLOPES, ids

# a prompt of 3, a turn of 2 with answers of 1 and 2, an answer of 2 to the prompt, a document of 2, 1 token of none
CU_SEQLENS, PARENTS = [0, 3, 5, 6, 8, 10, 12], [-1, 0, 1, 1, 0, -1]
PATHS = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6, 7], [0, 1, 2, 8, 9], [10, 11]]
TOKENS = 13
# spans that see both ways have no place in forests, see test_reference.py
CAUSAL = [options for options in OPTIONS if options.get("causal", True) and "spans" not in options]


def inputs():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape) for shape in ((TOKENS, 4, 3), (TOKENS, 2, 3), (TOKENS, 2, 2)))


@pytest.mark.parametrize("options", CAUSAL, ids=ids)
def test_attention_is_that_of_each_path_alone(options):
    q, k, v = inputs()
    out = attention(q, k, v, CU_SEQLENS, parents=PARENTS, **options)
    lse = attention_lse(q, k, CU_SEQLENS, parents=PARENTS, **options)

    for path in PATHS:
        alone = attention(q[path], k[path], v[path], [0, len(path)], **options)
        np.testing.assert_allclose(out[path], alone, rtol=1e-14, atol=1e-14)
        np.testing.assert_allclose(lse[path], attention_lse(q[path], k[path], [0, len(path)], **options), rtol=1e-14)
    assert not out[12].any() and np.isneginf(lse[12]).all()


@pytest.mark.parametrize("options", CAUSAL, ids=ids)
def test_attention_gradients_agree_with_finite_differences(options):
    q, k, v = inputs()
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal((TOKENS, 4, 2)), rng.standard_normal((TOKENS, 4))
    dlse[12] = 0
    arrays = {"q": q, "k": k, "v": v}

    def value(**arrays):
        out = attention(**arrays, cu_seqlens=CU_SEQLENS, parents=PARENTS, **options)
        lse = attention_lse(arrays["q"], arrays["k"], CU_SEQLENS, parents=PARENTS, **options)[:12]
        return (out * dout).sum() + (lse * dlse[:12]).sum()

    gradients = attention_vjp(**arrays, cu_seqlens=CU_SEQLENS, dout=dout, dlse=dlse, parents=PARENTS, **options)
    assert_gradients(value, arrays, {name: gradients[name] for name in arrays})


def test_a_shared_token_gets_the_sum_over_its_documents():
    q, k, v = inputs()
    dout = np.random.default_rng(2).standard_normal((TOKENS, 4, 2))
    whole = attention_vjp(q, k, v, CU_SEQLENS, dout, parents=PARENTS, sinks=np.zeros(4), alibi_slopes=SLOPES)

    total, seen = {name: np.zeros_like(x) for name, x in whole.items()}, np.zeros(TOKENS, bool)
    for path in PATHS:
        given = np.where(seen[path][:, None, None], 0, dout[path])
        alone = attention_vjp(q[path], k[path], v[path], [0, len(path)], given, sinks=np.zeros(4), alibi_slopes=SLOPES)
        for name in "qkv":
            total[name][path] += alone[name]
        for name in ("sinks", "alibi_slopes"):
            total[name] += alone[name]
        seen[path] = True
    for name, gradient in whole.items():
        np.testing.assert_allclose(gradient, total[name], rtol=1e-12, atol=1e-12)


def test_bad_parents_are_refused():
    q, k, v = inputs()
    with pytest.raises(LayoutError, match=r"parents\[1\] is 4: a parent stands before its children"):
        attention(q, k, v, CU_SEQLENS, parents=[-1, 4, 1, 1, 0, -1])
    with pytest.raises(PackingError, match="parents need causal attention"):
        attention(q, k, v, CU_SEQLENS, parents=PARENTS, causal=False)
