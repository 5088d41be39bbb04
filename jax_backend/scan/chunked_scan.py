"""Linear attention with a decay, with or without the delta rule, in chunks: the arithmetic behind `gated_delta_rule`
and `ssd`.

Rows are cut into chunks of 64 tokens. Inside a chunk everything is a product of small matrices, for all chunks at once;
from chunk to chunk goes a state:

    decays between tokens, 0 between segments -> what each chunk adds to the state, and what it takes off
    -> the states at the chunks' starts, one after the other -> outputs

Boundaries may stand anywhere in a chunk: the decay from one segment to another is 0, so segment ids are data and shapes
depend on the length of the row alone. A decay is the exponential of a sum of ``g`` over the tokens between, never a
quotient of two products, so that neither long rows nor strong decays overflow.

Memory: a long row is cut into blocks of chunks, and the backward keeps nothing but the inputs and one state a block; it
computes a block's intermediates again. Everything is float32; products follow ``jax_default_matmul_precision``, but the
sums of ``g`` and the triangular inverse, which are exact float32.

Shape letters: B rows, N chunks, C tokens of a chunk (I and J where two meet), H heads of q and k, G heads of v for each
of them, D key channels, E value channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_backend.strictness import aligned

CHUNK = 64
GROUP = 8  # chunks whose states are found for all groups at once, before the walk from group to group
_BASE = 16  # width of the triangles that are inverted by doubling in place; larger ones are put together from these
_STATES = 2**25  # numbers in the states of a block, 128 MiB: what bounds the memory of a long row
_EXACT = jax.lax.Precision.HIGHEST
_FORGOTTEN = -1e4  # a log decay of this is 0 as float32, and so is one of -inf, of which sums would be NaN


class Inputs(NamedTuple):
    """Tokens of rows, of any floating dtype; anything at padding.

    Attributes:
        runs: int32 [B, S], equal inside a segment, different between segments, 0 for padding.
        q, k: [B, S, H, D].
        v: [B, S, H, G, E].
        g: [B, S, H, G], the log of the decay.
        strength: [B, S, H, G], of what is written: beta of the delta rule, the step of Mamba-2.
    """

    runs: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    strength: jax.Array


class Rule(NamedTuple):
    """The kind of scan to compute.

    Attributes:
        corrects: the delta rule, which writes what the memory lacks of v; without it v itself is written.
        scale: of the output.
        normalises: q and k, each head to norm 1, with 1e-6 under the root as fla and transformers have it.
    """

    corrects: bool
    scale: float
    normalises: bool = False


class Carry(NamedTuple):
    """The carry from one token to the next: the state [B, H, G, D, E] and the number of its run, [B]."""

    state: jax.Array
    run: jax.Array


def scan(rule: Rule, inputs: Inputs, carry: Carry) -> tuple[Carry, jax.Array]:
    """The carry after the last token, and the outputs [B, S, H, G, E], both float32; outputs at padding are 0."""
    rows, tokens = inputs.runs.shape
    chunks = -(-tokens // CHUNK)
    blocks = -(-chunks // max(1, _STATES // carry.state.size))
    in_block = -(-chunks // blocks)
    padding = blocks * in_block * CHUNK - tokens

    def cut(x: jax.Array) -> jax.Array:
        """[B, S, ...] to [blocks, B, N, C, ...]."""
        # The last run goes on with tokens of 0, which leave its state as it is.
        more = x[:, -1:] if x is inputs.runs else jnp.zeros_like(x[:, :1])
        x = jnp.concatenate([x, jnp.repeat(more, padding, axis=1)], axis=1) if padding else x
        return jnp.moveaxis(x.reshape(rows, blocks, in_block, CHUNK, *x.shape[2:]), 1, 0)

    carry, out = jax.lax.scan(jax.checkpoint(partial(_block, rule)), carry, jax.tree.map(cut, inputs))
    return carry, jnp.moveaxis(out, 0, 1).reshape(rows, -1, *inputs.v.shape[2:])[:, :tokens]


def _block(rule: Rule, carry: Carry, inputs: Inputs) -> tuple[Carry, jax.Array]:
    """One block: arrays [B, N, C, ...] as `Inputs` has them, outputs [B, N, C, H, G, E]."""
    runs = inputs.runs
    q, k, v, g, strength = (
        jnp.where(runs.reshape(*runs.shape, *[1] * (x.ndim - 3)) > 0, x.astype(jnp.float32), 0.0) for x in inputs[1:]
    )
    if rule.normalises:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q = q * rule.scale
    before = jnp.concatenate([carry.run[:, None], runs[:, :-1, -1]], axis=1)  # run of the token before each chunk
    goes_on = ((runs == before[..., None]) & (runs > 0))[:, :, None, None]  # [B, N, 1, 1, C]
    at = jnp.arange(CHUNK)
    from_before = aligned(at[:, None] >= at[None], runs.ndim + 1)
    together = (runs[..., :, None] == runs[..., None, :]) & (runs[..., :, None] > 0) & from_before
    together = together[:, :, None, None]  # [B, N, 1, 1, I, J]

    g = jnp.maximum(jnp.moveaxis(g, 2, -1), _FORGOTTEN)  # [B, N, H, G, C]
    later = aligned(at[:, None] > at[None], 6)  # [1, 1, 1, 1, I, J]
    after = jnp.where(together & later, g[..., :, None], 0.0)
    tril = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32))
    exponent = jnp.einsum("it,bnhgtj->bnhgij", tril, after, precision=_EXACT)  # sum of g from j + 1 to i
    decay = jnp.where(together, jnp.exp(exponent), 0.0)  # from token j to token i
    from_start = jnp.where(goes_on, jnp.exp(exponent[..., 0] + g[..., :1]), 0.0)  # from the chunk before to token i
    to_end, kept = decay[..., -1, :], from_start[..., -1]

    if rule.corrects:
        strength = jnp.moveaxis(strength, 2, -1)
        likeness = jnp.einsum("bnihd,bnjhd->bnhij", k, k)[:, :, :, None]
        solved = _unit_lower_inverse(jnp.where(later, likeness * decay * strength[..., None], 0.0))
        solved = solved * strength[..., None, :]
        fresh = jnp.einsum("bnhgij,bnjhge->bnhgie", solved, v)
        read = jnp.einsum("bnhgij,bnjhd->bnhgid", solved * from_start[..., None, :], k)
    else:
        fresh, read = jnp.moveaxis(strength[..., None] * v, 2, 4), None
    ending = jnp.moveaxis(k, 2, 3)[:, :, :, None] * to_end[..., None]  # [B, N, H, G, C, D]
    gain = jnp.einsum("bnhgcd,bnhgce->nbhgde", ending, fresh)
    loss = None if read is None else jnp.einsum("bnhgcd,bnhgcf->nbhgdf", ending, read)
    last, states = _carry_states(jnp.moveaxis(kept, 1, 0)[..., None, None], loss, gain, carry.state)

    if read is not None:
        fresh = fresh - jnp.einsum("bnhgid,nbhgde->bnhgie", read, states)
    scores = jnp.einsum("bnihd,bnjhd->bnhij", q, k)[:, :, :, None] * decay
    out = jnp.einsum("bnhgij,bnhgje->bnhgie", scores, fresh)
    out = out + jnp.einsum("bnihd,nbhgde->bnhgie", q, states) * from_start[..., None]
    return Carry(last, runs[:, -1, -1]), jnp.moveaxis(out, 4, 2)


@jax.custom_vjp
def _carry_states(
    kept: jax.Array, loss: jax.Array | None, gain: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The state after the last chunk, and the states before each: ``S' = kept S - loss S + gain``.

    Args:
        kept: [N, B, H, G, 1, 1].
        loss: [N, B, H, G, D, D]; None for none.
        gain: [N, B, H, G, D, E].
        state: [B, H, G, D, E].
    """
    return _walk(kept, loss, gain, state)


