"""A flax ``nnx`` decoder of the Llama, Qwen2 and Qwen3 shapes that reads packed rows.

Data flows ``input_ids, segment_ids, position_ids -> hidden states -> logits``. Attributes carry the names of the
Hugging Face checkpoints, so that ``weights.py`` maps a parameter by its path. Shape letters: B rows, S tokens of a
row, M hidden size, N query heads, K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies

from jax_backend.attention import segment_attention
from jax_backend.attention.request import SAVED
from jax_backend.decoder_config import DecoderConfig as DecoderConfig
from jax_backend.head_loss import linear_cross_entropy
from jax_backend.loss import packed_cross_entropy
from jax_backend.rope import apply_rope
from jax_backend.segments import find_segments
from packing_core.errors import PackingError

# what a recomputed layer keeps for its backward; "attention" is what the attention's own backward reads of its forward
REMAT: dict[str, Any] = {
    "full": checkpoint_policies.nothing_saveable,
    "attention": checkpoint_policies.save_only_these_names(SAVED),
    "dots": checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_and_attention": checkpoint_policies.save_from_both_policies(
        checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(SAVED)
    ),
}


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
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight[...].astype(jnp.float32))).astype(self.dtype)
        return self.weight[...].astype(self.dtype) * wide.astype(self.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention inside segments; biases, fused projections and q/k norms as the family has them."""

    def __init__(self, config: DecoderConfig, window: int | None, make: _Maker) -> None:
        n, k, d, m = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        if config.fused:
            self.qkv_proj = make.linear(m, (n + 2 * k) * d, use_bias=config.qkv_bias)
        else:
            self.q_proj = make.linear(m, n * d, use_bias=config.qkv_bias)
            self.k_proj = make.linear(m, k * d, use_bias=config.qkv_bias)
            self.v_proj = make.linear(m, k * d, use_bias=config.qkv_bias)
        self.o_proj = make.linear(n * d, m, use_bias=config.output_bias)
        if config.qk_norm is not None:
            self.q_norm, self.k_norm = (make.norm(d if config.qk_norm == "head" else h * d) for h in (n, k))
        self.config = config
        self.window = window

    def __call__(self, x_BSM: jax.Array, rotate: Any, attend: Any) -> jax.Array:
        config = self.config
        if config.fused:
            queries = config.num_attention_heads * config.head_dim
            keys = config.num_key_value_heads * config.head_dim
            q, k, v = jnp.split(self.qkv_proj(x_BSM), [queries, queries + keys], axis=-1)
        else:
            q, k, v = self.q_proj(x_BSM), self.k_proj(x_BSM), self.v_proj(x_BSM)
        if config.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSND, k_BSKD, v_BSKD = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q, k, v))
        if config.qk_norm == "head":
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        q_BSND, k_BSKD = rotate(q_BSND, k_BSKD, local=self.window is not None)
        out_BSND = attend(q_BSND, k_BSKD, v_BSKD, window=self.window)
        return self.o_proj(out_BSND.reshape(*x_BSM.shape[:2], -1))


