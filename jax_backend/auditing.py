"""``audit(model)``: measures whether documents that are packed together see each other, with the model's own attention.

Random documents -> packed rows, and the same documents one a row -> logits and gradients of both -> the probe: packed
rows in which every second document is replaced, under a loss of the others alone -> a :class:`AuditReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from jax_backend.training.objective import INPUTS, check_signature, fold_keys
from packing_core.budget import EPSILON, FACTOR, Difference, by_largest, difference, floor_of, worst_by_bound
from packing_core.errors import LayoutError, PackingError
from packing_core.hints import hinted

Call = Callable[[Any, dict[str, jax.Array]], jax.Array]

_FLOOR = floor_of(EPSILON["float32"])  # for every dtype: its own rounding is measured
# One row of 640 tokens: documents begin at tokens 64, 128 and 256, where kernels and scans begin a chunk, and one is
# longer than 256.
_CHUNKS = (5, 19, 33, 7, 64, 128, 320, 1, 2, 13, 48)
_ROW = sum(_CHUNKS)


@dataclass(frozen=True)
class AuditReport:
    """Differences are max error / max |reference|.

    Attributes:
        logits, gradients: packed against each document alone; of the parameter that is worst by what its own may be.
        allowed_logits, allowed_gradients: how large those may be: twice what rounding in the working dtype changes of
            each document alone, and a floor. A parameter's rounding is its own, and its floor is of the
            largest gradient of all.
        moved: documents whose packed logits changed, in any bit, when the documents beside them were replaced.
        own: whether the logits of every replaced document changed: if not, the probe saw nothing.
        gradient_leak: how far the gradients of the other documents' loss moved, of the largest; 16 epsilons of float32
            are allowed.
    """

    logits: float
    gradients: float
    allowed_logits: float
    allowed_gradients: float
    moved: int
    own: bool
    gradient_leak: float = 0.0

    @property
    def exact(self) -> bool:
        """Returns whether nothing leaks: all differences within rounding, and no other document moved."""
        within = self.logits <= self.allowed_logits and self.gradients <= self.allowed_gradients
        return bool(within and self.moved == 0 and self.gradient_leak <= _FLOOR and self.own)

    @property
    def line(self) -> str:
        """The verdict's figures in one line."""
        return (
            f"max relative error against each document alone: logits {self.logits:.0e} (tolerance "
            f"{self.allowed_logits:.0e}), gradients {self.gradients:.0e} (tolerance {self.allowed_gradients:.0e}); "
            f"replacing every second document changes {self.moved or 'none'} of the others, and their gradients by "
            f"{self.gradient_leak:.0e}"
        )


