"""The part of the conformance adapter about clips: the front of audio encoders, by what runs in patched models."""

from __future__ import annotations

from torch import Tensor

from packing_core.protocol import Array, Gradients
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.ops.conv.clips import ClipRows, convolve_clips


class ClipMethods(TensorMethods):
    """`clips`."""

    def clips(
        self,
        features: Array,
        frames: Array,
        up: Array,
        up_bias: Array,
        down: Array,
        *,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        rows = ClipRows(frames.tolist(), features.shape[1])

        def run(features: Tensor, up: Tensor, up_bias: Tensor, down: Tensor) -> Tensor:
            return convolve_clips(features.transpose(1, 2), rows, (up, up_bias), (down, None), activation=lambda x: x)

        operands = self._operands({"features": features, "up": up, "up_bias": up_bias, "down": down}, dtype)
        return self._out_and_gradients(run, operands, dout)
