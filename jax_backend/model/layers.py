"""The parts of a decoder's layer: norms, attention, MLP or experts, and the layer around them.

Data flows x [B, S, M] -> attention -> MLP -> x. Attributes carry the names of the Hugging Face checkpoints. Shape
letters as in ``decoder.py``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_backend.model.decoder_config import DecoderConfig, LayerKind
from jax_backend.model.delta_net import GatedDeltaNet
from jax_backend.model.linear import Linear, multiply, project, scale_by
from jax_backend.model.moe import Balance, BiasedExperts, Experts, Router, run_experts
from jax_backend.segments import is_real
from jax_backend.strictness import aligned, widened

# The name of what policies that keep products keep in a product's place, because a backward reads it and
# not the product: queries, keys and values as the attention takes them, the sum of a residual, a norm's mean square.
IN_PLACE = "in_place_of_products"


class Embedding(nnx.Embed):
    """Rows of a table, and products with it; gradients add up in float32 for every ``dtype``.

    An id that is no row gives NaN.
    """

    def __call__(self, ids: jax.Array) -> jax.Array:  # type: ignore[override]  # without flax's out_sharding
        table = self.embedding[...]
        ids = jnp.where(ids < 0, len(table), ids)  # a negative one would count from the end
        rows = jnp.take(table.astype(widened(table.dtype)), ids, axis=0)
        return rows.astype(table.dtype if self.dtype is None else self.dtype)

    def attend(self, query: jax.Array) -> jax.Array:  # type: ignore[override]  # without flax's out_sharding
        table = self.embedding[...]
        return multiply(query.astype(table.dtype if self.dtype is None else self.dtype), table.T)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, statistics in float32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    ``offset`` is added to the weights, which then start at 0 (Gemma).
    """

    def __init__(self, size: int, eps: float, dtype: Any, param_dtype: Any, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.full((size,), 1.0 - offset, param_dtype))
        self.eps = eps
        self.dtype = dtype
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        square = checkpoint_name(jnp.mean(wide * wide, axis=-1, keepdims=True), IN_PLACE)
        wide = wide * jax.lax.rsqrt(square + self.eps)
        if self.offset:
            weight = self.offset + self.weight[...].astype(jnp.float32)
            return (wide * aligned(weight, wide.ndim)).astype(self.dtype)
        return scale_by(wide.astype(self.dtype), self.weight[...])