@hinted()
def audit(
    model: Any,
    *,
    call: Call | None = None,
    vocab_size: int | None = None,
    window: int | None = None,
    longest: int | None = None,
    dtype: Any = None,
    seed: int = 0,
) -> AuditReport:
    """Measure contamination of ``model`` on random documents that straddle its windows and chunks of 64 to 256 tokens.

    >>> audit(decoder)  # doctest: +SKIP
    >>> audit(params, call=lambda params, batch: linen_module.apply(params, **batch))  # doctest: +SKIP

    It runs on the current default device, and leaves the model as it is. Dropout of an ``nnx`` module is turned off.

    Args:
        model: a `Decoder`, another ``nnx`` module, or with ``call`` any tree of weights.
        call: from the model and a batch to logits [B, S, V]. The batch holds int32 ``input_ids``, ``segment_ids`` and
            ``position_ids``, [B, S] each. None calls the model with these three in this order.
        vocab_size: token ids that the model knows; None for as many as it gives logits for.
        window: the widest sliding window of the model; None for a `Decoder`'s own, or none.
        longest: most tokens of a document, where the model's positions end (a table of them); None for no limit.
        dtype: the coarsest one that the model computes in; None for the coarser of its weights' and its logits'. The
            tolerance is twice the change that rounding every weight to another neighbour in that dtype makes.

    Raises:
        PackingError: the model is no ``nnx`` module, and there is no ``call``; or what it gives for a document alone is
            not finite, so that nothing can be compared with it.
        UnsupportedModelError: it is called without ``call``, and its parameters are named for something else.
        LayoutError: it gives no logits [B, S, V].
    """
    if isinstance(model, Decoder):
        window = max((w for w in model.config.windows if w), default=None)
        vocab_size = model.config.vocab_size
    run = _Model(model, call)
    size = min(window or 24, 256)
    lengths = [*_CHUNKS, size + 9, 1, size, size // 2 + 1, 7, max(size - 1, 1), 2, size + 1]
    lengths = [min(length, longest or length) for length in lengths]
    vocabulary, coarsest = run.vocabulary_and_dtype((2, _ROW))
    vocabulary = vocab_size or vocabulary
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]
    replaced = [(d + 1) % vocabulary if number % 2 == 0 else d for number, d in enumerate(documents)]
    others = range(1, len(lengths), 2)
    rows = packing_core.plan(lengths, _ROW, strategy="sequential", seed=None)
    packed = packing_core.pack(documents, rows)
    alone = packing_core.pack(documents, packing_core.plan(lengths, max(lengths), max_segments=1, seed=None))

    packed_logits, packed_grads = run.measure(packed)
    alone_logits, alone_grads = _finite(lengths, *run.measure(alone))
    # rounding: of the weights, and of sums over the tokens in another order, with more padding
    wider = packing_core.pack(documents[::-1], packing_core.plan(lengths[::-1], _ROW, max_segments=1, seed=None))
    epsilon = float(jnp.finfo(dtype or coarsest).eps)
    rounded_logits, rounded_grads = _finite(lengths[::-1], *run.measure(wider, relative=epsilon, seed=seed))
    before_logits, before_grads = run.measure(packed, of=others)
    after_logits, after_grads = run.measure(packing_core.pack(replaced, rows), of=others)

    noise = max(difference(rounded_logits[len(lengths) - 1 - s], x).relative() for s, x in alone_logits.items())
    moved = {source for source, logits in after_logits.items() if not np.array_equal(logits, before_logits[source])}
    gradients, allowed_gradients, _ = worst_by_bound(
        _differences(packed_grads, alone_grads), _FLOOR, _differences(rounded_grads, alone_grads)
    )
    return AuditReport(
        logits=max(difference(packed_logits[s], x).relative() for s, x in alone_logits.items()),
        gradients=gradients,
        allowed_logits=FACTOR * noise + _FLOOR,
        allowed_gradients=allowed_gradients,
        moved=len(moved & {*others}),
        own=moved >= {*range(0, len(lengths), 2)},
        gradient_leak=by_largest(_differences(after_grads, before_grads)),
    )


def _finite(
    lengths: Sequence[int], logits: dict[int, np.ndarray], grads: list[np.ndarray]
) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
    """Returns the logits and gradients of documents alone.

    Raises:
        PackingError: they are not finite.
    """
    broken = [lengths[source] for source, array in logits.items() if not np.isfinite(array).all()]
    if broken or not all(np.isfinite(gradient).all() for gradient in grads):
        which = f"logits of a document of {min(broken)} tokens" if broken else "gradients of documents"
        raise PackingError(
            f"the model's {which} by itself are not finite, and packed rows are compared with them: pass longest= if "
            "its table of positions is shorter, and look at its weights otherwise"
        )
    return logits, grads


def _differences(got: list[np.ndarray], want: list[np.ndarray]) -> dict[str, Difference]:
    return {str(number): difference(*pair) for number, pair in enumerate(zip(got, want, strict=True))}


