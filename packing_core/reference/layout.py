"""Checks and small helpers about segments that every reference function shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array

Boundaries = Sequence[int] | npt.NDArray[np.integer]


def segment_slices(cu_seqlens: Boundaries, tokens: int) -> Iterator[slice]:
    """Yield the token range of each non-empty segment in order.

    Args:
        cu_seqlens: ``[S+1]`` cumulative boundaries that start at 0, never fall and end at ``tokens`` or before it;
            tokens after the last boundary belong to no segment.
        tokens: length of the token axis.

    Raises:
        LayoutError: the boundaries break one of these rules.
    """
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size == 0 or not np.issubdtype(bounds.dtype, np.integer):
        raise LayoutError(
            f"cu_seqlens must be integers of shape [S+1] that start with 0, got shape {bounds.shape} of {bounds.dtype}"
        )
    falls = np.flatnonzero(np.diff(bounds.astype(np.int64)) < 0)
    if falls.size:
        where = int(falls[0])
        raise LayoutError(
            f"cu_seqlens falls from {bounds[where]} to {bounds[where + 1]} at index {where + 1}: "
            "boundaries are cumulative, so pass np.cumsum([0, *lengths])"
        )
    if bounds[0] != 0 or bounds[-1] > tokens:
        raise LayoutError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]} over {tokens} tokens: it must start at 0 and end at or "
            f"before {tokens}"
        )
    return (slice(start, stop) for start, stop in pairwise(bounds.tolist()) if stop > start)


def check_shape(name: str, x: Array | None, shape: tuple[int | None, ...], legend: str) -> None:
    """Compare a shape with the expected one, in which None stands for any size; an operand left out has any shape.

    Raises:
        LayoutError: they differ; ``legend`` names the axes in the message.
    """
    if x is None:
        return
    fits = x.ndim == len(shape) and all(want is None or have == want for have, want in zip(x.shape, shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise LayoutError(f"{name} must have shape {legend} = ({wanted}), got {x.shape}")
