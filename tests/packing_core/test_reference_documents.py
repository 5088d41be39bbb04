"""The oracle of log-probabilities, held against definitions worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from packing_core.errors import LayoutError
from packing_core.reference import token_logprobs, token_logprobs_vjp
from tests.packing_core.finite_differences import assert_gradients

LOGITS = np.random.default_rng(0).standard_normal((4, 3))
TARGETS = np.array([2, -100, 0, 1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probability_and_entropy_of_each_target(temperature):
    logprobs, entropy = token_logprobs(LOGITS, TARGETS, temperature=temperature)
    for t, target in enumerate(TARGETS):
        powers = [math.exp(x / temperature) for x in LOGITS[t]]
        p = [x / sum(powers) for x in powers]
        wanted = (0.0, 0.0) if target == -100 else (math.log(p[target]), -sum(x * math.log(x) for x in p))
        assert (logprobs[t], entropy[t]) == pytest.approx(wanted, rel=1e-14)


def test_the_gradient_is_the_slope_of_the_forward_pass():
    weights = np.array([0.3, 9.0, -1.0, 2.0])
    found = token_logprobs_vjp(LOGITS, TARGETS, weights, temperature=0.7)
    assert_gradients(
        lambda logits: float((weights * token_logprobs(logits, TARGETS, temperature=0.7)[0]).sum()),
        {"logits": LOGITS},
        found,
    )


def test_a_target_that_is_no_class_is_refused():
    with pytest.raises(LayoutError, match="target 3 of row 0 is neither one of 3 classes"):
        token_logprobs(LOGITS, np.array([3, 0, 0, 0]))
