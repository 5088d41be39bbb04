"""Converts array-likes to native NumPy arrays; what cannot be read raises an error that names it.

Lists, arrays of any byte order, tensors and columns of other libraries enter ``packing_core`` here, so the rules about
them are written once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from packing_core.errors import LayoutError, RowIndexError, first_line

Array = NDArray[Any]
Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
AnyArray = TypeVar("AnyArray", bound=NDArray[Any])

NUMBERS = "iufb"  # dtype kinds
_WANTED = {"iu": "integers", "i": "signed integers", "b": "bool"}


def as_array(values: Any, what: str, kinds: str = NUMBERS) -> Array:
    """``values`` as an array of one of the dtype kinds in native byte order; an array that is one already is no copy.

    Args:
        values: an array, a tensor on the CPU, a list, or anything else that NumPy reads.
        what: what an error calls it.
        kinds: the dtype kinds that are taken.

    Raises:
        LayoutError: NumPy cannot read it, some of it is null or masked, or it is of another kind.
    """
    wanted = _WANTED.get(kinds, "numbers")
    if isinstance(values, np.ma.MaskedArray):
        raise LayoutError(f"{what} is a masked array: fill it with filled(), or drop what is masked")
    try:
        array = np.asarray(values)
    except Exception as error:  # what reads it is another library's __array__, which may raise anything
        raise LayoutError(
            f"{what} is not one flat sequence of numbers: {first_line(error)}; pass {wanted} in one array"
        ) from None
    if array.dtype.kind not in kinds:
        raise LayoutError(_why_not(array, what, wanted))
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _why_not(array: Array, what: str, wanted: str) -> str:
    if array.dtype.kind == "O":
        for place, value in enumerate(array.reshape(-1).tolist()):
            if value is None:
                return f"{what} holds a null at {place}: drop or fill it"
            if type(value) is int and not -(2**63) <= value < 2**64:
                return f"{what} holds {value} at {place}, which does not fit 64 bits: pass smaller numbers"
    return f"{what} has dtype {array.dtype}: pass {wanted}"


def as_int64(given: Any, what: str) -> NDArray[np.int64]:
    """``given`` as an int64 array of one dimension.

    Raises:
        LayoutError: it is not of integers that int64 holds, or not one-dimensional.
    """
    array = as_array(given, what)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise LayoutError(f"{what} is {array.dtype} {list(array.shape)}: pass integers in one dimension")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise LayoutError(f"{what} holds {array.max():,}, which does not fit int64: pass smaller numbers")
    return array.astype(np.int64, copy=False)


def read_only(array: AnyArray) -> AnyArray:
    """A view of the array that cannot be written; the array itself stays as it is."""
    view = array.view()
    view.flags.writeable = False
    return view


def frozen(array: AnyArray) -> AnyArray:
    """The same array, a new one of the caller's, which cannot be written from here on."""
    array.flags.writeable = False
    return array


def row_number(index: Any, count: int, what: str = "row") -> int:
    """``index`` as a number from 0 to ``count`` - 1; negative ones count from the end.

    Raises:
        RowIndexError: it is out of range, or no integer.
    """
    try:
        return range(count)[operator.index(index)]
    except (TypeError, IndexError):
        raise RowIndexError(
            f"there is no {what} {index!r}: {what}s are numbered 0 to {count - 1:,} and chosen by integers"
        ) from None


def check_names(columns: Any, reserved: Collection[str]) -> None:
    """Raises:
    LayoutError: ``columns`` is no mapping, a name is no string, or it is ``reserved``.
    """
    if not hasattr(columns, "items"):
        raise LayoutError(f'columns is a {type(columns).__name__}: pass a mapping, columns={{"reward": [..]}}')
    for name in columns:
        if not isinstance(name, str):
            raise LayoutError(f"columns has the name {name!r}: pass names that are strings")
        if name in reserved:
            raise LayoutError(f"columns[{name!r}] has the name of a PackedBatch field: choose another name")


SAMPLED = 256


def sampled(count: int) -> list[int]:
    """Numbers of at most 256 of ``count`` documents, evenly spaced from the first to the last.

    Their contents tell data that were exchanged or shuffled from the same ones.
    """
    numbers: list[int] = np.unique(np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64)).tolist()
    return numbers


def digest(documents: Iterable[tuple[int, int, Any]]) -> str:
    """Digests pieces (document number, first token, content): the same for lists and arrays of the same numbers."""
    hashed = blake2b(digest_size=16)
    for number, start, content in documents:
        columns = content if isinstance(content, Mapping) else {"input_ids": content}
        for name in sorted(columns, key=str):
            array = as_array(columns[name], f"{name} of document {number}")
            wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
            hashed.update(f"{number} {start} {name} {wide.shape} {wide.dtype}".encode())
            hashed.update(wide.tobytes())
    return hashed.hexdigest()
