"""The one error budget: how far a result may lie from what is right. No judge and no test has a tolerance of its own.

    budget = 2 * |rounded - exact| + FLOOR(dtype) * epsilon(dtype) * scale          (maxima over the array)

``rounded`` is what an honest implementation computes in the working dtype: the reference with every operation rounded
to it (`packing_core.reference.arithmetic`; for the gradients of a model's loss, the worse of two such roundings), or
the documents of an audit alone, as rounding changes them. That error is doubled because another order of the same
operations may make as large an error in the other direction. The floor is for results at which rounding happens to
make no error (a one-token document, a gradient that cancels); its scale is the largest magnitude among everything that
was computed, of a gradient the largest among gradients, because such a result is a difference of terms of that size.

Judges that cannot run documents in two roundings (of a stack's batch, of somebody's trainer) allow ``FLOAT32`` or
``NARROW`` of the largest value. Arrays of a framework come in as :class:`Difference`, which each framework measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from packing_core.protocol.data import Array

# distance from 1 to the next number of the dtype
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FACTOR = 2.0
# Narrow dtypes are accumulated in float32, so the order of a sum does not show in them. It shows in float32: by about
# the square root of the number of terms, 64 in a head of usual width, and twice where two such sums cancel.
FLOOR = {"float32": 16.0, "float16": 1.0, "bfloat16": 1.0}
# Of the largest gradient. A smaller one is compared with this much, because it may be a difference of terms as large as
# the largest, and float32 rounds these by 1e-7.
SMALL = 1e-2
MOVED = 0.01  # at least what a probe must do to its own document, and twice what it does to another
FLOAT32, NARROW = 1e-4, 2e-2  # what errors may be in float32, and in fewer bits, where nothing measures rounding
_TINY = float(np.finfo(np.float32).tiny)


class Difference(NamedTuple):
    """Two arrays, compared.

    Attributes:
        error: max |got - want|; infinite where something is missing or not finite.
        largest: max |want|.
    """

    error: float
    largest: float

    def relative(self, scale: float = 0.0) -> float:
        """Returns the error relative to the largest value.

        Args:
            scale: of the gradients of all parameters; one far below it is compared with ``SMALL`` times the scale.
        """
        return self.error / max(self.largest, SMALL * scale, _TINY)


def difference(got: Array, want: Array) -> Difference:
    """Compares two arrays of numpy."""
    error = float(np.abs(got - want).max())
    return Difference(error if np.isfinite(error) else float("inf"), float(np.abs(want).max()))


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


def floor_of(epsilon: float) -> float:
    """Returns the error allowed relative to the largest value, where rounding happens to make none.

    Args:
        epsilon: of the working dtype; losses and norms are in float32 at most.
    """
    if epsilon <= EPSILON["float32"]:
        return FLOOR["float32"] * EPSILON["float32"]
    return FLOOR["bfloat16"] * epsilon


def half_of(epsilon: float) -> float:
    """Returns half the digits of a dtype, which is more than the order of sums and the shape of products change."""
    return math.sqrt(max(epsilon, EPSILON["float32"]))


def moves_allowed(noise: float, rounding: float, floor: float, epsilon: float) -> float:
    """Returns how far documents may move when others are replaced: as far as rounding goes, half the digits at most.

    Args:
        noise: how far they move when nothing is replaced.
        rounding: how far rows of an unpacked batch, which cannot see each other, move each other.
        floor: of the dtype where these do, 0 elsewhere.
        epsilon: of the dtype.
    """
    return min(FACTOR * max(noise, rounding) + floor, half_of(epsilon))


def noticed(moved: float, leak: float) -> bool:
    """Returns whether a probe did enough to its own document that what it did to others says something."""
    return moved > max(MOVED, 2 * leak)


def by_largest(gradients: Mapping[str, Difference]) -> float:
    """Returns the largest error relative to the largest gradient of all; 0 if there is none."""
    scale = max((each.largest for each in gradients.values()), default=0.0)
    return max((each.error for each in gradients.values()), default=0.0) / max(scale, _TINY)


def worst_gradient(gradients: Mapping[str, Difference]) -> tuple[float, str]:
    """Returns the largest relative error of a parameter's gradient, and its name."""
    scale = max(each.largest for each in gradients.values())
    errors = {name: each.relative(scale) for name, each in gradients.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def worst_by_bound(
    gradients: Mapping[str, Difference], floor: float, *rounded: Mapping[str, Difference]
) -> tuple[float, float, str]:
    """Returns the error largest relative to its parameter's bound, that bound, and the parameter's name.

    A parameter may be off by twice what rounding does to itself, and by ``floor`` of the largest gradient of all: one
    whose gradient is zero in exact arithmetic, and all rounding in any other, decides on nothing but itself.

    Args:
        gradients: against the documents alone, by parameter.
        floor: relative to the largest gradient.
        rounded: those of the documents alone as rounding changes them, in one arrangement or several.
    """
    scale = max(each.largest for each in gradients.values())
    worst = 0.0, 0.0, ""
    for name, each in gradients.items():
        error, rounding = each.relative(scale), max(by_name[name].relative(scale) for by_name in rounded)
        allowed = FACTOR * rounding + floor * scale / max(each.largest, SMALL * scale, _TINY)
        if not worst[2] or error * worst[1] > worst[0] * allowed:
            worst = error, allowed, name
    return worst