class MLP(nnx.Module):
    """Gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, make: _Maker) -> None:
        m, f = config.hidden_size, config.intermediate_size
        if config.fused:
            self.gate_up_proj = make.linear(m, 2 * f, use_bias=config.mlp_bias)
        else:
            self.gate_proj = make.linear(m, f, use_bias=config.mlp_bias)
            self.up_proj = make.linear(m, f, use_bias=config.mlp_bias)
        self.down_proj = make.linear(f, m, use_bias=config.mlp_bias)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up_proj(x), 2, -1) if self.config.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(_ACTIVATIONS[self.config.activation](gate) * up)


class Layer(nnx.Module):
    """One decoder layer: attention and MLP, with norms before them, after them, or both."""

    def __init__(self, config: DecoderConfig, window: int | None, make: _Maker) -> None:
        self.names = _NORMS[config.norms]
        for name in filter(None, self.names):
            setattr(self, name, make.norm(config.hidden_size))
        self.self_attn = Attention(config, window, make)
        self.mlp = MLP(config, make)

    def __call__(self, x_BSM: jax.Array, rotate: Any, attend: Any) -> jax.Array:
        before_attention, after_attention, before_mlp, after_mlp = (
            (lambda x: x) if name is None else getattr(self, name) for name in self.names
        )
        x_BSM = x_BSM + after_attention(self.self_attn(before_attention(x_BSM), rotate, attend))
        return x_BSM + after_mlp(self.mlp(before_mlp(x_BSM)))


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


class Model(nnx.Module):
    """Embedding, layers and the last norm: everything that a checkpoint keeps under ``model.``.

    Attributes:
        blocks: with ``scan_layers``, the layers of one period of windows, each with a leading axis of repetitions on
            its weights: layer ``r * period + j`` is repetition r of block j. Empty otherwise.
        layers: the layers after those.
    """

    def __init__(self, config: DecoderConfig, make: _Maker, scan_layers: bool) -> None:
        self.embed_tokens = make.embed(config.vocab_size, config.hidden_size)
        windows = config.windows
        period, repeats = _repetition(windows) if scan_layers else (0, 0)
        self.blocks = nnx.List([make.stacked(config, window, repeats) for window in windows[:period]])
        self.layers = nnx.List([Layer(config, window, make) for window in windows[period * repeats :]])
        self.norm = make.norm(config.hidden_size)


class _Maker:
    """Makes the parts of a decoder with one initialisation and one pair of dtypes."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype: Any, param_dtype: Any) -> None:
        self.config = config
        self.rngs = rngs
        self.kinds = {"dtype": dtype, "param_dtype": param_dtype}
        self.init = nnx.initializers.normal(config.initializer_range)

    def linear(self, inputs: int, outputs: int, *, use_bias: bool) -> nnx.Linear:
        return nnx.Linear(inputs, outputs, use_bias=use_bias, kernel_init=self.init, rngs=self.rngs, **self.kinds)

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config.rms_norm_eps, **self.kinds, offset=self.config.norm_offset)

    def embed(self, rows: int, size: int) -> nnx.Embed:
        return nnx.Embed(rows, size, embedding_init=self.init, rngs=self.rngs, **self.kinds)

    def stacked(self, config: DecoderConfig, window: int | None, repeats: int) -> Layer:
        """A layer whose weights have a leading axis of ``repeats``, each drawn by itself."""

        @nnx.split_rngs(splits=repeats)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> Layer:
            return Layer(config, window, _Maker(config, rngs, **self.kinds))

        return make(self.rngs)


def _repetition(windows: tuple[int | None, ...]) -> tuple[int, int]:
    """The shortest period of the layers' windows, and how often it repeats as a whole."""
    for period in range(1, len(windows) + 1):
        if all(window == windows[i % period] for i, window in enumerate(windows)):
            return period, len(windows) // period
    raise AssertionError("a sequence repeats itself after its length")


