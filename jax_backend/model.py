"""A flax ``nnx`` decoder of the Llama, Qwen2 and Qwen3 shapes that reads packed rows.

Data flows ``input_ids, segment_ids, position_ids -> hidden states -> logits``. Attributes carry the names of the
Hugging Face checkpoints, so that ``weights.py`` maps a parameter by its path. Shape letters: B rows, S tokens of a
row, M hidden size, N query heads, K key/value heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_backend.attention import segment_attention
from jax_backend.linear_cross_entropy import linear_cross_entropy
from jax_backend.loss import packed_cross_entropy
from jax_backend.rope import apply_rope
from jax_backend.segments import find_segments
from packing_core.errors import UnsupportedModelError

_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderConfig:
    """The hyperparameters that shape a decoder; ``windows`` holds one sliding window (or None) a layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope_parameters: tuple[tuple[str, Any], ...]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_hidden_layers(self) -> int:
        return len(self.windows)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face ``config.json`` (transformers 4 or 5 layout).

        Raises:
            UnsupportedModelError: another family, activation or rotary type than the decoder computes exactly.
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise UnsupportedModelError(
                f"model_type is {family!r} and the flax decoder computes {', '.join(_FAMILIES)}: "
                "use torch_backend for this model, or segment_attention in a model of your own"
            )
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"hidden_act is {config['hidden_act']!r} and the flax decoder computes 'silu' only"
            )
        heads = config["num_attention_heads"]
        layers = config["num_hidden_layers"]
        bias = bool(config.get("attention_bias", False))
        return cls(
            model_type=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            windows=_windows(config, layers),
            rope_parameters=tuple(sorted(_rope_parameters(config).items())),
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            initializer_range=config.get("initializer_range", 0.02),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else bias,
            output_bias=False if family == "qwen2" else bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers reads for these hyperparameters."""
        config: dict[str, Any] = {
            "architectures": [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.model_type] + "ForCausalLM"],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_parameters": dict(self.rope_parameters),
        }
        if self.model_type != "qwen2":
            config["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        elif any(self.windows):
            config |= {
                "use_sliding_window": True,
                "sliding_window": next(w for w in self.windows if w),
                "layer_types": ["sliding_attention" if w else "full_attention" for w in self.windows],
            }
        return config


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return (None,) * layers
    first = config.get("max_window_layers", layers)
    kinds = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps ``rope_parameters``; 4.x kept ``rope_theta`` beside ``rope_scaling``."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if found["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"rope_type is {found['rope_type']!r} and the flax decoder computes default, linear and llama3: "
            "longrope and dynamic NTK take their frequencies from the longest position of a batch, not exact packed"
        )
    return found


def rope_frequencies(config: DecoderConfig) -> np.ndarray:
    """Inverse frequencies, float32 [D/2], in radians per position.

    RoPE is Su et al. 2021 (arXiv:2104.09864), section 3.2.2; ``linear`` is position interpolation, Chen et al. 2023
    (arXiv:2306.15595); ``llama3`` is the wavelength-dependent scaling published with Llama 3.1.
    """
    rope = dict(config.rope_parameters)
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inv_freq = (1.0 / np.float32(rope["rope_theta"]) ** exponent).astype(np.float32)
    if rope["rope_type"] == "linear":
        return inv_freq / np.float32(rope["factor"])
    if rope["rope_type"] == "llama3":
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        turns = rope["original_max_position_embeddings"] * inv_freq / (2 * np.pi)
        blend = np.clip(
            (turns - low) / (high - low), 0.0, 1.0
        )  # 0: long wavelengths, fully scaled; 1: short, untouched
        return (inv_freq * (blend + (1 - blend) / factor)).astype(np.float32)
    return inv_freq


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, statistics in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: Any, param_dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(self.dtype) * wide.astype(self.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention inside segments; biases and q/k norms as the family has them."""

    def __init__(self, config: DecoderConfig, window: int | None, linear: Any, norm: Any) -> None:
        n, k, d, m = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        self.q_proj = linear(m, n * d, use_bias=config.qkv_bias)
        self.k_proj = linear(m, k * d, use_bias=config.qkv_bias)
        self.v_proj = linear(m, k * d, use_bias=config.qkv_bias)
        self.o_proj = linear(n * d, m, use_bias=config.output_bias)
        self.q_norm = norm(d) if config.qk_norm else None
        self.k_norm = norm(d) if config.qk_norm else None
        self.head_dim = d
        self.window = window

    def __call__(self, x_BSM: jax.Array, rotate: Any, attend: Any) -> jax.Array:
        q_BSND, k_BSKD, v_BSKD = (
            projection(x_BSM).reshape(*x_BSM.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        q_BSND, k_BSKD = rotate(q_BSND, k_BSKD)
        out_BSND = attend(q_BSND, k_BSKD, v_BSKD, window=self.window)
        return self.o_proj(out_BSND.reshape(*x_BSM.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU feed-forward block (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, linear: Any) -> None:
        m, f = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(m, f, use_bias=config.mlp_bias)
        self.up_proj = linear(m, f, use_bias=config.mlp_bias)
        self.down_proj = linear(f, m, use_bias=config.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DecoderConfig, window: int | None, linear: Any, norm: Any) -> None:
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = Attention(config, window, linear, norm)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = MLP(config, linear)

    def __call__(self, x_BSM: jax.Array, rotate: Any, attend: Any) -> jax.Array:
        x_BSM = x_BSM + self.self_attn(self.input_layernorm(x_BSM), rotate, attend)
        return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM))


class Model(nnx.Module):
    """Embedding, layers and the last norm: everything that a checkpoint keeps under ``model.``."""

    def __init__(self, config: DecoderConfig, linear: Any, norm: Any, embed: Any) -> None:
        self.embed_tokens = embed(config.vocab_size, config.hidden_size)
        self.layers = nnx.List([Layer(config, window, linear, norm) for window in config.windows])
        self.norm = norm(config.hidden_size)


class Decoder(nnx.Module):
    """A causal language model over packed rows.

    Args:
        config: the hyperparameters.
        rngs: initialises the weights (normal, ``initializer_range``; norms one, biases zero), as transformers does.
        dtype: what the layers compute in; norm statistics, rotary angles and logits' softmax stay float32.
        param_dtype: what the weights are kept in; float32 master weights with ``dtype=jnp.bfloat16`` is mixed
            precision.
        remat: recompute each layer in the backward instead of keeping its activations.
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
        remat: bool = False,
        implementation: str | None = None,
        max_segments: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        init = nnx.initializers.normal(config.initializer_range)
        kinds = {"dtype": dtype, "param_dtype": param_dtype}

        def linear(inputs: int, outputs: int, *, use_bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=use_bias, kernel_init=init, rngs=rngs, **kinds)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, **kinds)

        def embed(rows: int, size: int) -> nnx.Embed:
            return nnx.Embed(rows, size, embedding_init=init, rngs=rngs, **kinds)

        self.model = Model(config, linear, norm, embed)
        self.lm_head = (
            None if config.tie_word_embeddings else linear(config.hidden_size, config.vocab_size, use_bias=False)
        )
        self.config = config
        self.remat = remat
        self.implementation = implementation
        self.max_segments = max_segments
        self.mesh = mesh

    def hidden(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Last hidden states [B, S, M] of integer ``input_ids``, ``segment_ids`` and ``position_ids`` [B, S]."""

        def rotate(q_BSND: jax.Array, k_BSKD: jax.Array) -> tuple[jax.Array, jax.Array]:
            return apply_rope(q_BSND, position_ids, inv_freq), apply_rope(k_BSKD, position_ids, inv_freq)

        def attend(q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, *, window: int | None) -> jax.Array:
            return segment_attention(
                q_BSND,
                k_BSKD,
                v_BSKD,
                segments,
                window=window,
                max_segments=self.max_segments,
                implementation=self.implementation,
                mesh=self.mesh,
            )

        def run(layer: Layer, x_BSM: jax.Array) -> jax.Array:
            return layer(x_BSM, rotate, attend)

        segments = find_segments(segment_ids)  # once, for all layers
        inv_freq = jnp.asarray(rope_frequencies(self.config))
        step = nnx.remat(run) if self.remat else run
        x_BSM = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x_BSM = step(layer, x_BSM)
        return self.model.norm(x_BSM)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of hidden states [..., M], through the output head or the tied embedding."""
        return self.model.embed_tokens.attend(hidden) if self.lm_head is None else self.lm_head(hidden)

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
        return linear_cross_entropy(hidden, kernel, targets, weights=weights, mesh=self.mesh)

    def __call__(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        """Logits [B, S, V] of packed rows; a padding position's logits mean nothing and influence nothing."""
        return self.logits(self.hidden(input_ids, segment_ids, position_ids))
