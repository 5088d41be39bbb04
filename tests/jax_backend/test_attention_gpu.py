"""Kernels on an NVIDIA GPU: attention and the delta rule against the oracle, isolation and repetition to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conformance.draws import segment_ids
from jax_backend import gated_delta_rule, segment_attention
from tests.jax_backend.oracle import Case
from tests.jax_backend.scan_operands import delta_rule_alone, out_and_gradients

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


DELTA_ROWS = ((-7, 250, 1, 30, -60, 100, 64), (300, 212))
EPSILON = 2.0**-10  # of TF32; four products follow one another
IDS = segment_ids(DELTA_ROWS)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_output_and_gradients_are_those_of_each_document_alone(precision: str) -> None:
    draw = np.random.default_rng(0)
    q, k = (draw.standard_normal((*IDS.shape, 2, 128)) for _ in range(2))
    v, dout = (draw.standard_normal((*IDS.shape, 4, 128)) for _ in range(2))
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": v,
        "g": -0.1 * draw.exponential(size=v.shape[:3]),
        "beta": draw.uniform(size=v.shape[:3]),
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    dout = dout.astype(np.float32) * (IDS != 0)[..., None, None]
    with jax.default_matmul_precision(precision):
        found = out_and_gradients(gated_delta_rule, arrays, IDS, dout)
    wanted = delta_rule_alone(arrays, IDS, dout)
    allowed = 4 * EPSILON if precision == "default" else 1e-5
    for name, exact in wanted.items():
        assert np.abs(np.asarray(found[name]) - exact).max() <= allowed * np.abs(exact).max(), name
