"""The reference backend's routed experts: all tokens of a batch together, one expert after the other, in numpy.

Each rule that a mutant breaks is a method of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.draws import round_to
from packing_core import reference
from packing_core.protocol import Array, Backend, Gradients
from packing_core.reference import ExpertActivation


class ExpertMethods(Backend):
    """`experts`."""

    def experts(
        self,
        x: Array,
        indices: Array,
        weights: Array,
        up: Array,
        down: Array,
        segment_ids: Array,
        *,
        dtype: str,
        activation: ExpertActivation,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        chosen = self.routed(indices, segment_ids).reshape(-1, indices.shape[-1])
        tokens, shares = x.reshape(-1, x.shape[-1]), self.routing_weights(weights, segment_ids).reshape(chosen.shape)
        options: dict[str, Any] = {"up_bias": up_bias, "down_bias": down_bias, "activation": activation}
        out = reference.experts(tokens, chosen, shares, up, down, **options).reshape(x.shape)
        if dout is None:
            return round_to(dtype, out), {}
        found = reference.experts_vjp(tokens, chosen, shares, up, down, dout.reshape(tokens.shape), **options)
        found |= {"x": found["x"].reshape(x.shape), "weights": found["weights"].reshape(weights.shape)}
        return round_to(dtype, out), {name: round_to(dtype, gradient) for name, gradient in found.items()}

    def routed(self, indices: Array, segment_ids: Array) -> Array:
        """The choices ``[B, S, K]`` that are followed, -1 for none."""
        return np.where(segment_ids[..., None] > 0, indices, -1)

    def routing_weights(self, weights: Array, segment_ids: Array) -> Array:
        """The weight ``[B, S, K]`` of each choice."""
        return weights
