"""Backends that are right at the sizes of a small test and wrong beyond, in ways that `sizes` does not draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packing_core.protocol import position_ids, segments
from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.trainer import Training

# -- collator --------------------------------------------------------------------------------------------------------


class IdsWrapAt16Bits(Mutant, rejected_by="LAY-01"):
    """Token ids are stored in 16 bits."""

    def collate(self, documents, capacity):
        batch = super().collate(documents, capacity)
        return replace(batch, input_ids=batch.input_ids % 2**16)


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


class LossOver128Words(Mutant, rejected_by="LOSS-10"):
    """The softmax is over the first 128 words."""

    def loss(self, logits, labels, *args, **kwargs):
        total, weight, dlogits = super().loss(logits[..., :128], np.minimum(labels, 127), *args, **kwargs)
        missing = np.zeros((*logits.shape[:2], logits.shape[2] - dlogits.shape[2]), np.float32)
        return total, weight, np.concatenate([dlogits, missing], axis=2)


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


# -- trainer ---------------------------------------------------------------------------------------------------------


class TrainerTakesNineDocuments(Training, rejected_by="TRAIN-04"):
    """The trainer takes nine documents of a microbatch."""

    def collate(self, documents, capacity):
        return super().collate(documents[:9] if self.training else documents, capacity)
