"""Backends that compute a common beginning once, and something about it wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packing_core.protocol import segments
from tests.conformance.mutants.base import Mutant


class ChildSeesItsSibling(Mutant, rejected_by="TREE-01"):
    """An answer sees every token before it in the row, those of other answers too."""

    def ancestors(self, tree):
        return np.tril(np.ones((len(tree.parents),) * 2, bool))

    def tree_positions(self, tree):
        positions = super().ancestors(tree).sum(axis=1) - 1
        return positions


class GradientOfOneAnswer(Mutant, rejected_by="TREE-01"):
    """The prompt's keys and values get the gradient of the first answer alone."""

    def credited(self, tree):
        others = (tree.owners > tree.owners[tree.owners >= 0].min())[:, None] & (tree.owners < 0)
        return super().credited(tree) & ~others


class FirstTargetsLost(Mutant, rejected_by="TREE-01"):
    """No token predicts the first one of an answer."""

    def pairs(self, tree):
        places, targets = super().pairs(tree)
        inside = tree.owners[places] >= 0
        return places[inside], targets[inside]


class SharesNothing(Mutant, rejected_by="TREE-01"):
    """Every answer has a prompt of its own, and the count of tokens says so."""

    def shared_gradients(self, decoder, documents, *, dtype):
        mean, found, _ = super().shared_gradients(decoder, documents, dtype=dtype)
        return mean, found, sum(len(document.input_ids) for document in documents)


class PositionsRestart(Mutant, rejected_by="TREE-02"):
    """Positions of what follows a beginning count from 0."""

    def tree_positions(self, tree):
        positions = super().tree_positions(tree)
        own = tree.owners >= 0
        first = {owner: positions[tree.owners == owner].min() for owner in np.unique(tree.owners[own])}
        return positions - np.array([first.get(owner, 0) for owner in tree.owners.tolist()])


class WrongParent(Mutant, rejected_by="TREE-02"):
    """The answers to the second prompt continue the first one."""

    def tree(self, documents):
        tree = super().tree(documents)
        ends = np.flatnonzero((tree.owners >= 0) & (tree.parents >= 0) & (tree.owners[tree.parents] < 0))
        first = tree.parents[ends[0]]
        parents = tree.parents.copy()
        parents[ends] = np.where(tree.parents[ends] > first, first, tree.parents[ends])
        return replace(tree, parents=parents)


# -- states that segments go on from ---------------------------------------------------------------------------------


class StateOfTheSegmentBefore(Mutant, rejected_by="TREE-03"):
    """A segment that continues another starts from the state of the segment before it in the row."""

    def before(self, segment_ids, parents):
        before = super().before(segment_ids, parents)
        for (row, start, _), parent in zip(segments(segment_ids), () if parents is None else parents, strict=False):
            before[row, start] = start - 1 if parent >= 0 else -1
        return before


class StateGradientOfOneChild(Mutant, rejected_by="TREE-03"):
    """The first alone of several segments that start from one state hands a gradient back to it."""

    def hands_back(self, before):
        firsts = np.zeros(before.shape, bool)
        for row, of_row in zip(firsts, before, strict=True):
            row[np.unique(of_row, return_index=True)[1]] = True
        return super().hands_back(before) & firsts


class StateOfTheRoot(Mutant, rejected_by="TREE-04"):
    """A segment that continues an answer starts from the state in which the prompt ended."""

    def before(self, segment_ids, parents):
        if parents is not None:
            above = np.where(parents >= 0, parents[parents], -1)
            parents = np.where(above >= 0, above, parents)
        return super().before(segment_ids, parents)


class StatesBeginAnew(Mutant, rejected_by="TREE-04"):
    """Every segment starts from zero, also one that continues another."""

    def before(self, segment_ids, parents):
        return super().before(segment_ids, None)


class TailLost(Mutant, rejected_by="TREE-05"):
    """Zeros stand before a segment, as if it continued none."""

    def before(self, segment_ids, parents):
        return super().before(segment_ids, None)


class TailGradientOfOneChild(StateGradientOfOneChild, rejected_by="TREE-05"):
    """The first alone of several segments that see the last tokens of one hands them a gradient."""
