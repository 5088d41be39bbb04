"""Cross-entropy of packed rows as a pair of sums, divided once.

Data flows labels, segment ids -> targets (shifted inside each segment) -> (loss sum, weight sum). Sums are added over
microbatches and devices and divided at the end: a mean of means is wrong as soon as target counts differ.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_backend.segments import checked_ids, is_real, segment_starts
from packing_core.errors import LayoutError

IGNORED = -100


def shift_labels(labels: jax.Array, segment_ids: jax.Array, *, ignore_index: int = IGNORED) -> jax.Array:
    """Targets of next-token prediction: each token's target is the label after it, within its own segment.

    The last token of a segment has no target, so the first token of the next one is never predicted from it.

    Args:
        labels: integer [B, S], aligned with the tokens (``labels[t]`` is what token t is).
        segment_ids: integer [B, S], 0 for padding.

    Returns:
        [B, S] in the dtype of labels, or in int32 if that cannot hold every id and ``ignore_index`` (int8, unsigned);
        ``ignore_index`` where there is no target.

    Raises:
        LayoutError: the shapes differ, or the ids break a rule of :func:`find_segments`.
    """
    if labels.shape != segment_ids.shape or labels.ndim != 2:
        raise LayoutError(f"labels {labels.shape} and segment_ids {segment_ids.shape} must share one shape [B, S]")
    segment_ids, labels = checked_ids("segment_ids", segment_ids), signed("labels", labels)
    last = jnp.ones_like(segment_ids[:, :1], bool)
    closes = jnp.concatenate([segment_starts(segment_ids)[:, 1:], last], axis=1)
    following = jnp.concatenate([labels[:, 1:], labels[:, :1]], axis=1)
    return jnp.where(closes | ~is_real(segment_ids), ignore_index, following)


def packed_cross_entropy(
    logits: jax.Array, targets: jax.Array, *, weights: jax.Array | None = None, ignore_index: int = IGNORED
) -> tuple[jax.Array, jax.Array]:
    """The sum of weighted negative log-likelihoods and the sum of weights; the loss is their quotient, taken once.

    ``sum_t w_t (log sum_v exp(l_tv) - l_t,target)`` over tokens that have a target, in float32.

    Args:
        logits: [..., V].
        targets: integer [...], already shifted (:func:`shift_labels`, or a batch's ``targets``); ``ignore_index`` for
            none.
        weights: [...] weight of each target; None for 1. Weights are data and get no gradient.

    Returns:
        (loss_sum, weight_sum), float32 scalars. A target that is no class makes the loss and its gradients NaN, unless
        its weight is 0; there logits need not be finite either.

    Raises:
        LayoutError: the shapes contradict each other.
    """
    if logits.shape[:-1] != targets.shape:
        raise LayoutError(f"logits {logits.shape} must be targets {targets.shape} with a last axis of classes")
    if weights is not None and weights.shape != targets.shape:
        raise LayoutError(f"weights {weights.shape} and targets {targets.shape} must have the same shape")
    labels, weight, valid = counted(targets, weights, classes=logits.shape[-1], ignore_index=ignore_index)
    wide = jnp.where((labels >= 0)[..., None], logits.astype(jnp.float32), 0.0)
    picked = jnp.take_along_axis(wide, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    nll = jnp.where(labels >= 0, jax.nn.logsumexp(wide, axis=-1) - picked, 0.0)
    return jnp.sum(weight * nll) * valid, jnp.sum(weight)


def counted(
    targets: jax.Array, weights: jax.Array | None, *, classes: int, ignore_index: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tells which targets count: those that are not ``ignore_index`` and have a weight other than 0.

    Returns:
        The targets, -1 where none counts; float32 weights, 0 there; and 1, or NaN if one that counts is no class.
    """
    targets = signed("targets", targets)
    counts = targets != ignore_index
    weight = counts if weights is None else jax.lax.stop_gradient(weights)
    weight = jnp.where(counts, weight.astype(jnp.float32), 0.0)
    counts, is_class = weight != 0, (targets >= 0) & (targets < classes)
    return jnp.where(counts & is_class, targets, -1), weight, one_or_nan(is_class | ~counts)


def signed(name: str, ids: jax.Array) -> jax.Array:
    """Returns integer ids in a dtype that holds negative numbers and every class: int32, or wider if they are.

    Raises:
        LayoutError: they are no integers.
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise LayoutError(f"{name} must be integers, got {ids.dtype}")
    wide = jnp.int64 if ids.dtype.itemsize == 8 or ids.dtype == jnp.uint32 else jnp.int32
    return ids.astype(jax.dtypes.canonicalize_dtype(wide))


def one_or_nan(targets_hold: jax.Array) -> jax.Array:
    """Returns 1 if all of these are true, else NaN: a factor makes gradients NaN as well, so that optimizers that
    look at gradients, such as ``optax.apply_if_finite``, leave out the step."""
    return jnp.where(targets_hold.all(), 1.0, jnp.nan)
