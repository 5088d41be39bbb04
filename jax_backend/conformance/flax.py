"""Anybody's JAX causal language model as a conformance backend: a function from weights and a batch to logits.

The model is its own oracle: packed, in the named dtype, against itself in float64 with one document per row. The suite
lays out the rows, so that padding and boundaries stand anywhere; training packs with `packing_core` and steps with
optax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_backend.conformance.operations import RULES
from jax_backend.losses.cross_entropy import packed_cross_entropy, shift_labels
from packing_core.errors import UnsupportedError
from packing_core.protocol import (
    Array,
    Backend,
    Batch,
    Capabilities,
    Decoder,
    Document,
    Gradients,
    require_declared,
)
from packing_core.protocol.backend import batch_of, pack_documents

Inputs = dict[str, jax.Array]


class FlaxStack(Backend):
    """A model, and optax steps of it.

    >>> FlaxStack(lambda params, batch: model.apply(params, **batch), params)  # linen  # doctest: +SKIP
    >>> FlaxStack.from_nnx(model, lambda model, batch: model(**batch))  # doctest: +SKIP

    Args:
        logits: from weights and a batch to logits ``[B, S, V]``, without dropout. The batch holds int32 ``input_ids``,
            ``segment_ids`` (1.. per row, 0 for padding) and ``position_ids``, each ``[B, S]``.
        params: the weights, any tree of arrays.
        dtypes: the working dtypes that the model is meant for; weights are cast to them.
        words: token ids that the model knows, at least 64.
        longest: tokens of the longest document that the model takes, at least 96.
    """

    def __init__(
        self,
        logits: Callable[[Any, Inputs], jax.Array],
        params: Any,
        *,
        dtypes: tuple[str, ...] = ("float32",),
        words: int = 64,
        longest: int = 1024,
    ) -> None:
        self._params = jax.tree.map(np.asarray, params)
        self._logits = jax.jit(logits)
        self._summed = jax.jit(jax.value_and_grad(partial(_loss_sum, logits), has_aux=True))
        on_gpu = jax.default_backend() == "gpu"
        self.capabilities = Capabilities(
            dtypes=dtypes,
            options=frozenset({"adamw", "untrained_batches"}),
            atomic_backward=on_gpu,
            own_model=True,
            words=words,
            longest=longest,
        )
        self.description = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"

    @classmethod
    def from_nnx(cls, model: nnx.Module, call: Callable[[Any, Inputs], jax.Array], **options: Any) -> FlaxStack:
        """A stack of an ``nnx`` model; ``call`` runs it on a batch."""
        graph, params, *rest = nnx.split(model, nnx.Param, ...)
        return cls(lambda params, batch: call(nnx.merge(graph, params, *rest), batch), params, **options)

    def forward(self, decoder: Decoder, batch: Batch, *, dtype: str) -> Array:
        self._check(decoder, dtype)
        with _arithmetic(dtype):
            return np.asarray(self._logits(self._cast(dtype), _inputs(batch)), np.float64)

    def gradients(self, decoder: Decoder, batch: Batch, *, dtype: str) -> tuple[float, Gradients]:
        self._check(decoder, dtype)
        with _arithmetic(dtype):
            loss, weight, found = self._sums(self._cast(dtype), batch)
        share = 1 / weight if weight else 0.0
        return loss * share, {name: share * gradient for name, gradient in _named(found).items()}

    def train(
        self,
        decoder: Decoder,
        steps: Sequence[Sequence[Sequence[Document]]],
        *,
        capacity: int,
        learning_rate: float,
        dtype: str,
        optimizer: str = "sgd",
        ranks: int = 1,
    ) -> tuple[list[float], dict[str, Array]]:
        if ranks != 1 or dtype not in ("float32", "float64"):
            raise UnsupportedError(f"it trains in float32 on one rank, not in {dtype} on {ranks}")
        losses = []
        with _arithmetic(dtype):
            params, tx = self._cast(dtype), RULES[optimizer](learning_rate)
            state = tx.init(params)
            for microbatches in steps:
                parts = [
                    self._sums(params, batch_of(pack_documents(documents, capacity))) for documents in microbatches
                ]
                weight = sum(part[1] for part in parts)
                share = 1 / weight if weight else 0.0
                gradients = jax.tree.map(lambda *g, share=share: share * sum(g), *(part[2] for part in parts))
                updates, state = tx.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
                losses.append(share * sum(part[0] for part in parts))
        return losses, _named(params)

    def _check(self, decoder: Decoder, dtype: str) -> None:
        taken = {"sliding_window": decoder.config.sliding_window, "dynamic_rope": decoder.config.dynamic_rope_factor}
        require_declared(self, dtype=dtype, options=[name for name, value in taken.items() if value is not None])

    def _cast(self, dtype: str) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x, dtype) if np.issubdtype(x.dtype, np.floating) else x, self._params)

    def _sums(self, params: Any, batch: Batch) -> tuple[float, float, Any]:
        (loss, weight), found = self._summed(params, _inputs(batch), jnp.asarray(batch.labels, jnp.int32))
        return float(loss), float(weight), found


def _loss_sum(logits: Any, params: Any, inputs: Inputs, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    found = logits(params, inputs)
    targets = shift_labels(labels, inputs["segment_ids"])
    if found.dtype != jnp.float64:
        return packed_cross_entropy(found, targets)
    counts = targets >= 0  # packed_cross_entropy is float32, and the oracle is not
    picked = jnp.take_along_axis(jax.nn.log_softmax(found), jnp.where(counts, targets, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(counts, picked, 0.0).sum(), counts.sum()


def _arithmetic(dtype: str) -> Any:
    """float64 where the oracle asks for it; otherwise float32 that a GPU does not multiply in TF32."""
    return jax.enable_x64(True) if dtype == "float64" else jax.default_matmul_precision("highest")


def _inputs(batch: Batch) -> Inputs:
    return {name: jnp.asarray(getattr(batch, name), jnp.int32) for name in ("input_ids", "segment_ids", "position_ids")}


def _named(tree: Any) -> Gradients:
    """The leaves of a tree by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}
