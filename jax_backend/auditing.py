"""Does this model train packed rows as it trains each document alone? A measurement, with the model's own attention.

Data flows random documents -> one packed batch, and the same documents one a row -> logits and gradients of both ->
Verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import packing_core
from jax_backend.batches import to_batch
from jax_backend.losses.cross_entropy import packed_cross_entropy
from jax_backend.model.decoder import Decoder
from packing_core.errors import LayoutError

_INPUTS = ("input_ids", "segment_ids", "position_ids")
Call = Callable[[Any, dict[str, jax.Array]], jax.Array]

_FLOOR = 1e-5  # of the largest reference value; what float32 summation order may cost on a small model


@dataclass(frozen=True)
class Verdict:
    """Differences are max error / max |reference|.

    Attributes:
        logits, gradients: packed against each document alone; the gradients' worst parameter.
        allowed_logits, allowed_gradients: how large those may be: twice what rounding the weights in the working dtype
            changes of each document alone, and a floor.
        moved: documents whose packed logits changed, in any bit, when another document's tokens were exchanged.
        own: whether the exchanged document's own logits changed: if not, the probe saw nothing.
    """

    logits: float
    gradients: float
    allowed_logits: float
    allowed_gradients: float
    moved: int
    own: bool

    @property
    def exact(self) -> bool:
        """Whether nothing leaks: both differences within rounding, and no other document moved."""
        within = self.logits <= self.allowed_logits and self.gradients <= self.allowed_gradients
        return bool(within and self.moved == 0 and self.own)

    @property
    def line(self) -> str:
        """The verdict's figures in one line."""
        return (
            f"max relative error against each document alone: logits {self.logits:.0e} (tolerance "
            f"{self.allowed_logits:.0e}), gradients {self.gradients:.0e} (tolerance {self.allowed_gradients:.0e}); "
            f"exchanging one document changes {self.moved or 'none'} of the others"
        )


