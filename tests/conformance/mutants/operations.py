"""Wrong rotary embeddings, scans and losses."""

from __future__ import annotations

import numpy as np

from conformance.draws import round_to
from tests.conformance.mutants.base import Mutant, rows_alike

# -- rope ------------------------------------------------------------------------------------------------------------


class HalfTurnedTwice(Mutant, rejected_by="POS-02"):
    """The first pair of channels turns at twice its frequency."""

    def angles(self, position_ids, inv_freq):
        angles = super().angles(position_ids, inv_freq)
        angles[..., 0] *= 2
        return angles


class InterleavedAsHalf(Mutant, rejected_by="POS-03"):
    """Interleaved rotary pairs halves."""

    def rope(self, *args, interleaved=False, **kwargs):
        return super().rope(*args, interleaved=False, **kwargs)


class PartialTurnsTheLast(Mutant, rejected_by="POS-04"):
    """Partial rotary turns the last channels."""

    def rope(self, x, position_ids, inv_freq, **kwargs):
        shift = x.shape[3] - 2 * len(inv_freq)
        out, found = super().rope(np.roll(x, shift, axis=3), position_ids, inv_freq, **kwargs)
        return np.roll(out, -shift, axis=3), found


class PositionsInBfloat16(Mutant, rejected_by="POS-05"):
    """Positions are held in bfloat16, which is exact up to 256."""

    def angles(self, position_ids, inv_freq):
        return super().angles(round_to("bfloat16", position_ids), inv_freq)


class RowsSharePositions(Mutant, rejected_by="POS-06"):
    """Every row is turned by the positions of the first."""

    def angles(self, position_ids, inv_freq):
        return super().angles(rows_alike(position_ids), inv_freq)


class RotaryGradientTurnsForward(Mutant, rejected_by="GRAD-06"):
    """The gradient turns by the angle and not by its opposite."""

    def rope(self, x, *args, dout=None, **kwargs):
        out, _ = super().rope(x, *args, **kwargs)
        return out, {} if dout is None else {"x": super().rope(dout, *args, **kwargs)[0]}


class AnglesInWorkingDtype(Mutant, rejected_by="DTYPE-05"):
    """Angles are computed in the working dtype."""

    def rope(self, x, position_ids, inv_freq, *, dtype, **kwargs):
        return super().rope(x, position_ids, round_to(dtype, inv_freq), dtype=dtype, **kwargs)


# -- scan ------------------------------------------------------------------------------------------------------------


class StateCarriedOver(Mutant, rejected_by="ISO-06"):
    """The state continues into the next segment."""

    def carries(self, segment_ids):
        carried = np.ones(segment_ids.shape, bool)
        carried[:, 0] = False
        return carried


class StateOfRowsMixed(Mutant, rejected_by="REP-02"):
    """Every row's state is reset where the first row's is."""

    def carries(self, segment_ids):
        return super().carries(rows_alike(segment_ids))


class ScanForgetsAtTiles(Mutant, rejected_by="SHAPE-09"):
    """The state is lost after 64 tokens of a segment."""

    def carries(self, segment_ids):
        carried = super().carries(segment_ids)
        carried[:, 64] &= ~carried[:, 1:64].all(axis=1)
        return carried


class ScanGradient(Mutant):
    """Changes the gradients of the right scan."""

    def found(self, gradients, segment_ids):
        """Change gradients in place."""

    def scan(self, *args, **kwargs):
        out, gradients = super().scan(*args, **kwargs)
        if gradients:
            self.found(gradients, kwargs["segment_ids"])
        return out, gradients


class GradientOfDecayMissing(ScanGradient, rejected_by="GRAD-07"):
    """The gradient of A leaves out the last state."""

    def found(self, gradients, segment_ids):
        gradients["A"][:, -1] = 0.0


class ScanGradientAtPadding(ScanGradient, rejected_by="PAD-05"):
    """Padding gets a gradient from the scan."""

    def found(self, gradients, segment_ids):
        gradients["x"][segment_ids == 0] = 1e-6


class ScanInBfloat16(Mutant, rejected_by="DTYPE-06"):
    """The scan computes in bfloat16 for every requested dtype."""

    def scan(self, *args, dtype, **kwargs):
        return super().scan(*args, dtype="bfloat16", **kwargs)


# -- loss ------------------------------------------------------------------------------------------------------------


class BoundaryLabelCounts(Mutant, rejected_by="LOSS-03"):
    """The last token of a segment is trained on the first of the next."""

    def trained(self, labels, segment_ids):
        counts = (labels != -100) & (segment_ids > 0)
        counts[:, 1:] &= segment_ids[:, :-1] > 0
        counts[:, 0] = False
        return counts


class MaskedLabelsCount(Mutant, rejected_by="LOSS-04"):
    """A masked label is a target, of class 0."""

    def loss(self, logits, labels, *args, **kwargs):
        return super().loss(logits, np.maximum(labels, 0), *args, **kwargs)


class NothingToTrainIsNaN(Mutant, rejected_by="LOSS-05"):
    """A batch without targets divides by zero."""

    def loss(self, *args, **kwargs):
        total, weight, dlogits = super().loss(*args, **kwargs)
        return (total, weight, dlogits) if weight else (np.nan, weight, np.full_like(dlogits, np.nan))


class TokenWeightsOutOfStep(Mutant, rejected_by="LOSS-06"):
    """Weights are taken one token early."""

    def loss(self, *args, token_weights=None, **kwargs):
        late = None if token_weights is None else np.roll(token_weights, 1, axis=1)
        return super().loss(*args, token_weights=late, **kwargs)


class PaddingLabelsCount(Mutant, rejected_by="PAD-06"):
    """Labels at padding count."""

    def trained(self, labels, segment_ids):
        counts = labels != -100
        counts[:, 0] = False
        counts[:, 1:] &= segment_ids[:, 1:] == segment_ids[:, :-1]
        return counts


class LossGradientOfTheMean(Mutant, rejected_by="GRAD-08"):
    """The gradient is that of the mean, and the loss is the sum."""

    def loss(self, *args, **kwargs):
        total, weight, dlogits = super().loss(*args, **kwargs)
        return total, weight, dlogits / max(weight, 1.0)


class LossSeesOtherSegments(Mutant, rejected_by="ISO-07"):
    """Logits are scaled by the largest of the batch."""

    def loss(self, logits, *args, **kwargs):
        return super().loss(logits * (1 + 1e-4 * np.abs(logits).max()), *args, **kwargs)


class LossInBfloat16(Mutant, rejected_by="DTYPE-07"):
    """Logits are rounded to bfloat16 before the softmax, in every dtype."""

    def loss(self, logits, *args, **kwargs):
        return super().loss(round_to("bfloat16", logits), *args, **kwargs)
