"""The part of the conformance adapter about keys that an indexer selects: its choice, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from packing_core import protocol
from packing_core.protocol import Array, Gradients, OperationCall, takes_call
from torch_backend.conformance.tensors import TensorMethods
from torch_backend.ops.attention import request_of
from torch_backend.ops.attention.index_loss import IndexFactors, index_loss
from torch_backend.ops.attention.selected import LongDocuments, SelectedKeys, select, select_pooled


class SelectionMethods(TensorMethods):
    """`index_loss` of a backend that runs selected keys itself.

    Attributes:
        name: of its attention.
    """

    name: str

    def selected(self, index: Sequence[Tensor], long: LongDocuments, top_k: int) -> Tensor:
        """The keys or blocks of keys that queries of long documents see."""
        q, k, weights = index
        if long.block == 1:
            return select(q, k, weights, long, top_k=top_k)
        keys = (x[: len(x) // long.block * long.block] for x in k[long.places].split(long.lengths))
        pooled = [x.unflatten(0, (-1, long.block)).mean(1) for x in keys]
        return select_pooled(q * weights.unsqueeze(-1), pooled, long, top_k=top_k)  # weights are not below 0

    @takes_call("index_q", "index_k", "index_weights")
    def index_loss(self, call: OperationCall) -> tuple[Array, Gradients]:
        attended = {name: call.options[name] for name in ("q", "k")}
        q, k = (x.detach().flatten(0, 1) for x in self._operands(attended, call.dtype).values())
        packed = self._packed(call.segment_ids)
        real = np.flatnonzero(call.segment_ids.ravel()[protocol.cu_seqlens(call.segment_ids)[:-1]])
        long = LongDocuments.of(packed, 0, [[number] for number in real.tolist()])
        assert long is not None

        def losses(**operands: Tensor) -> Tensor:
            index = [x.flatten(0, 1) for x in operands.values()]
            request = request_of(q, k, k, packed)
            chosen = self.selected(index, long, call.options["top_k"])
            keys = SelectedKeys(chosen, long, request, implementation=self.name)
            return index_loss(IndexFactors(*index), q, k, keys)

        exact = {name: torch.tensor(x, device=self.device).requires_grad_() for name, x in call.operands.items()}
        return self._run(losses, call, exact)
