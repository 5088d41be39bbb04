"""Wrong rows of clips."""

from __future__ import annotations

import numpy as np

from tests.conformance.mutants.base import Mutant


class ConvolutionIntoTheNextClip(Mutant, rejected_by="CLIP-01"):
    """After the first convolution a clip does not begin in zeros: the second sees the one before."""

    def mask(self, kept):
        return np.ones_like(kept)


class NothingBehindTheEnd(Mutant, rejected_by="CLIP-01"):
    """A clip is followed by zeros, where its encoder alone sees the padding that the processor made."""

    def beyond(self):
        return 0


class GradientIntoTheNextClip(Mutant, rejected_by="CLIP-02"):
    """The backward takes the zeros between clips for frames."""

    def mask_of_gradients(self, kept):
        return np.ones_like(kept)


class NormOverTheRow(Mutant, rejected_by="CLIP-03"):
    """Outputs are centred over all clips of the row."""

    def finished(self, out):
        return out - out.mean(0)