def audit(
    model: Any,
    *,
    call: Call | None = None,
    vocab_size: int | None = None,
    window: int | None = None,
    dtype: Any = None,
    seed: int = 0,
) -> Verdict:
    """Measure contamination of ``model`` on random documents that straddle its windows and fill several rows.

    >>> audit(decoder)  # doctest: +SKIP
    >>> audit(params, call=lambda params, batch: linen_module.apply(params, **batch))  # doctest: +SKIP

    It runs on the current default device, and leaves the model as it is. Dropout of an ``nnx`` module is turned off.

    Args:
        model: a `Decoder`, another ``nnx`` module, or with ``call`` any tree of weights.
        call: from the model and a batch to logits [B, S, V]. The batch holds int32 ``input_ids``, ``segment_ids`` and
            ``position_ids``, [B, S] each. None calls the model with these three in this order.
        vocab_size: token ids that the model knows; None for as many as it gives logits for.
        window: the widest sliding window of the model; None for a `Decoder`'s own, or none.
        dtype: the coarsest one that the model computes in; None for the coarser of its weights' and its logits'. The
            tolerance is twice the change that rounding every weight to another neighbour in that dtype makes.
    """
    if isinstance(model, Decoder):
        window = max((w for w in model.config.windows if w), default=None)
        vocab_size = model.config.vocab_size
    run = _Model(model, call)
    size = min(window or 24, 256)
    lengths = [size + 9, 1, size, size // 2 + 1, 7, max(size - 1, 1), 2, size + 1]
    capacity = max(-(-2 * max(lengths) // 64) * 64, 64)
    vocabulary, coarsest = run.vocabulary_and_dtype((2, capacity))
    vocabulary = vocab_size or vocabulary
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    packed = packing_core.pack(documents, capacity, seed=seed)
    alone = packing_core.pack(documents, packing_core.plan(lengths, capacity, max_segments=1, seed=None))

    exchanged = int(packed.sources[0])
    changed = list(documents)
    changed[exchanged] = (documents[exchanged] + 1) % vocabulary
    packed_logits, packed_grads = run.measure(packed)
    alone_logits, alone_grads = run.measure(alone)
    changed_logits, _ = run.measure(packing_core.pack(changed, capacity, seed=seed))
    rounded_logits, rounded_grads = run.measure(alone, relative=float(jnp.finfo(dtype or coarsest).eps), seed=seed)

    moved = {source for source, logits in changed_logits.items() if not np.array_equal(logits, packed_logits[source])}
    noise_logits = max(_relative(rounded_logits[s], alone_logits[s]) for s in alone_logits)
    noise_gradients = max(map(_relative, rounded_grads, alone_grads))
    return Verdict(
        logits=max(_relative(packed_logits[s], alone_logits[s]) for s in alone_logits),
        gradients=max(map(_relative, packed_grads, alone_grads)),
        allowed_logits=2 * noise_logits + _FLOOR,
        allowed_gradients=2 * noise_gradients + _FLOOR,
        moved=len(moved - {exchanged}),
        own=exchanged in moved,
    )


class _Model:
    """A model as a function of its floating-point weights and a batch."""

    def __init__(self, model: Any, call: Call | None) -> None:
        call = call or (lambda model, batch: model(*batch.values()))
        if isinstance(model, nnx.Module):
            still = nnx.clone(model)
            still.eval()
            graph, self._weights, *rest = nnx.split(still, nnx.Param, ...)
            self._logits: Any = lambda weights, batch: call(nnx.merge(graph, weights, _own(rest[0])), batch)
        else:
            self._weights, self._logits = model, call
        self._run = jax.jit(self._logits_and_gradients)

    def vocabulary_and_dtype(self, shape: tuple[int, int]) -> tuple[int, Any]:
        """The last axis of the logits, and the coarsest dtype among weights and logits."""
        like = jax.ShapeDtypeStruct(shape, jnp.int32)
        logits = jax.eval_shape(self._logits, self._weights, dict.fromkeys(_INPUTS, like))
        if logits.ndim != 3 or logits.shape[:2] != shape:
            raise LayoutError(f"the model gives {logits.shape} for inputs [B, S] = {shape}: return logits [B, S, V]")
        dtypes = [leaf.dtype for leaf in (*jax.tree.leaves(self._weights), logits)]
        floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return logits.shape[-1], max(floating, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def measure(
        self, packed: packing_core.PackedBatch, *, relative: float = 0.0, seed: int = 0
    ) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
        """Logits by document, and every weight's gradient, with the weights changed by up to ``relative`` at random."""
        weights = _jittered(self._weights, relative, seed) if relative else self._weights
        logits, grads = self._run(weights, {name: jnp.asarray(array) for name, array in to_batch(packed).items()})
        host = np.asarray(logits, np.float32)
        segments = zip(packed.sources.tolist(), packed.rows, packed.segment_starts, packed.lengths, strict=True)
        by_document = {source: host[row, start : start + length] for source, row, start, length in segments}
        return by_document, [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(grads)]

    def _logits_and_gradients(self, weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        leaves, tree = jax.tree.flatten(weights)
        trained = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def loss(floating: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            given = iter(floating)
            whole = [next(given) if is_trained else leaf for leaf, is_trained in zip(leaves, trained, strict=True)]
            logits = self._logits(jax.tree.unflatten(tree, whole), {name: batch[name] for name in _INPUTS})
            total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
            return total / weight, logits

        floating = [leaf for leaf, is_trained in zip(leaves, trained, strict=True) if is_trained]
        grads, logits = jax.grad(loss, has_aux=True)(floating)
        return logits, grads


def _own(variables: Any) -> Any:
    """The variables as those of the present trace, which a call may change (counters of random streams)."""
    return jax.tree.map(lambda x: x, variables)


def _jittered(weights: Any, relative: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def jitter(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        factors = 1 + relative * rng.choice([-0.5, 0.5], leaf.shape).astype(np.float32)
        return (jnp.asarray(leaf).astype(jnp.float32) * factors).astype(jnp.float32)

    return jax.tree.map(jitter, weights)


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), np.finfo(np.float32).tiny))
