"""Arrow list arrays as flat buffers and offsets, by the methods that pyarrow gives them; pyarrow is never imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from packing_core.errors import LayoutError, first_line
from packing_core.storage.arrays import Array, as_array


def is_arrow(given: Any) -> bool:
    """Returns whether ``given`` is an object of pyarrow; other libraries have attributes of the same names."""
    return any(kind.__module__.partition(".")[0] == "pyarrow" for kind in type(given).__mro__)


def lists_of(given: Any, name: str) -> list[tuple[Array, Array]]:
    """Values and offsets of each chunk with a list in it, views where the type allows it.

    Raises:
        LayoutError: it is no array of lists of numbers, or holds a null.
    """
    kind = type(given).__name__
    if kind == "ChunkedArray":
        chunks = given.chunks
    elif hasattr(given, "type") and hasattr(given, "null_count"):
        chunks = [given]
    else:
        raise LayoutError(f'{name} is a pyarrow {kind}: pass one column of it, table["input_ids"]')
    first, found = 0, []
    for chunk in chunks:
        if len(chunk):
            found.append(_lists(chunk, name, first))
        first += len(chunk)
    return found


def _lists(array: Any, name: str, first: int) -> tuple[Array, Array]:
    """Reads one array, whose first list is number ``first`` of all."""
    if array.null_count:
        row = first + _first_null(array)
        raise LayoutError(f"{name}[{row}] is null ({array.null_count:,} nulls in all): drop nulls with drop_null()")
    kind = type(array).__name__
    if kind == "FixedSizeListArray":
        values = array.flatten()
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size
    elif kind in ("ListArray", "LargeListArray"):
        offsets = array.offsets.to_numpy()
        values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        offsets = offsets - offsets[0] if offsets[0] else offsets
    else:
        raise LayoutError(f"{name} is an Arrow array of {array.type}: cast it to list, large_list or fixed_size_list")
    if values.null_count:
        home = int(np.searchsorted(offsets, _first_null(values), side="right")) - 1
        raise LayoutError(
            f"{name}[{first + home}] holds a null token ({values.null_count:,} in all): fill nulls with fill_null()"
        )
    try:
        numbers = values.to_numpy(zero_copy_only=False)
    except Exception as error:  # of pyarrow's own kinds: a type that NumPy has not
        raise LayoutError(f"{name} has Arrow values of {values.type}: pass numbers ({first_line(error)})") from None
    if not len(numbers) and numbers.dtype == object:  # of type null, as datasets makes of empty lists alone
        numbers = np.zeros(0, np.int64)
    return as_array(numbers, f"{name}.values"), offsets


def _first_null(array: Any) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
