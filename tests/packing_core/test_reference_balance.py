"""The oracle of the sequence-wise balance loss, held against the equations of DeepSeek-V3, and its gradient."""

import numpy as np
import pytest

from packing_core.errors import LayoutError
from packing_core.reference import sequence_balance, sequence_balance_vjp
from tests.packing_core.finite_differences import assert_gradients

LENGTHS, EXPERTS, CHOSEN = (3, 1, 5), 6, 2
SCORES = np.random.default_rng(0).uniform(0.1, 1.0, (sum(LENGTHS), EXPERTS))


def test_it_is_that_of_the_equations_token_by_token():
    found, first = sequence_balance(SCORES, LENGTHS, CHOSEN), 0
    for loss, length in zip(found, LENGTHS, strict=True):
        right = 0.0
        for i in range(EXPERTS):
            f, p = 0.0, 0.0
            for token in SCORES[first : first + length]:
                f += EXPERTS / (CHOSEN * length) * (token[i] in sorted(token)[-CHOSEN:])
                p += token[i] / token.sum() / length
            right += f * p
        assert loss == pytest.approx(right, abs=1e-14)
        first += length


def test_it_is_one_where_tokens_are_spread_evenly():
    scores = np.eye(EXPERTS) + 1e-9
    assert sequence_balance(scores, [EXPERTS], 1) == pytest.approx([1.0])
    assert sequence_balance(np.tile(scores[:1], (4, 1)), [4], 1) == pytest.approx([EXPERTS], abs=1e-6)


def test_gradients_are_the_differences():
    dy = np.array([0.5, -1.0, 2.0])
    found = {"scores": sequence_balance_vjp(SCORES, LENGTHS, CHOSEN, dy)}
    assert_gradients(
        lambda scores: float((sequence_balance(scores, LENGTHS, CHOSEN) * dy).sum()), {"scores": SCORES}, found
    )


@pytest.mark.parametrize(("lengths", "chosen"), [((3, 1), 2), (LENGTHS, 7), (LENGTHS, 0)])
def test_shapes_that_contradict_each_other_are_refused(lengths, chosen):
    with pytest.raises(LayoutError, match="scores must be"):
        sequence_balance(SCORES, lengths, chosen)
