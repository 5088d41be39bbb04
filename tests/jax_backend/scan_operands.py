"""Operands of packed scans, and what the float64 reference makes of them, one document at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.draws import Rows, segment_ids
from packing_core import reference
from packing_core.budget import over_budget
from packing_core.protocol import segments

Arrays = dict[str, np.ndarray]

# Around the edges of chunks, with padding before, between and after; a document over several chunks.
EDGES: Rows = ((-5, 31, 32, 33, 63, 64, 65, -3, 1, 1, 22), (1, 128, 129, -20, 1, 41))
# Programs are compiled for one call or two: the passes that would make them quick take seconds.
quick_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def delta_operands(rows: Rows, *, heads: int = 2, group: int = 2, decay: float = 0.3, seed: int = 0) -> Arrays:
    """``q``, ``k`` of norm 1, ``v``, ``g``, ``beta``: float32, of 8 key and 6 value channels."""
    draw, shape = np.random.default_rng(seed), segment_ids(rows).shape
    q, k = (draw.standard_normal((*shape, heads, 8)) for _ in range(2))
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": draw.standard_normal((*shape, heads * group, 6)),
        "g": -decay * draw.exponential(size=(*shape, heads * group)),
        "beta": draw.uniform(size=(*shape, heads * group)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def ssd_operands(rows: Rows, *, heads: int = 4, groups: int = 2, seed: int = 0) -> Arrays:
    """``x``, ``dt``, ``A``, ``B``, ``C`` and ``D``: float32, heads of 6 channels, 8 states."""
    draw, shape = np.random.default_rng(seed), segment_ids(rows).shape
    arrays = {
        "x": draw.standard_normal((*shape, heads, 6)),
        "dt": draw.uniform(0.01, 0.5, (*shape, heads)),
        "A": -draw.uniform(0.1, 2.0, heads),
        "B": draw.standard_normal((*shape, groups, 8)),
        "C": draw.standard_normal((*shape, groups, 8)),
        "D": draw.standard_normal(heads),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def out_and_gradients(function: Callable[..., jax.Array], arrays: Arrays, ids: np.ndarray, dout: np.ndarray) -> Any:
    """``out`` and the gradient of each operand of ``function(**operands, segment_ids=ids)``, compiled once a shape."""
    return _both(function, arrays, jnp.asarray(ids, jnp.int32), dout)


@partial(quick_jit, static_argnums=0)
def _both(function: Callable[..., jax.Array], arrays: dict[str, jax.Array], ids: jax.Array, dout: jax.Array) -> Any:
    out, pullback = jax.vjp(lambda given: function(**given, segment_ids=ids), arrays)
    return {"out": out, **pullback(dout.astype(out.dtype))[0]}


def delta_rule_alone(
    arrays: Arrays, ids: np.ndarray, dout: np.ndarray, arithmetic: reference.WorkingDtype = "float64"
) -> Arrays:
    """``out`` and the gradients by the reference, on each document alone."""
    group = arrays["v"].shape[2] // arrays["q"].shape[2]
    total = {"out": np.zeros(dout.shape)} | {name: np.zeros(x.shape) for name, x in arrays.items()}
    for row, start, stop in segments(ids):
        here, bounds = (row, slice(start, stop)), [0, stop - start]
        mine = {name: np.repeat(x[here], group, axis=1) if name in "qk" else x[here] for name, x in arrays.items()}
        total["out"][here] = reference.gated_delta_rule(**mine, cu_seqlens=bounds, dtype=arithmetic)
        found = reference.gated_delta_rule_vjp(**mine, cu_seqlens=bounds, dout=dout[here], dtype=arithmetic)
        for name, gradient in found.items():
            if name in "qk":
                gradient = gradient.reshape(stop - start, -1, group, gradient.shape[-1]).sum(axis=2)
            total[name][here] = gradient
    return total


def budgets(found: Any, alone: Callable[..., Arrays], arrays: Arrays, ids: np.ndarray, dout: np.ndarray) -> Any:
    """Returns the error of each result in float32 error budgets against the float64 reference; at most 1 passes."""
    exact, rounded = (alone(arrays, ids, dout, arithmetic) for arithmetic in ("float64", "float32"))
    scale = max(np.abs(x).max() for x in exact.values())
    over = {
        name: over_budget(np.asarray(x, np.float64), exact[name], rounded[name], scale=scale, dtype="float32")
        for name, x in found.items()
    }
    return {name: float(x.max()) for name, x in over.items()}
