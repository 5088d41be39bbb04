"""Wrong planners and collators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance import naive
from packing_core.protocol import Batch, Document
from tests.conformance.mutants.base import Mutant, starts


class DocumentLost(Mutant, rejected_by="LAY-01"):
    """The last document of several is left out."""

    def collate(self, documents, capacity):
        return super().collate(documents[: max(1, len(documents) - 1)], capacity)


class RowsOverfull(Mutant, rejected_by="LAY-02"):
    """Rows are filled to two tokens more than their capacity."""

    def collate(self, documents, capacity):
        return super().collate(documents, capacity + 2)


class SegmentIdsRunOn(Mutant, rejected_by="LAY-03"):
    """Segment ids count on from row to row."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        before = np.cumsum(batch.segment_ids.max(axis=1)) - batch.segment_ids.max(axis=1)
        return replace(batch, segment_ids=np.where(batch.segment_ids > 0, batch.segment_ids + before[:, None], 0))


class LongDocumentCut(Mutant, rejected_by="LAY-04"):
    """A document longer than the capacity is cut without a word."""

    def collate(self, documents, capacity):
        return super().collate([Document(d.input_ids[:capacity], d.labels[:capacity]) for d in documents], capacity)


class FirstFitForBestFit(Mutant, rejected_by="LAY-05"):
    """Best fit takes the first row that fits, not the fullest."""

    def plan(self, lengths, capacity, *, strategy):
        return super().plan(lengths, capacity, strategy="first_fit" if strategy == "best_fit" else strategy)


class BestFitForFirstFit(Mutant, rejected_by="LAY-06"):
    """First fit takes the fullest row, not the first that fits."""

    def plan(self, lengths, capacity, *, strategy):
        return super().plan(lengths, capacity, strategy="best_fit" if strategy == "first_fit" else strategy)


class SequentialSorts(Mutant, rejected_by="LAY-07"):
    """The sequential strategy takes the longest documents first."""

    def plan(self, lengths, capacity, *, strategy):
        return super().plan(lengths, capacity, strategy="best_fit" if strategy == "sequential" else strategy)


class CountsWrapAt32Bits(Mutant, rejected_by="LAY-08"):
    """Token counts are 32-bit integers that wrap."""

    def plan(self, lengths, capacity, *, strategy):
        wrapped = np.array(lengths, np.int64).astype(np.int32).tolist()
        return naive.STRATEGIES[strategy](wrapped, capacity)


class PositionsRunOn(Mutant, rejected_by="POS-01"):
    """Positions count through the row and never restart."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, position_ids=np.tile(np.arange(batch.input_ids.shape[1]), (len(batch.input_ids), 1)))


class BoundaryTargetKept(Mutant, rejected_by="LOSS-01"):
    """The first token of a segment is the target of the last token of the segment before."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        kept = starts(batch.segment_ids) & (batch.segment_ids > 0)
        return replace(batch, labels=np.where(kept, batch.input_ids, batch.labels))


class PromptsAreTargets(Mutant, rejected_by="LOSS-02"):
    """Labels that the document masks are targets all the same."""

    def collate(self, documents, capacity):
        return super().collate([Document(d.input_ids, d.input_ids) for d in documents], capacity)


class LabelsShiftedAlready(Mutant, rejected_by="LOSS-02"):
    """Labels come shifted by one, and the model shifts them again."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, labels=np.where(starts(batch.segment_ids), -100, np.roll(batch.labels, -1, axis=1)))


class PaddingIsTarget(Mutant, rejected_by="PAD-07"):
    """The padding token is trained on."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, labels=np.where(batch.segment_ids == 0, batch.input_ids, batch.labels))


class FirstDocumentUnlabelled(Mutant, rejected_by="REP-06"):
    """The document that comes first loses its labels."""

    def collate(self, documents, capacity):
        first, *others = documents
        return super().collate([replace(first, labels=np.full_like(first.labels, -100)), *others], capacity)


class FullLengthDocumentLost(Mutant, rejected_by="SHAPE-11"):
    """A document exactly as long as the capacity is taken for one that does not fit, beside others that do."""

    def collate(self, documents, capacity):
        fitting = [document for document in documents if len(document.input_ids) < capacity]
        return super().collate(fitting or documents, capacity)


class RowsReshuffled(Mutant, rejected_by="DET-02"):
    """The rows come in another order at every call."""

    calls = 0

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        self.calls += 1
        arrays = (batch.input_ids, batch.segment_ids, batch.position_ids, batch.labels)
        return Batch(*(np.roll(x, self.calls, axis=0) for x in arrays))
