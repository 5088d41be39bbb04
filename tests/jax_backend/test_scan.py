"""The selective scan with its state reset at segment starts, against the float64 recurrence of each document alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import selective_scan
from packing_core import reference
from packing_core.budget import over_budget
from packing_core.errors import LayoutError
from packing_core.protocol import segments

E, N = 6, 4
#               padding first, a one-token segment, padding between, padding last; a whole row
IDS = np.array([[0, 0] + [1] * 7 + [2] + [0] * 3 + [3] * 9 + [0] * 2, [1] * 24], np.int32)


def operands(groups: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal
    shared = (2, 24, groups, N)
    arrays = {
        "x": normal((2, 24, E)),
        "dt": rng.uniform(0.01, 0.5, (2, 24, E)),
        "A": -rng.uniform(0.1, 2.0, (E, N)),
        "B": normal(shared),
        "C": normal(shared),
        "D": normal(E),
        "z": normal((2, 24, E)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def run(arrays: dict[str, np.ndarray], dy: np.ndarray) -> dict[str, Any]:
    @jax.jit
    def both(arrays: dict[str, jax.Array]) -> dict[str, Any]:
        out, pullback = jax.vjp(lambda given: selective_scan(**given, segment_ids=jnp.asarray(IDS)), arrays)
        return {"out": out, **pullback(jnp.asarray(dy))[0]}

    return both(arrays)


def test_output_and_gradients_with_groups_are_within_the_error_budget() -> None:
    arrays = operands(2)
    dy = np.random.default_rng(1).standard_normal((2, 24, E)).astype(np.float32) * (IDS != 0)[..., None]
    expected = []
    for arithmetic in ("float64", "float32"):
        total = {name: np.zeros(x.shape) for name, x in {"out": dy, **arrays}.items()}
        for row, start, stop in segments(IDS):
            here, bounds = (row, slice(start, stop)), [0, stop - start]
            mine = {name: x if name in "AD" else x[here] for name, x in arrays.items()}
            total["out"][here] = reference.selective_scan(**mine, cu_seqlens=bounds, dtype=arithmetic)  # type: ignore[arg-type]
            found = reference.selective_scan_vjp(**mine, cu_seqlens=bounds, dy=dy[here], dtype=arithmetic)  # type: ignore[arg-type]
            for name, gradient in found.items():
                total[name][(...,) if name in "AD" else here] += gradient
        expected.append(total)
    for name, result in run(arrays, dy).items():
        exact, rounded = expected[0][name], expected[1][name]
        over = over_budget(np.asarray(result, np.float64), exact, rounded, scale=np.abs(exact).max(), dtype="float32")
        assert over.max() <= 1, (name, over.max())
        if name in ("out", "x", "dt", "B", "C"):
            assert not np.asarray(result)[IDS == 0].any(), f"{name} at padding must be exactly 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.ones((24, E))}, "x must have shape [B, S, E], got (24, 6)"),
        ({"A": jnp.ones((E + 1, N))}, "A must have shape [E, N] = (6, *), got (7, 4)"),
        ({"dt": jnp.ones((2, 24, 1))}, "dt must have shape (2, 24, 6), got (2, 24, 1)"),
        ({"B": jnp.ones((2, 24, 4, N))}, "B must have shape [B, S, N] = (2, 24, 4), or [B, S, G, N] with G dividing 6"),
        ({"segment_ids": jnp.ones((2, 23), int)}, "segment_ids must have shape [B, S] = (2, 24), got (2, 23)"),
    ],
)
def test_shapes_that_do_not_fit_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        selective_scan(**{**operands(2), "segment_ids": jnp.asarray(IDS), **changes})
