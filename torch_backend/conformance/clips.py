"""The part of the conformance adapter about clips: the front of audio encoders, by what runs in patched models."""

from __future__ import annotations

from torch import Tensor

from packing_core.protocol import Array, Gradients, OperationCall, takes_call
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.ops.conv.clip_rows import ClipRows, convolve_clips


class ClipMethods(TensorMethods):
    """`clips`."""

    @takes_call("features", "up", "up_bias", "down")
    def clips(self, call: OperationCall) -> tuple[Array, Gradients]:
        rows = ClipRows(call.options["frames"].tolist(), call.operands["features"].shape[1])

        def run(features: Tensor, up: Tensor, up_bias: Tensor, down: Tensor) -> Tensor:
            return convolve_clips(features.transpose(1, 2), rows, (up, up_bias), (down, None), activation=lambda x: x)

        return self._run(run, call)
