"""Cross-entropy with and without whole logits."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_backend import linear_cross_entropy, packed_cross_entropy, shift_labels
from jax_backend.attention.request import LOG2E
from jax_backend.losses import mosaic_powers, output_layer
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import make_train_step
from packing_core.budget import over_budget
from packing_core.errors import LayoutError, PackingError
from tests.jax_backend.models import CONFIGS

B, S, M, V = 4, 7, 8, 11


def plain_powers(hidden, weight, labels, bases, scale) -> Any:
    """Computes the result of the kernel for Hopper GPUs in plain operations."""
    logits = jnp.einsum("cm,vm->cv", hidden, weight, preferred_element_type=jnp.float32) * scale
    exponents = jnp.minimum(logits * LOG2E - bases[:, None], mosaic_powers.HIGHEST)
    powers = jnp.where(jnp.arange(len(weight))[None] == labels[:, None], 0.0, jnp.exp2(exponents))
    return powers.astype(hidden.dtype), powers.sum(axis=1)[None]


@pytest.fixture(params=["logits", "powers"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the gradient of the logits; that of Hopper GPUs with a stand-in for its kernel."""
    if request.param == "powers":
        monkeypatch.setattr(output_layer, "platform_of", lambda hidden, mesh: "gpu")
        monkeypatch.setattr(output_layer, "_against_powers", lambda hidden, classes, platform, softcap, chunk: softcap)
        monkeypatch.setattr(mosaic_powers, "powers", plain_powers)
    return request.param


def case(dtype: str = "float32") -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, (B, S))
    targets[rng.random((B, S)) < 0.3] = -100
    return {
        "hidden": jnp.asarray(rng.standard_normal((B, S, M)), dtype),
        "weight": jnp.asarray(rng.standard_normal((M, V)), jnp.float32),
        "targets": jnp.asarray(targets),
        "weights": jnp.asarray(rng.random((B, S)), jnp.float32),
    }


def two_steps(hidden, weight, targets, *, weights, softcap=None, logit_scale=1.0) -> Any:
    """Full logits in the dtype of ``hidden`` and weight, then the cross-entropy."""
    logits = logit_scale * (hidden @ weight)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    if logits.dtype != jnp.float64:
        return packed_cross_entropy(logits, targets, weights=weights)
    counts = targets >= 0
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(counts, targets, 0)[..., None], -1)[..., 0]
    return -jnp.where(counts, weights * picked, 0).sum(), jnp.where(counts, weights, 0).sum()


def sums_and_gradients(function: Any, hidden: Any, weight: Any, *data: Any, **options: Any) -> list[np.ndarray]:
    def run(hidden, weight):
        return function(hidden, weight, data[0], weights=data[1], **options)

    found = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(hidden, weight)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]


CAPPED, SCALED = {"softcap": 1.5, "logit_scale": 0.7}, {"logit_scale": 0.7}


@pytest.mark.parametrize(
    ("chunk", "dtype", "options"),
    [
        (5, "float32", {}),
        (None, "bfloat16", {}),
        (None, "float32", CAPPED),
        (5, "bfloat16", CAPPED),
        (5, "bfloat16", SCALED),
    ],
)
def test_sums_and_gradients_are_within_the_error_budget(chunk, dtype, options, way) -> None:
    arrays = case(dtype)
    found = sums_and_gradients(linear_cross_entropy, *arrays.values(), chunk=chunk, **options)
    rounded = sums_and_gradients(
        two_steps, arrays["hidden"], arrays["weight"].astype(dtype), *list(arrays.values())[2:], **options
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (arrays["hidden"], arrays["weight"])]
        if dtype == "bfloat16":
            wide[1] = wide[1].astype(jnp.bfloat16).astype(jnp.float64)
        exact = sums_and_gradients(
            two_steps, *wide, np.asarray(arrays["targets"]), np.asarray(arrays["weights"], np.float64), **options
        )
    for one, truth, like in zip(found, exact, rounded, strict=True):
        assert over_budget(one, truth, like, scale=float(np.abs(truth).max()), dtype=dtype).max() <= 1


@pytest.mark.parametrize("strength", [1, 40], ids=["small", "where-powers-overflow"])
def test_an_embedding_gives_the_numbers_of_a_head(strength, way) -> None:
    arrays = case() | {"hidden": strength * case()["hidden"]}
    embedding = arrays["weight"].T
    found = sums_and_gradients(
        linear_cross_entropy, arrays["hidden"], embedding, arrays["targets"], arrays["weights"], transposed=True
    )
    assert (found[0] > 1000) == (strength > 1)  # of 20 targets: some far above the loss whose power fits into float32
    for one, other in zip(found, sums_and_gradients(two_steps, *arrays.values()), strict=True):
        other = other.T if one.shape == embedding.shape else other
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * np.abs(other).max())


