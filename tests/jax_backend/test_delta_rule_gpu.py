"""The delta rule on an NVIDIA GPU at the widths of Qwen3.5, in TF32 as JAX multiplies by default."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from conformance.draws import segment_ids
from jax_backend import gated_delta_rule
from tests.jax_backend.scans import delta_rule_alone, out_and_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device that JAX sees"),
]

ROWS = ((-7, 250, 1, 30, -60, 100, 64), (300, 212))
EPSILON = 2.0**-10  # of TF32; four products follow one another
IDS = segment_ids(ROWS)


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
