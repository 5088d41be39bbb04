"""The reference backend's routed experts: all tokens of a batch together, one expert after the other, in numpy.

Each rule that a mutant breaks is a method of its own.
"""

from __future__ import annotations

import numpy as np

from conformance.draws import round_to
from packing_core import reference
from packing_core.protocol import Array, Backend, Gradients, OperationCall, takes_call


class ExpertMethods(Backend):
    """`experts`."""

    @takes_call("x", "weights", "up", "down")
    def experts(self, call: OperationCall) -> tuple[Array, Gradients]:
        (x, weights, up, down), dtype, dout = call.operands.values(), call.dtype, call.dout
        options = dict(call.options)
        chosen = self.routed(options.pop("indices"), call.segment_ids).reshape(-1, weights.shape[-1])
        shares = self.routing_weights(weights, call.segment_ids).reshape(chosen.shape)
        tokens = x.reshape(-1, x.shape[-1])
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
