"""Backends that cut documents over ranks, and something about it wrongly."""

from __future__ import annotations

import numpy as np

from tests.conformance.mutants.base import Mutant


def same_rank(cut):
    """bool ``[T, T]``: pairs of tokens that lie on one rank."""
    return cut.ranks[:, None] == cut.ranks


class StateLeaksIntoTheNextDocument(Mutant, rejected_by="CUT-01"):
    """A document that begins on a rank goes on from what the rank has computed before it."""

    def seen_over_ranks(self, cut, window):
        place = np.arange(len(cut.ranks))
        return super().seen_over_ranks(cut, window) | (same_rank(cut) & (place[:, None] >= place))


class BoundariesDividedByRanks(Mutant, rejected_by="CUT-01"):
    """Every rank divides the boundaries of the row by the number of ranks."""

    def seen_over_ranks(self, cut, window):
        ranks = int(cut.ranks.max()) + 1
        ends = np.cumsum(np.bincount(cut.documents)) // ranks
        local = np.concatenate([np.arange(n) for n in np.bincount(cut.ranks)])
        segments = np.searchsorted(ends, local, side="right")
        place = np.arange(len(local))
        return (segments[:, None] == segments) & (place[:, None] >= place) & same_rank(cut)


class EarlierPiecesNotFetched(Mutant, rejected_by="CUT-01"):
    """A piece sees the tokens of its own rank alone."""

    def seen_over_ranks(self, cut, window):
        return super().seen_over_ranks(cut, window) & same_rank(cut)


class GradientsNotReturned(Mutant, rejected_by="CUT-01"):
    """Keys and values get the gradients of their own rank's queries alone."""

    def returned(self, cut, seen):
        return seen & same_rank(cut)


class PositionsOfAPiece(Mutant, rejected_by="CUT-01"):
    """Positions count from 0 in every piece."""

    def context_positions(self, cut):
        first = np.ones(len(cut.ranks), bool)
        first[1:] = (np.diff(cut.ranks) > 0) | (np.diff(cut.documents) > 0)
        place = np.arange(len(first))
        return place - np.maximum.accumulate(np.where(first, place, 0))


class TargetsLostAtCuts(Mutant, rejected_by="CUT-01"):
    """Labels are shifted after the cut, so the last token of a piece predicts nothing."""

    def predicting(self, cut):
        last = np.append(np.diff(cut.ranks) > 0, True)
        return super().predicting(cut) & ~last


class MeanOfMeans(Mutant, rejected_by="CUT-01"):
    """Every rank divides by its own targets, and the ranks take the mean of that."""

    def divisors(self, cut, places):
        ranks = cut.ranks[places]
        return np.bincount(ranks)[ranks] * float(len(np.unique(ranks)))


class EveryRankComputesAll(Mutant, rejected_by="CUT-01"):
    """Nothing is cut: every rank computes all tokens."""

    def held(self, cut, ranks):
        return [len(cut.ranks)] * ranks


class HaloLost(Mutant, rejected_by="CUT-02"):
    """The first token of a piece sees its whole window, and the others none of the tokens before the piece."""

    def seen_over_ranks(self, cut, window):
        seen = super().seen_over_ranks(cut, window)
        first = np.append(True, np.diff(cut.ranks) > 0)
        return seen & (same_rank(cut) | first[:, None])


class WindowOfAllBefore(Mutant, rejected_by="CUT-02"):
    """Tokens that were fetched from other ranks are seen beyond the window too."""

    def seen_over_ranks(self, cut, window):
        return super().seen_over_ranks(cut, window) | (super().seen_over_ranks(cut, None) & ~same_rank(cut))
