"""Checks of shapes and boundaries that every reference function shares, and the documents of segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from packing_core.errors import LayoutError
from packing_core.reference.arithmetic import Array
from packing_core.storage.arrays import Int64
from packing_core.storage.forest import check_parents, leaves, lineage

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


@dataclass(frozen=True)
class DocumentPath:
    """One path from a root to a leaf.

    Attributes:
        tokens: int64 [L], where its tokens stand.
        own: bool [L], the tokens of which no earlier path has taken the output: every token is one path's own.
    """

    tokens: Int64
    own: npt.NDArray[np.bool_]


def documents(cu_seqlens: Boundaries, tokens: int, parents: npt.ArrayLike | None = None) -> Iterator[DocumentPath]:
    """Yields the documents of segments, of which each may continue another: the paths from a root to a leaf.

    An output of a token that several paths share is that of any of them, since no later token changes it. A gradient is
    the sum over the paths; what comes in at a shared token enters on one of them.

    Args:
        cu_seqlens: ``[S+1]`` boundaries, strictly rising where there are parents.
        tokens: length of the token axis.
        parents: ``[S]``, the segment that each one continues, -1 for none; None if no segment continues another.

    Raises:
        LayoutError: the boundaries are wrong, or the parents make no forest.
    """
    segments = [np.arange(part.start, part.stop) for part in segment_slices(cu_seqlens, tokens)]
    if parents is None:
        yield from (DocumentPath(segment, np.ones(len(segment), np.bool_)) for segment in segments)
        return
    above = check_parents(parents, len(segments))
    seen = np.zeros(tokens, np.bool_)
    for leaf in leaves(above).tolist():
        path = np.concatenate([segments[s] for s in lineage(above, leaf)])
        yield DocumentPath(path, ~seen[path])
        seen[path] = True
