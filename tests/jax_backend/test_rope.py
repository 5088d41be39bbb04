"""Rotary embedding on packed positions, against the float64 reference."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.numerics import over_budget
from jax_backend import apply_rope, segment_positions
from jax_backend.model.rope_scaling import read_rope
from packing_core import reference
from packing_core.errors import LayoutError

#                 . 1 1 1 1 2 2 . . 3 3 3
IDS = np.array([[0, 1, 1, 1, 1, 2, 2, 0, 0, 3, 3, 3], [1] * 12], np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("turned", [16, 6])
@pytest.mark.parametrize("interleaved", [False, True])
def test_output_and_gradient_are_within_the_error_budget(interleaved: bool, turned: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dout = (np.asarray(jnp.asarray(rng.standard_normal((2, 12, 3, 16)), dtype), np.float32) for _ in range(2))
    inv_freq = (1e4 ** (-np.arange(0, turned, 2) / turned)).astype(np.float32)
    positions = segment_positions(jnp.asarray(IDS))
    turn = partial(apply_rope, positions=positions, inv_freq=jnp.asarray(inv_freq), interleaved=interleaved)
    out, pullback = jax.jit(lambda x: jax.vjp(turn, x))(jnp.asarray(x, dtype))
    found = {"out": out, "x": pullback(jnp.asarray(dout, dtype))[0]}
    for row in range(2):
        where = x[row], np.asarray(positions)[row], inv_freq
        for name, result in found.items():
            exact, rounded = (
                reference.rope(*where, interleaved=interleaved, dtype=arithmetic)
                if name == "out"
                else reference.rope_vjp(*where, dout[row], interleaved=interleaved, dtype=arithmetic)["x"]
                for arithmetic in ("float64", dtype)
            )
            over = over_budget(
                np.asarray(result, np.float64)[row], exact, rounded, scale=np.abs(exact).max(), dtype=dtype
            )
            assert over.max() <= 1, (name, over.max())
    if turned < 16:
        np.testing.assert_array_equal(np.asarray(out, np.float32)[..., turned:], x[..., turned:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((12, 3, 16))}, "x must have shape [B, S, N, D], got (12, 3, 16)"),
        ({"positions": jnp.ones((1, 12), int)}, "positions must have shape [B, S] = (2, 12), got (1, 12)"),
        ({"inv_freq": jnp.ones(9)}, "inv_freq must be [R/2] with R at most 16 channels, got (9,)"),
    ],
)
def test_shapes_that_do_not_fit_raise(changes: dict[str, jax.Array], message: str) -> None:
    legal = {"x": jnp.ones((2, 12, 3, 16)), "positions": jnp.ones((2, 12), int), "inv_freq": jnp.ones(8)}
    with pytest.raises(LayoutError, match=re.escape(message)):
        apply_rope(**(legal | changes))


@pytest.mark.parametrize("truncate", [True, False])
def test_yarns_ramp_is_that_of_transformers_whether_its_ends_are_rounded_or_not(truncate: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters={**rope, "truncate": truncate}
    )
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found, _ = read_rope(config.to_dict(), 64)
    np.testing.assert_allclose(found.frequencies(jnp.zeros((1, 1), jnp.int32)), wanted.numpy(), rtol=1e-6)
    assert found.scale == pytest.approx(scale)
