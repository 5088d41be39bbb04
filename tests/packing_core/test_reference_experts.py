"""The experts' oracle, held against its definition term by term, and its gradients."""

import numpy as np
import pytest

from packing_core.errors import LayoutError, UnsupportedError
from packing_core.reference import ExpertActivation, experts, experts_vjp
from tests.packing_core.finite_differences import assert_gradients

# Four experts, the last of which nobody chooses; token 3 is padding; the second choice of token 4 is dropped.
INDICES = np.array([[0, 1], [1, 2], [2, 0], [4, 4], [1, -1]])
TOKENS, WIDTH, INNER, COUNT = 5, 3, 2, 4
CLAMPED = ExpertActivation(alpha=1.702, limit=0.7, offset=1.0)
ACTIVATIONS = [
    pytest.param(ExpertActivation(), False, id="silu"),
    pytest.param(ExpertActivation("gelu_tanh"), False, id="gelu"),
    pytest.param(CLAMPED, True, id="clamped, biased"),
    pytest.param(ExpertActivation("relu2", gated=False), True, id="no gate"),
]


def inputs(activation: ExpertActivation, biased: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    outer = 2 * INNER if activation.gated else INNER
    made = {
        "x": rng.standard_normal((TOKENS, WIDTH)),
        "weights": rng.uniform(0.2, 1.0, INDICES.shape),
        "up": rng.standard_normal((COUNT, outer, WIDTH)),
        "down": rng.standard_normal((COUNT, WIDTH, INNER)),
    }
    if biased:
        made |= {"up_bias": rng.standard_normal((COUNT, outer)), "down_bias": rng.standard_normal((COUNT, WIDTH))}
    return made


def in_order(function, given, activation, *others):
    given = dict(given)
    first = [given.pop(name) for name in ("x", "weights", "up", "down")]
    return function(first[0], INDICES, *first[1:], *others, activation=activation, **given)


@pytest.mark.parametrize(("activation", "biased"), ACTIVATIONS)
def test_gradients_are_the_differences(activation, biased):
    given, dy = inputs(activation, biased), np.random.default_rng(1).standard_normal((TOKENS, WIDTH))
    found = in_order(experts_vjp, given, activation, dy)
    assert_gradients(lambda **moved: float((in_order(experts, moved, activation) * dy).sum()), given, found)


def test_each_token_is_the_weighted_sum_of_the_experts_that_it_chose():
    given = inputs(CLAMPED, True)
    y = in_order(experts, given, CLAMPED)
    for token, choices in enumerate(INDICES):
        right = np.zeros(WIDTH)
        for weight, expert in zip(given["weights"][token], choices, strict=True):
            if 0 <= expert < COUNT:
                z = given["up"][expert] @ given["x"][token] + given["up_bias"][expert]
                gate, value = np.minimum(z[:INNER], 0.7), np.clip(z[INNER:], -0.7, 0.7)
                h = gate / (1 + np.exp(-1.702 * gate)) * (value + 1)
                right += weight * (given["down"][expert] @ h + given["down_bias"][expert])
        np.testing.assert_allclose(y[token], right, atol=1e-14)


def test_padding_contributes_exactly_zero_and_moves_nothing():
    given = inputs(CLAMPED, True)
    dy = np.ones((TOKENS, WIDTH))
    before = in_order(experts_vjp, given, CLAMPED, dy)
    assert not in_order(experts, given, CLAMPED)[3].any() and not before["x"][3].any()
    assert not before["weights"][3].any() and before["weights"][4, 1] == 0
    given["x"][3] = 1e6
    after = in_order(experts_vjp, given, CLAMPED, dy)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_contradictions_are_named():
    given = inputs(ExpertActivation(), False)
    with pytest.raises(LayoutError, match=r"up must be \[4, 4, 3\], got \[4, 2, 3\]"):
        in_order(experts, given | {"up": given["up"][:, :2]}, ExpertActivation())
    with pytest.raises(UnsupportedError, match="no expert activation 'tanh': there are silu, gelu_tanh, relu2"):
        ExpertActivation("tanh")
    with pytest.raises(UnsupportedError, match="limit and offset belong to experts with a gate"):
        ExpertActivation(gated=False, limit=1.0)
