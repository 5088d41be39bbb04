"""Does this decoder train packed rows as it trains each document alone? A measurement, with the model's own attention.

Data flows random documents -> one packed batch, and the same documents one a row -> logits and gradients of both ->
Verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import packing_core
from jax_backend.data import to_batch
from jax_backend.loss import packed_cross_entropy
from jax_backend.model import Decoder

_FLOOR = 1e-5  # of the largest reference value; what float32 summation order may cost on a small model


@dataclass(frozen=True)
class Verdict:
    """Differences are max error / max |reference|.

    Attributes:
        logits, gradients: packed against each document alone; the gradients' worst parameter.
        allowed_logits, allowed_gradients: how large those may be: twice what the working dtype costs each document
            alone, and a floor.
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


def audit(model: Decoder, *, seed: int = 0) -> Verdict:
    """Measure contamination of ``model`` on random documents that straddle its windows and fill several rows.

    The model is left as it is. It runs on the current default device, in the model's dtype, with the implementation
    that the model was built with.
    """
    config = model.config
    rng = np.random.default_rng(seed)
    window = min(max([w for w in config.windows if w] or [24]), 256)
    lengths = [window + 9, 1, window, window // 2 + 1, 7, window - 1, 2, window + 1]
    documents = [rng.integers(0, config.vocab_size, length).astype(np.int32) for length in lengths]
    capacity = max(-(-2 * max(lengths) // 64) * 64, 64)
    packed = packing_core.pack(documents, capacity, seed=seed)
    alone = packing_core.pack(documents, packing_core.plan(lengths, capacity, max_segments=1, seed=None))

    exchanged = int(packed.sources[0])
    changed = list(documents)
    changed[exchanged] = (documents[exchanged] + 1) % config.vocab_size
    packed_logits, packed_grads = _measure(model, packed)
    alone_logits, alone_grads = _measure(model, alone)
    changed_logits, _ = _measure(model, packing_core.pack(changed, capacity, seed=seed))
    exact_logits, exact_grads = (alone_logits, alone_grads)
    if model.model.norm.dtype != jnp.float32:
        exact_logits, exact_grads = _measure(_in_float32(model), alone)

    moved = {source for source, logits in changed_logits.items() if not np.array_equal(logits, packed_logits[source])}
    noise_logits = max(_relative(alone_logits[s], exact_logits[s]) for s in exact_logits)
    noise_gradients = max(map(_relative, alone_grads, exact_grads))
    return Verdict(
        logits=max(_relative(packed_logits[s], alone_logits[s]) for s in alone_logits),
        gradients=max(map(_relative, packed_grads, alone_grads)),
        allowed_logits=2 * noise_logits + _FLOOR,
        allowed_gradients=2 * noise_gradients + _FLOOR,
        moved=len(moved - {exchanged}),
        own=exchanged in moved,
    )


@nnx.jit
def _run(model: Decoder, batch: dict[str, jax.Array]) -> tuple[jax.Array, nnx.State]:
    def loss(model: Decoder) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
        return total / weight, logits

    grads, logits = nnx.grad(loss, has_aux=True)(model)
    return logits, grads


def _measure(model: Decoder, packed: packing_core.PackedBatch) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Logits by document, and every parameter's gradient."""
    logits, grads = _run(model, {name: jnp.asarray(array) for name, array in to_batch(packed).items()})
    host = np.asarray(logits, np.float32)
    segments = zip(packed.sources.tolist(), packed.rows, packed.segment_starts, packed.lengths, strict=True)
    by_document = {source: host[row, start : start + length] for source, row, start, length in segments}
    return by_document, [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(grads)]


def _in_float32(model: Decoder) -> Decoder:
    wide = Decoder(model.config, rngs=nnx.Rngs(0), implementation=model.implementation, mesh=model.mesh)
    nnx.update(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(model, nnx.Param)))
    return wide


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), np.finfo(np.float32).tiny))
