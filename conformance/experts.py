"""Routed experts: cases, the truth of each document beside the packed answer, and what is checked.

The oracle is `packing_core.reference.experts`. At padding the arguments hold what a model would have there: any
numbers, and choices of experts that must not be followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from conformance.draws import Rows, generator, round_to, segment_ids
from conformance.judge import LARGE, Judge
from conformance.oracle import Expected, Result
from packing_core import reference
from packing_core.protocol import Array, segments
from packing_core.reference import ExpertActivation, WorkingDtype

FULL: Rows = ((7, 16, 1, 20, 4), (30, 18))
PADDED: Rows = ((-3, 9, 13, -2, 1, 14, -6), (41, -7))
SILU = ExpertActivation()
CLAMPED = ExpertActivation(alpha=1.702, limit=0.8, offset=1.0)
UNGATED = ExpertActivation("relu2", gated=False)
PER_TOKEN = ("x", "weights")


@dataclass(frozen=True)
class ExpertsCase:
    """One call of `Backend.experts`.

    Attributes:
        biased: whether both products have a bias.
        routing: "drawn", "one" (every token's first choice is expert 0) or "few" (most experts are chosen by nobody).
    """

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
        """``x``, ``indices``, ``weights``, ``up``, ``down``, biases, and ``dout`` (zero at padding)."""
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


def ask(judge: Judge, case: ExpertsCase, dtype: str, changed: Mapping[str, Array] | None = None) -> Result:
    """Output and gradients of a case, some of whose arrays may be exchanged."""
    given: dict[str, Any] = {**case.arguments(dtype), **(changed or {}), "segment_ids": segment_ids(case.rows)}
    taken = {"biased_experts"} if case.biased else set()
    taken |= {"clamped_experts"} if case.activation.limit is not None else set()
    taken |= set() if case.activation.gated else {"ungated_experts"}
    out, found = judge.ask("experts", **given, activation=case.activation, dtype=dtype, options=taken)
    return np.asarray(out, np.float64), {name: np.asarray(x, np.float64) for name, x in found.items()}


def check(judge: Judge, case: ExpertsCase, dtype: str | None = None, *, only: str | None = None) -> None:
    """Output and gradients, or the one that is named, are those of the documents run alone."""
    dtype = dtype or judge.dtype
    judge.within(ask(judge, case, dtype), expected(case, dtype), segment_ids(case.rows), dtype, only=only)


def check_isolated(judge: Judge, case: ExpertsCase) -> None:
    """No segment moves another's output or gradients, also where it crowds into one expert."""

    def call(arguments: Mapping[str, Array]) -> dict[str, Array]:
        out, found = ask(judge, case, judge.dtype, arguments)
        return {"output": out} | {f"gradient of {name}": found[name] for name in PER_TOKEN}

    judge.isolated(
        call, case.arguments(judge.dtype), segment_ids(case.rows),
        change=("x", "weights", "dout"), dtype=judge.dtype, backward=True,
    )  # fmt: skip


def check_padding(judge: Judge, case: ExpertsCase) -> None:
    """Padding routes to no expert: zeros there, and what stands there moves nothing."""
    given, real, large = case.arguments(judge.dtype), segment_ids(case.rows) > 0, LARGE[judge.dtype]
    changed = {"x": given["x"].copy(), "indices": given["indices"].copy(), "dout": given["dout"].copy()}
    changed["x"][~real] = large
    changed["indices"][~real] = np.arange(case.top_k)
    before, found = ask(judge, case, judge.dtype)
    after, moved = ask(judge, case, judge.dtype, changed)
    judge.holds(not before[~real].any(), "the output at padding is not exactly 0")
    judge.holds(not after[~real].any(), "the output at padding is not exactly 0")
    judge.unmoved("the output", before[real], after[real], because="padding changed")
    noise = judge.noise(lambda: ask(judge, case, judge.dtype)[1], found)
    for name, gradient in found.items():
        because = "padding changed"
        judge.unmoved(f"the gradient of {name}", gradient, moved[name], because=because, noise=noise[name])
        if name in PER_TOKEN:
            judge.holds(not gradient[~real].any(), f"the gradient of {name} at padding is not exactly 0")


@cache
def expected(case: ExpertsCase, dtype: WorkingDtype) -> Expected:
    """Output and gradients of every argument, each document run alone."""
    given, ids = case.arguments(dtype), segment_ids(case.rows)
    biases = {name: given[name] for name in ("up_bias", "down_bias") if name in given}

    def compute(arithmetic: WorkingDtype) -> Result:
        out = np.zeros(given["dout"].shape)
        gradients = {name: np.zeros(x.shape) for name, x in given.items() if name not in ("dout", "indices")}
        for row, start, stop in segments(ids):
            here = (row, slice(start, stop))
            arguments: Any = [given[name][here] for name in ("x", "indices", "weights")] + [given["up"], given["down"]]
            options: Any = {"activation": case.activation, "dtype": arithmetic, **biases}
            out[here] = reference.experts(*arguments, **options)
            gradient_of: Any = [*arguments, given["dout"][here]]
            for name, x in reference.experts_vjp(*gradient_of, **options).items():
                gradients[name][here if name in PER_TOKEN else ...] += x
        return out, gradients

    return Expected(compute("float64"), compute(dtype))
