"""The kernels on an NVIDIA GPU: widths, dtypes and options against the oracle, isolation and repetition to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import segment_attention
from tests.jax_backend.oracle import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees"),
]

# Two rows of 512 tokens: segments longer and shorter than every tile, padding before, between and after.
ROWS = ((-7, 250, 1, 30, -60, 100, 64), (300, 212))
CASES: dict[str, dict[str, Any]] = {
    "128": {"width": 128, "heads": 8, "kv_heads": 2, "dtype": "bfloat16"},
    "128, float16, no groups": {"width": 128, "heads": 2, "kv_heads": 2, "dtype": "float16"},
    "64, a group of seven, window": {"width": 64, "heads": 14, "kv_heads": 2, "dtype": "bfloat16", "window": 100},
    "256, softcap": {"width": 256, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "softcap": 5.0},
    "80, both directions": {"width": 80, "heads": 4, "kv_heads": 2, "dtype": "bfloat16", "causal": False},
    "192 and 128, sinks": {
        "width": 192,
        "value_width": 128,
        "heads": 4,
        "kv_heads": 1,
        "dtype": "bfloat16",
        "sinks": True,
    },
    "64, float32": {"width": 64, "heads": 4, "kv_heads": 2},
    "256, float32, window to both sides": {"width": 256, "heads": 2, "kv_heads": 1, "causal": False, "window": 60},
}
PACKED_CALL = ("128", "128, float16, no groups")  # what cuDNN's packed call serves


def run(case: Case, implementation: str) -> dict[str, Any]:
    """Output and gradients of one jitted call, by name."""
    options = case.options | ({"max_segments": 8} if implementation == "cudnn" else {})
    attend = partial(segment_attention, segment_ids=jnp.asarray(case.ids), implementation=implementation, **options)

    @jax.jit
    def both(operands: dict[str, jax.Array], dout: jax.Array) -> dict[str, Any]:
        out, pullback = jax.vjp(lambda operands: attend(**operands), operands)
        return {"out": out, **pullback(dout)[0]}

    return both(case.jax_operands(), jnp.asarray(case.dout, case.dtype))


@pytest.mark.parametrize(
    ("implementation", "name"),
    [("pallas", name) for name in CASES] + [("cudnn", name) for name in PACKED_CALL] + [("chunked", "128")],
)
def test_output_and_gradients_are_within_the_error_budget(implementation: str, name: str) -> None:
    case = Case(ROWS, **CASES[name])
    found = run(case, implementation)
    over = case.worst(found)
    assert all(worst <= 1 for worst in over.values()), over
    for part in ("out", "q", "k", "v"):
        assert not np.asarray(found[part], np.float32)[case.ids == 0].any(), f"{part} at padding must be exactly 0"
