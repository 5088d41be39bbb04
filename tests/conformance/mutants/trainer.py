"""Trainers whose models are right and whose steps are wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from conformance.draws import round_to
from packing_core.protocol import Document
from tests.conformance.mutants.base import Mutant
from tests.conformance.mutants.model import one_segment

Trained = tuple[list[float], dict[str]]


def _mean(results):
    names = results[0][1]
    mean = {name: np.mean([found[name] for _, found in results], axis=0) for name in names}
    return float(np.mean([loss for loss, _ in results])), mean


class MeanOfMicrobatchMeans(Mutant, rejected_by="LOSS-08"):
    """Every microbatch is averaged, and then the averages."""

    def combine(self, by_rank):
        return _mean([super(MeanOfMicrobatchMeans, self).combine([[sums]]) for rank in by_rank for sums in rank])


class MeanOfRankMeans(Mutant, rejected_by="LOSS-09"):
    """Every rank is averaged, and then the averages."""

    def combine(self, by_rank):
        return _mean([super(MeanOfRankMeans, self).combine([rank]) for rank in by_rank if rank])


class Training(Mutant):
    """Changes the inputs or the results of the correct trainer."""

    training = False

    def train(self, decoder, steps, **kwargs):
        self.training = True
        try:
            return super().train(decoder, steps, **kwargs)
        finally:
            self.training = False


class TrainerLeaks(Training, rejected_by="ISO-10"):
    """In the trainer, and only there, the model runs without boundaries."""

    def _decode(self, decoder, batch):
        return super()._decode(decoder, one_segment(batch) if self.training else batch)


class LastDocumentOfAMicrobatchDropped(Training, rejected_by="REP-07"):
    """The trainer's dataloader drops what does not fill its last row."""

    def train(self, decoder, steps, **kwargs):
        cut = [[microbatch[: max(1, len(microbatch) - 1)] for microbatch in step] for step in steps]
        return super().train(decoder, cut, **kwargs)


class LearningRateScaledByRows(Training, rejected_by="TRAIN-01"):
    """The learning rate is multiplied by the number of microbatches."""

    def train(self, decoder, steps, **kwargs):
        kwargs["learning_rate"] *= len(steps[0])
        return super().train(decoder, steps, **kwargs)


class MasterWeightsInBfloat16(Training, rejected_by="TRAIN-01"):
    """Weights are kept in bfloat16, so that small updates are lost."""

    def train(self, decoder, steps, **kwargs):
        losses = []
        for step in steps:
            loss, weights = super().train(decoder, [step], **kwargs)
            losses += loss
            decoder = replace(decoder, weights={name: round_to("bfloat16", w) for name, w in weights.items()})
        return losses, dict(decoder.weights)


class LossAfterTheUpdate(Training, rejected_by="TRAIN-01"):
    """The loss that is reported for a step is that of the next."""

    def train(self, decoder, steps, **kwargs):
        losses, weights = super().train(decoder, steps, **kwargs)
        return losses[1:] + losses[-1:], weights


class MomentsForgotten(Training, rejected_by="TRAIN-02"):
    """AdamW starts anew at every step."""

    def train(self, decoder, steps, **kwargs):
        losses = []
        for step in steps:
            loss, weights = super().train(decoder, [step], **kwargs)
            losses += loss
            decoder = replace(decoder, weights=weights)
        return losses, dict(decoder.weights)


class TrainerUnmasksPrompts(Training, rejected_by="TRAIN-03"):
    """The trainer makes its own labels from the tokens."""

    def collate(self, documents, capacity):
        if self.training:
            documents = [Document(d.input_ids, d.input_ids) for d in documents]
        return super().collate(documents, capacity)


class StepsDifferFromRunToRun(Training, rejected_by="DET-04"):
    """Another seed at every run."""

    runs = 0

    def train(self, decoder, steps, **kwargs):
        self.runs += 1
        kwargs["learning_rate"] *= 1 + 1e-6 * self.runs
        return super().train(decoder, steps, **kwargs)
