"""The short convolution inside segments, against the float64 reference of each document alone."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from conformance.draws import segment_ids
from jax_backend import causal_conv
from packing_core import reference
from packing_core.errors import LayoutError, PackingError
from packing_core.protocol import segments
from tests.jax_backend.scan_operands import Arrays, budgets, out_and_gradients

ROWS = ((-2, 7, 1, 2, -3, 9), (24,))
IDS = segment_ids(ROWS)


def operands(bias: bool = True) -> Arrays:
    draw = np.random.default_rng(0)
    shapes = {"x": (2, 24, 5), "w": (5, 4)} | ({"bias": (5,)} if bias else {})
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


DOUT = np.random.default_rng(1).standard_normal((2, 24, 5)).astype(np.float32) * (IDS != 0)[..., None]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_output_and_gradients_are_those_of_each_document_alone(activation: str | None) -> None:
    def alone(arrays: Arrays, ids: np.ndarray, dout: np.ndarray, arithmetic: Any) -> Arrays:
        total = {"out": np.zeros(dout.shape)} | {name: np.zeros(x.shape) for name, x in arrays.items()}
        more: Any = {"bias": arrays.get("bias"), "silu": activation == "silu", "dtype": arithmetic}
        for row, start, stop in segments(ids):
            here, bounds = (row, slice(start, stop)), [0, stop - start]
            total["out"][here] = reference.short_convolution(arrays["x"][here], arrays["w"], bounds, **more)
            found = reference.short_convolution_vjp(arrays["x"][here], arrays["w"], bounds, dout[here], **more)
            total["x"][here] = found["x"]
            total["w"] += found["weight"]
            if "bias" in found:
                total["bias"] += found["bias"]
        return total

    arrays = operands(bias=activation == "silu")
    found = out_and_gradients(lambda **given: causal_conv(**given, activation=activation), arrays, IDS, DOUT)
    over = budgets(found, alone, arrays, IDS, DOUT)
    assert max(over.values()) <= 1, over
    assert not np.asarray(found["out"])[IDS == 0].any() and not np.asarray(found["x"])[IDS == 0].any()


def test_the_tokens_before_a_row_belong_to_its_first_segment_alone() -> None:
    arrays = operands()
    whole = causal_conv(**arrays, segment_ids=jnp.asarray(IDS), activation="silu")
    for cut in (4, 12, 20):  # inside a segment in the second row; in the first inside one, in padding, and inside one
        before = np.where((IDS[:, cut - 3 : cut] == IDS[:, cut, None])[..., None], arrays["x"][:, cut - 3 : cut], 0)
        rest = arrays | {"x": arrays["x"][:, cut:]}
        out = causal_conv(**rest, segment_ids=jnp.asarray(IDS[:, cut:]), activation="silu", before=jnp.asarray(before))
        assert np.allclose(out, whole[:, cut:], atol=1e-6), cut


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": jnp.ones((24, 5))}, LayoutError, "x must have shape [B, S, E], got (24, 5)"),
        ({"w": jnp.ones((4, 4))}, LayoutError, "w must have shape [E, W] = (5, *), got (4, 4)"),
        ({"bias": jnp.ones(4)}, LayoutError, "bias must have shape (5,), got (4,)"),
        ({"before": jnp.ones((2, 4, 5))}, LayoutError, "before must have shape (2, 3, 5), got (2, 4, 5)"),
        ({"segment_ids": jnp.ones((2, 23), int)}, LayoutError, "segment_ids must have shape [B, S] = (2, 24)"),
        ({"activation": "gelu"}, PackingError, "activation is 'gelu': pass 'silu' or None"),
    ],
)
def test_what_does_not_fit_raises(changes: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        causal_conv(**{**operands(), "segment_ids": jnp.asarray(IDS), **changes})
