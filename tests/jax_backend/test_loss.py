"""Packed cross-entropy as a pair of sums, and the targets it is computed on."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import linear_cross_entropy, packed_cross_entropy, shift_labels
from packing_core.errors import LayoutError, PackingError

V = 11


def case(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [2, 9, V], targets with ignored ones, weights."""
    rng = np.random.default_rng(0)
    logits = np.asarray(jnp.asarray(3 * rng.standard_normal((2, 9, V)), dtype), np.float32)
    targets = rng.integers(0, V, (2, 9))
    targets[rng.random((2, 9)) < 0.3] = -100
    return logits, targets, rng.random((2, 9)).astype(np.float32)


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


EYE = jnp.eye(V)
LOSSES: dict[str, Any] = {
    "whole logits": packed_cross_entropy,
    "chunks": lambda logits, targets, **options: linear_cross_entropy(logits, EYE, targets, **options),
}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8"])
@pytest.mark.parametrize("loss", LOSSES)
def test_targets_of_any_integer_dtype_ignore_what_is_ignored(loss: str, dtype: str) -> None:
    wide = 300  # -100 is class 156 of uint8
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((1, 8, V)), jnp.float32)
    ids, labels = jnp.asarray([[1] * 4 + [2] * 4]), rng.integers(0, V, (1, 8))
    wanted = LOSSES[loss](logits, shift_labels(jnp.asarray(labels), ids))
    targets = shift_labels(jnp.asarray(labels, dtype), ids)
    assert targets.dtype == jnp.int32 and (targets == -100).sum() == 2
    np.testing.assert_array_equal(LOSSES[loss](logits, targets), wanted)
    classes = jnp.zeros((1, 2, wide)), jnp.asarray([[3, 156]], "uint8")
    assert packed_cross_entropy(*classes)[1] == 2
    narrow = jnp.pad(logits, [(0, 0), (0, 0), (0, wide - V)], constant_values=-1e9), jnp.asarray(labels, "int8")
    assert np.isfinite(packed_cross_entropy(*narrow)[0])
    with pytest.raises(LayoutError, match="targets must be integers, got float32"):
        LOSSES[loss](logits, targets.astype(jnp.float32))


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_may_be_a_mask(loss: str) -> None:
    logits, targets = jax.random.normal(jax.random.key(0), (1, 8, V)), jnp.arange(8)[None]
    mask = targets % 3 == 0
    found, wanted = (LOSSES[loss](logits, targets, weights=weights) for weights in (mask, mask.astype(jnp.float32)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_no_tokens_is_nothing_of_nothing(loss: str) -> None:
    def run(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return LOSSES[loss](logits, jnp.zeros((2, 0), jnp.int32))

    (total, weight), gradient = jax.value_and_grad(run, has_aux=True)(jnp.zeros((2, 0, V)))
    assert (total, weight, gradient.shape) == (0, 0, (2, 0, V))


def test_a_softcap_of_zero_is_none() -> None:
    logits, targets, _ = case()
    head = jnp.asarray(logits), EYE, jnp.asarray(targets)
    np.testing.assert_array_equal(linear_cross_entropy(*head, softcap=0.0), linear_cross_entropy(*head))
    for softcap in (-1.0, np.nan, np.inf):
        with pytest.raises(PackingError, match="it must be positive and finite; pass None for none"):
            linear_cross_entropy(*head, softcap=softcap)
