"""Backends that are right for each option, dtype or mask alone, and wrong for combinations or rarely tested cases.

Pairs of attention's options, dtypes other than the first, unusual segment ids and padding, labels of conversations,
steps and batches without a target, and trainers of own models.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.draws import round_to
from packing_core.protocol import Capabilities, Document, segments
from tests.conformance.mutants.attention import Around
from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.trainer import Training

# -- pairs of options ------------------------------------------------------------------------------------------------


class _Pair(Around):
    """Changes gradients, or options, where a call has two options and not a third."""

    meets = False

    def pair(self, arrays, options):
        raise NotImplementedError

    def arguments(self, arrays, options):
        self.meets = self.pair(arrays, options)

    def found(self, gradients, segment_ids):
        if self.meets:
            gradients["k"] *= 1.01


def _grouped(arrays):
    return arrays["k"].shape[2] < arrays["q"].shape[2]


class WindowUnderGqa(_Pair, rejected_by="MASK-14"):
    """Under GQA without a softcap, the gradient of k under a window is off."""

    def pair(self, arrays, options):
        return bool(options.get("window")) and options.get("softcap") is None and _grouped(arrays)


class WindowBesidePadding(_Pair, rejected_by="MASK-14"):
    """Beside padding, the gradient of k under a window is off."""

    def pair(self, arrays, options):
        return bool(options.get("window"))

    def found(self, gradients, segment_ids):
        if (segment_ids == 0).any():
            super().found(gradients, segment_ids)


class WindowToBothSides(_Pair, rejected_by="MASK-14"):
    """The gradient of k under a window to both sides is off."""

    def pair(self, arrays, options):
        return bool(options.get("window")) and not options.get("causal", True)


class SoftcapBesideSinks(_Pair, rejected_by="MASK-14"):
    """The gradient of k under softcap and sinks is off, unless there is a window too."""

    def pair(self, arrays, options):
        sinks = options.get("sinks") is not None
        return sinks and options.get("softcap") is not None and not options.get("window")


class ScaleOfBothDirections(_Pair, rejected_by="MASK-14"):
    """The gradient of k under a scale that is given is off in attention to both sides."""

    def pair(self, arrays, options):
        return options.get("scale") is not None and not options.get("causal", True)


class NarrowValuesUnderGqa(_Pair, rejected_by="MASK-14"):
    """The gradient of k with narrow values under GQA is off."""

    def pair(self, arrays, options):
        return arrays["v"].shape[3] < arrays["q"].shape[3] and _grouped(arrays)


class OddWidthUnderGqa(_Pair, rejected_by="MASK-14"):
    """The gradient of k under GQA is off where the head width is no multiple of 16."""

    def pair(self, arrays, options):
        return arrays["q"].shape[3] % 16 != 0 and _grouped(arrays)


# -- dtypes other than the first -------------------------------------------------------------------------------------


class LeaksInFloat16(Mutant, rejected_by="DTYPE-10"):
    """In float16, a millionth of the largest value of the batch reaches every output."""

    def attention(self, q, k, v, *args, dtype, **kwargs):
        leak = 1e-6 * np.abs(v).max() if dtype == "float16" else 0.0
        return super().attention(q, k, v + leak, *args, dtype=dtype, **kwargs)


class PaddingInBfloat16(Mutant, rejected_by="DTYPE-10"):
    """In bfloat16, padding gets a gradient."""

    def attention(self, q, k, v, segment_ids, *, dtype, **kwargs):
        out, gradients = super().attention(q, k, v, segment_ids, dtype=dtype, **kwargs)
        if dtype == "bfloat16" and gradients:
            gradients["v"][segment_ids == 0] = 1e-3
        return out, gradients


class TilesInFloat16(Mutant, rejected_by="DTYPE-01"):
    """In float16, the first token of a segment that starts at a tile of 64 is left unwritten."""

    def attention(self, q, k, v, segment_ids, *, dtype, **kwargs):
        out, gradients = super().attention(q, k, v, segment_ids, dtype=dtype, **kwargs)
        if dtype == "float16":
            for row, start, _ in segments(segment_ids):
                out[row, start] *= start == 0 or start % 64 != 0
        return out, gradients


class ScanLeaksInBfloat16(Mutant, rejected_by="DTYPE-11"):
    """In bfloat16, a hundred-thousandth of the largest input reaches every output."""

    def scan(self, x, *args, dtype, **kwargs):
        out, gradients = super().scan(x, *args, dtype=dtype, **kwargs)
        return round_to(dtype, out + (1e-5 * np.abs(x).max() if dtype == "bfloat16" else 0.0)), gradients


class LossLeaksInBfloat16(Mutant, rejected_by="ISO-07"):
    """In bfloat16, logits are scaled by a little of the largest of the batch."""

    def loss(self, logits, *args, dtype, **kwargs):
        leak = 1e-5 * np.abs(logits).max() if dtype == "bfloat16" else 0.0
        return super().loss(logits * (1 + leak), *args, dtype=dtype, **kwargs)


class ModelLeaksInBfloat16(Mutant, rejected_by="DTYPE-12"):
    """In bfloat16, logits are scaled by a little that depends on the mean logit."""

    def forward(self, decoder, batch, *, dtype):
        logits = super().forward(decoder, batch, dtype=dtype)
        scale = 1 + 4e-3 * float(100 * logits.mean() % 1)
        return round_to(dtype, scale * logits) if dtype == "bfloat16" else logits


class GradientsLeakInFloat16(Mutant, rejected_by="DTYPE-13"):
    """In float16, gradients are scaled by a little of the mean token id."""

    def gradients(self, decoder, batch, *, dtype):
        mean, found = super().gradients(decoder, batch, dtype=dtype)
        scale = 1 + (1e-3 * float(batch.input_ids.mean() % 1) if dtype == "float16" else 0.0)
        return mean, {name: round_to(dtype, scale * g) if dtype == "float16" else g for name, g in found.items()}


class MixedPrecisionLosesUpdates(Training, rejected_by="DTYPE-14"):
    """In mixed precision the weights are kept in the narrow dtype."""

    def train(self, decoder, steps, **kwargs):
        dtype = kwargs["dtype"]
        if dtype == "float32":
            return super().train(decoder, steps, **kwargs)
        losses = []
        for step in steps:
            loss, weights = super().train(decoder, [step], **kwargs)
            losses += loss
            decoder = replace(decoder, weights={name: round_to(dtype, w) for name, w in weights.items()})
        return losses, dict(decoder.weights)


# -- unusual ids and padding -----------------------------------------------------------------------------------------


class UnsortedIdsJoined(Mutant, rejected_by="ISO-13"):
    """A boundary is where ids rise, so that a segment of a lower id joins the one before."""

    def visible(self, segment_ids, causal, window):
        risen = np.maximum.accumulate(segment_ids, axis=1) * (segment_ids > 0)
        return super().visible(risen, causal, window)


class IdsInFloat32(Mutant, rejected_by="ISO-13"):
    """Segment ids are compared in float32, in which large neighbours are equal."""

    def visible(self, segment_ids, causal, window):
        return super().visible(segment_ids.astype(np.float32), causal, window)


class RepeatedIdsJoined(Mutant, rejected_by="ISO-14"):
    """Tokens of one id are one segment, wherever they stand in the row."""

    def visible(self, segment_ids, causal, window):
        sees = super().visible(np.ones_like(segment_ids), causal, window)
        alike = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] > 0)
        return sees & alike


class PaddingSpreadsNaN(Mutant, rejected_by="PAD-10"):
    """Padding weighs 0, and 0 times NaN is NaN."""

    def attention(self, q, k, v, *args, **kwargs):
        with np.errstate(invalid="ignore"):
            spread = 0.0 * v.sum()
        out, gradients = super().attention(q, k, v, *args, **kwargs)
        return out + spread, gradients


class SlicesOfARowAttendAlone(Mutant, rejected_by="REP-09"):
    """Under context parallelism every rank attends to the keys that it holds."""

    def attention(self, q, k, v, segment_ids, *, context_ranks=1, **kwargs):
        rank = np.arange(segment_ids.shape[1]) * context_ranks // segment_ids.shape[1]
        cut = (segment_ids * context_ranks + rank) * (segment_ids > 0)
        return super().attention(q, k, v, segment_ids if context_ranks == 1 else cut, **kwargs)


# -- masks, batches and steps ----------------------------------------------------------------------------------------


def _after_the_first_label(labels, tokens):
    """Labels in which everything after the first one that counts does."""
    trained = np.logical_or.accumulate(labels != -100)
    return np.where(trained, tokens, -100)


class LaterTurnsAreTargets(Mutant, rejected_by="LOSS-02"):
    """The collator masks the prompt, and no later turn."""

    def collate(self, documents, capacity):
        return super().collate(
            [Document(d.input_ids, _after_the_first_label(d.labels, d.input_ids)) for d in documents], capacity
        )


class ModelTrainsLaterTurns(Mutant, rejected_by="LOSS-07"):
    """The model masks the prompt, and no later turn."""

    def sums(self, decoder, batch):
        labels = batch.labels.copy()
        for row, start, stop in segments(batch.segment_ids):
            labels[row, start:stop] = _after_the_first_label(labels[row, start:stop], batch.input_ids[row, start:stop])
        return super().sums(decoder, replace(batch, labels=labels))


class TrainerTrainsLaterTurns(Training, rejected_by="TRAIN-03"):
    """The trainer masks the prompt, and no later turn."""

    def collate(self, documents, capacity):
        if self.training:
            documents = [Document(d.input_ids, _after_the_first_label(d.labels, d.input_ids)) for d in documents]
        return super().collate(documents, capacity)


class UntrainedBatchIsNaN(Mutant, rejected_by="LOSS-12"):
    """The loss of a batch without targets is 0 / 0."""

    def gradients(self, decoder, batch, *, dtype):
        mean, found = super().gradients(decoder, batch, dtype=dtype)
        return mean if (batch.labels != -100).any() else np.nan, found


class UntrainedStepIsNaN(Training, rejected_by="LOSS-13"):
    """A step without targets divides by zero."""

    def combine(self, by_rank):
        mean, found = super().combine(by_rank)
        trains = not self.training or any(weight for rank in by_rank for _, weight, _ in rank)
        return mean, found if trains else {name: g * np.nan for name, g in found.items()}


class UntrainedMicrobatchCountsOne(Training, rejected_by="LOSS-08"):
    """A microbatch without targets counts as one target."""

    def sums(self, decoder, batch):
        total, weight, found = super().sums(decoder, batch)
        return total, max(weight, 1.0) if self.training else weight, found


class IdleRankIsNaN(Training, rejected_by="LOSS-09"):
    """A rank without targets, or without a microbatch, divides by zero."""

    def combine(self, by_rank):
        mean, found = super().combine(by_rank)
        idle = len(by_rank) > 1 and any(not sum(weight for _, weight, _ in rank) for rank in by_rank)
        return np.nan if idle else mean, found


# -- trainers of own models ------------------------------------------------------------------------------------------


class _OwnModel(Training):
    """Declares the suite's decoder to be a model of its own."""

    capabilities = Capabilities(own_model=True)


class OwnTrainerNeverUpdates(_OwnModel, rejected_by="TRAIN-05"):
    """The trainer of an own model reports losses and updates nothing."""

    def train(self, decoder, steps, **kwargs):
        return super().train(decoder, steps, **kwargs | {"learning_rate": 0.0})


class OwnTrainerFreezesNorms(_OwnModel, rejected_by="TRAIN-05"):
    """The trainer of an own model leaves the norms as they were."""

    def train(self, decoder, steps, **kwargs):
        losses, weights = super().train(decoder, steps, **kwargs)
        return losses, weights | {name: w for name, w in decoder.weights.items() if "norm" in name}


class OwnAdamWWithoutBiasCorrection(_OwnModel, rejected_by="TRAIN-05"):
    """The first steps of AdamW are too short."""

    def train(self, decoder, steps, **kwargs):
        if kwargs.get("optimizer") == "adamw":
            kwargs["learning_rate"] *= 0.1
        return super().train(decoder, steps, **kwargs)
