"""Models whose operations are right and whose glue is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.draws import round_to
from packing_core.protocol import Batch
from tests.conformance.mutants.base import Mutant, padding_joined, rows_alike


def one_segment(batch):
    """The batch with all of a row's segments run together; positions and labels stay."""
    return replace(batch, segment_ids=1 * (batch.segment_ids > 0))


class ModelIgnoresBoundaries(Mutant, rejected_by="ISO-08"):
    """Positions restart, and the attention mask is causal over the whole row (a cache hides the packing)."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, one_segment(batch), dtype=dtype)


class CheckpointedBackwardLeaks(Mutant, rejected_by="ISO-09"):
    """The forward pass is right; recomputed for the backward pass, it lacks the boundaries."""

    def sums(self, decoder, batch):
        total, weight, _ = super().sums(decoder, batch)
        logits, backward = self._decode(decoder, one_segment(batch))
        _, _, dlogits = self._loss(logits, batch.labels, batch.segment_ids)
        return total, weight, backward(dlogits.reshape(-1, dlogits.shape[-1]))


class BatchWideFrequencies(Mutant, rejected_by="POS-07"):
    """Rotary frequencies follow the longest document of the batch."""

    def lengths(self, segment_ids):
        return np.full_like(segment_ids, super().lengths(segment_ids).max())


class ModelWindowOffByOne(Mutant, rejected_by="MASK-13"):
    """The model passes its window on as the distance to the last visible key."""

    def _decode(self, decoder, batch):
        window = decoder.config.sliding_window
        if window is not None:
            decoder = replace(decoder, config=replace(decoder.config, sliding_window=window + 1))
        return super()._decode(decoder, batch)


class GradientOfOneWeightMissing(Mutant, rejected_by="GRAD-09"):
    """One projection gets no gradient."""

    def gradients(self, decoder, batch, *, dtype):
        mean, found = super().gradients(decoder, batch, dtype=dtype)
        found["model.layers.0.self_attn.k_proj.weight"] *= 0.0
        return mean, found


class LossMeanPerRow(Mutant, rejected_by="LOSS-07"):
    """The loss is the mean of the rows' means."""

    def gradients(self, decoder, batch, *, dtype):
        arrays = (batch.input_ids, batch.segment_ids, batch.position_ids, batch.labels)
        rows = [Batch(*(x[row : row + 1] for x in arrays)) for row in range(len(batch.input_ids))]
        means = [super(LossMeanPerRow, self).gradients(decoder, row, dtype=dtype) for row in rows]
        mean = {name: np.mean([found[name] for _, found in means], axis=0) for name in means[0][1]}
        return float(np.mean([loss for loss, _ in means])), mean


class ModelAttendsPadding(Mutant, rejected_by="PAD-08"):
    """Padding in front of a document belongs to it."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, replace(batch, segment_ids=padding_joined(batch.segment_ids)), dtype=dtype)


class GradientThroughPadding(Mutant, rejected_by="PAD-09"):
    """Logits at padding are trained on the padding token."""

    def sums(self, decoder, batch):
        padding = batch.segment_ids == 0
        labels = np.where(padding, batch.input_ids, batch.labels)
        ids = np.where(padding, batch.segment_ids.max() + 1, batch.segment_ids)
        return super().sums(decoder, replace(batch, labels=labels, segment_ids=ids))


class ModelRowsShareBoundaries(Mutant, rejected_by="REP-03"):
    """Every row of a batch is cut where the first one is."""

    def forward(self, decoder, batch, *, dtype):
        return super().forward(decoder, replace(batch, segment_ids=rows_alike(batch.segment_ids)), dtype=dtype)


class OnlyTheCollatorsLayout(Mutant, rejected_by="REP-04"):
    """A row that starts with padding is read from its first token all the same."""

    def forward(self, decoder, batch, *, dtype):
        first = (batch.segment_ids > 0).argmax(axis=1)
        ids = np.stack([np.roll(row, -n) for row, n in zip(batch.segment_ids, first, strict=True)])
        return super().forward(decoder, replace(batch, segment_ids=ids), dtype=dtype)


class GradientsOfTheFirstRow(Mutant, rejected_by="REP-05"):
    """With padding in a batch, the last row's gradient is lost."""

    def gradients(self, decoder, batch, *, dtype):
        if len(batch.input_ids) > 1 and (batch.segment_ids == 0).any():
            labels = batch.labels.copy()
            labels[-1] = -100
            batch = replace(batch, labels=labels)
        return super().gradients(decoder, batch, dtype=dtype)


class OneTokenDocumentsJoined(Mutant, rejected_by="SHAPE-10"):
    """A document of one token is taken for the end of the one before."""

    def forward(self, decoder, batch, *, dtype):
        ids = batch.segment_ids.copy()
        for row in ids:
            for t in range(1, len(row)):
                if row[t] != row[t - 1] and row[t] > 0 and (t + 1 == len(row) or row[t + 1] != row[t]):
                    row[t] = row[t - 1]
        return super().forward(decoder, replace(batch, segment_ids=ids), dtype=dtype)


class ModelInBfloat16(Mutant, rejected_by="DTYPE-08"):
    """Weights are cast to bfloat16 for every requested dtype."""

    def forward(self, decoder, batch, *, dtype):
        cast = {name: round_to("bfloat16", w) for name, w in decoder.weights.items()}
        return super().forward(replace(decoder, weights=cast), batch, dtype=dtype)


class GradientsInBfloat16(Mutant, rejected_by="DTYPE-09"):
    """Gradients are cast to bfloat16 for every requested dtype."""

    def gradients(self, decoder, batch, *, dtype):
        return super().gradients(decoder, batch, dtype="bfloat16")


class DropoutLeftOn(Mutant, rejected_by="DET-03"):
    """Gradients differ from run to run."""

    calls = 0

    def gradients(self, decoder, batch, *, dtype):
        self.calls += 1
        mean, found = super().gradients(decoder, batch, dtype=dtype)
        return mean, {name: g * np.float32(1 + 1e-6 * self.calls) for name, g in found.items()}


class WeightsKept(Mutant, rejected_by="DET-05"):
    """Weights are converted once for a config, and kept."""

    def __init__(self):
        self.kept = {}

    def forward(self, decoder, batch, *, dtype):
        return super().forward(self.kept.setdefault(decoder.config, decoder), batch, dtype=dtype)
