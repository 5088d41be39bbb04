"""Documents that share their beginnings, each computed as a document of its own: the oracle of forests.

A forest of segments -> the token numbers of each path from a root to a leaf -> a function of one document, called on
each path. An output of a token that several paths share is that of any of them, since no later token changes it. A
gradient is the sum over the paths; what comes in at a shared token enters on one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packing_core.reference.layout import Boundaries, segment_slices
from packing_core.storage.forest import check_parents, leaves, lineage

Int64 = npt.NDArray[np.int64]


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
    """Yields the documents of segments, of which each may continue another.

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
