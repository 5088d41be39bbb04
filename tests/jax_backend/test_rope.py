"""Rotary embedding: refusals, and frequencies of a config. The numbers are judged by the gate."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import apply_rope
from jax_backend.model.config_fields import read_fields
from jax_backend.model.rope_scaling import read_rope
from packing_core.errors import LayoutError


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


SHORT = {"original_max_position_embeddings": 8, "beta_slow": 2.0}  # the ramp would end before channel 0


@pytest.mark.parametrize("options", [{"truncate": True}, {"truncate": False}, {"truncate": False, **SHORT}])
def test_yarns_ramp_is_that_of_transformers_wherever_its_ends_are(options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128, **options}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=rope)
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found, _ = read_rope(read_fields(config, ["llama"]), 64)
    np.testing.assert_allclose(found.frequencies(jnp.zeros((1, 1), jnp.int32)), wanted.numpy(), rtol=1e-6)
    assert found.scale == pytest.approx(scale)