def test_rows_over_a_mesh_with_a_sharded_head_give_the_numbers_of_one_device(way) -> None:
    arrays = case()
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, cut = (jax.sharding.NamedSharding(mesh, jax.P(spec)) for spec in (("data", "fsdp"), "fsdp"))
    spread = {name: jax.device_put(x, cut if name == "weight" else rows) for name, x in arrays.items()}
    found = sums_and_gradients(linear_cross_entropy, *spread.values(), chunk=3, mesh=mesh)
    for one, other in zip(found, sums_and_gradients(two_steps, *arrays.values()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_scaled_scales_its_gradients() -> None:
    arrays = case()

    def mean(hidden):
        total, weight = linear_cross_entropy(hidden, *list(arrays.values())[1:3], weights=arrays["weights"])
        return total / weight

    total, weight = linear_cross_entropy(**arrays)
    whole = sums_and_gradients(linear_cross_entropy, *arrays.values())[2]
    np.testing.assert_allclose(jax.grad(mean)(arrays["hidden"]), whole / weight, rtol=1e-5, atol=1e-7)
    assert mean(arrays["hidden"]) == pytest.approx(float(total / weight))


def test_the_step_of_a_large_vocabulary_holds_no_logits() -> None:
    vocabulary, tokens = 151_936, 16_384
    tiny = CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 1, "vocab_size": vocabulary}
    config = DecoderConfig.from_hf(tiny)
    train_step = make_train_step(lambda: Decoder(config, rngs=nnx.Rngs(0)), optax.sgd(0.1))
    compiled = train_step.compile(rows=1, tokens=tokens)  # nothing is allocated
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocabulary * 4 / 4


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_class_makes_the_loss_and_its_gradients_nan(wrong: int, way) -> None:
    arrays = case()
    arrays["targets"] = arrays["targets"].at[1, 2].set(wrong)
    loss, _, *gradients = sums_and_gradients(linear_cross_entropy, *arrays.values())
    assert all(jnp.isnan(x).any() for x in (loss, *gradients))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": jnp.ones((V, M))}, LayoutError, "hidden (4, 7, 8) must end in the first axis of weight [M, V]"),
        ({"transposed": True}, LayoutError, "hidden (4, 7, 8) must end in the last axis of weight [V, M], got (8, 11)"),
        ({"targets": jnp.ones((B, 3), int)}, LayoutError, "hidden (4, 7, 8) must be targets (4, 3) with a last axis"),
        ({"weights": jnp.ones((B, 3))}, LayoutError, "weights (4, 3) and targets (4, 7) must have the same shape"),
        ({"chunk": 0}, PackingError, "chunk is 0: it counts tokens"),
    ],
)
def test_what_does_not_fit_raises(change, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        linear_cross_entropy(**case() | change)


@pytest.mark.parametrize(
    ("tokens", "most", "chunk"), [(16384, 1766, 1664), (16384, 16384, 16384), (100, 1766, 128), (1000, 1, 128)]
)
def test_chunks_are_about_equal_so_that_the_last_is_not_mostly_padding(tokens: int, most: int, chunk: int) -> None:
    assert output_layer.chunk_of(tokens, most) == chunk


FEW_WORDS = 11


def small_case(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [2, 9, FEW_WORDS], targets with ignored ones, weights."""
    rng = np.random.default_rng(0)
    logits = np.asarray(jnp.asarray(3 * rng.standard_normal((2, 9, FEW_WORDS)), dtype), np.float32)
    targets = rng.integers(0, FEW_WORDS, (2, 9))
    targets[rng.random((2, 9)) < 0.3] = -100
    return logits, targets, rng.random((2, 9)).astype(np.float32)


def test_targets_are_the_next_labels_of_the_same_segment() -> None:
    #                       1  1  1  2  2  .  .  3  .
    ids = jnp.array([[1, 1, 1, 2, 2, 0, 0, 3, 0]])
    labels = jnp.array([[10, 11, 12, 20, 21, 99, 99, 30, 99]])
    assert shift_labels(labels, ids).tolist() == [[11, 12, -100, 21, -100, -100, -100, -100, -100]]


def test_a_sum_of_two_halves_is_the_whole() -> None:
    logits, targets, weights = (jnp.asarray(x) for x in small_case())
    pair = jax.jit(packed_cross_entropy)
    whole = pair(logits, targets, weights=weights)
    halves = [pair(logits[r], targets[r], weights=weights[r]) for r in range(2)]
    np.testing.assert_allclose(np.sum(halves, axis=0), whole, rtol=1e-6)


def test_weights_get_no_gradient_and_no_target_is_no_loss() -> None:
    logits, targets, weights = (jnp.asarray(x) for x in small_case())
    assert not jax.grad(lambda w: packed_cross_entropy(logits, targets, weights=w)[0])(weights).any()
    assert packed_cross_entropy(logits, jnp.full_like(targets, -100)) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [FEW_WORDS, -1])
def test_a_target_that_is_no_class_makes_the_loss_and_its_gradient_nan(wrong: int) -> None:
    logits, targets, _ = (jnp.asarray(x) for x in small_case())
    wrong_targets = targets.at[1, 2].set(wrong)
    loss, gradient = jax.value_and_grad(lambda logits: packed_cross_entropy(logits, wrong_targets)[0])(logits)
    assert jnp.isnan(loss) and jnp.isnan(gradient).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: packed_cross_entropy(jnp.ones((2, 9, FEW_WORDS)), jnp.ones((2, 8), int)),
            "logits (2, 9, 11) must be targets (2, 8)",
        ),
        (
            lambda: packed_cross_entropy(jnp.ones((9, FEW_WORDS)), jnp.ones(9, int), weights=jnp.ones(8)),
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


EYE = jnp.eye(FEW_WORDS)
LOSSES: dict[str, Any] = {
    "whole logits": packed_cross_entropy,
    "chunks": lambda logits, targets, **options: linear_cross_entropy(logits, EYE, targets, **options),
}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8"])
@pytest.mark.parametrize("loss", LOSSES)
def test_targets_of_any_integer_dtype_ignore_what_is_ignored(loss: str, dtype: str) -> None:
    wide = 300  # -100 is class 156 of uint8
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((1, 8, FEW_WORDS)), jnp.float32)
    ids, labels = jnp.asarray([[1] * 4 + [2] * 4]), rng.integers(0, FEW_WORDS, (1, 8))
    wanted = LOSSES[loss](logits, shift_labels(jnp.asarray(labels), ids))
    targets = shift_labels(jnp.asarray(labels, dtype), ids)
    assert targets.dtype == jnp.int32 and (targets == -100).sum() == 2
    np.testing.assert_array_equal(LOSSES[loss](logits, targets), wanted)
    classes = jnp.zeros((1, 2, wide)), jnp.asarray([[3, 156]], "uint8")
    assert packed_cross_entropy(*classes)[1] == 2
    narrow = jnp.pad(logits, [(0, 0), (0, 0), (0, wide - FEW_WORDS)], constant_values=-1e9), jnp.asarray(labels, "int8")
    assert np.isfinite(packed_cross_entropy(*narrow)[0])
    with pytest.raises(LayoutError, match="targets must be integers, got float32"):
        LOSSES[loss](logits, targets.astype(jnp.float32))


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_may_be_a_mask(loss: str) -> None:
    logits, targets = jax.random.normal(jax.random.key(0), (1, 8, FEW_WORDS)), jnp.arange(8)[None]
    mask = targets % 3 == 0
    found, wanted = (LOSSES[loss](logits, targets, weights=weights) for weights in (mask, mask.astype(jnp.float32)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_weighs_nothing_may_be_no_class_and_have_no_finite_logits(loss: str) -> None:
    logits, targets = jax.random.normal(jax.random.key(0), (1, 8, FEW_WORDS)), jnp.arange(8)[None]
    weights = jnp.where(targets % 3 == 0, 1.0, 0.0)

    def run(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return LOSSES[loss](logits, targets, weights=weights)

    call = jax.value_and_grad(run, has_aux=True)
    wanted = call(logits, targets)
    for outside in (-1, FEW_WORDS):
        result = call(logits, jnp.where(weights == 0, outside, targets))
        jax.tree.map(np.testing.assert_array_equal, result, wanted)
    broken = call(jnp.where(weights[..., None] == 0, jnp.nan, logits), targets)
    jax.tree.map(np.testing.assert_array_equal, broken, wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_no_tokens_is_nothing_of_nothing(loss: str) -> None:
    def run(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return LOSSES[loss](logits, jnp.zeros((2, 0), jnp.int32))

    (total, weight), gradient = jax.value_and_grad(run, has_aux=True)(jnp.zeros((2, 0, FEW_WORDS)))
    assert (total, weight, gradient.shape) == (0, 0, (2, 0, FEW_WORDS))


def test_a_softcap_of_zero_is_none() -> None:
    logits, targets, _ = small_case()
    head = jnp.asarray(logits), EYE, jnp.asarray(targets)
    np.testing.assert_array_equal(linear_cross_entropy(*head, softcap=0.0), linear_cross_entropy(*head))
    for softcap in (-1.0, np.nan, np.inf):
        with pytest.raises(PackingError, match="it must be positive and finite; pass None for none"):
            linear_cross_entropy(*head, softcap=softcap)
