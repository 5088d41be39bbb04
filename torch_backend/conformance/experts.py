"""The part of the conformance adapter about routed experts: the operation as patched models call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packing_core.protocol import Array, Gradients, OperationCall, takes_call
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.ops.experts import experts


class ExpertMethods(TensorMethods):
    """`experts`."""

    @takes_call("x", "weights", "up", "down", "up_bias", "down_bias")
    def experts(self, call: OperationCall) -> tuple[Array, Gradients]:
        real = torch.tensor(call.segment_ids, device=self.device).flatten() > 0
        chosen = torch.tensor(call.options["indices"], device=self.device).flatten(0, 1)
        chosen = torch.where(real[:, None], chosen, len(call.operands["up"]))
        activation = call.options["activation"]

        def run(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, **biases: Any) -> Tensor:
            y = experts(x.flatten(0, 1), chosen, weights.flatten(0, 1), up, down, activation=activation, **biases)
            return y.view(x.shape)

        return self._run(run, call)
