"""The output head and the cross-entropy in one, a chunk of tokens at a time, so that no full logits exist.

Data flows hidden [T, M], weight [M, V] -> chunks of logits [C, V] -> (loss sum, weight sum). When the loss is
differentiated, the forward already makes both gradients of each chunk while its logits are there; the backward only
scales them. On a Hopper GPU not even a chunk's logits exist: ``mosaic_powers`` makes their gradient, but for a factor
per token, in the product itself. Shape letters: T tokens, C tokens of a chunk, M hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_backend.attention.sharding import is_whole, platform_of
from jax_backend.differentiation import reverse_mode
from jax_backend.lacking import missing
from jax_backend.losses.cross_entropy import IGNORED, counted
from jax_backend.placement import refuse_varying, takes_explicit_axes
from packing_core.errors import LayoutError, PackingError

# Logits of a chunk, in float32 (1 GiB, and half as much for their gradient) or as powers (0.6 GiB). Each chunk reads
# and writes the whole gradient of the weight: with half as many logits a row of 16,384 tokens took a tenth longer on an
# H200; of powers, twice as many were no faster (benchmarks/RESULTS.md).
_ENTRIES, _POWERS = 2**28, 5 * 2**26
_MULTIPLE = 128
_LARGEST = 2.0**80  # sum of powers (a loss of 55) above which they may have lost what they stand for
_FORWARD_MODE = (
    "linear_cross_entropy has a gradient in reverse mode alone (jax.grad, jax.vjp): for forward mode (jax.jvp, "
    "jax.jacfwd, jax.hessian) pass the logits to packed_cross_entropy"
)
_FAR = 1e30  # a base that every power vanishes beside


@dataclass(frozen=True)
class _LossOptions:
    softcap: float | None
    logit_scale: float
    chunk: int
    transposed: bool = False
    powers: bool = False

    @property
    def matrix(self) -> str:
        """The axes of the weight, as in the formulas of products."""
        return "vm" if self.transposed else "mv"


def chunk_of(tokens: int, most: int) -> int:
    """Tokens of a chunk, about ``most`` at most: as many in each, in whole tiles of a product."""
    tokens = max(tokens, 1)
    chunks = -(-tokens // max(most, _MULTIPLE))
    return -(-tokens // chunks // _MULTIPLE) * _MULTIPLE


@takes_explicit_axes(lambda given: P())
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
    transposed: bool = False,
    mesh: Mesh | NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes `packed_cross_entropy` of the logits ``logit_scale * hidden @ weight``, without keeping the logits.

    Products run in the dtype of ``hidden`` and add up in float32; the softmax and the gradient of ``weight`` are
    float32.

    Args:
        hidden: [..., M], the last hidden states.
        weight: [M, V], the output head's kernel, of any floating dtype; [V, M], an embedding, if ``transposed``.
        targets: integer [...], already shifted; ``ignore_index`` for none.
        weights: [...] weight of each target; None for 1. Weights are data and get no gradient.
        softcap: bound on the logits, ``softcap * tanh(logits / softcap)``, after the scale; None or 0 for none.
        logit_scale: factor on the logits.
        chunk: tokens whose logits exist at a time, on each device; None for about 2**28 logits.
        transposed: whether ``weight`` is [V, M].
        mesh: the mesh over whose axes the first axis of ``hidden`` is spread, or the sharding of ``hidden``. Each
            device then computes its own tokens, and the gradient of ``weight`` is added up over the devices once.
            ``weight`` may be sharded in any way.

    Returns:
        (loss_sum, weight_sum), float32 scalars. A target that is no class makes the loss and its gradients NaN, unless
        its weight is 0; there hidden states need not be finite either.

    Raises:
        LayoutError: the shapes contradict each other.
        PackingError: ``chunk`` is less than 1, or ``softcap`` less than 0.
    """
    if weight.ndim != 2 or hidden.shape[-1:] != weight.shape[transposed:][:1]:
        axes = f"{('first', 'last')[transposed]} axis of weight {('[M, V]', '[V, M]')[transposed]}"
        raise LayoutError(f"hidden {hidden.shape} must end in the {axes}, got {weight.shape}")
    if hidden.shape[:-1] != targets.shape:
        raise LayoutError(f"hidden {hidden.shape} must be targets {targets.shape} with a last axis of channels")
    if weights is not None and weights.shape != targets.shape:
        raise LayoutError(f"weights {weights.shape} and targets {targets.shape} must have the same shape")
    if chunk is not None and chunk < 1:
        raise PackingError(f"chunk is {chunk}: it counts tokens and is at least 1")
    if softcap is not None and not 0 <= softcap < float("inf"):
        raise PackingError(f"softcap is {softcap}: it must be positive and finite; pass None for none")
    softcap = softcap or None
    classes = weight.shape[not transposed]
    labels, factors, valid = counted(targets, weights, classes=classes, ignore_index=ignore_index)
    platform, whole = platform_of(hidden, mesh), mesh is not None or is_whole(hidden, weight)

    def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array) -> jax.Array:
        """The loss sum [1] of what one device has."""
        tokens, channels = labels.size, hidden.shape[-1]
        hidden = jnp.where((labels >= 0)[..., None], hidden, 0)  # 0 times what is not finite would be NaN
        asked = None if chunk is None else min(chunk, chunk_of(tokens, tokens))
        long, short = (asked or chunk_of(tokens, entries // classes) for entries in (_POWERS, _ENTRIES))
        found = answers(hidden.reshape(tokens, channels), classes, platform=platform, softcap=softcap, chunk=long)
        powers = whole and found["powers"] is None
        options = _LossOptions(softcap, logit_scale, long if powers else max(1, min(short, tokens)), transposed, powers)
        return _loss_sum(options, hidden.reshape(tokens, channels), weight, labels.ravel(), factors.ravel())[None]

    hidden, weight = reverse_mode(_FORWARD_MODE, hidden, weight)
    if mesh is None:
        refuse_varying("linear_cross_entropy", hidden, weight)
        return run(hidden, weight, labels, factors).sum() * valid, factors.sum()
    sharding = mesh if isinstance(mesh, NamedSharding) else NamedSharding(mesh, P(mesh.axis_names))
    spec = P(*sharding.spec[: labels.ndim])
    sums = P(tuple(axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)))
    spread = jax.shard_map(run, mesh=sharding.mesh, in_specs=(spec, P(), spec, spec), out_specs=sums, check_vma=False)
    return spread(hidden, weight, labels, factors).sum() * valid, factors.sum()


def answers(
    hidden: jax.Array | jax.ShapeDtypeStruct,
    classes: int,
    *,
    platform: str,
    softcap: float | None = None,
    chunk: int | None = None,
) -> dict[str, str | None]:
    """Collects for each way to make the loss of hidden [T, M] None, or why it cannot serve; the first that can is
    taken."""
    chunk = chunk or chunk_of(len(hidden), _POWERS // classes)
    return {"powers": _against_powers(hidden, classes, platform, softcap, chunk), "logits": None}


def _against_powers(
    hidden: jax.Array | jax.ShapeDtypeStruct, classes: int, platform: str, softcap: float | None, chunk: int
) -> str | None:
    """Explains why the product cannot write powers at once, else None: it needs their dtype and whole copies."""
    if (reason := missing("jax_backend.losses.mosaic_powers")) is not None:
        return reason
    from jax_backend import hopper
    from jax_backend.losses import mosaic_powers

    if softcap is not None:
        return f"logits are capped at {softcap:g}"
    if hidden.dtype != jnp.bfloat16:
        return f"hidden states are {hidden.dtype}, not bfloat16"
    units = {
        "channels": (hidden.shape[-1], mosaic_powers.DEPTH),
        "classes": (classes, mosaic_powers.PART),
        "tokens of a chunk": (chunk, mosaic_powers.TOKENS),
    }
    for what, (size, unit) in units.items():
        if size % unit:
            return f"{size} {what} are no multiple of {unit}"
    if classes < mosaic_powers.CLASSES:
        return f"{classes} classes are fewer than {mosaic_powers.CLASSES}"
    if platform != "gpu" or not hopper.compiles_for_hopper():
        return "it is written for Hopper GPUs"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(
    options: _LossOptions, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """Computes the loss of hidden [T, M]; labels [T] are -1 where there is no target; factors [T]."""
    narrow = weight.astype(hidden.dtype)

    def add(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
        hidden_CM, labels_C, factors_C = part
        logits_CV, _ = _logits(options, hidden_CM, narrow)
        return total + _losses(logits_CV, labels_C, factors_C)[0], None

    return jax.lax.scan(add, jnp.zeros(()), _chunks(options.chunk, hidden, labels, factors))[0]


def _forward(
    options: _LossOptions, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, Any]:
    narrow = weight.astype(hidden.dtype)
    data = hidden, narrow, labels, factors
    if options.powers:
        found, overflowed = _by_powers(options, *data)

        def again(_: Any) -> Any:
            return _by_logits(replace(options, chunk=_MULTIPLE), *data), jnp.zeros((), bool)

        # At most one round; a conditional would copy the gradients.
        (total, dhidden, dweight), _ = jax.lax.while_loop(lambda carry: carry[1], again, (found, overflowed))
    else:
        total, dhidden, dweight = _by_logits(options, *data)
    return total, (dhidden, dweight, jnp.zeros((), weight.dtype))


def _by_logits(
    options: _LossOptions, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss sum and its gradients by hidden [T, M] and the weight."""

    def add(carry: Any, part: Any) -> tuple[Any, jax.Array]:
        total, dweight = carry
        hidden_CM, labels_C, factors_C = part
        logits_CV, slope_CV = _logits(options, hidden_CM, weight)
        loss, lse_C1 = _losses(logits_CV, labels_C, factors_C)
        is_label_CV = jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1) == labels_C[:, None]
        dlogits_CV = (jnp.exp(logits_CV - lse_C1) - is_label_CV.astype(jnp.float32)) * factors_C[:, None] * slope_CV
        dlogits_CV = dlogits_CV.astype(hidden.dtype)
        dhidden_CM = _product(f"cv,{options.matrix}->cm", dlogits_CV, weight).astype(hidden.dtype)
        more = _product(f"cm,cv->{options.matrix}", hidden_CM, dlogits_CV)
        return (total + loss, dweight + more), dhidden_CM

    start = jnp.zeros(()), jnp.zeros(weight.shape, jnp.float32)
    (total, dweight), dhidden = jax.lax.scan(add, start, _chunks(options.chunk, hidden, labels, factors))
    return total, dhidden.reshape(-1, hidden.shape[1])[: len(hidden)], dweight


def _by_powers(
    options: _LossOptions, hidden: jax.Array, weight: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The same, and whether a token's powers overflowed, so that none of it can be used.

    The gradient of a chunk's logits is ``share_C * powers_CV``, of which the products take ``powers_CV`` alone.
    """
    from jax_backend.losses import mosaic_powers

    by_class_VM = weight if options.transposed else weight.T

    def add(carry: Any, part: Any) -> tuple[Any, jax.Array]:
        total, dweight, largest = carry
        hidden_CM, labels_C, factors_C = part
        place_C = jnp.maximum(labels_C, 0)
        base_C = _product("cm,cm->c", hidden_CM, by_class_VM[place_C]) * (options.logit_scale * mosaic_powers.LOG2E)
        base_C = jnp.where(labels_C == -1, _FAR, base_C)
        powers_CV, sums = mosaic_powers.powers(hidden_CM, by_class_VM, place_C, base_C, options.logit_scale)
        others_C = sums.sum(axis=0)
        nll_C = jnp.log1p(others_C)
        at_label_C = others_C.astype(hidden.dtype)
        powers_CV = powers_CV.at[jnp.arange(len(place_C)), place_C].set(
            -at_label_C, unique_indices=True, indices_are_sorted=True
        )
        share_C1 = (factors_C * options.logit_scale / (1 + others_C))[:, None]
        # The label's is most of a token's gradient: what it lost by rounding is made good in all of the token's.
        share_C1 *= jnp.where(others_C > 0, others_C / at_label_C.astype(jnp.float32), 1)[:, None]
        dhidden_CM = (_product(f"cv,{options.matrix}->cm", powers_CV, weight) * share_C1).astype(hidden.dtype)
        shared_CM = (hidden_CM.astype(jnp.float32) * share_C1).astype(hidden.dtype)
        more = _product(f"cm,cv->{options.matrix}", shared_CM, powers_CV)
        total = total + jnp.sum(jnp.where(labels_C == -1, 0.0, nll_C) * factors_C)
        return (total, dweight + more, jnp.maximum(largest, others_C.max())), dhidden_CM

    start = jnp.zeros(()), jnp.zeros(weight.shape, jnp.float32), jnp.zeros(())
    chunks = _chunks(options.chunk, hidden, labels, factors)
    (total, dweight, largest), dhidden = jax.lax.scan(add, start, chunks)
    return (total, dhidden.reshape(-1, hidden.shape[1])[: len(hidden)], dweight), ~(largest < _LARGEST)


def _chunks(chunk: int, hidden: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[jax.Array, ...]:
    """hidden [chunks, C, M], labels and factors [chunks, C], filled up by tokens without a target."""
    pad = (0, -len(hidden) % chunk)
    hidden, labels = jnp.pad(hidden, (pad, (0, 0))), jnp.pad(labels, pad, constant_values=-1)
    return tuple(x.reshape(-1, chunk, *x.shape[1:]) for x in (hidden, labels, jnp.pad(factors, pad)))


def _backward(options: _LossOptions, saved: Any, dloss: jax.Array) -> tuple[Any, ...]:
    dhidden, dweight, like = saved
    return (dhidden.astype(dloss.dtype) * dloss).astype(dhidden.dtype), (dweight * dloss).astype(like.dtype), None, None


_loss_sum.defvjp(_forward, _backward)


def _logits(options: _LossOptions, hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Logits [C, V] in float32, and their derivative by the plain product."""
    logits = _product(f"cm,{options.matrix}->cv", hidden, weight) * options.logit_scale
    if options.softcap is None:
        return logits, options.logit_scale
    tanh = jnp.tanh(logits / options.softcap)
    return options.softcap * tanh, (1 - tanh * tanh) * options.logit_scale


def _losses(logits: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of negative log-likelihoods, and each token's log-sum-exp [C, 1]."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
    nll = jnp.where(labels == -1, 0.0, lse[:, 0] - picked)
    return jnp.sum(nll * factors), lse


def _product(formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)
