"""The head's product that writes powers: where it is taken, on any host; what it computes, on a Hopper GPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jax_backend import linear_cross_entropy
from jax_backend.attention.request import LOG2E
from jax_backend.losses.mosaic_powers import powers
from packing_core.budget import over_budget
from tests.jax_backend.test_linear_cross_entropy import plain_powers


@pytest.mark.parametrize(
    ("device", "dtype", "classes", "tokens", "options", "taken"),
    [
        ("NVIDIA H200", "bfloat16", 1088, 200, {"logit_scale": 0.5}, True),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 1088, 256, {"chunk": 128, "transposed": True}, True),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 1088, 256, {}, False),
        ("NVIDIA H200", "float32", 1088, 256, {}, False),
        ("NVIDIA H200", "float16", 1088, 256, {}, False),  # a power may be too large for it
        ("NVIDIA H200", "bfloat16", 1056, 256, {}, False),
        ("NVIDIA H200", "bfloat16", 1088, 256, {"chunk": 100}, False),
        ("NVIDIA H200", "bfloat16", 1088, 256, {"softcap": 5.0}, False),
    ],
)
def test_the_head_takes_it_where_it_serves(
    device: str, dtype: str, classes: int, tokens: int, options: dict[str, Any], taken: bool
) -> None:
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device, num_cores=132, platform="cuda"))
    hidden = jax.ShapeDtypeStruct((1, tokens, 128), dtype)
    weight = jax.ShapeDtypeStruct((classes, 128) if "transposed" in options else (128, classes), jnp.float32)

    def loss(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, weight, targets, **options)[0]

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(hidden, weight, jax.ShapeDtypeStruct((1, tokens), int))
        text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert len(re.findall("custom_call @mosaic_gpu", text)) == taken


needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees")


def operands(tokens: int, channels: int, classes: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    hidden, weight = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((tokens, channels), (classes, channels))
    )
    labels = jnp.asarray(rng.integers(0, classes, tokens), jnp.int32)
    return {"hidden": hidden, "weight": weight, "labels": labels}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("tokens", "channels", "classes"), [(256, 128, 1088), (640, 192, 5056), (128, 64, 256)])
def test_powers_and_their_sums_are_those_of_plain_operations(tokens: int, channels: int, classes: int) -> None:
    data = operands(tokens, channels, classes)
    logits = jnp.einsum("cm,cm->c", data["hidden"], data["weight"][data["labels"]], preferred_element_type=jnp.float32)
    scale = channels**-0.5
    bases = jnp.where(jnp.arange(tokens) % 7 == 0, 1e30, logits * (scale * LOG2E))
    found, sums = jax.jit(powers, static_argnums=4)(*data.values(), bases, scale)
    wanted, whole = plain_powers(*data.values(), bases, scale)
    np.testing.assert_allclose(sums.sum(axis=0), whole[0], rtol=2e-5)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2**-7, atol=2.0**-100
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("strength", [1.0, 30.0], ids=["small", "where-powers-overflow"])
@pytest.mark.parametrize("transposed", [False, True])
def test_loss_and_gradients_are_within_the_error_budget(transposed: bool, strength: float) -> None:
    data = operands(700, 192, 5056)
    hidden, weight = data["hidden"] * jnp.bfloat16(strength * 192**-0.5), data["weight"]
    targets = jnp.where(jnp.arange(700) % 5 == 0, -100, data["labels"])
    factors = jnp.asarray(np.random.default_rng(1).random(700), jnp.float32)

    def fused(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        head = weight if transposed else weight.T
        return linear_cross_entropy(hidden, head, targets, weights=factors, chunk=256, transposed=transposed)[0]

    def plain(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        wide = jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32
        log_p = jax.nn.log_softmax((hidden @ weight.T).astype(wide))
        picked = jnp.take_along_axis(log_p, jnp.where(targets < 0, 0, targets)[:, None], 1)[:, 0]
        return -jnp.where(targets < 0, 0, factors.astype(wide) * picked).sum()

    def run(function: Any, *arrays: Any) -> list[np.ndarray]:
        found = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arrays)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(found)]

    found, rounded = run(fused, hidden, weight), run(plain, hidden, weight)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = run(plain, *(jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, weight)))
    for one, truth, like in zip(found, exact, rounded, strict=True):
        assert over_budget(one, truth, like, scale=float(np.abs(truth).max()), dtype="bfloat16").max() <= 1
