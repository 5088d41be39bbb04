"""The part of the conformance adapter about routed experts: the operation as patched models call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packing_core import protocol
from packing_core.protocol import Array, Gradients
from packing_core.reference import ExpertActivation
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.ops.experts import experts


class ExpertMethods(TensorMethods):
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
        protocol.require_declared(self, dtype=dtype)
        real = torch.tensor(segment_ids, device=self.device).flatten() > 0
        chosen = torch.tensor(indices, device=self.device).flatten(0, 1)
        chosen = torch.where(real[:, None], chosen, up.shape[0])

        def run(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, **biases: Any) -> Tensor:
            y = experts(x.flatten(0, 1), chosen, weights.flatten(0, 1), up, down, activation=activation, **biases)
            return y.view(x.shape)

        given = {"x": x, "weights": weights, "up": up, "down": down, "up_bias": up_bias, "down_bias": down_bias}
        operands = self._operands({name: value for name, value in given.items() if value is not None}, dtype)
        return self._out_and_gradients(run, operands, dout)
