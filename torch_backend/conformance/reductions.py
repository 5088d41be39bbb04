"""The part of the conformance adapter about numbers per document: reductions, log-probabilities, losses over pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from packing_core import protocol
from packing_core.batches.keys import BatchKey
from packing_core.protocol import Array, Batch, Document, Gradients, OperationCall, Place, takes_call
from torch_backend.collate import PackedCollator
from torch_backend.conformance.tensors import TensorMethods, to_numpy
from torch_backend.hf.unpadding import LENGTHS, unpad_calls
from torch_backend.losses.cross_entropy import normalise
from torch_backend.losses.preference import dpo_loss
from torch_backend.losses.token_logprobs import token_logprobs
from torch_backend.ops.reduction import reduce


class DocumentMethods(TensorMethods):
    """`reduce`, `logprobs`, `embed` and `preference` of an adapter that makes the suite's decoder."""

    @takes_call("values")
    def reduce(self, call: OperationCall) -> tuple[Array, Gradients]:
        batch = _described(call.options["documents"], call.operands["values"].shape)
        where = call.options.get("where")
        counted = None if where is None else torch.tensor(where, device=self.device)
        return self._run(lambda values: reduce(values, batch, call.options["how"], where=counted), call)

    def logprobs(
        self,
        decoder: protocol.Decoder,
        batch: Batch,
        *,
        dtype: str,
        temperature: float = 1.0,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        model = self._model(decoder, dtype)
        with torch.set_grad_enabled(dout is not None):
            found = token_logprobs(model, self._inputs(batch), temperature=temperature).logprobs
        if dout is not None:
            found.backward(torch.tensor(dout, device=found.device).to(found.dtype))
        return found.detach().cpu().numpy(), {} if dout is None else _gradients(model)

    def embed(
        self,
        decoder: protocol.Decoder,
        documents: Sequence[Document],
        *,
        how: str,
        dtype: str,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        # A padded call, as libraries of embeddings make it; it runs packed, and its tokens go back to their places.
        model = self._model(decoder, dtype)
        unpad_calls(model)
        lengths = torch.tensor([len(document.input_ids) for document in documents])
        ids = nn.utils.rnn.pad_sequence([torch.tensor(document.input_ids) for document in documents], batch_first=True)
        places = torch.arange(ids.shape[1])
        real = places < lengths[:, None]
        shares = {"first": places == 0, "last": places == lengths[:, None] - 1, "mean": real / lengths[:, None]}
        batch = self._on_device({"input_ids": ids, "attention_mask": real.long(), LENGTHS: tuple(lengths.tolist())})
        with torch.set_grad_enabled(dout is not None):
            hidden = model(**batch, output_hidden_states=True).hidden_states[-1]
            pooled = (hidden * shares[how].to(hidden)[..., None]).sum(1)
        if dout is not None:
            pooled.backward(torch.tensor(dout, device=pooled.device).to(pooled.dtype))
        return to_numpy(pooled), {} if dout is None else _gradients(model)

    def preference(
        self,
        decoder: protocol.Decoder,
        microbatches: Sequence[Sequence[Document]],
        *,
        capacity: int,
        beta: float,
        dtype: str,
    ) -> tuple[float, Gradients]:
        model = self._model(decoder, dtype)
        collate = PackedCollator(model, capacity=capacity)
        pairs = torch.tensor(sum(len(documents) // 2 for documents in microbatches), device=self.device)
        total = 0.0
        for documents in microbatches:
            batch = self._on_device(collate([{"input_ids": d.input_ids, "labels": d.labels} for d in documents]))
            sums = reduce(token_logprobs(model, batch).logprobs, batch, "sum")
            loss = normalise(dpo_loss(sums[::2], sums[1::2], beta=beta).sum(), pairs)
            loss.backward()
            total += loss.item()
        return total, _gradients(model)

    # -- of the adapter that this is mixed into ----------------------------------------------------------------------

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        raise NotImplementedError

    def _on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _model(self, decoder: protocol.Decoder, dtype: str) -> nn.Module:
        raise NotImplementedError


def _described(documents: Sequence[Sequence[Place]], shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the batch that a packed collator would make of these documents in rows of this shape."""
    pieces = sorted((row * shape[1] + start, stop - start) for places in documents for row, start, stop in places)
    lengths, number, filled = [], {}, 0
    for first, length in [*pieces, (shape[0] * shape[1], 0)]:
        lengths += [first - filled] if first > filled else []  # padding is a segment of its own
        number[first] = len(lengths)
        lengths += [length] if length else []
        filled = first + length
    of_document = [tuple(number[row * shape[1] + start] for row, start, _ in places) for places in documents]
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"input_ids": ids, BatchKey.LENGTHS: tuple(lengths), BatchKey.DOCUMENTS: tuple(of_document)}


def _gradients(model: nn.Module) -> Gradients:
    found = {name: x.grad for name, x in model.named_parameters()}
    return {name: np.asarray(x.detach().float().cpu()) for name, x in found.items() if x is not None}
