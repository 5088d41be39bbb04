"""The part of the conformance adapter about numbers per document: reductions, log-probabilities, losses over pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_backend.batches import to_batch
from jax_backend.losses.cross_entropy import shift_labels
from jax_backend.losses.reduction import reduce
from jax_backend.losses.token_logprobs import token_logprobs
from jax_backend.model import weights
from packing_core import protocol
from packing_core.protocol import Array, Backend, Batch, Document, Gradients, OperationCall, takes_call
from packing_core.protocol.backend import batch_of, pack_documents


class DocumentMethods(Backend):
    """`reduce`, `logprobs` and `preference` of an adapter that makes the suite's decoder."""

    @takes_call("values")
    def reduce(self, call: OperationCall) -> tuple[Array, Gradients]:
        values, documents, where = call.operands["values"], call.options["documents"], call.options.get("where")
        ids, positions = np.full(values.shape, -1, np.int32), np.zeros(values.shape, np.int32)
        for number, pieces in enumerate(documents):
            read = 0
            for row, start, stop in pieces:
                ids[row, start:stop] = number
                positions[row, start:stop] = np.arange(read, read + stop - start)
                read += stop - start
        counted = np.ones(values.shape, bool) if where is None else where
        batch = {"document_ids": ids, "document_positions": positions}
        given = np.asarray(values, jnp.dtype(call.dtype)), call.dout
        out, gradient = _reduced(*given, batch, counted, how=call.options["how"], documents=len(documents))
        gradients = {} if gradient is None else {"values": np.asarray(gradient, np.float32)}
        return np.asarray(out, np.float32), gradients

    def logprobs(
        self,
        decoder: protocol.Decoder,
        batch: Batch,
        *,
        dtype: str,
        temperature: float = 1.0,
        dout: Array | None = None,
    ) -> tuple[Array, Gradients]:
        names = ("input_ids", "segment_ids", "position_ids", "labels")
        inputs = {name: np.asarray(getattr(batch, name), np.int32) for name in names}
        # A batch's targets stand one token before the labels, and so do their log-probabilities.
        shifted = None if dout is None else np.roll(np.asarray(dout, np.float32), -1, axis=1)
        with arithmetic(dtype):
            found, gradients = _logprobs(*self._model(decoder, dtype, batch), inputs, shifted, temperature=temperature)
        at_labels = np.roll(np.asarray(found, np.float32), 1, axis=1)
        return at_labels, {} if gradients is None else _exported(gradients)

    def preference(
        self,
        decoder: protocol.Decoder,
        microbatches: Sequence[Sequence[Document]],
        *,
        capacity: int,
        beta: float,
        dtype: str,
    ) -> tuple[float, Gradients]:
        pairs = sum(len(documents) // 2 for documents in microbatches)
        total, sums = 0.0, dict[str, Array]()
        for documents in microbatches:
            packed = pack_documents(documents, capacity)
            parts = self._model(decoder, dtype, batch_of(packed))
            with arithmetic(dtype):
                loss, gradients = _pair_sums(*parts, to_batch(packed), beta, documents=len(documents))
            total += float(loss)
            sums = {name: sums.get(name, 0.0) + x for name, x in _exported(gradients).items()}
        return total / pairs, {name: x / np.float32(pairs) for name, x in sums.items()}

    def _model(self, decoder: protocol.Decoder, dtype: str, batch: Batch) -> tuple[Any, Any, Any]:
        raise NotImplementedError


@partial(jax.jit, static_argnames=("how", "documents"))
def _reduced(values: Any, dout: Any, batch: Mapping[str, Any], where: Any, *, how: Any, documents: int) -> Any:
    def run(values: jax.Array) -> jax.Array:
        return reduce(values, batch, how, documents=documents, where=where)

    if dout is None:
        return run(values), None
    out, pullback = jax.vjp(run, values)
    return out, pullback(dout.astype(out.dtype))[0]


@partial(jax.jit, static_argnums=0, static_argnames="temperature")
def _logprobs(graph: Any, params: Any, rest: Any, inputs: Mapping[str, Any], dout: Any, *, temperature: float) -> Any:
    targets = shift_labels(inputs["labels"], inputs["segment_ids"])
    batch = {**inputs, "targets": targets, "loss_weights": targets != -100}

    def run(params: Any) -> jax.Array:
        return token_logprobs(nnx.merge(graph, params, rest), batch, temperature=temperature).logprobs

    if dout is None:
        return run(params), None
    found, pullback = jax.vjp(run, params)
    return found, pullback(dout)[0]


@partial(jax.jit, static_argnums=0, static_argnames="documents")
def _pair_sums(graph: Any, params: Any, rest: Any, batch: Mapping[str, Any], beta: Any, *, documents: int) -> Any:
    """The summed loss of a microbatch's pairs, and its gradient."""

    def loss(params: Any) -> jax.Array:
        logprobs = token_logprobs(nnx.merge(graph, params, rest), batch).logprobs
        sums = reduce(logprobs, batch, "sum", documents=documents)
        return -jax.nn.log_sigmoid(beta * (sums[::2] - sums[1::2])).sum()

    return jax.value_and_grad(loss)(params)


def arithmetic(dtype: str) -> Any:
    """Computes in full float32: on a GPU JAX multiplies float32 in TF32 unless it is asked for more."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else nullcontext()


def _exported(gradients: Any) -> Gradients:
    return {name: np.asarray(x, np.float32) for name, x in weights.export(gradients).items()}
