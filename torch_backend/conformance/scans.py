"""The part of the conformance adapter about delta rules, Mamba-2's scan and convolutions, as patched layers run them.

transformers' own functions, behind the stand-ins that a patch puts in their place: our kernels on a GPU, fla's or
mamba_ssm's where those pass their trial, batches of documents in plain torch elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import functional as F

from packing_core.errors import UnsupportedError
from packing_core.protocol import Array, Gradients, OperationCall, takes_call
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.hf.anatomy.families import SCANS
from torch_backend.hf.edits.stand_ins import LayerSegments, convolve, scan

# The function that layers call, and a modeling file that has it.
_FILES = {
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "mamba2",
}
_CHUNK = 64
# Before 5.23 the function takes as many heads of q and k as of v, and layers repeat them.
_HEADS_REPEATED_BY_LAYERS = Version(transformers.__version__) < Version("5.23")


class ScanMethods(TensorMethods):
    """`delta_rule`, `ssd` and `convolution`."""

    @takes_call("q", "k", "v", "g", "beta")
    def delta_rule(self, call: OperationCall) -> tuple[Array, Gradients]:
        by_channel = call.operands["g"].ndim == 4
        name = "chunk_kimi_delta_attention" if by_channel else "torch_chunk_gated_delta_rule"
        run, normalise = self._stand_in(name, call), call.options.get("normalise", False)

        def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            if _HEADS_REPEATED_BY_LAYERS:
                q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
            out: Tensor = run(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalise)[0]
            return out

        return self._run(layer, call)

    @takes_call("x", "dt", "A", "B", "C", "D")
    def ssd(self, call: OperationCall) -> tuple[Array, Gradients]:
        run = self._stand_in("mamba2_chunk_scan", call)

        def layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
            out: Tensor = run(x, dt, A, B, C, chunk_size=_CHUNK, D=D)
            return out.to(x.dtype)

        return self._run(layer, call)

    @takes_call("x", "weight", "bias")
    def convolution(self, call: OperationCall) -> tuple[Array, Gradients]:
        segments = LayerSegments(self._packed(call.segment_ids, call.parents))

        def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return convolve(_convolution, x.transpose(1, 2), weight, bias, segments=segments).transpose(1, 2)

        return self._run(layer, call)

    def _stand_in(self, name: str, call: OperationCall) -> Callable[..., Any]:
        """Returns the function that a patched layer calls under this name, for the segments of a call."""
        file = f"transformers.models.{_FILES[name]}.modeling_{_FILES[name]}"
        try:
            function = getattr(import_module(file), name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(f"this transformers has no {name}: install transformers 5") from error
        segments = LayerSegments(self._packed(call.segment_ids, call.parents))
        return partial(scan, name, function, SCANS[name], seq_idx=segments)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None) -> Tensor:
    """Convolves documents [B, C, S], as modeling files do where Triton does not run."""
    assert activation is None
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])
