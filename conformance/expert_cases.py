"""Routed experts: cases, and the truth of each document by itself.

The oracle is `packing_core.reference.experts`. At padding the arguments hold what a model would have there: any
numbers, and choices of experts that must not be followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from conformance.draws import OperationCase, Rows, generator, round_to, segment_ids
from conformance.oracle import Expected, Result
from conformance.pairwise import Needs
from packing_core import reference
from packing_core.protocol import Array, segments
from packing_core.reference import ExpertActivation, WorkingDtype

FULL: Rows = ((7, 16, 1, 20, 4), (30, 18))
PADDED: Rows = ((-48,), (-3, 9, 13, -2, 1, 14, -6), (41, -7))
ALIKE: Rows = ((16, 16, 16), (16, -16, 16))
LAYOUTS = {"alike": ALIKE, "full": FULL, "padded": PADDED, "one document": ((48,),), "none": ((-48,),)}
SILU = ExpertActivation()
CLAMPED = ExpertActivation(alpha=1.702, limit=0.8, offset=1.0)
NEVER_CLAMPED = replace(CLAMPED, limit=7.0)  # gpt-oss's; rounding moves a gradient where values are at the limit
UNGATED = ExpertActivation("relu2", gated=False)
PER_TOKEN = ("x", "weights")


@dataclass(frozen=True)
class ExpertsCase(OperationCase):
    """One call of `Backend.experts`.

    Attributes:
        biased: whether both products have a bias.
        routing: "drawn", "one" (every token's first choice is expert 0) or "few" (most experts are chosen by nobody).
    """

    method = "experts"
    isolated = ("x", "weights", "dout")
    padded = ("x", "indices")
    rows: Rows = PADDED
    width: int = 16
    inner: int = 16
    experts: int = 8
    top_k: int = 3
    activation: ExpertActivation = SILU
    biased: bool = False
    routing: str = "drawn"
    seed: int = 0

    def arguments(self, dtype: str) -> dict[str, Array]:
        draw, ids = generator(self), segment_ids(self.rows)
        outer = 2 * self.inner if self.activation.gated else self.inner
        arrays = {
            "x": draw.standard_normal((*ids.shape, self.width)),
            "weights": draw.uniform(0.1, 1.0, (*ids.shape, self.top_k)),
            "up": draw.standard_normal((self.experts, outer, self.width)) / self.width**0.5,
            "down": draw.standard_normal((self.experts, self.width, self.inner)) / self.inner**0.5,
            "dout": draw.standard_normal((*ids.shape, self.width)) * (ids > 0)[..., None],
        }
        if self.biased:
            arrays["up_bias"] = draw.standard_normal((self.experts, outer))
            arrays["down_bias"] = draw.standard_normal((self.experts, self.width))
        scores = draw.random((*ids.shape, self.experts))
        if self.routing == "one":
            scores[..., 0] = 2.0
        elif self.routing == "few":
            scores[..., self.top_k :] = -1.0
        indices = np.argsort(-scores, axis=-1)[..., : self.top_k]
        return {name: round_to(dtype, x) for name, x in arrays.items()} | {"indices": indices.astype(np.int64)}

    def options(self) -> dict[str, Any]:
        return {"activation": self.activation}

    def taken(self, arrays: Mapping[str, Any]) -> set[str]:
        clamped, ungated = self.activation.limit is not None, not self.activation.gated
        taken = {"biased_experts": self.biased, "clamped_experts": clamped, "ungated_experts": ungated}
        return {name for name, is_taken in taken.items() if is_taken}

    def sound(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Array]:
        """Arguments whose indices are of experts, the first ones where they were of none."""
        indices = arrays["indices"]
        there = (indices >= 0) & (indices < self.experts)
        return {**arrays, "indices": np.where(there, indices, np.arange(self.top_k)).astype(np.int64)}


EXPERT_PAIRS: dict[str, list[Any]] = {
    "rows": [PADDED, ALIKE, ((70, -2, 8), (2,) * 40)],
    "top_k": [3, 1, 8],
    "activation": [SILU, Needs("clamped_experts", NEVER_CLAMPED), Needs("ungated_experts", UNGATED)],
    "biased": [False, Needs("biased_experts", True)],
    "routing": ["drawn", "one", "few"],
}


@cache
def expected(case: ExpertsCase, dtype: WorkingDtype) -> Expected:
    """Output and gradients of every argument, each document run alone."""
    arrays, ids = case.arguments(dtype), segment_ids(case.rows)
    biases = {name: arrays[name] for name in ("up_bias", "down_bias") if name in arrays}

    def compute(arithmetic: WorkingDtype) -> Result:
        out = np.zeros(arrays["dout"].shape)
        gradients = {name: np.zeros(x.shape) for name, x in arrays.items() if name not in ("dout", "indices")}
        for row, start, stop in segments(ids):
            here = (row, slice(start, stop))
            arguments: Any = [arrays[name][here] for name in ("x", "indices", "weights")] + [
                arrays["up"],
                arrays["down"],
            ]
            options: Any = {"activation": case.activation, "dtype": arithmetic, **biases}
            out[here] = reference.experts(*arguments, **options)
            gradient_of: Any = [*arguments, arrays["dout"][here]]
            for name, x in reference.experts_vjp(*gradient_of, **options).items():
                gradients[name][here if name in PER_TOKEN else ...] += x
        return out, gradients

    return Expected(compute("float64"), compute(dtype))
