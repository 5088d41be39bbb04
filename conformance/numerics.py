"""The one error budget of the suite: how far a result may lie from the float64 oracle. No test has its own tolerance.

    budget = 2 * |rounded - oracle| + FLOOR(dtype) * epsilon(dtype) * scale          (maxima over the array)

``rounded`` is the reference itself with every operation rounded to the working dtype
(`packing_core.reference.arithmetic`): the error that an honest implementation of that dtype makes. It is doubled
because another order of the same operations may make as large an error in the other direction. The floor is for results
at which the rounded reference happens to make no error (a one-token document, a gradient that cancels); its scale is
the largest magnitude among everything the call returns, because such a result is a difference of terms of that size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from packing_core.protocol import Array

# distance from 1 to the next number of the dtype
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FACTOR = 2.0
# Narrow dtypes are accumulated in float32, so the order of a sum does not show in them. It shows in float32: by about
# the square root of the number of terms, 64 in a head of usual width, and twice where two such sums cancel.
FLOOR = {"float32": 16.0, "float16": 1.0, "bfloat16": 1.0}


def largest(arrays: Iterable[Array]) -> float:
    """The largest magnitude in any of the arrays, 0 if there is none."""
    return max((float(np.abs(x).max(initial=0.0)) for x in arrays), default=0.0)


def over_budget(result: Array, oracle: Array, rounded: Array, *, scale: float, dtype: str) -> Array:
    """Every error of ``result`` as a multiple of the budget: at most 1 passes; infinite where it is not finite."""
    budget = FACTOR * largest([rounded - oracle]) + FLOOR[dtype] * EPSILON[dtype] * scale
    error = np.abs(result - oracle)
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.where(error == 0, 0.0, error / budget)
    return np.where(np.isfinite(result), over, np.inf)
