"""Wrong selections of keys."""

from __future__ import annotations

import numpy as np

from packing_core.protocol import position_ids
from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant


class BudgetCountedOverTheRow(Mutant, rejected_by="SPARSE-01"):
    """Keys of other segments take places among the top-k, and are hidden afterwards."""

    def chosen(self, segment_ids, seen, scores, top_k):
        row = np.broadcast_to(np.tri(seen.shape[1], dtype=bool), seen.shape)
        return super().chosen(segment_ids, row, scores, top_k) & seen


class DenseAtTwiceTheBudget(Mutant, rejected_by="SPARSE-01"):
    """Segments of up to twice as many tokens as top-k see all of their keys."""

    def chosen(self, segment_ids, seen, scores, top_k):
        length = (segment_ids[:, :, None] == segment_ids[:, None, :]).sum(-1)
        return np.where((length < 2 * top_k)[..., None], seen, super().chosen(segment_ids, seen, scores, top_k))


class SelectionAmongLaterKeys(Mutant, rejected_by="SPARSE-01"):
    """Keys after a query take places among its top-k, and are hidden afterwards."""

    def chosen(self, segment_ids, seen, scores, top_k):
        return super().chosen(segment_ids, seen | seen.swapaxes(1, 2), scores, top_k) & seen


class SelectionIgnoredInTheBackward(Around, rejected_by="SPARSE-02"):
    """The forward is right, and the gradient of k at the first token of a segment counts twice."""

    def arguments(self, arrays, options):
        self.selects = options.get("top_k") is not None

    def found(self, gradients, segment_ids):
        if self.selects:
            gradients["k"][(position_ids(segment_ids) == 0) & (segment_ids > 0)] *= 2


class SelectionAcrossSegments(Mutant, rejected_by="SPARSE-03"):
    """A query of a segment longer than top-k also sees the best key of the row before it."""

    def chosen(self, segment_ids, seen, scores, top_k):
        best = super().chosen(segment_ids, seen, scores, top_k)
        row = np.tri(seen.shape[1], dtype=bool) & (segment_ids[:, None, :] > 0)
        outside = super().chosen(segment_ids, row, scores, 1)
        return best | (outside & (seen.sum(-1, keepdims=True) > top_k))


class TiesAllSeen(Mutant, rejected_by="SPARSE-04"):
    """A threshold replaces the choice: every key that scores no less than the last of the top-k is seen."""

    def chosen(self, segment_ids, seen, scores, top_k):
        hidden = np.where(seen, scores, -np.inf)
        last = np.sort(hidden, axis=-1)[..., -top_k, None]
        return seen & (hidden >= last)


class BlocksCountedInTheRow(Mutant, rejected_by="SPARSE-05"):
    """Blocks of keys are counted from the beginning of the row, so that some hold keys of two segments."""

    def counted(self, segment_ids):
        return [(row, 0, segment_ids.shape[1]) for row in range(len(segment_ids))]


class BlocksBeforeTheirEnd(Mutant, rejected_by="SPARSE-05"):
    """A query takes the block that it stands in for one that has ended, if the segment holds all of it."""

    def chosen_blocks(self, segment_ids, seen, index, top_k, size):
        best = super().chosen_blocks(segment_ids, seen, index, top_k, size)
        own = (position_ids(segment_ids) % size == size - 2)[..., None]
        later = np.concatenate([best[:, 1:], best[:, -1:]], 1)
        return np.where(own, later & seen, best)


class TargetOverTheRow(Mutant, rejected_by="SPARSE-06"):
    """The indexer learns from attention over all of the row before the query, other segments included."""

    def target(self, q, k, chosen):
        row = np.broadcast_to(np.tri(chosen.shape[1], dtype=bool), chosen.shape)
        return super().target(q, k, row) * chosen


class ChoiceAmongTheRow(Mutant, rejected_by="SPARSE-06"):
    """The softmax of the indexer's scores also runs over the selected keys of the query before it in the row."""

    def choice(self, scores, chosen):
        before = np.concatenate([chosen[:, :1], chosen[:, :-1]], 1)
        return super().choice(scores, chosen | before) * chosen


class LossOverTheRow(Mutant, rejected_by="SPARSE-06"):
    """The loss of a segment is a mean over the real tokens of its row."""

    def share_of_queries(self, segment_ids):
        share = super().share_of_queries(segment_ids) > 0
        return share / np.maximum((segment_ids > 0).sum(-1), 1)[:, None]
