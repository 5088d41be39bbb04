"""The base of mutants: the reference backend with one method overridden, and the requirement that rejects it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from conformance.reference import Reference

MUTANTS: dict[str, type[Mutant]] = {}


class Mutant(Reference):
    """Subclass as ``class Name(Mutant, rejected_by="ISO-01")``; the docstring says what is broken."""

    rejected_by: ClassVar[str]

    def __init_subclass__(cls, *, rejected_by=None, **kwargs):
        super().__init_subclass__(**kwargs)
        if rejected_by is not None:  # else a base of several mutants
            cls.rejected_by = rejected_by
            MUTANTS[cls.__name__] = cls

    @classmethod
    def breaks(cls):
        """Says in one line what is broken."""
        return (cls.__doc__ or "").strip().splitlines()[0]


def starts(segment_ids):
    """bool ``[B, S]``: the first token of every run of equal ids."""
    found = np.ones(segment_ids.shape, bool)
    found[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return found


def padding_joined(segment_ids):
    """Segment ids in which padding belongs to the segment after it, or at the end to the one before."""
    joined = segment_ids.copy()
    for row in joined:
        for t in reversed(range(len(row) - 1)):
            row[t] = row[t] or row[t + 1]
        for t in range(1, len(row)):
            row[t] = row[t] or row[t - 1]
    return joined


def rows_alike(segment_ids):
    """Segment ids in which every row has those of the first."""
    return np.broadcast_to(segment_ids[:1], segment_ids.shape).copy()
