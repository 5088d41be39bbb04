"""Wrong routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.mutants.base import Mutant
from packing_core.protocol import Array, Gradients
from packing_core.reference import ExpertActivation


class LastChoiceDropped(Mutant, rejected_by="EXP-01"):
    """A token's last choice is not followed."""

    def routed(self, indices: Array, segment_ids: Array) -> Array:
        followed = super().routed(indices, segment_ids).copy()
        followed[..., -1] = -1
        return followed


class RoutingWeightsLost(Mutant, rejected_by="EXP-01"):
    """The experts of a token are added up without their weights."""

    def routing_weights(self, weights: Array, segment_ids: Array) -> Array:
        return np.ones_like(weights)


class TokensOutOfOrder(Mutant, rejected_by="EXP-01"):
    """The tokens of a row come back from their experts in the order of their first choice."""

    def experts(self, x: Array, indices: Array, *args: Any, **kwargs: Any) -> tuple[Array, Gradients]:
        out, gradients = super().experts(x, indices, *args, **kwargs)
        order = np.argsort(indices[..., :1], axis=1, kind="stable")
        return np.take_along_axis(out, order, axis=1), gradients


class RoutingGradientMissing(Mutant, rejected_by="EXP-02"):
    """The weights of choices get no gradient, so the router does not learn."""

    def experts(self, *args: Any, **kwargs: Any) -> tuple[Array, Gradients]:
        out, gradients = super().experts(*args, **kwargs)
        return out, gradients | ({"weights": np.zeros_like(gradients["weights"])} if gradients else {})


class PaddingRouted(Mutant, rejected_by="EXP-03"):
    """Padding goes to the experts that the router chose for it."""

    def routed(self, indices: Array, segment_ids: Array) -> Array:
        return indices


class ExpertsOfLimitedCapacity(Mutant, rejected_by="EXP-04"):
    """An expert takes twice its even share of the tokens and drops the others."""

    def experts(self, x: Array, indices: Array, weights: Array, up: Array, *args: Any, **kwargs: Any) -> Any:
        flat = indices.reshape(-1).copy()
        most = 2 * len(flat) // len(up)
        for expert in range(len(up)):
            flat[np.flatnonzero(flat == expert)[most:]] = -1
        return super().experts(x, flat.reshape(indices.shape), weights, up, *args, **kwargs)


class WeightsNormalisedOverTheRow(Mutant, rejected_by="EXP-05"):
    """The weights of choices are divided by their mean over the row."""

    def routing_weights(self, weights: Array, segment_ids: Array) -> Array:
        return weights / weights.mean(axis=1, keepdims=True)


class GatesWithoutLimit(Mutant, rejected_by="EXP-06"):
    """Gates and values are not clamped."""

    def experts(self, *args: Any, activation: ExpertActivation, **kwargs: Any) -> tuple[Array, Gradients]:
        return super().experts(*args, activation=replace(activation, limit=None), **kwargs)


class DownBiasOncePerToken(Mutant, rejected_by="EXP-06"):
    """The bias of the second product is added without the weight of the choice."""

    def experts(self, x: Array, indices: Array, weights: Array, *args: Any, **kwargs: Any) -> tuple[Array, Gradients]:
        out, gradients = super().experts(x, indices, weights, *args, **kwargs)
        bias, segment_ids = kwargs.get("down_bias"), kwargs["segment_ids"]
        if bias is not None:
            out = out + (bias[indices] * (1 - weights)[..., None]).sum(axis=2) * (segment_ids > 0)[..., None]
        return out, gradients


class ReluNotSquared(Mutant, rejected_by="EXP-07"):
    """Experts without gates use silu."""

    def experts(self, *args: Any, activation: ExpertActivation, **kwargs: Any) -> tuple[Array, Gradients]:
        other = activation if activation.gated else ExpertActivation("silu", gated=False)
        return super().experts(*args, activation=other, **kwargs)


class ExpertsInBfloat16(Mutant, rejected_by="EXP-08"):
    """Experts compute in bfloat16 for every requested dtype."""

    def experts(self, *args: Any, dtype: str, **kwargs: Any) -> tuple[Array, Gradients]:
        return super().experts(*args, dtype="bfloat16", **kwargs)
