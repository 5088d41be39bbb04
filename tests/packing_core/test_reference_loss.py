"""The loss oracle: sums and weights, held against the definition with one logarithm per target."""

import math

import numpy as np
import pytest

from packing_core.errors import LayoutError
from packing_core.reference import cross_entropy, cross_entropy_vjp
from tests.packing_core.finite_differences import assert_gradients

LOGITS = np.random.default_rng(0).standard_normal((5, 4))
TARGETS = np.array([2, -100, 0, 3, -100])  # the second and the last row predict nothing
WEIGHTS = np.array([1.0, 7.0, 0.5, 0.0, 7.0])


def by_hand(weights: np.ndarray) -> tuple[float, float]:
    total = 0.0
    for row, target, weight in zip(LOGITS, TARGETS, weights, strict=True):
        if target != -100:
            total -= weight * math.log(math.exp(row[target]) / sum(math.exp(x) for x in row))
    return total, sum(weight for target, weight in zip(TARGETS, weights, strict=True) if target != -100)


def test_the_loss_is_a_sum_and_its_weight():
    assert cross_entropy(LOGITS, TARGETS) == pytest.approx(by_hand(np.ones(5)), rel=1e-14)
    assert cross_entropy(LOGITS, TARGETS, weights=WEIGHTS) == pytest.approx(by_hand(WEIGHTS), rel=1e-14)


def test_sums_add_up_over_any_split_of_the_rows():
    whole = cross_entropy(LOGITS, TARGETS, weights=WEIGHTS)
    parts = [cross_entropy(LOGITS[rows], TARGETS[rows], weights=WEIGHTS[rows]) for rows in (slice(2), slice(2, 5))]
    assert np.sum(parts, axis=0) == pytest.approx(whole, rel=1e-14)


def test_rows_without_a_target_may_hold_anything():
    logits, weights = LOGITS.copy(), WEIGHTS.copy()
    logits[[1, 4]], weights[[1, 4]] = np.nan, np.nan
    assert cross_entropy(logits, TARGETS, weights=weights) == cross_entropy(LOGITS, TARGETS, weights=WEIGHTS)
    assert not cross_entropy_vjp(logits, TARGETS, weights=weights)["logits"][[1, 4]].any()


def test_no_target_at_all_is_nothing_to_divide():
    assert cross_entropy(LOGITS, np.full(5, -100)) == (0.0, 0.0)


def test_another_value_can_mark_rows_without_a_target():
    assert cross_entropy(LOGITS, np.where(TARGETS == -100, -1, TARGETS), ignore_index=-1) == cross_entropy(
        LOGITS, TARGETS
    )


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_gradient_is_the_slope_of_the_forward_pass(weights):
    found = cross_entropy_vjp(LOGITS, TARGETS, weights=weights, dloss=0.3)
    assert_gradients(lambda logits: 0.3 * cross_entropy(logits, TARGETS, weights=weights)[0], {"logits": LOGITS}, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.array([2, 4, 0, 3, 1])}, "target 4 of row 1 is neither one of 4 classes nor the ignored -100"),
        ({"targets": np.array([2, 1, 0, -1, 1])}, "target -1 of row 3"),
        ({"targets": TARGETS[:4]}, r"targets must have shape \[T\] = \(5\)"),
        ({"weights": WEIGHTS[:4]}, "weights must have shape"),
        ({"logits": LOGITS[0]}, r"logits must have shape \[T, V\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(LayoutError, match=message):
        cross_entropy(**{"logits": LOGITS, "targets": TARGETS, **change})
