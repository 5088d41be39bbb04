"""The output head and the cross-entropy in one, a chunk of tokens at a time, so that no full logits exist.

Data flows hidden [T, M], weight [M, V] -> chunks of logits [C, V] -> (loss sum, weight sum). When the loss is
differentiated, the forward already makes both gradients of each chunk while its logits are there; the backward only
scales them. Shape letters: T tokens, C tokens of a chunk, M hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_backend.losses.cross_entropy import IGNORED
from packing_core.errors import LayoutError, PackingError

# Of a chunk's logits, 1 GiB in float32. Each chunk reads and writes the whole gradient of the weight: with half as many
# logits a row of 16,384 tokens took a tenth longer on an H200 (benchmarks/RESULTS.md).
_ENTRIES = 2**28
_MULTIPLE = 128


@dataclass(frozen=True)
class _Options:
    softcap: float | None
    logit_scale: float
    chunk: int | None
    most: int

    def chunk_of(self, tokens: int) -> int:
        """Tokens of a chunk: what the caller asked for, or the same for all chunks and in whole tiles of a product."""
        if self.chunk is not None:
            return min(self.chunk, tokens)
        chunks = -(-tokens // max(self.most, _MULTIPLE))
        return min(-(-tokens // chunks // _MULTIPLE) * _MULTIPLE, tokens)


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = IGNORED,
    chunk: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What `packed_cross_entropy` gives for the logits ``logit_scale * hidden @ weight``, without keeping the logits.

    Products run in the dtype of ``hidden`` and add up in float32; the softmax and the gradient of ``weight`` are
    float32.

    Args:
        hidden: [..., M], the last hidden states.
        weight: [M, V], the output head's kernel or the transposed embedding, of any floating dtype.
        targets: integer [...], already shifted; ``ignore_index`` for none.
        weights: [...] weight of each target; None for 1. Weights are data and get no gradient.
        softcap: bound on the logits, ``softcap * tanh(logits / softcap)``, after the scale.
        logit_scale: factor on the logits.
        chunk: tokens whose logits exist at a time, on each device; None for about 2**28 logits.
        mesh: the mesh over whose axes the first axis of ``hidden`` is spread. Each device then computes its own rows,
            and the gradient of ``weight`` is added up over the devices once. ``weight`` may be sharded in any way.

    Returns:
        (loss_sum, weight_sum), float32 scalars. A target that is no class makes the loss NaN.

    Raises:
        LayoutError: the shapes contradict each other.
        PackingError: ``chunk`` is less than 1.
    """
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[:1]:
        raise LayoutError(f"hidden {hidden.shape} must end in the first axis of weight [M, V], got {weight.shape}")
    if hidden.shape[:-1] != targets.shape:
        raise LayoutError(f"hidden {hidden.shape} must be targets {targets.shape} with a last axis of channels")
    if weights is not None and weights.shape != targets.shape:
        raise LayoutError(f"weights {weights.shape} and targets {targets.shape} must have the same shape")
    if chunk is not None and chunk < 1:
        raise PackingError(f"chunk is {chunk}: it counts tokens and is at least 1")
    counts = targets != ignore_index
    factors = counts if weights is None else jnp.where(counts, jax.lax.stop_gradient(weights), 0)
    factors = factors.astype(jnp.float32)
    classes = weight.shape[1]
    labels = jnp.where(counts, jnp.where((targets >= 0) & (targets < classes), targets, classes), -1)
    run = partial(_flat_loss_sum, _Options(softcap, logit_scale, chunk, _ENTRIES // classes))
    if mesh is None:
        return run(hidden, weight, labels, factors).sum(), factors.sum()
    rows = P(mesh.axis_names)
    spread = jax.shard_map(run, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=rows, check_vma=False)
    return spread(hidden, weight, labels, factors).sum(), factors.sum()


def _flat_loss_sum(
    options: _Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """The loss sum [1] of hidden [..., M]; labels [...] are -1 where there is no target, V if it is wrong."""
    size = labels.size
    chunk = options.chunk_of(size)
    pad = -size % chunk
    flat = jnp.pad(hidden.reshape(size, -1), ((0, pad), (0, 0)))
    flat_labels = jnp.pad(labels.reshape(size), (0, pad), constant_values=-1)
    chunks = [x.reshape(-1, chunk, *x.shape[1:]) for x in (flat, flat_labels, jnp.pad(factors.reshape(size), (0, pad)))]
    return _loss_sum(options, chunks[0], weight, chunks[1], chunks[2])[None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    options: _Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """Of hidden [chunks, C, M], labels and factors [chunks, C]."""
    narrow = weight.astype(hidden.dtype)

    def add(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        hidden_CM, labels_C, factors_C = part
        logits_CV, _ = _logits(options, hidden_CM, narrow)
        return total + _losses(logits_CV, labels_C, factors_C)[0], None

    return jax.lax.scan(add, jnp.zeros(()), (hidden, labels, factors))[0]


def _forward(
    options: _Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, Any]:
    narrow = weight.astype(hidden.dtype)

    def add(carry: Any, part: Any) -> tuple[Any, jax.Array]:
        total, dweight_MV = carry
        hidden_CM, labels_C, factors_C = part
        logits_CV, slope_CV = _logits(options, hidden_CM, narrow)
        loss, lse_C1 = _losses(logits_CV, labels_C, factors_C)
        is_label_CV = jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == labels_C[:, None]
        dlogits_CV = (jnp.exp(logits_CV - lse_C1) - is_label_CV) * factors_C[:, None] * slope_CV
        narrow_dlogits_CV = dlogits_CV.astype(hidden.dtype)
        dhidden_CM = _product("cv,mv->cm", narrow_dlogits_CV, narrow).astype(hidden.dtype)
        return (total + loss, dweight_MV + _product("cm,cv->mv", hidden_CM, narrow_dlogits_CV)), dhidden_CM

    start = jnp.zeros(()), jnp.zeros(weight.shape, jnp.float32)
    (total, dweight), dhidden = jax.lax.scan(add, start, (hidden, labels, factors))
    return total, (dhidden, dweight, jnp.zeros((), weight.dtype))


def _backward(options: _Options, saved: Any, dloss: jax.Array) -> tuple[Any, ...]:
    dhidden, dweight, like = saved
    return (dhidden * dloss).astype(dhidden.dtype), (dweight * dloss).astype(like.dtype), None, None


_loss_sum.defvjp(_forward, _backward)


def _logits(options: _Options, hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Logits [C, V] in float32, and their derivative by the plain product."""
    logits = _product("cm,mv->cv", hidden, weight) * options.logit_scale
    if options.softcap is None:
        return logits, options.logit_scale
    tanh = jnp.tanh(logits / options.softcap)
    return options.softcap * tanh, (1 - tanh * tanh) * options.logit_scale


def _losses(logits: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of negative log-likelihoods, and each token's log-sum-exp [C, 1]."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    classes = logits.shape[-1]
    picked = jnp.take_along_axis(logits, jnp.clip(labels, 0, classes - 1)[:, None], axis=-1)[:, 0]
    picked = jnp.where(labels == classes, jnp.nan, picked)
    nll = jnp.where(labels == -1, 0.0, lse[:, 0] - picked)
    return jnp.sum(nll * factors), lse


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)
