"""Backends that are right at the sizes of a small test and wrong beyond: rows, heads, tiles, lengths, counts, words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packing_core.protocol import Document, position_ids, segments
from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant, starts
from tests.conformance.mutants.operations import ScanGradient
from tests.conformance.mutants.trainer import Training

# -- collator --------------------------------------------------------------------------------------------------------


class IdsWrapAt16Bits(Mutant, rejected_by="LAY-01"):
    """Token ids are stored in 16 bits."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, input_ids=batch.input_ids % 2**16)


class TenthDocumentLost(Mutant, rejected_by="LAY-01"):
    """A batch takes nine documents at most."""

    def collate(self, documents, capacity):
        return super().collate(documents[:9], capacity)


class CollatorCutsAt64(Mutant, rejected_by="LAY-01"):
    """Documents are cut after 64 tokens."""

    def collate(self, documents, capacity):
        return super().collate([Document(d.input_ids[:64], d.labels[:64]) for d in documents], capacity)


class SegmentIdsIn8Bits(Mutant, rejected_by="LAY-03"):
    """Segment ids wrap at 256."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, segment_ids=batch.segment_ids % 256)


class PositionsEndAt512(Mutant, rejected_by="POS-01"):
    """Positions beyond 511 stay at 511."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, position_ids=np.minimum(batch.position_ids, 511))


# -- attention -------------------------------------------------------------------------------------------------------


class NinthRowLeaks(Mutant, rejected_by="ISO-04"):
    """Rows after the eighth have no boundaries."""

    def visible(self, segment_ids, causal, window):
        joined = np.where(np.arange(len(segment_ids))[:, None] < 8, segment_ids, segment_ids > 0)
        return super().visible(joined, causal, window)


class ThirdRowLeaks(Mutant, rejected_by="ISO-04"):
    """Rows after the second have no boundaries."""

    def visible(self, segment_ids, causal, window):
        ids = segment_ids.copy()
        ids[2:] = ids[2:] > 0
        return super().visible(ids, causal, window)


class GradientsOfTwoRows(Around, rejected_by="REP-01"):
    """Rows after the second get the gradients of the row before."""

    def found(self, gradients, segment_ids):
        for name in ("q", "k", "v"):
            gradients[name][2:] = gradients[name][1:-1]