class Decoder(nnx.Module):
    """A causal language model over packed rows.

    Args:
        config: the hyperparameters.
        rngs: initialises the weights (normal, ``initializer_range``; norms one, biases zero), as transformers does.
        dtype: what the layers compute in; norm statistics, rotary angles and logits' softmax stay float32.
        param_dtype: what the weights are kept in; float32 master weights with ``dtype=jnp.bfloat16`` is mixed
            precision.
        remat: what each layer recomputes in the backward instead of keeping it: False for nothing, True or "full" for
            everything; "attention" recomputes all but the attention, "dots" all but products of activations and
            weights, "dots_and_attention" all but both.
        scan_layers: run the layers in a `jax.lax.scan` over stacked weights, so that compile time does not grow with
            their number. `load` and `save` read and write the same folders.
        implementation: of :func:`~jax_backend.attention.segment_attention`; None follows its measured order.
        max_segments: most segments that a row may hold, which ``implementation="cudnn"`` needs.
        mesh: the mesh that inputs are sharded over, handed to the attention.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: bool | str = False,
        scan_layers: bool = False,
        implementation: str | None = None,
        max_segments: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        make = _Maker(config, rngs, dtype, param_dtype)
        self.model = Model(config, make, scan_layers)
        self.lm_head = (
            None if config.tie_word_embeddings else make.linear(config.hidden_size, config.vocab_size, use_bias=False)
        )
        self.config = config
        self.remat = remat
        self.implementation = implementation
        self.max_segments = max_segments
        self.mesh = mesh
        if not isinstance(remat, bool) and remat not in REMAT:
            raise PackingError(f"remat is {remat!r}: pass True, False or one of {', '.join(REMAT)}")

    def hidden(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Last hidden states [B, S, M] of integer ``input_ids``, ``segment_ids`` and ``position_ids`` [B, S]."""

        config = self.config

        def rotate(q_BSND: jax.Array, k_BSKD: jax.Array, *, local: bool) -> tuple[jax.Array, ...]:
            frequencies, scale = turns[local and config.local_rope is not None]
            return tuple(apply_rope(x, position_ids, frequencies, scale=scale) for x in (q_BSND, k_BSKD))

        def attend(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, *, window: int | None) -> jax.Array:
            return segment_attention(
                q_BSND,
                k_BSKD,
                v_BSKD,
                segments,
                window=window,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                max_segments=self.max_segments,
                implementation=self.implementation,
                mesh=self.mesh,
            )

        def run(layer: Layer, x_BSM: jax.Array) -> jax.Array:
            return layer(x_BSM, rotate, attend)

        segments = find_segments(segment_ids)  # once, for all layers
        lengths = segments.key_end - segments.key_begin
        turns = [(rope.frequencies(lengths), rope.scale) for rope in (config.rope, config.local_rope) if rope]
        policy = "full" if self.remat is True else self.remat
        step = nnx.remat(run, policy=REMAT[policy]) if policy else run
        x_BSM = self.model.embed_tokens(input_ids)
        if config.padding_id is not None:
            is_padding_BS = input_ids == config.padding_id % config.vocab_size
            x_BSM = jnp.where(is_padding_BS[..., None], jax.lax.stop_gradient(x_BSM), x_BSM)
        x_BSM = x_BSM * jnp.asarray(config.embedding_scale, x_BSM.dtype)
        if len(self.model.blocks):
            graphs, states = zip(*(nnx.split(block) for block in self.model.blocks), strict=True)

            def period(x_BSM: jax.Array, slices: Any) -> tuple[jax.Array, None]:
                for graph, state in zip(graphs, slices, strict=True):
                    x_BSM = step(nnx.merge(graph, state), x_BSM)
                return x_BSM, None

            x_BSM, _ = jax.lax.scan(period, x_BSM, states)
        for layer in self.model.layers:
            x_BSM = step(layer, x_BSM)
        return self.model.norm(x_BSM)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of hidden states [..., M], through the output head or the tied embedding."""
        logits = self.model.embed_tokens.attend(hidden) if self.lm_head is None else self.lm_head(hidden)
        softcap = self.config.final_softcap
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    def loss(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Loss sum and weight sum of a batch as ``to_batch`` makes it, arrays [B, S], without keeping the logits.

        An output head that is no plain ``nnx.Linear`` (LoRA, a quantised one) is called, and its logits are kept.
        """
        hidden = self.hidden(batch["input_ids"], batch["segment_ids"], batch["position_ids"])
        targets, weights = batch["targets"], batch["loss_weights"]
        if self.lm_head is None:
            kernel = self.model.embed_tokens.embedding[...].T
        elif type(self.lm_head) is nnx.Linear:
            kernel = self.lm_head.kernel[...]
        else:
            return packed_cross_entropy(self.logits(hidden), targets, weights=weights)
        softcap = self.config.final_softcap
        return linear_cross_entropy(hidden, kernel, targets, weights=weights, softcap=softcap, mesh=self.mesh)

    def __call__(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Logits [B, S, V] of packed rows; a padding position's logits mean nothing and influence nothing."""
        return self.logits(self.hidden(input_ids, segment_ids, position_ids))
