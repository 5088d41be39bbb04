"""Log-probabilities of the trained tokens of a batch without all of its logits, under ``jit`` and ``grad``.

Hidden states [B, S, M] -> chunks of a few tokens of each row, one after the other -> their logits -> log-probability
(and entropy) of each target. A chunk's logits are made again in the backward, so no [B, S, V] array ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_backend.batches import renamed
from jax_backend.losses.cross_entropy import signed
from jax_backend.model.decoder import Decoder
from jax_backend.strictness import finite
from packing_core.errors import LayoutError, PackingError

CHUNK_BYTES = 2**28  # float32 logits of one chunk


class TokenLogprobs(NamedTuple):
    """The log-probabilities and entropies of a batch's targets, standing where ``batch["targets"]`` stand; float32.

    Attributes:
        logprobs: [B, S]: log-probability of each target; 0 where ``loss_weights`` is 0.
        entropy: [B, S] in nats, of the distribution that it is of; None if not asked.
        candidates: int32 [B, S, K]: the most likely ids, or those that were asked for; None if none were.
        candidate_logprobs: [B, S, K]; None likewise.
    """

    logprobs: jax.Array
    entropy: jax.Array | None
    candidates: jax.Array | None
    candidate_logprobs: jax.Array | None


def token_logprobs(
    model: Decoder,
    batch: Mapping[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top_k: int | None = None,
    candidates: jax.Array | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogprobs:
    """Computes the log-probability of each trained token of a batch, differentiable.

    Args:
        model: a decoder, or anything with its ``hidden(input_ids, segment_ids, position_ids)`` and ``logits(hidden)``.
        batch: of :func:`jax_backend.to_batch`: ``input_ids``, ``segment_ids``, ``position_ids``, ``targets`` (shifted)
            and ``loss_weights``, of which nothing is read but whether they are 0; [B, S] each.
        temperature: divides the model's logits, after whatever the model does to them.
        entropy: also that of each distribution.
        top_k: also the k most likely ids at each trained token, and their log-probabilities.
        candidates: integer [B, S, K]: also the log-probabilities of these ids at each trained token.
        chunk_bytes: about as much memory as the float32 logits of a chunk may take.

    Raises:
        LayoutError: the batch lacks something, or shapes contradict each other.
        PackingError: the model is none of these, the temperature is not above 0, or both ``top_k`` and ``candidates``
            are given.
    """
    if not all(hasattr(type(model), name) for name in ("hidden", "logits")):
        raise PackingError(
            f"token_logprobs takes a Decoder, or another model with hidden(...) and logits(...), got "
            f"{type(model).__name__}"
        )
    if not temperature > 0:
        raise PackingError(f"temperature must be above 0, got {temperature}: for the most likely ids pass top_k")
    if top_k is not None and candidates is not None:
        raise PackingError("top_k chooses candidates by the model and candidates names them: pass one of them")
    if top_k is not None and top_k < 1:
        raise PackingError(f"top_k must be at least 1, got {top_k}")
    batch = renamed(batch)
    wanted = ("input_ids", "segment_ids", "position_ids", "targets", "loss_weights")
    if missing := [name for name in wanted if name not in batch]:
        raise LayoutError(f"the batch lacks {', '.join(missing)}: jax_backend.to_batch makes all of them")
    input_ids, segment_ids, position_ids, targets, weights = (jnp.asarray(batch[name]) for name in wanted)
    targets = signed("targets", targets)
    if candidates is not None:
        candidates = signed("candidates", candidates)
    if candidates is not None and candidates.shape[:-1] != targets.shape:
        raise LayoutError(f"candidates must be [*{targets.shape}, K], got {candidates.shape}")

    def of_chunk(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
        hidden, ids = chunk[0], chunk[1]
        logits = model.logits(hidden).astype(jnp.float32) / temperature
        log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        if top_k is not None:
            ids = jnp.concatenate([ids, jax.lax.top_k(jax.lax.stop_gradient(logits), top_k)[1]], axis=-1)
        spread_out = -jnp.sum(jnp.exp(log_p) * finite(log_p), axis=-1) if entropy else None  # a probability of 0 adds 0
        rows = jnp.where(ids < 0, log_p.shape[-1], ids)  # NaN, where a negative id would count from the end
        return jnp.take_along_axis(log_p, rows, axis=-1), spread_out, ids[..., 1:]

    ids = targets[..., None] if candidates is None else jnp.concatenate([targets[..., None], candidates], axis=-1)
    trained = weights.astype(bool)
    hidden = model.hidden(input_ids, segment_ids, position_ids)
    hidden = jnp.where(trained[..., None], hidden, 0)  # 0 times what is not finite would be NaN
    rows, length = input_ids.shape
    classes = jax.eval_shape(model.logits, hidden).shape[-1]
    tokens = max(1, min(length, chunk_bytes // max(4 * classes * rows, 1)))
    chunks = -(-length // tokens)

    def cut(x: jax.Array) -> jax.Array:
        """[B, S, ...] -> [chunks, B, tokens, ...]."""
        padded = jnp.pad(x, [(0, 0), (0, chunks * tokens - length), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(rows, chunks, tokens, *x.shape[2:]), 1, 0)

    def joined(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        whole = jnp.moveaxis(x, 0, 1).reshape(rows, chunks * tokens, *x.shape[3:])[:, :length]
        return jnp.where(trained.reshape(*trained.shape, *[1] * (whole.ndim - 2)), whole, 0)

    found = jax.lax.map(jax.checkpoint(of_chunk), (cut(hidden), cut(jnp.where(trained[..., None], ids, 0))))
    at_ids, entropies, chosen = (joined(x) for x in found)
    assert at_ids is not None and chosen is not None
    more = chosen.shape[-1] > 0
    return TokenLogprobs(at_ids[..., 0], entropies, chosen if more else None, at_ids[..., 1:] if more else None)