class Attention(nnx.Module):
    """Grouped-query self-attention inside segments; biases, fused projections and q/k norms as the family has them."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, make: Maker) -> None:
        n, k, d, m = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        if config.fused:
            self.qkv_proj = make.linear(m, (n + 2 * k) * d, use_bias=config.qkv_bias)
        else:
            self.q_proj = make.linear(m, n * d * (1 + config.output_gate), use_bias=config.qkv_bias)
            self.k_proj = make.linear(m, k * d, use_bias=config.qkv_bias)
            self.v_proj = make.linear(m, k * d, use_bias=config.qkv_bias)
        self.o_proj = make.linear(n * d, m, use_bias=config.output_bias)
        if config.qk_norm is not None:
            self.q_norm, self.k_norm = (make.norm(d if config.qk_norm == "head" else h * d) for h in (n, k))
        self.sinks = make.weight(n) if config.sinks else None
        self.config = config
        self.window = kind.window

    def __call__(self, x_BSM: jax.Array, rotate: Any, attend: Any, together: bool = True) -> jax.Array:
        """Output in the shape of ``x_BSM``; queries, keys and values are made in one product if ``together``."""
        config = self.config
        if config.fused:
            queries = config.num_attention_heads * config.head_dim
            keys = config.num_key_value_heads * config.head_dim
            q, k, v = jnp.split(self.qkv_proj(x_BSM), [queries, queries + keys], axis=-1)
        else:
            q, k, v = project([self.q_proj, self.k_proj, self.v_proj], x_BSM, together)
        if config.output_gate:  # of each head, behind its queries
            q, gate = jnp.split(q.reshape(*q.shape[:2], config.num_attention_heads, -1), 2, axis=-1)
        if config.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSND, k_BSKD, v_BSKD = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q, k, v))
        if config.qk_norm == "head":
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        q_BSND, k_BSKD = rotate(q_BSND, k_BSKD, local=self.window is not None)
        if config.qk_norm is None and not config.output_gate:  # whose backward reads the products
            q_BSND, k_BSKD, v_BSKD = (checkpoint_name(x, IN_PLACE) for x in (q_BSND, k_BSKD, v_BSKD))
        sinks = None if self.sinks is None else self.sinks[...]
        out_BSND = attend(q_BSND, k_BSKD, v_BSKD, window=self.window, sinks=sinks)
        if config.output_gate:
            out_BSND = out_BSND * jax.nn.sigmoid(gate)
        return self.o_proj(out_BSND.reshape(*x_BSM.shape[:2], -1))


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, size: int, make: Maker) -> None:
        m, f = config.hidden_size, size
        if config.fused:
            self.gate_up_proj = make.linear(m, 2 * f, use_bias=config.mlp_bias)
        else:
            self.gate_proj = make.linear(m, f, use_bias=config.mlp_bias)
            self.up_proj = make.linear(m, f, use_bias=config.mlp_bias)
        self.down_proj = make.linear(f, m, use_bias=config.mlp_bias)
        self.config = config

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, Balance]:
        """Output in the shape of ``x``, and the sums of no router; ``real`` says which tokens are no padding."""
        gate, up = jnp.split(self.gate_up_proj(x), 2, -1) if self.config.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(_ACTIVATIONS[self.config.activation](gate) * up), no_balance(self.config)


class SparseMLP(nnx.Module):
    """A mixture of experts (`jax_backend.model.moe`), with a shared expert where the family has one."""

    def __init__(self, config: DecoderConfig, make: Maker) -> None:
        mixture, m = config.mixture, config.hidden_size
        assert mixture is not None
        setattr(self, mixture.router, Router(m, mixture, make))
        self.experts = (
            BiasedExperts(m, mixture, make)
            if mixture.clamp
            else Experts(m, mixture, _ACTIVATIONS[config.activation], make)
        )
        if mixture.shared_size:
            self.shared_expert = MLP(config, mixture.shared_size, make)
            self.shared_expert_gate = make.linear(m, 1, use_bias=False)
        self.mixture = mixture

    def __call__(self, x_BSM: jax.Array, real_BS: jax.Array) -> tuple[jax.Array, Balance]:
        routing = getattr(self, self.mixture.router)(x_BSM)
        y_BSM = run_experts(self.experts, x_BSM, routing)
        if self.mixture.shared_size:
            shared_BSM, _ = self.shared_expert(x_BSM, real_BS)
            y_BSM = y_BSM + jax.nn.sigmoid(self.shared_expert_gate(x_BSM)) * shared_BSM
        return y_BSM, Balance.of(routing, real_BS)


class Layer(nnx.Module):
    """One decoder layer: attention or a gated delta net, an MLP or experts, norms before them, after them, or both."""

    def __init__(self, config: DecoderConfig, kind: LayerKind, make: Maker) -> None:
        self.names = _NORMS[config.norms]
        for name in filter(None, self.names):
            setattr(self, name, make.norm(config.hidden_size))
        if kind.recurrent:
            self.linear_attn = GatedDeltaNet(config, make)
        else:
            self.self_attn = Attention(config, kind, make)
        self.recurrent = kind.recurrent
        mixture = config.mixture if kind.sparse else None
        self.block = mixture.block if mixture else "mlp"
        setattr(self, self.block, SparseMLP(config, make) if mixture else MLP(config, config.intermediate_size, make))

    def __call__(
        self, x_BSM: jax.Array, rotate: Any, attend: Any, segment_ids: jax.Array, *, together: bool = True
    ) -> tuple[jax.Array, Balance]:
        before_attention, after_attention, before_mlp, after_mlp = (
            (lambda x: x) if name is None else getattr(self, name) for name in self.names
        )
        mixed_BSM = before_attention(x_BSM)
        if self.recurrent:
            mixed_BSM = self.linear_attn(mixed_BSM, segment_ids)
        else:
            mixed_BSM = self.self_attn(mixed_BSM, rotate, attend, together)
        x_BSM = x_BSM + after_attention(mixed_BSM)
        if self.names[1] is None:
            x_BSM = checkpoint_name(x_BSM, IN_PLACE)
        block: MLP | SparseMLP = getattr(self, self.block)
        y_BSM, balance = block(before_mlp(x_BSM), is_real(segment_ids))
        return x_BSM + after_mlp(y_BSM), balance


def no_balance(config: DecoderConfig) -> Balance:
    """The sums of a layer without a router."""
    return Balance.zero(config.mixture.experts if config.mixture else 0)


_ACTIVATIONS: dict[str, Any] = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}
# the norms before and after the attention, before and after the MLP, under the checkpoints' names
_NORMS: dict[str, tuple[str | None, ...]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class Maker:
    """Makes the parts of a decoder with one initialisation and one pair of dtypes."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: Any, param_dtype: Any) -> None:
        self.config = config
        self.rngs = rngs
        self.kinds = {"dtype": dtype, "param_dtype": param_dtype}
        self.init = nnx.initializers.normal(config.initializer_range)

    def linear(self, inputs: int, outputs: int, *, use_bias: bool) -> Linear:
        return Linear(inputs, outputs, use_bias=use_bias, kernel_init=self.init, rngs=self.rngs, **self.kinds)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, **self.kinds, offset=self.config.norm_offset)

    def embed(self, rows: int, size: int) -> Embedding:
        return Embedding(rows, size, embedding_init=self.init, rngs=self.rngs, **self.kinds)

    def weight(self, *shape: int) -> nnx.Param:
        return nnx.Param(self.init(self.rngs.params(), shape, self.kinds["param_dtype"]))

    def ones(self, *shape: int) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.kinds["param_dtype"]))

    def zeros(self, *shape: int) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self.kinds["param_dtype"]))

    def stacked(self, config: DecoderConfig, kind: LayerKind, repeats: int) -> Layer:
        """A layer whose weights have a leading axis of ``repeats``, each drawn by itself."""

        @nnx.split_rngs(splits=repeats)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(config, kind, Maker(config, rngs, **self.kinds))

        return make(self.rngs)