def _carry_states_forward(*arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    kept, loss, _, _ = arguments
    last, states = _carry_states(*arguments)
    return (last, states), (kept, loss, states)


def _carry_states_backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
    """The states' gradient goes from the last chunk to the first; all else is made of it for all chunks at once."""
    kept, loss, states = saved
    dlast, dstates = cotangents
    dstate, dafter = _walk(kept, None if loss is None else loss.mT, dstates, dlast, reverse=True)
    dkept = jnp.sum(dafter * states, axis=(-2, -1), keepdims=True)
    return dkept, None if loss is None else -(dafter @ states.mT), dafter, dstate


_carry_states.defvjp(_carry_states_forward, _carry_states_backward)


def _walk(
    kept: jax.Array, loss: jax.Array | None, gain: jax.Array, state: jax.Array, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``S' = kept S - loss S + gain`` over the first axis: the last state, and the states before each step.

    Many steps are cut into groups. In all groups at once, step after step, goes what a group makes of an empty state,
    and of any state S: ``fade S + change S``. So the walk itself has a step for each group only. What fades is kept
    apart, in float32, so that products in a narrower precision round the changes alone.
    """
    steps = gain.shape[0]
    if steps < 2 * GROUP or GROUP == 1:
        return _one_by_one(kept, loss, gain, state, reverse)
    groups = -(-steps // GROUP)

    def cut(x: jax.Array, filling: float) -> jax.Array:
        """[N, ...] to [GROUP, groups, ...], filled up with steps that change nothing."""
        padding = [(0, groups * GROUP - steps), *[(0, 0)] * (x.ndim - 1)]
        x = jnp.pad(x, padding, constant_values=filling)
        return jnp.moveaxis(x.reshape(groups, GROUP, *x.shape[1:]), 0, 1)

    width = gain.shape[-1]
    kept, gain = cut(kept, 1.0), cut(gain, 0.0)
    columns = [width] if loss is None else [width, loss.shape[-1]]  # of the state, and of the change of any state
    start = jnp.zeros((*gain.shape[1:-1], sum(columns)), jnp.float32), jnp.ones(kept.shape[1:], jnp.float32)

    def step(carry: tuple[jax.Array, jax.Array], chunk: Any) -> tuple[Any, Any]:
        both, fade = carry
        kept, loss, gain = chunk
        if loss is None:
            return (kept * both + gain, kept * fade), carry
        return (kept * both - loss @ both + jnp.concatenate([gain, -fade * loss], axis=-1), kept * fade), carry

    steps_of_groups = (kept, None if loss is None else cut(loss, 0.0), gain)
    (ends, fades), (inside, fades_inside) = jax.lax.scan(step, start, steps_of_groups, reverse=reverse)

    def of_state(both: jax.Array, fade: jax.Array, state: jax.Array) -> jax.Array:
        made = fade * state + both[..., :width]
        return made if loss is None else made + both[..., width:] @ state

    def walk(state: jax.Array, group: Any) -> tuple[jax.Array, jax.Array]:
        both, fade = group
        return of_state(both, fade, state), state

    last, starts = jax.lax.scan(walk, state, (ends, fades), reverse=reverse)
    states = of_state(inside, fades_inside, starts[None])
    return last, jnp.moveaxis(states, 0, 1).reshape(-1, *state.shape)[:steps]


def _one_by_one(
    kept: jax.Array, loss: jax.Array | None, gain: jax.Array, state: jax.Array, reverse: bool
) -> tuple[jax.Array, jax.Array]:
    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        kept, loss, gain = chunk
        moved = kept * state + gain
        return moved if loss is None else moved - loss @ state, state

    return jax.lax.scan(step, state, (kept, loss, gain), reverse=reverse)


@jax.custom_vjp
def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """``(I + L)^-1`` of strictly lower triangles L [..., C, C], by block elimination.

    With the inverses X of two neighbouring diagonal blocks and J the block that joins them, that of both together is
    ``X - X J X``. Unlike a product of powers of L this adds no large numbers that cancel.
    """
    at = jnp.arange(_BASE)
    base = _blocks(lower, _BASE, 0, _BASE)
    x = aligned(jnp.eye(_BASE, dtype=jnp.float32), base.ndim) - jnp.where(
        aligned(at[:, None] // 2 == at[None] // 2, base.ndim), base, 0.0
    )
    size = 2
    while size < _BASE:
        pair, block = at // (2 * size), at // size
        joint = jnp.where(
            aligned((pair[:, None] == pair[None]) & (block[:, None] != block[None]), base.ndim), base, 0.0
        )
        x = x - _exactly(_exactly(x, joint), x)
        size *= 2
    while size < CHUNK:
        first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
        corner = -_exactly(_exactly(second, _blocks(lower, 2 * size, size, size)), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        x = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return x[..., 0, :, :]


def _blocks(lower: jax.Array, step: int, below: int, size: int) -> jax.Array:
    """The blocks [..., C / step, size, size] that stand ``below`` the diagonal's every ``step`` columns."""
    corners = range(0, CHUNK, step)
    return jnp.stack([lower[..., a + below : a + below + size, a : a + size] for a in corners], axis=-3)


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (-_exactly(_exactly(inverse.mT, cotangent), inverse.mT),)


_unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=_EXACT)
