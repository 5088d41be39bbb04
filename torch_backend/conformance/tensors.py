"""Conversions shared by the conformance adapter: numpy float32 in, tensors of the named dtype, numpy float32 out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from packing_core import protocol
from packing_core.protocol import Array, Backend, Gradients
from torch_backend.segments import PackedMetadata


class TensorMethods(Backend):
    """The way from the protocol's words to torch's and back, on one device."""

    device: torch.device

    def _operands(self, arrays: Mapping[str, Array], dtype: str) -> dict[str, Tensor]:
        protocol.require_declared(self, dtype=dtype)
        working = getattr(torch, dtype)
        return {name: torch.tensor(x, device=self.device).to(working).requires_grad_() for name, x in arrays.items()}

    def _packed(self, segment_ids: Array, parents: Array | None = None) -> PackedMetadata:
        """Every run of equal ids is a segment, also one of padding; ``parents`` counts the real ones."""
        bounds = protocol.cu_seqlens(segment_ids)
        lengths = np.diff(bounds).tolist()
        if parents is None:
            return PackedMetadata.from_lengths(lengths, device=self.device)
        real = np.flatnonzero(np.ravel(segment_ids)[bounds[:-1]])
        of_runs = np.full(len(lengths), -1)
        of_runs[real] = np.where(parents >= 0, real[parents], -1)
        return PackedMetadata.from_lengths(lengths, device=self.device, parents=of_runs.tolist())

    def _run(
        self,
        function: Callable[..., Tensor],
        call: protocol.OperationCall,
        operands: Mapping[str, Tensor] | None = None,
    ) -> tuple[Array, Gradients]:
        """The output of ``function(**operands)`` and, where the call has a ``dout``, the operands' gradients.

        Args:
            operands: those of the call, if not in its dtype.
        """
        operands = self._operands(call.operands, call.dtype) if operands is None else operands
        with torch.set_grad_enabled(call.dout is not None):
            out = function(**operands)
        if call.dout is None:
            return to_numpy(out), {}
        cotangent = torch.tensor(call.dout, device=self.device).to(out.dtype)
        found = torch.autograd.grad(out, list(operands.values()), cotangent)
        return to_numpy(out), {name: to_numpy(x) for name, x in zip(operands, found, strict=True)}


def to_numpy(x: Tensor | None) -> Array:
    """float32 on the host; of a gradient that must be there."""
    assert x is not None
    return np.asarray(x.detach().float().cpu())
