"""Reports to ``crosspack doctor``: JAX's devices, what each kind of attention layer would run on, what is missing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_backend.attention import answers, request_for
from packing_core.diagnosis import Diagnosis, LayerChoice, first_served, has_nvidia_driver

# what an attention layer has -> the options of its call; widths are those of keys and of values
ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention with a sliding window": {"window": 512},
    "attention with softcap": {"softcap": 50.0},
    "attention with sinks": {"return_lse": True},
    "attention with narrow values (MLA)": {"widths": (192, 128)},
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
        layers=tuple(_choice(layer, platform, dtype, **options) for layer, options in ATTENTION.items()),
        faster=tuple(advice),
    )


def _choice(
    layer: str, platform: str, dtype: jnp.dtype, *, widths: tuple[int, int] = (128, 128), **options: Any
) -> LayerChoice:
    shapes = (16, widths[0]), (4, widths[0]), (4, widths[1])
    q, k, v = (jax.ShapeDtypeStruct((1, 4_096, heads, width), dtype) for heads, width in shapes)
    return first_served(layer, answers(request_for(q, k, v, platform=platform, **options)))
