"""Sparse mixtures of experts without dropped tokens, and the auxiliary loss that keeps their routers balanced.

Data flows x [B, S, M] -> router (float32) -> the experts and weights of each token -> tokens sorted by expert into
blocks of one expert -> products with that expert's weights -> weighted sums per token. Shapes are static: a row's
``S * k`` choices fill at most ``S * k / c + E`` blocks of ``c`` tokens, whatever the router says, and rows are sorted
each by itself, so rows that are spread over devices stay where they are.

`jax.lax.ragged_dot` would be shorter, but JAX expands it to every token times every expert on CPUs, at least.

Shape letters: B rows, S tokens of a row, M hidden size, F intermediate size, E experts, k experts of a token, n blocks,
c tokens of a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_backend.model.decoder_config import MixtureConfig
from jax_backend.model.linear import add_products

_SMALLEST_BLOCK = 8


class Routing(NamedTuple):
    """The decision of a router.

    Attributes:
        experts: int32 [B, S, k].
        weights: float32 [B, S, k].
        probabilities: float32 [B, S, E], the softmax over all experts.
    """

    experts: jax.Array
    weights: jax.Array
    probabilities: jax.Array


class Router(nnx.Module):
    """Logits, probabilities and choices in float32, for every dtype of the layers."""

    def __init__(self, size: int, mixture: MixtureConfig, make: Any) -> None:
        self.kernel = make.weight(size, mixture.experts)
        self.bias = make.zeros(mixture.experts) if mixture.router_bias else None
        self.chosen = mixture.chosen
        self.normalise = mixture.normalise

    def __call__(self, x_BSM: jax.Array) -> Routing:
        wide = x_BSM.astype(jnp.float32)
        logits = jnp.matmul(wide, self.kernel[...].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)[None, None]
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.chosen)
        if self.normalise:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return Routing(experts, weights, probabilities)


class Balance(NamedTuple):
    """Sums over the real tokens of all sparse layers, float32, of which the auxiliary loss is made.

    Attributes:
        chosen: [E], how often each expert was chosen.
        probability: [E], sum of each expert's probabilities.
        tokens: [], how many tokens were routed.
    """

    chosen: jax.Array
    probability: jax.Array
    tokens: jax.Array

    @classmethod
    def zero(cls, experts: int) -> Balance:
        return cls(jnp.zeros(experts), jnp.zeros(experts), jnp.zeros(()))

    @classmethod
    def of(cls, routing: Routing, real_BS: jax.Array) -> Balance:
        experts = routing.probabilities.shape[-1]
        real = real_BS.astype(jnp.float32)
        chosen = jax.nn.one_hot(routing.experts, experts).sum(axis=2)
        return cls(
            jnp.einsum("bse,bs->e", chosen, real), jnp.einsum("bse,bs->e", routing.probabilities, real), real.sum()
        )

    def loss(self) -> jax.Array:
        """``E sum_e f_e P_e`` with f the share of tokens that chose expert e and P its mean probability (Fedus et al.
        2021, arXiv:2101.03961, equations 4 to 6); ``k`` when experts are chosen evenly, 0 without tokens."""
        tokens = jnp.maximum(self.tokens, 1.0)
        return len(self.chosen) * jnp.sum(self.chosen / tokens * self.probability / tokens)


class ExpertBlocks(NamedTuple):
    """A row's choices sorted by expert, in blocks of one expert each.

    Attributes:
        choice: int32 [n, c], the number ``token * k + j`` of the choice at each place; ``S * k`` where there is none.
        expert: int32 [n], whose weights the block is multiplied with; the last expert's for blocks that are empty.
        place: int32 [S * k], where each choice stands, counted over all blocks.
    """

    choice: jax.Array
    expert: jax.Array
    place: jax.Array


def block_size(choices: int, experts: int) -> int:
    """c: half of what an expert gets on average, a power of two. At most a third of all places are then empty on
    average, and copies of weights, one a block, come to three times the weights."""
    half = max(choices // (2 * experts), _SMALLEST_BLOCK)
    return int(2 ** (half.bit_length() - 1))


def sort_by_expert(choices: jax.Array, experts: int) -> ExpertBlocks:
    """Lay out the choices [S * k] of one row.

    >>> sort_by_expert(jnp.array([2, 0, 2]), 3).expert[:2]
    Array([0, 2], dtype=int32)
    """
    total = choices.shape[0]
    size = block_size(total, experts)
    count = -(-total // size) + experts
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)
    of_each = jnp.zeros(experts, jnp.int32).at[choices].add(1)
    blocks_of_each = -(-of_each // size)
    block_end = jnp.cumsum(blocks_of_each)
    ahead = jnp.cumsum(of_each) - of_each  # choices of the experts before
    in_order = choices[order]
    rank = jnp.arange(total, dtype=jnp.int32) - ahead[in_order]
    position = (block_end - blocks_of_each)[in_order] * size + rank
    choice = jnp.full(count * size, total, jnp.int32).at[position].set(order)
    place = jnp.zeros(total, jnp.int32).at[order].set(position.astype(jnp.int32))
    expert = jnp.searchsorted(block_end, jnp.arange(count), side="right")
    return ExpertBlocks(choice.reshape(count, size), jnp.minimum(expert, experts - 1).astype(jnp.int32), place)


@jax.custom_vjp
def dispatch(x_SM: jax.Array, blocks: ExpertBlocks) -> jax.Array:
    """Each place's token [n, c, M], zeros where there is none. The gradient gathers too: places are known both ways."""
    each = len(blocks.place) // len(x_SM)
    padded = jnp.pad(x_SM, ((0, 1), (0, 0)))  # choice S * k is token S
    return padded[blocks.choice // each]


def _dispatch_forward(x_SM: jax.Array, blocks: ExpertBlocks) -> tuple[jax.Array, tuple[ExpertBlocks, jax.Array]]:
    return dispatch(x_SM, blocks), (blocks, jnp.zeros((len(x_SM), 0)))


def _dispatch_backward(kept: tuple[ExpertBlocks, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    blocks, like = kept
    picked_SkM = gradient.reshape(-1, gradient.shape[-1])[blocks.place].reshape(len(like), -1, gradient.shape[-1])
    return picked_SkM.sum(axis=1, dtype=jnp.float32).astype(gradient.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(y_ncM: jax.Array, blocks: ExpertBlocks, tokens: int) -> jax.Array:
    """The output of each of a token's choices [S, k, M]."""
    return y_ncM.reshape(-1, y_ncM.shape[-1])[blocks.place].reshape(tokens, -1, y_ncM.shape[-1])


def _collect_forward(y_ncM: jax.Array, blocks: ExpertBlocks, tokens: int) -> tuple[jax.Array, ExpertBlocks]:
    return collect(y_ncM, blocks, tokens), blocks


def _collect_backward(tokens: int, blocks: ExpertBlocks, gradient: jax.Array) -> tuple[jax.Array, None]:
    return jnp.pad(gradient.reshape(-1, gradient.shape[-1]), ((0, 1), (0, 0)))[blocks.choice], None


collect.defvjp(_collect_forward, _collect_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def weights_of(tensor: jax.Array, expert: jax.Array, dtype: Any) -> jax.Array:
    """[E, ...] -> [n, ...], each block's weights in ``dtype``. The gradient is a product with zeros and ones, added in
    float32: a scatter of matrices would add them up in any order."""
    return tensor.astype(dtype)[expert]


def _weights_of_forward(
    tensor: jax.Array, expert: jax.Array, dtype: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return weights_of(tensor, expert, dtype), (expert, jnp.zeros((tensor.shape[0], 0), tensor.dtype))


def _weights_of_backward(dtype: Any, kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    expert, like = kept
    whose = jax.nn.one_hot(expert, like.shape[0], dtype=gradient.dtype)
    return add_products(whose, gradient, axes=1).astype(like.dtype), None


weights_of.defvjp(_weights_of_forward, _weights_of_backward)


class ExpertLinear(nnx.Module):
    """The weights of one projection in all experts, ``kernel`` [E, inputs, outputs]; checkpoints keep one each."""

    def __init__(self, experts: int, inputs: int, outputs: int, make: Any) -> None:
        self.kernel = make.weight(experts, inputs, outputs)


class Experts(nnx.Module):
    """Gated experts (Shazeer 2020, arXiv:2002.05202) under the names that the family's checkpoints give them."""

    def __init__(self, size: int, mixture: MixtureConfig, activation: Any, make: Any) -> None:
        gate, up, down = mixture.names
        setattr(self, gate, ExpertLinear(mixture.experts, size, mixture.size, make))
        setattr(self, up, ExpertLinear(mixture.experts, size, mixture.size, make))
        setattr(self, down, ExpertLinear(mixture.experts, mixture.size, size, make))
        self.names = mixture.names
        self.activation = activation

    def tensors(self) -> tuple[jax.Array, ...]:
        return tuple(getattr(self, name).kernel[...] for name in self.names)

    def apply(self, x_ncM: jax.Array, tensors: tuple[jax.Array, ...]) -> jax.Array:
        """Outputs [n, c, M] of blocks, given the weights of each block."""
        gate, up, down = tensors
        return _product(self.activation(_product(x_ncM, gate)) * _product(x_ncM, up), down)


class BiasedExperts(nnx.Module):
    """GPT-OSS's experts: gate and up projections interleaved, biases, and a clamped gate.

    ``(up + 1) * gate * sigmoid(alpha * gate)``, gate at most ``limit`` and up within ``limit``.
    """

    def __init__(self, size: int, mixture: MixtureConfig, make: Any) -> None:
        experts, inner = mixture.experts, mixture.size
        self.gate_up_proj = make.weight(experts, size, 2 * inner)
        self.gate_up_proj_bias = make.zeros(experts, 2 * inner)
        self.down_proj = make.weight(experts, inner, size)
        self.down_proj_bias = make.zeros(experts, size)
        self.clamp = mixture.clamp

    def tensors(self) -> tuple[jax.Array, ...]:
        every = self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias
        return tuple(tensor[...] for tensor in every)

    def apply(self, x_ncM: jax.Array, tensors: tuple[jax.Array, ...]) -> jax.Array:
        """Outputs [n, c, M] of blocks, given the weights of each block."""
        gate_up, gate_up_bias, down, down_bias = tensors
        assert self.clamp is not None
        alpha, limit = self.clamp
        both = _product(x_ncM, gate_up) + gate_up_bias[:, None]
        gate, up = jnp.minimum(both[..., ::2], limit), jnp.clip(both[..., 1::2], -limit, limit)
        return _product((up + 1) * gate * jax.nn.sigmoid(alpha * gate), down) + down_bias[:, None]


def run_experts(experts: Experts | BiasedExperts, x_BSM: jax.Array, routing: Routing) -> jax.Array:
    """The weighted sums [B, S, M] of the outputs of each token's experts, in the dtype of x; no token is dropped."""
    tensors = experts.tensors()
    count = len(tensors[0])

    def row(x_SM: jax.Array, chosen_Sk: jax.Array, weights_Sk: jax.Array) -> jax.Array:
        blocks = sort_by_expert(chosen_Sk.reshape(-1), count)
        own = tuple(weights_of(tensor, blocks.expert, x_SM.dtype) for tensor in tensors)
        outputs_SkM = collect(experts.apply(dispatch(x_SM, blocks), own), blocks, len(x_SM))
        return jnp.einsum("skm,sk->sm", outputs_SkM, weights_Sk, preferred_element_type=jnp.float32)

    return jax.vmap(row)(x_BSM, routing.experts, routing.weights).astype(x_BSM.dtype)


def _product(x_ncM: jax.Array, weights_nMF: jax.Array) -> jax.Array:
    return jnp.einsum("ncm,nmf->ncf", x_ncM, weights_nMF)
