"""Wrong delta rules and scans of Mamba-2."""

from __future__ import annotations

import numpy as np

from tests.conformance.mutants.base import Mutant, rows_alike


class CarriedAtChunks(Mutant):
    """Mixin: the state continues into a segment that starts at a multiple of 32."""

    def goes_on(self, segment_ids):
        goes_on = super().goes_on(segment_ids)
        goes_on[:, 32::32] |= segment_ids[:, 32::32] > 0
        return goes_on


class ForgottenAtChunks(Mutant):
    """Mixin: the state is lost at every 128th token of a row."""

    def goes_on(self, segment_ids):
        goes_on = super().goes_on(segment_ids)
        goes_on[:, 128::128] = False
        return goes_on


class Gradient(Mutant):
    """Mixin: changes the gradients of the right operation."""

    method: str

    def found(self, gradients, given):
        """Change gradients in place."""

    def delta_rule(self, *args, **kwargs):
        out, gradients = super().delta_rule(*args, **kwargs)
        if gradients and self.method == "delta_rule":
            self.found(gradients, kwargs)
        return out, gradients

    def ssd(self, *args, **kwargs):
        out, gradients = super().ssd(*args, **kwargs)
        if gradients and self.method == "ssd":
            self.found(gradients, kwargs)
        return out, gradients


# -- delta rule ------------------------------------------------------------------------------------------------------


class MemoryOfRowsMixed(Mutant, rejected_by="SCAN-01"):
    """Every row's memory is reset where the first row's is."""

    def goes_on(self, segment_ids):
        return super().goes_on(rows_alike(segment_ids))


class MemoryCarriedAtChunks(CarriedAtChunks, rejected_by="SCAN-02"):
    """The memory continues into a segment that starts at a multiple of 32."""


class GateGradientLost(Gradient, rejected_by="SCAN-03"):
    """The gate gets no gradient."""

    method = "delta_rule"

    def found(self, gradients, given):
        gradients["g"][:] = 0.0


class BoundaryDecayMissing(Mutant, rejected_by="SCAN-04"):
    """The memory that comes over from a chunk of 64 does not fade at the first token of the next."""

    def decays(self, exponent):
        exponent = exponent.copy()
        exponent[:, 64::64] = 0.0
        return super().decays(exponent)


class DeltaGradientAtPadding(Gradient, rejected_by="SCAN-05"):
    """Padding gets a gradient of beta."""

    method = "delta_rule"

    def found(self, gradients, given):
        gradients["beta"][given["segment_ids"] == 0] = 1e-6


class DecaysAreBounded(Mutant, rejected_by="SCAN-06"):
    """At one token the memory fades to a fifth and no further, so that no quotient of decays overflows."""

    def decays(self, exponent):
        return super().decays(np.maximum(exponent, np.log(0.2)))


class KeyHeadsInTurns(Mutant, rejected_by="SCAN-07"):
    """Heads of v read the heads of k in turns."""

    def key_head(self, heads, key_heads):
        return np.arange(heads) % key_heads


class ChannelsFadeAlike(Mutant, rejected_by="SCAN-08"):
    """The channels of a head fade by their mean."""

    def delta_rule(self, q, k, v, g, *args, **kwargs):
        mean = g.mean(axis=-1, keepdims=True) if g.ndim == 4 else g
        return super().delta_rule(q, k, v, np.broadcast_to(mean, g.shape), *args, **kwargs)


class NormalisedAcrossHeads(Mutant, rejected_by="SCAN-09"):
    """All heads of q and k are normalised together."""

    def unit(self, x):
        unit = x * np.sqrt(x.shape[2] / ((x * x).sum(axis=(-2, -1), keepdims=True) + 1e-6))
        return unit


class DeltaRuleInBfloat16(Mutant, rejected_by="SCAN-10"):
    """The delta rule computes in bfloat16 for every requested dtype."""

    def delta_rule(self, *args, dtype, **kwargs):
        return super().delta_rule(*args, dtype="bfloat16", **kwargs)


# -- the scan of Mamba-2 ---------------------------------------------------------------------------------------------


class GroupsInTurns(Mutant, rejected_by="SCAN-11"):
    """Heads read the groups of B and C in turns."""

    def group(self, heads, groups):
        return np.arange(heads) % groups


class StateCarriedAtChunks(CarriedAtChunks, rejected_by="SCAN-12"):
    """The state continues into a segment that starts at a multiple of 32."""


class StepGradientWithoutDecay(Gradient, rejected_by="SCAN-13"):
    """The gradient of dt leaves out the decay."""

    method = "ssd"

    def found(self, gradients, given):
        drive = gradients["x"] - given["dout"] * given["D"][:, None]
        gradients["dt"] = (drive * given["x"]).sum(axis=-1) / given["dt"]


class StateForgottenAtChunks(ForgottenAtChunks, rejected_by="SCAN-14"):
    """The state is lost at every 128th token of a row."""


class SsdGradientAtPadding(Gradient, rejected_by="SCAN-15"):
    """Padding gets a gradient of B."""

    method = "ssd"

    def found(self, gradients, given):
        gradients["B"][given["segment_ids"] == 0] = 1e-6


class SsdInBfloat16(Mutant, rejected_by="SCAN-16"):
    """The scan computes in bfloat16 for every requested dtype."""

    def ssd(self, *args, dtype, **kwargs):
        return super().ssd(*args, dtype="bfloat16", **kwargs)


# -- the convolution -------------------------------------------------------------------------------------------------


class ConvolutionTurnedAround(Mutant, rejected_by="SCAN-17"):
    """The first weight belongs to the current token."""

    def columns(self, width):
        return list(range(width))


class ConvolutionCarriedOver(Mutant, rejected_by="SCAN-18"):
    """The convolution sees the last tokens of the segment before."""

    def goes_on(self, segment_ids):
        return super().goes_on(1 * (segment_ids > 0))
