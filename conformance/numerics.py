"""The one error budget of the suite: how far a result may lie from the float64 oracle. No test has its own tolerance.

    budget = 2 * |rounded - oracle| + FLOOR * epsilon(dtype) * scale          (maxima over the array)

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
FLOOR = 4.0


def largest(arrays: Iterable[Array]) -> float:
    """The largest magnitude in any of the arrays, 0 if there is none."""
    return max((float(np.abs(x).max(initial=0.0)) for x in arrays), default=0.0)


def over_budget(result: Array, oracle: Array, rounded: Array, *, scale: float, dtype: str) -> float:
    """The error of ``result`` as a multiple of its budget: at most 1 passes; infinite when it is not finite."""
    if not np.isfinite(result).all():
        return np.inf
    error = largest([result - oracle])
    budget = FACTOR * largest([rounded - oracle]) + FLOOR * EPSILON[dtype] * scale
    if error == 0:
        return 0.0
    return error / budget if budget > 0 else np.inf