class _Model:
    """A model as a function of its floating-point weights and a batch."""

    def __init__(self, model: Any, call: Call | None) -> None:
        if call is None and not isinstance(model, nnx.Module):
            raise PackingError(
                f"audit takes an nnx module, got {type(model).__name__}: for other models pass their weights, and call="
                " from (weights, batch) to logits, such as lambda weights, batch: module.apply(weights, **batch)"
            )
        if call is None:
            check_signature(model)
        call = call or (lambda model, batch: model(*batch.values()))
        if isinstance(model, nnx.Module):
            still = nnx.clone(model)
            for _, module in nnx.iter_modules(still):
                if hasattr(module, "contain_nonfinite"):
                    module.contain_nonfinite = True  # or NaN of one document would count as a leak
            still.eval()
            graph, self._weights, *rest = nnx.split(still, nnx.Param, ...)
            self._logits: Any = lambda weights, batch: call(nnx.merge(graph, weights, fold_keys(rest[0])), batch)
        else:
            self._weights, self._logits = model, call
        self._run = jax.jit(self._logits_and_gradients)

    def vocabulary_and_dtype(self, shape: tuple[int, int]) -> tuple[int, Any]:
        """The last axis of the logits, and the coarsest dtype among weights and logits."""
        like = jax.ShapeDtypeStruct(shape, jnp.int32)
        logits = jax.eval_shape(self._logits, self._weights, dict.fromkeys(INPUTS, like))
        if logits.ndim != 3 or logits.shape[:2] != shape:
            raise LayoutError(f"the model gives {logits.shape} for inputs [B, S] = {shape}: return logits [B, S, V]")
        dtypes = [leaf.dtype for leaf in (*jax.tree.leaves(self._weights), logits)]
        floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
        return logits.shape[-1], max(floating, key=lambda dtype: float(jnp.finfo(dtype).eps))

    def measure(
        self,
        packed: packing_core.PackedBatch,
        *,
        relative: float = 0.0,
        seed: int = 0,
        of: Sequence[int] | None = None,
    ) -> tuple[dict[int, np.ndarray], list[np.ndarray]]:
        """Logits by document, and every weight's gradient.

        Args:
            packed: the rows.
            relative: the weights are changed by up to this share, at random.
            of: the documents whose loss it is; all of them if None.
        """
        weights = _jittered(self._weights, relative, seed) if relative else self._weights
        batch = {name: np.asarray(array) for name, array in to_batch(packed).items()}
        segments = list(zip(packed.sources.tolist(), packed.rows, packed.segment_starts, packed.lengths, strict=True))
        if of is not None:
            batch["loss_weights"] = batch["loss_weights"].copy()
            for source, row, start, length in segments:
                batch["loss_weights"][row, start : start + length] *= source in of
        logits, grads = self._run(weights, {name: jnp.asarray(array) for name, array in batch.items()})
        host = np.asarray(logits, np.float32)
        by_document = {source: host[row, start : start + length] for source, row, start, length in segments}
        return by_document, [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(grads)]

    def _logits_and_gradients(self, weights: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        leaves, tree = jax.tree.flatten(weights)
        trained = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

        def loss(floating: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            given = iter(floating)
            whole = [next(given) if is_trained else leaf for leaf, is_trained in zip(leaves, trained, strict=True)]
            logits = self._logits(jax.tree.unflatten(tree, whole), {name: batch[name] for name in INPUTS})
            total, weight = packed_cross_entropy(logits, batch["targets"], weights=batch["loss_weights"])
            return total / weight, logits

        floating = [leaf for leaf, is_trained in zip(leaves, trained, strict=True) if is_trained]
        grads, logits = jax.grad(loss, has_aux=True)(floating)
        return logits, grads


def _jittered(weights: Any, relative: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def jitter(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        factors = 1 + relative * rng.choice([-0.5, 0.5], leaf.shape).astype(np.float32)
        return jnp.asarray(leaf).astype(jnp.float32) * factors

    return jax.tree.map(jitter, weights)
