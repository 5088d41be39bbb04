"""Packed cross-entropy as a pair of sums, and the targets it is computed on."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.numerics import over_budget
from jax_backend import packed_cross_entropy, shift_labels
from packing_core import reference
from packing_core.errors import LayoutError

V = 11


def case(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [2, 9, V], targets with ignored ones, weights."""
    rng = np.random.default_rng(0)
    logits = np.asarray(jnp.asarray(3 * rng.standard_normal((2, 9, V)), dtype), np.float32)
    targets = rng.integers(0, V, (2, 9))
    targets[rng.random((2, 9)) < 0.3] = -100
    return logits, targets, rng.random((2, 9)).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_gradient_are_within_the_error_budget(dtype: str, weighted: bool) -> None:
    logits, targets, weights = case(dtype)
    given: Any = {"weights": weights.ravel()} if weighted else {}

    def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return packed_cross_entropy(logits, jnp.asarray(targets), weights=jnp.asarray(weights) if weighted else None)

    (loss_sum, weight_sum), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(logits, dtype))
    flat = logits.reshape(-1, V), targets.ravel()
    exact, rounded = (reference.cross_entropy(*flat, **given, dtype=d) for d in ("float64", dtype))
    assert over_budget(np.float64(loss_sum), exact[0], rounded[0], scale=exact[0], dtype="float32").max() <= 1
    np.testing.assert_allclose(weight_sum, exact[1], rtol=1e-6)
    exact, rounded = (
        reference.cross_entropy_vjp(*flat, **given, dtype=d)["logits"].reshape(logits.shape) for d in ("float64", dtype)
    )
    assert over_budget(np.asarray(gradient, np.float64), exact, rounded, scale=1.0, dtype=dtype).max() <= 1


def test_targets_are_the_next_labels_of_the_same_segment() -> None:
    #                       1  1  1  2  2  .  .  3  .
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0, 3, 0]])
    labels = jnp.array([[10, 11, 12, 20, 21, 99, 99, 30, 99]])
    assert shift_labels(labels, ids).tolist() == [[11, 12, -100, 21, -100, -100, -100, -100, -100]]


def test_a_sum_of_two_halves_is_the_whole() -> None:
    logits, targets, weights = (jnp.asarray(x) for x in case())
    pair = jax.jit(packed_cross_entropy)
    whole = pair(logits, targets, weights=weights)
    halves = [pair(logits[r], targets[r], weights=weights[r]) for r in range(2)]
    np.testing.assert_allclose(np.sum(halves, axis=0), whole, rtol=1e-6)


def test_weights_get_no_gradient_and_no_target_is_no_loss() -> None:
    logits, targets, weights = (jnp.asarray(x) for x in case())
    assert not jax.grad(lambda w: packed_cross_entropy(logits, targets, weights=w)[0])(weights).any()
    assert packed_cross_entropy(logits, jnp.full_like(targets, -100)) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_class_makes_the_loss_and_its_gradient_nan(wrong: int) -> None:
    logits, targets, _ = (jnp.asarray(x) for x in case())
    wrong_targets = targets.at[1, 2].set(wrong)
    loss, gradient = jax.value_and_grad(lambda logits: packed_cross_entropy(logits, wrong_targets)[0])(logits)
    assert jnp.isnan(loss) and jnp.isnan(gradient).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: packed_cross_entropy(jnp.ones((2, 9, V)), jnp.ones((2, 8), int)),
            "logits (2, 9, 11) must be targets (2, 8)",
        ),
        (
            lambda: packed_cross_entropy(jnp.ones((9, V)), jnp.ones(9, int), weights=jnp.ones(8)),
            "weights (8,) and targets (9,) must have the same shape",
        ),
        (
            lambda: shift_labels(jnp.ones((2, 8), int), jnp.ones((2, 9), int)),
            "labels (2, 8) and segment_ids (2, 9) must share",
        ),
    ],
)
def test_shapes_that_do_not_fit_raise(call: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        call()
