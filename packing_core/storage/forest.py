"""Segments that continue other segments: a forest, given by the number of each segment's parent.

``parents[s]`` is the segment at whose end segment s goes on, or -1 if s starts a document of its own. A parent stands
before its children, so numbers rise from root to leaf and there are no cycles. A document is the path from a root to a
leaf; what several documents have in common stands once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from packing_core.errors import LayoutError
from packing_core.storage.arrays import Int64, as_int64

ROOT = -1


def check_parents(parents: ArrayLike, count: int) -> Int64:
    """Returns ``parents`` as int64 [count].

    Raises:
        LayoutError: there is not one entry per segment, or a segment's parent does not stand before it.
    """
    found = as_int64(parents, "parents")
    if found.shape != (count,):
        raise LayoutError(
            f"parents has {len(found)} entries and there are {count} segments: give the number of each segment's "
            f"parent, {ROOT} for none"
        )
    wrong = np.flatnonzero((found < ROOT) | (found >= np.arange(count)))
    if len(wrong):
        s = int(wrong[0])
        raise LayoutError(
            f"parents[{s}] is {found[s]}: a parent stands before its children, so it is {ROOT} (none) or a segment "
            f"from 0 to {s - 1}"
            if s
            else f"parents[0] is {found[0]}: no segment stands before the first, so it has no parent ({ROOT})"
        )
    return found


def offsets(parents: Int64, lengths: Int64) -> Int64:
    """int64 [S]: tokens of all ancestors of each segment, the position of its first token in its document.

    >>> offsets(np.array([-1, 0, 1, 0, -1]), np.array([4, 2, 3, 5, 6]))
    array([0, 4, 6, 4, 0])
    """
    before = np.zeros(len(parents), np.int64)
    above = parents.copy()
    while (has := above >= 0).any():
        before[has] += lengths[above[has]]
        above[has] = parents[above[has]]
    return before


def depth_of(parents: Sequence[int] | Int64) -> int:
    """The most segments that one continues, one after the other.

    >>> depth_of([-1, 0, 1, 0, -1])
    2
    """
    depths: list[int] = []
    for above in parents:
        depths.append(depths[above] + 1 if above >= 0 else 0)
    return max(depths, default=0)


def leaves(parents: Int64) -> Int64:
    """int64: the segments that no other continues, rising; each ends a document.

    >>> leaves(np.array([-1, 0, 1, 0, -1]))
    array([2, 3, 4])
    """
    continued = np.zeros(len(parents), np.bool_)
    continued[parents[parents >= 0]] = True
    return np.flatnonzero(~continued)


def lineage(parents: Sequence[int] | Int64, segment: int) -> list[int]:
    """The segments from the root down to ``segment``, itself included.

    >>> lineage([-1, 0, 1, 0, -1], 2)
    [0, 1, 2]
    """
    path = [segment]
    while (above := int(parents[path[-1]])) != ROOT:
        path.append(above)
    return path[::-1]
