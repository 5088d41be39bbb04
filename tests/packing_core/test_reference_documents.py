"""The oracles of log-probabilities and of losses over documents, held against definitions worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from packing_core.errors import LayoutError, PackingError
from packing_core.reference import distillation, policy, preference, token_logprobs, token_logprobs_vjp
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


def log_sigmoid(x: float) -> float:
    return math.log(1 / (1 + math.exp(-x)))


def test_preference_losses_of_one_pair():
    # log-ratios 2 and 0.5: the margin is 1.5
    pair, beta = (-3.0, -4.0, -5.0, -4.5), 0.2
    assert preference.dpo(*pair, beta=beta) == pytest.approx(-log_sigmoid(0.3))
    assert preference.dpo(*pair, beta=beta, label_smoothing=0.1) == pytest.approx(
        -0.9 * log_sigmoid(0.3) - 0.1 * log_sigmoid(-0.3)
    )
    assert preference.dpo(*pair, beta=beta, kind="hinge") == pytest.approx(0.7)
    assert preference.dpo(*pair, beta=beta, kind="ipo") == pytest.approx((1.5 - 2.5) ** 2)
    assert preference.dpo(*pair, beta=beta, kind="robust", label_smoothing=0.1) == pytest.approx(
        (-0.9 * log_sigmoid(0.3) + 0.1 * log_sigmoid(-0.3)) / 0.8
    )
    assert preference.simpo(-0.5, -1.0, beta=2.0, gamma=0.4) == pytest.approx(-log_sigmoid(0.6))
    odds = [math.exp(x) / (1 - math.exp(x)) for x in (-0.5, -1.0)]
    assert preference.orpo(-0.5, -1.0, beta=0.3) == pytest.approx(0.5 - 0.3 * log_sigmoid(math.log(odds[0] / odds[1])))
    assert preference.reward(1.0, 0.25, margin=0.5, center_coefficient=0.1) == pytest.approx(
        -log_sigmoid(0.25) + 0.1 * 1.25**2
    )
    found = preference.kto([-3.0, -3.0], [-5.0, -5.0], [True, False], 0.5, beta=0.2, undesirable_weight=2.0)
    assert found == pytest.approx([1 - math.exp(log_sigmoid(0.3)), 2 * (1 - math.exp(log_sigmoid(-0.3)))])
    with pytest.raises(PackingError, match="kind must be one of"):
        preference.dpo(*pair, kind="cubic")


def test_advantages_of_two_groups():
    rewards, groups = [1.0, 3.0, 5.0, 7.0], [0, 0, 0, 1]
    assert policy.advantages(rewards, groups, kind="dr_grpo").tolist() == [-2.0, 0.0, 2.0, 0.0]
    assert policy.advantages(rewards, groups, kind="rloo").tolist() == [-3.0, 0.0, 3.0, 0.0]
    assert policy.advantages(rewards, groups, epsilon=0.0).tolist() == [-1.0, 0.0, 1.0, 0.0]
    with pytest.raises(PackingError, match="kind must be grpo, dr_grpo or rloo"):
        policy.advantages(rewards, groups, kind="ppo")


def test_the_policy_loss_of_two_documents():
    # ratios 1.5 and 0.5 of the first document, 2 of the second; advantages 1 and -1; the clip is 0.2
    old = [np.log([0.2, 0.4]), np.log([0.1])]
    new = [np.log([0.3, 0.2]), np.log([0.2])]
    per_token = [-1.2, -0.5, 2.0]
    assert policy.loss(new, old, [1.0, -1.0]) == pytest.approx((sum(per_token[:2]) / 2 + 2.0, 2))
    assert policy.loss(new, old, [1.0, -1.0], per="token") == pytest.approx((sum(per_token), 3))
    assert policy.loss(new, old, [1.0, -1.0], per="constant", max_length=4) == pytest.approx((sum(per_token), 8))
    assert policy.loss(new, old, [1.0, -1.0], delta=1.7) == pytest.approx((-0.85 + 1.7, 2))
    mean, product = math.sqrt(0.75), 0.75
    assert policy.loss(new, old, [1.0, -1.0], ratio="sequence") == pytest.approx((-mean + 2.0, 2))
    assert policy.loss(new, old, [1.0, -1.0], ratio="sequence sum") == pytest.approx((-product + 2.0, 2))
    kl = [x / y - math.log(x / y) - 1 for x, y in ((0.2, 0.3), (0.4, 0.2), (0.1, 0.2))]
    found = policy.loss(new, old, [1.0, -1.0], reference=old, beta=0.5, per="token")
    assert found[0] == pytest.approx(sum(per_token) + 0.5 * sum(kl))


def test_the_divergence_in_both_directions():
    student, teacher = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert distillation.divergence(student, teacher) == pytest.approx(0.25 * math.log(2))
    skewed = np.log([0.8, 0.1, 0.1])
    forward = 0.25 * math.log(0.25 / 0.8) + 0.5 * math.log(5) + 0.25 * math.log(2.5)
    assert distillation.divergence(skewed, teacher) == pytest.approx(forward)
    assert distillation.divergence(teacher, skewed, direction="reverse") == pytest.approx(forward)
