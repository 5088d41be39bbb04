"""Seeded operands for segment_attention and what the float64 reference makes of them, one segment at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.draws import Rows, round_to, segment_ids
from packing_core import reference
from packing_core.budget import over_budget
from packing_core.protocol import segments

Arrays = dict[str, np.ndarray]


class Case:
    """Packed rows in the notation of ``conformance.draws`` (a negative length is padding), operands and cotangents.

    Attributes:
        ids: int32 [B, S].
        operands: float32 ``q``, ``k``, ``v`` and, with ``sinks``, one logit per head; all values of ``dtype``.
        dout: [B, S, N, E], not 0 at padding. dlse: [B, S, N].
    """

    def __init__(
        self,
        rows: Rows,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 16,
        value_width: int | None = None,
        dtype: str = "float32",
        sinks: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.ids = segment_ids(rows).astype(np.int32)
        self.dtype, self.options = dtype, options
        value_width = value_width or width

        def normal(*shape: int) -> np.ndarray:
            return round_to(dtype, rng.standard_normal(shape))

        batch = self.ids.shape
        shapes = {"q": (heads, width), "k": (kv_heads, width), "v": (kv_heads, value_width)}
        self.operands = {name: normal(*batch, *shape) for name, shape in shapes.items()}
        if sinks:
            self.operands["sinks"] = normal(heads)
        self.dout = normal(*batch, heads, value_width)
        self.dlse = rng.standard_normal((*batch, heads)).astype(np.float32)

    def jax_operands(self) -> dict[str, Any]:
        return {name: jnp.asarray(x, self.dtype) for name, x in self.operands.items()}

    def expected(self, arithmetic: str = "float64", *, lse: bool = False) -> Arrays:
        """``out``, ``lse`` and the gradients of the operands, 0 (lse: -inf) at padding."""
        found: Arrays = {name: np.zeros(x.shape) for name, x in self.operands.items()}
        found["out"] = np.zeros(self.dout.shape)
        found["lse"] = np.full(self.dlse.shape, -np.inf)
        per_head = {"sinks": self.operands["sinks"]} if "sinks" in self.operands else {}
        options: Any = {**self.options, **per_head, "dtype": arithmetic}
        for row, start, stop in segments(self.ids):
            here, bounds = (row, slice(start, stop)), [0, stop - start]
            q, k, v = (self.operands[name][here] for name in "qkv")
            found["out"][here] = reference.attention(q, k, v, bounds, **options)
            found["lse"][here] = reference.attention_lse(q, k, bounds, **options)
            dlse = self.dlse[here] if lse else None
            gradients = reference.attention_vjp(q, k, v, bounds, self.dout[here], dlse=dlse, **options)
            for name in "qkv":
                found[name][here] = gradients[name]
            if per_head:
                found["sinks"] += gradients["sinks"]
        return found

    def worst(self, found: dict[str, Any], *, lse: bool = False) -> dict[str, float]:
        """Returns the error of each array of ``found`` in error budgets against the oracle; at most 1 passes."""
        exact, rounded = self.expected(lse=lse), self.expected(self.dtype, lse=lse)
        scale = max(np.abs(exact[name]).max() for name in found if name != "lse")
        real = self.ids != 0
        over = {}
        for name, x in found.items():
            arrays = [np.asarray(y, np.float64) for y in (x, exact[name], rounded[name])]
            if name == "lse":
                assert (arrays[0][~real] == -np.inf).all()
                arrays = [y[real] for y in arrays]
            over[name] = float(over_budget(*arrays, scale=scale, dtype=self.dtype).max())
        return over


def assert_same(found: Any, wanted: Any) -> None:
    """Two float32 computations of one thing, in any tree: they differ by at most 1e-5 of the largest magnitude."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()
        assert error <= 1e-5, error
