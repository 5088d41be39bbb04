"""Reports to ``crosspack doctor``: JAX's devices, what each kind of attention layer would run on, what is missing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.attention import answers
from jax_backend.attention.request import Request
from packing_core.diagnosis import Diagnosis, LayerChoice, first_served, has_nvidia_driver

# what an attention layer has -> the changes to the request of a plain one
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention with a sliding window": {"window": 512},
    "attention with softcap": {"softcap": 50.0},
    "attention with sinks": {"needs_lse": True},
    "attention with narrow values (MLA)": {"head_dim": 192, "value_dim": 128},
}


def examine() -> Diagnosis:
    """See the module's docstring."""
    platform = jax.devices()[0].platform
    dtype = jnp.dtype("float32" if platform == "cpu" else "bfloat16")
    advice = []
    if platform == "cpu" and has_nvidia_driver():
        advice.append(f"there is an NVIDIA driver, and jax {jax.__version__} finds no GPU: pip install 'jax[cuda13]'")
    elif platform == "cpu":
        advice.append("jax finds no GPU or TPU, and the fast kernels need one")
    return Diagnosis(
        devices=tuple(f"{device.platform}:{device.id}: {device.device_kind}" for device in jax.devices()),
        judged=f"{platform}, {dtype.name}",
        layers=tuple(_choice(layer, platform, dtype, changes) for layer, changes in ATTENTION.items()),
        faster=tuple(advice),
    )


def _choice(layer: str, platform: str, dtype: jnp.dtype, changes: dict[str, Any]) -> LayerChoice:
    plain: dict[str, Any] = {
        "rows": 1,
        "queries": 4_096,
        "keys": 4_096,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 128,
        "value_dim": 128,
        "dtype": dtype,
        "causal": True,
        "scale": 128**-0.5,
        "window": None,
        "softcap": None,
        "needs_lse": False,
        "own_keys": True,
        "max_segments": None,
        "platform": platform,
    }
    return first_served(layer, answers(Request(**plain | changes)))