class GroupsOfFourHeads(Mutant, rejected_by="MASK-07"):
    """A key/value head serves four query heads at most."""

    def kv_head(self, heads, kv_heads):
        return np.minimum(np.arange(heads) // min(heads // kv_heads, 4), kv_heads - 1)


class GroupGradientOfFourHeads(Mutant, rejected_by="GRAD-05"):
    """The gradients of a key/value head add up over four query heads at most."""

    @staticmethod
    def _sum_groups(x, kv, kv_heads):
        kept = x.copy()
        kept[:, np.arange(len(kv)) % (len(kv) // kv_heads) >= 4] = 0.0
        return Mutant._sum_groups(kept, kv, kv_heads)


class SegmentAt128SeesItsPredecessor(Mutant, rejected_by="ISO-11"):
    """A segment that starts where a tile of 128 does sees the last token of the segment before."""

    def visible(self, segment_ids, causal, window):
        seen = super().visible(segment_ids, causal, window)
        for row, start, stop in segments(segment_ids):
            if start and start % 128 == 0 and stop - start > 1:
                seen[row, start, start - 1] = True
        return seen


class GradientCrossesAt256(Around, rejected_by="ISO-11"):
    """The gradient of v at the token before a tile of 256 takes in a little of the next segment's."""

    def found(self, gradients, segment_ids):
        for row, start, stop in segments(segment_ids):
            if start and start % 256 == 0 and stop - start > 1:
                gradients["v"][row, start - 1] += 1e-6 * gradients["v"][row, start]


class WidthsInSixteens(Around, rejected_by="SHAPE-06"):
    """Channels beyond the last whole sixteen are not loaded."""

    def arguments(self, arrays, options):
        width = arrays["q"].shape[3]
        options["scale"] = width**-0.5 if options.get("scale") is None else options["scale"]
        arrays["q"] = np.where(np.arange(width) < width // 16 * 16, arrays["q"], 0.0)


# -- rope, scan, loss ------------------------------------------------------------------------------------------------


class NinthRowKeepsStates(Mutant, rejected_by="ISO-06"):
    """In rows after the eighth, the state goes on into the next segment."""

    def carries(self, segment_ids):
        joined = np.where(np.arange(len(segment_ids))[:, None] < 8, segment_ids, segment_ids > 0)
        return super().carries(joined)


class ScanForgetsAt256(Mutant, rejected_by="SHAPE-09"):
    """The state is lost after every 256 tokens of a segment."""

    def carries(self, segment_ids):
        return super().carries(segment_ids) & (position_ids(segment_ids) % 256 != 0)


class ScanGradientsOfTwoRows(ScanGradient, rejected_by="REP-02"):
    """Rows after the second get no gradient."""

    def found(self, gradients, segment_ids):
        gradients["x"][2:] = 0.0


class LossOfTwoRows(Mutant, rejected_by="LOSS-04"):
    """Rows after the second are not trained on."""

    def trained(self, labels, segment_ids):
        counts = super().trained(labels, segment_ids)
        counts[2:] = False
        return counts


class LossOver128Words(Mutant, rejected_by="LOSS-10"):
    """The softmax is over the first 128 words."""

    def loss(self, logits, labels, *args, **kwargs):
        total, weight, dlogits = super().loss(logits[..., :128], np.minimum(labels, 127), *args, **kwargs)
        missing = np.zeros((*logits.shape[:2], logits.shape[2] - dlogits.shape[2]), np.float32)
        return total, weight, np.concatenate([dlogits, missing], axis=2)


class LabelsWrapAt16Bits(Mutant, rejected_by="LOSS-10"):
    """Labels are stored in 16 bits."""

    def loss(self, logits, labels, *args, **kwargs):
        return super().loss(logits, np.where(labels >= 0, labels % 2**16, labels), *args, **kwargs)


class SoftmaxOverflows(Mutant, rejected_by="LOSS-11"):
    """The softmax does not subtract the largest logit."""

    def loss(self, logits, *args, **kwargs):
        total, weight, dlogits = super().loss(logits, *args, **kwargs)
        overflown = np.abs(logits).max() > np.log(np.finfo(np.float32).max)
        return (np.inf if overflown else total), weight, dlogits


# -- model -----------------------------------------------------------------------------------------------------------


class ModelLeaksAt128(Mutant, rejected_by="REP-08"):
    """A document that starts where a block of 128 does belongs to the one before."""

    def forward(self, decoder, batch, *, dtype):
        ids = batch.segment_ids.copy()
        for row, start, stop in segments(batch.segment_ids):
            if start and start % 128 == 0:
                ids[row, start:stop] = ids[row, start - 1]
        return super().forward(decoder, replace(batch, segment_ids=ids), dtype=dtype)


class ModelCutsDocumentsAt64(Mutant, rejected_by="REP-08"):
    """Every 64 tokens a document starts anew, but for its positions."""

    def forward(self, decoder, batch, *, dtype):
        cut = 1000 * batch.segment_ids + position_ids(batch.segment_ids) // 64
        return super().forward(decoder, replace(batch, segment_ids=cut * (batch.segment_ids > 0)), dtype=dtype)


class RotaryTableOf512(Mutant, rejected_by="REP-08"):
    """The model's rotary table ends at 512, and later positions take its last entry."""

    def _decode(self, decoder, batch):
        return super()._decode(decoder, replace(batch, position_ids=np.minimum(batch.position_ids, 511)))


class ModelTableOf256Segments(Mutant, rejected_by="REP-08"):
    """The model keeps 256 segments of a row, the last of which holds all that follow."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, replace(batch, segment_ids=np.minimum(batch.segment_ids, 256)), dtype=dtype)


class EmbeddingOf256Words(Mutant, rejected_by="REP-08"):
    """Token ids wrap at 8 bits in the embedding."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, replace(batch, input_ids=batch.input_ids % 256), dtype=dtype)


class LongRowsLeakALittle(Mutant, rejected_by="ISO-12"):
    """In rows beyond 128 tokens a ten-millionth of the mean logit reaches every logit."""

    def forward(self, decoder, batch, *, dtype):
        logits = super().forward(decoder, batch, dtype=dtype)
        leak = 1e-7 * np.abs(logits).max() * (batch.input_ids.shape[1] > 128)
        return logits + np.float32(leak * (1 + logits.mean()))


class LongDocumentsTrainedInPart(Mutant, rejected_by="GRAD-10"):
    """Labels beyond the 128th token of a document do not count."""

    def gradients(self, decoder, batch, *, dtype):
        labels = np.where(position_ids(batch.segment_ids) < 128, batch.labels, -100)
        return super().gradients(decoder, replace(batch, labels=labels), dtype=dtype)


class BackwardOf128Segments(Mutant, rejected_by="GRAD-10"):
    """The backward keeps 128 segments of a row, the last of which holds all that follow."""

    def sums(self, decoder, batch):
        starting = starts(batch.segment_ids) & (batch.segment_ids > 0)
        batch = replace(batch, labels=np.where(starting, -100, batch.labels))
        return super().sums(decoder, replace(batch, segment_ids=np.minimum(batch.segment_ids, 128)))


# -- trainer ---------------------------------------------------------------------------------------------------------


class SeventhMicrobatchDropped(Training, rejected_by="LOSS-08"):
    """A step accumulates six microbatches at most."""

    def train(self, decoder, steps, **kwargs):
        return super().train(decoder, [step[:6] for step in steps], **kwargs)


class TrainerCutsDocumentsAt64(Training, rejected_by="TRAIN-04"):
    """The trainer cuts documents after 64 tokens."""

    def collate(self, documents, capacity):
        if self.training:
            documents = [Document(d.input_ids[:64], d.labels[:64]) for d in documents]
        return super().collate(documents, capacity)


class TrainerTakesNineDocuments(Training, rejected_by="TRAIN-04"):
    """The trainer takes nine documents of a microbatch."""

    def collate(self, documents, capacity):
        return super().collate(documents[:9] if self.training else documents, capacity)
