"""The reference backend's numbers per document: whole rows at a time, in dense numpy.

A matrix of documents by tokens says which token belongs to which document; every result is a masked sum over it. Each
rule that a mutant breaks is a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from conformance.draws import round_to
from packing_core.protocol import (
    Array,
    Backend,
    Batch,
    Decoder,
    Document,
    Gradients,
    OperationCall,
    Place,
    takes_call,
)
from packing_core.protocol.backend import batch_of, pack_documents


class DocumentMethods(Backend):
    """`reduce`, `logprobs` and `preference` of a backend that runs the suite's decoder and says what is trained."""

    @takes_call("values")
    def reduce(self, call: OperationCall) -> tuple[Array, Gradients]:
        values, dout = call.operands["values"], call.dout
        share = self.shares_of(shape=values.shape, **call.options)
        x = values.astype(np.float64).ravel()
        out = np.where(share != 0, share * x, 0.0).sum(axis=1)
        gradient = {} if dout is None else {"values": round_to(call.dtype, (dout @ share).reshape(values.shape))}
        return round_to("float32", out), gradient

    def shares_of(
        self, documents: Sequence[Sequence[Place]], shape: tuple[int, ...], how: str, where: Array | None = None
    ) -> Array:
        """``[N, T]``: by how much each token counts in each document's result."""
        order = np.stack([self.reading_order(pieces, shape).ravel() for pieces in documents])
        return self.shares((order >= 0) if where is None else (order >= 0) & where.ravel(), order, how)

    def reading_order(self, pieces: Sequence[Place], shape: tuple[int, ...]) -> Array:
        """int ``[B, S]``: the place of each token in the document, -1 at tokens of others and at padding."""
        order, read = np.full(shape, -1), 0
        for row, start, stop in pieces:
            order[row, start:stop] = np.arange(read, read + stop - start)
            read += stop - start
        return order

    def shares(self, counted: Array, order: Array, how: str) -> Array:
        """As :meth:`shares_of`, of documents by the places of their tokens."""
        if how in ("first", "last"):
            never = np.iinfo(np.int64).max if how == "first" else -1
            places = np.where(counted, order, never)
            wanted = places.min(axis=1, keepdims=True) if how == "first" else places.max(axis=1, keepdims=True)
            return (counted & (places == wanted)).astype(np.float64)
        share = counted.astype(np.float64)
        return share / np.maximum(1, share.sum(axis=1, keepdims=True)) if how == "mean" else share

    def logprobs(
        self, decoder: Decoder, batch: Batch, *, dtype: str, temperature: float = 1.0, dout: Array | None = None
    ) -> tuple[Array, Gradients]:
        found, backward = self.token_logprobs(decoder, batch, temperature)
        gradients = {} if dout is None else backward(dout)
        return round_to(dtype, found), {name: round_to(dtype, x) for name, x in gradients.items()}

    def token_logprobs(
        self, decoder: Decoder, batch: Batch, temperature: float = 1.0
    ) -> tuple[Array, Callable[[Array], Gradients]]:
        """``[B, S]`` at the labels' own tokens, and the function from its gradient to that of every weight."""
        logits, backward = self._decode(decoder, batch)
        trained = self.trained(batch.labels, batch.segment_ids)
        z = logits / temperature
        z = z - z.max(axis=-1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        log_p = np.roll(log_p, 1, axis=1)  # the logits at t - 1 predict label t, and label 0 is never trained
        targets = np.where(trained, batch.labels, 0)[..., None]
        found = np.where(trained, np.take_along_axis(log_p, targets, axis=-1)[..., 0], 0.0)

        def back(dout: Array) -> Gradients:
            weight = np.where(trained, dout, 0.0)[..., None] / temperature
            dlogits = np.roll(((targets == np.arange(logits.shape[-1])) - np.exp(log_p)) * weight, -1, axis=1)
            return backward(dlogits.reshape(-1, logits.shape[-1]))

        return found, back

    def preference(
        self, decoder: Decoder, microbatches: Sequence[Sequence[Document]], *, capacity: int, beta: float, dtype: str
    ) -> tuple[float, Gradients]:
        total, gradients = 0.0, Gradients()
        counts = [len(documents) // 2 for documents in microbatches]
        for number, documents in enumerate(microbatches):
            share = self.share_of_pair(counts, number)
            packed = pack_documents(documents, capacity)
            found, backward = self.token_logprobs(decoder, batch_of(packed))
            chosen, rejected = packed.reduce(found, "sum").reshape(-1, 2).T
            margin = beta * (chosen - rejected)
            total += share * np.logaddexp(0.0, -margin).sum()
            slope = -share * beta / (1 + np.exp(margin))
            for name, x in backward(packed.spread(np.stack([slope, -slope], axis=1).ravel())).items():
                gradients[name] = gradients.get(name, 0.0) + x
        return float(total), {name: round_to(dtype, x) for name, x in gradients.items()}

    def share_of_pair(self, counts: Sequence[int], number: int) -> float:
        """Returns the weight of a pair of microbatch ``number``, of ``counts`` pairs in each microbatch of the step."""
        return 1 / sum(counts)

    # -- of the backend that this is mixed into --------------------------------------------------------------------

    def trained(self, labels: Array, segment_ids: Array) -> Array:
        """bool ``[B, S]``: whether a label trains the logits one token before it."""
        raise NotImplementedError

    def _decode(self, decoder: Decoder, batch: Batch) -> tuple[Array, Callable[[Array], Gradients]]:
        raise NotImplementedError
