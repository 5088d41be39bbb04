"""The arithmetic policy of the reference: float64 throughout, or rounded to a working dtype after every operation.

Every function of `packing_core.reference` is written once, in plain numpy, and starts by passing its operands through
`operands`. For ``dtype="float64"`` they come back as plain arrays and the function is the oracle. For a narrower dtype
they come back as `Rounded` arrays: numpy hands each of their operations to the class, which computes it in float32 and
rounds the result to the working dtype. The function's results go back through `plain`.

    caller's arrays --operands(dtype)--> float64 or Rounded --the formula--> results --plain--> float64

What counts as one operation is what a matrix unit or a reduction does in one go: a matrix product or a sum accumulates
in float32 and is rounded once, everything elementwise is rounded each time. So the distance between the two runs is the
error that an honest kernel of that dtype makes, which is what an error budget is measured in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packing_core.errors import PackingError

Array = npt.NDArray[Any]
WorkingDtype = Literal["float64", "float32", "float16", "bfloat16"]


def round_to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round float32 values to the nearest bfloat16, ties to even; the result is still stored as float32.

    A bfloat16 is the upper half of a float32, so half a unit of the upper half, less one where its last bit is even, is
    added to the bits and the lower half is cleared. NaN stays NaN, and what lies past the largest finite bfloat16
    becomes infinite.
    """
    bits = np.asarray(x, dtype=np.float32, order="C").view(np.uint32)  # keeps 0-d arrays 0-d
    last_kept_bit = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + last_kept_bit) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))


def round_to_float16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round float32 values to the nearest float16, ties to even; the result is still stored as float32."""
    with np.errstate(over="ignore"):  # a value past the largest float16 becomes infinite, as on a device
        return x.astype(np.float16).astype(np.float32)


_ROUNDING: dict[str, Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]] = {
    "float32": lambda x: x,
    "float16": round_to_float16,
    "bfloat16": round_to_bfloat16,
}


class Rounded(np.ndarray[Any, np.dtype[np.float32]]):
    """A float32 array whose every arithmetic result is rounded to the working dtype named by `dtype_name`."""

    dtype_name: str

    def __array_finalize__(self, other: Any) -> None:
        self.dtype_name = getattr(other, "dtype_name", "float32")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        result = self._round(getattr(ufunc, method)(*(_in_float32(x) for x in inputs), **kwargs))
        if out is None:
            return result
        out[0][...] = result  # an augmented assignment
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # numpy's own functions (where, concatenate, ...) forget the subclass; what they return stays under the policy.
        return self._round(super().__array_function__(function, types, args, kwargs))

    def _round(self, result: Any) -> Any:
        if not np.issubdtype(np.asarray(result).dtype, np.floating):
            return result
        rounded = _ROUNDING[self.dtype_name](np.asarray(result, dtype=np.float32)).view(Rounded)
        rounded.dtype_name = self.dtype_name
        return rounded


def _in_float32(x: Any) -> Any:
    """Strip the policy from one operand; integer arrays become float32 too, or numpy would widen to float64."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x, dtype=np.float32) if x.dtype.kind in "iuf" else np.asarray(x)
    return x


def operands(dtype: WorkingDtype, *arrays: npt.ArrayLike) -> list[Array]:
    """Bring arrays under the policy of ``dtype``: float64 arrays, or `Rounded` ones already rounded to the dtype.

    Raises:
        PackingError: the dtype is not one of the working dtypes.
    """
    if dtype == "float64":
        return [np.asarray(x, dtype=np.float64) for x in arrays]
    if dtype not in _ROUNDING:
        raise PackingError(
            f'working dtype {dtype!r} is unknown: pass one of "float64", {", ".join(map(repr, _ROUNDING))}'
        )
    policy = np.zeros((), np.float32).view(Rounded)
    policy.dtype_name = dtype
    return [policy._round(np.asarray(x, dtype=np.float32)) for x in arrays]


def operand(dtype: WorkingDtype, array: npt.ArrayLike | None) -> Array | None:
    """Bring an array under the policy; None, for an operand that is left out, stays None."""
    return None if array is None else operands(dtype, array)[0]


def plain(x: Array) -> npt.NDArray[np.float64]:
    """Take a result out of the policy: a float64 array with the same values."""
    return np.array(x, dtype=np.float64, subok=False)


def plain_gradients(**gradients: Array | None) -> dict[str, npt.NDArray[np.float64]]:
    """Take gradients out of the policy, those of operands that were left out (None) aside."""
    return {name: plain(gradient) for name, gradient in gradients.items() if gradient is not None}


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, written with tanh so that it never overflows."""
    return 0.5 * (np.tanh(0.5 * x) + 1.0)


def log_softmax(x: Array) -> Array:
    """Over the last axis; the largest value comes off first, or exp would overflow."""
    largest = x.max(axis=-1, keepdims=True)
    logs: Array = x - (np.log(np.exp(x - largest).sum(axis=-1, keepdims=True)) + largest)
    return logs
