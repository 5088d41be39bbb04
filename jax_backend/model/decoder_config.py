"""The hyperparameters of a decoder, read from Hugging Face's ``config.json``: one table of families."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jax_backend.model.config_fields import Fields, read_fields
from jax_backend.model.rope_scaling import RopeParameters, read_rope
from packing_core.errors import PackingError, UnsupportedModelError


@dataclass(frozen=True)
class MixtureConfig:
    """A sparse mixture of experts in place of a layer's MLP.

    Attributes:
        experts, chosen, size: how many there are, how many a token gets, and their intermediate size.
        layers: which layers are sparse; the others have an MLP.
        normalise: the weights of a token's experts add up to 1.
        coefficient: factor on the routers' auxiliary loss in `Decoder.loss`; 0 leaves it out.
        block, router, names: what checkpoints call the layer's part, its router, and an expert's gate, up and down.
        router_bias: router logits have one.
        clamp: GPT-OSS's (alpha, limit), which also says that gate and up are interleaved in one tensor, with biases.
        shared_size: intermediate size of an MLP that every token runs through, weighed by a gate of its own; 0 for
            none.
    """

    experts: int
    chosen: int
    size: int
    layers: tuple[bool, ...]
    normalise: bool = True
    coefficient: float = 0.0
    block: str = "mlp"
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_bias: bool = False
    clamp: tuple[float, float] | None = None
    shared_size: int = 0


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated delta nets in place of some layers' attention (Qwen3-Next, Qwen3.5).

    Attributes:
        key_heads, key_width: heads of q and k, and their channels.
        heads, width: those of v.
        kernel: tokens that the short convolution sees.
        layers: which layers have one; the others have attention.
        by_key_head: projections keep q, k, v and z of each head of k together, in one matrix (Qwen3-Next).
    """

    key_heads: int
    key_width: int
    heads: int
    width: int
    kernel: int
    layers: tuple[bool, ...]
    by_key_head: bool = False


@dataclass(frozen=True)
class LayerKind:
    """The traits by which layers of one decoder differ: their window, experts in their MLP, a gated delta net
    in place of attention."""

    window: int | None
    sparse: bool = False
    recurrent: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    """The hyperparameters that shape a decoder.

    Attributes:
        windows: one sliding window (or None) a layer.
        rope: rotary parameters; ``local_rope`` are those of layers with a window, None for the same.
        norms: "pre" (before attention and MLP), "post" (after them, Olmo 2) or "both" (Gemma 2).
        norm_offset: what is added to the norms' weights, 1 in Gemma.
        qk_norm: "head" (over each head), "projection" (over all heads, Olmo 2), or None.
        fused: query, key and value projections are one, and so are gate and up projections (Phi-3).
        mixture: experts in place of some layers' MLP, or None.
        delta_net: gated delta nets in place of some layers' attention, or None.
        output_gate: the query projection also makes a gate, whose sigmoid multiplies the attention's output.
        sinks: attention has a logit per head that joins the softmax's denominator only (GPT-OSS).
        attention_scale: factor on attention logits; None for ``head_dim ** -0.5``.
        embedding_scale: factor on token embeddings.
        padding_id: the token whose embedding gets no gradient from where it is read, as in transformers.
        hf: the ``config.json`` that this was read from, as text; empty for a config built by hand.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope: RopeParameters
    local_rope: RopeParameters | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    norms: str = "pre"
    norm_offset: float = 0.0
    fused: bool = False
    activation: str = "silu"
    mixture: MixtureConfig | None = None
    delta_net: DeltaNetConfig | None = None
    output_gate: bool = False
    sinks: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embedding_scale: float = 1.0
    padding_id: int | None = None
    hf: str = field(default="", repr=False, compare=False)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.windows)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        neither = (False,) * len(self.windows)
        sparse = self.mixture.layers if self.mixture else neither
        recurrent = self.delta_net.layers if self.delta_net else neither
        return tuple(map(LayerKind, self.windows, sparse, recurrent))

    @property
    def shallow(self) -> DecoderConfig:
        """The same decoder with one layer of each kind, for what is judged by kinds of layers."""
        first = [i for i, kind in enumerate(self.layers) if kind not in self.layers[:i]]

        def chosen(layers: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(layers[i] for i in first)

        mixture = self.mixture and replace(self.mixture, layers=chosen(self.mixture.layers))
        delta_net = self.delta_net and replace(self.delta_net, layers=chosen(self.delta_net.layers))
        return replace(self, windows=chosen(self.windows), mixture=mixture, delta_net=delta_net)

    @classmethod
    def from_hf(cls, source: Any) -> DecoderConfig:
        """Read a Hugging Face ``config.json`` (transformers 4 or 5 layout).

        Args:
            source: its fields as a mapping, a config object of transformers, or the path of the file or its folder. A
                field that is left out is that of the family's config class in transformers. Of a model of several
                parts the ``text_config`` is read.

        Raises:
            UnsupportedModelError: another family, activation, rotary type or option than the decoder computes exactly.
            PackingError: there is no config, or it lacks a size.
        """
        config = read_fields(source, FAMILIES)
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UnsupportedModelError(_reason(config))
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
            if config.get(name):
                raise UnsupportedModelError(
                    f"{name} is {config[name]} and the flax decoder has no dropout: set it to 0 in config.json"
                )
        if config.get("quantization_config"):
            raise UnsupportedModelError(
                f"the weights are quantised ({config['quantization_config'].get('quant_method')}): write them with "
                "AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16).save_pretrained(folder) first"
            )
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        config["head_dim"] = head_dim = config["head_dim"] or config["hidden_size"] // heads
        config["num_key_value_heads"] = config["num_key_value_heads"] or heads
        own = "hidden_activation" if family.startswith("gemma") else "hidden_act"
        activation = config[own] or config.default(own)
        if activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"{own} is {activation!r} and the flax decoder computes {', '.join(ACTIVATIONS)}"
            )
        rope, local_rope = read_rope(config, head_dim)
        common = {
            "model_type": family,
            "vocab_size": config["vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "num_attention_heads": heads,
            "num_key_value_heads": config["num_key_value_heads"],
            "head_dim": head_dim,
            "windows": (None,) * layers,
            "rope": rope,
            "local_rope": local_rope,
            "rms_norm_eps": config["rms_norm_eps"],
            "initializer_range": config["initializer_range"],
            "tie_word_embeddings": bool(config["tie_word_embeddings"]),
            "activation": activation,
            "padding_id": config["pad_token_id"],
        }
        shape = common | FAMILIES[family](config)
        return cls(**shape, hf=json.dumps(config, sort_keys=True, default=str))

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that this was read from, which transformers reads.

        Raises:
            PackingError: it was read from none, or changed since.
        """
        source: dict[str, Any] = json.loads(self.hf or "{}")
        if not source or DecoderConfig.from_hf(source) != self:
            raise PackingError(
                "this DecoderConfig is not that of a config.json: make it with DecoderConfig.from_hf(dictionary)"
            )
        architecture = _ARCHITECTURES.get(self.model_type) or self.model_type.capitalize()
        return source | {"architectures": [f"{architecture}ForCausalLM"]}


# where it is not the model_type with a capital
_ARCHITECTURES = {
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "gemma3_text": "Gemma3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def _llama(config: Fields) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config["mlp_bias"])}


def _qwen2(config: Fields) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(config)}


def _qwen3(config: Fields) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": "head", "windows": _qwen_windows(config)}


def _mistral(config: Fields) -> dict[str, Any]:
    return {"windows": _windows(config, default="sliding_attention")}


def _phi3(config: Fields) -> dict[str, Any]:
    return {"windows": _windows(config, default="sliding_attention"), "fused": True}


def _olmo2(config: Fields) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": "projection", "norms": "post"}


def _olmo3(config: Fields) -> dict[str, Any]:
    every_fourth = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    return _olmo2(config) | {"windows": _windows(config, kinds=every_fourth)}


def _gemma2(config: Fields) -> dict[str, Any]:
    every_other = ["full_attention" if i % 2 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    return {
        "windows": _windows(config, kinds=every_other),
        "norms": "both",
        "norm_offset": 1.0,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": config["attn_logit_softcapping"],
        "final_softcap": config["final_logit_softcapping"],
        "embedding_scale": config["hidden_size"] ** 0.5,
    }


def _gemma3(config: Fields) -> dict[str, Any]:
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModelError(f"{name} is {config[name]}, which no published Gemma 3 decoder has: set it off")
    pattern = config["sliding_window_pattern"]
    kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(config["num_hidden_layers"])]
    own = {"windows": _windows(config, kinds=kinds), "qk_norm": "head", "attention_softcap": None}
    return _gemma2(config) | own


def _mixtral(config: Fields) -> dict[str, Any]:
    if config.get("router_jitter_noise"):
        raise UnsupportedModelError(
            f"router_jitter_noise is {config['router_jitter_noise']} and the flax decoder's router has no noise: set "
            "it to 0 in config.json"
        )
    mixture = _mixture(config, block="block_sparse_moe", names=("w1", "w3", "w2"))
    return _mistral(config) | {"mixture": mixture}


def _qwen2_moe(config: Fields) -> dict[str, Any]:
    shared, first = config["shared_expert_intermediate_size"], config["max_window_layers"]
    every_other = [
        "full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]
    own = {"qkv_bias": bool(config["qkv_bias"]), "windows": _qwen_windows(config, every_other)}
    return own | {"mixture": _qwen_mixture(config, shared_size=shared)}


def _qwen3_moe(config: Fields) -> dict[str, Any]:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    windows = {"windows": (window,) * config["num_hidden_layers"]}
    return _qwen3(config) | windows | {"mixture": _qwen_mixture(config)}


def _qwen3_5(config: Fields) -> dict[str, Any]:
    """Three gated delta nets to one layer of gated attention."""
    layers, every = config["num_hidden_layers"], config["full_attention_interval"]
    kinds = config["layer_types"] or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    if unknown := sorted({*kinds} - {"linear_attention", "full_attention"}):
        raise UnsupportedModelError(
            f"layer_types has {unknown[0]!r} and the flax decoder computes linear_attention, "
            "full_attention in this family"
        )
    delta_net = DeltaNetConfig(
        key_heads=config["linear_num_key_heads"],
        key_width=config["linear_key_head_dim"],
        heads=config["linear_num_value_heads"],
        width=config["linear_value_head_dim"],
        kernel=config["linear_conv_kernel_dim"],
        layers=tuple(kind == "linear_attention" for kind in kinds),
    )
    bias = bool(config["attention_bias"])
    own = {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True, "delta_net": delta_net}
    return own | {"qkv_bias": bias, "output_bias": bias}


def _qwen3_next(config: Fields) -> dict[str, Any]:
    dense = _qwen3_5(config)
    mixture = _qwen_mixture(config, shared_size=config["shared_expert_intermediate_size"])
    return dense | {"delta_net": replace(dense["delta_net"], by_key_head=True), "mixture": mixture}


def _gpt_oss(config: Fields) -> dict[str, Any]:
    every_other = ["full_attention" if i % 2 else "sliding_attention" for i in range(config["num_hidden_layers"])]
    clamp = float(config["swiglu_alpha"]), float(config["swiglu_limit"])
    bias = bool(config["attention_bias"])
    return {
        "windows": _windows(config, kinds=every_other),
        "qkv_bias": bias,
        "output_bias": bias,
        "sinks": True,
        "mixture": _mixture(config, router="router", router_bias=True, clamp=clamp),
    }


def _qwen_mixture(config: Fields, **more: Any) -> MixtureConfig:
    dense, every = config["mlp_only_layers"] or (), config["decoder_sparse_step"]
    layers = tuple(i not in dense and (i + 1) % every == 0 for i in range(config["num_hidden_layers"]))
    return _mixture(
        config,
        size=config["moe_intermediate_size"],
        layers=layers,
        normalise=bool(config["norm_topk_prob"]),
        **more,
    )


def _mixture(config: Fields, **more: Any) -> MixtureConfig:
    common = {
        "experts": config.get("num_local_experts") or config["num_experts"],
        "chosen": config["num_experts_per_tok"],
        "size": config["intermediate_size"],
        "layers": (True,) * config["num_hidden_layers"],
        "coefficient": config["router_aux_loss_coef"] if config.get("output_router_logits") else 0.0,
    }
    return MixtureConfig(**common | more)


# model_type -> the fields in which the family differs from a plain decoder
FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "ministral": _mistral,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
}
_ALIBI = ("bloom", "mpt")


def _reason(config: Fields) -> str:
    family = config.get("model_type")
    if family in _ALIBI or config.get("alibi"):
        return f"model_type is {family!r}, and its ALiBi biases are not in the JAX kernels: use torch_backend"
    return (
        f"model_type is {family!r} and the flax decoder computes {', '.join(FAMILIES)}: "
        "use torch_backend for this model, or segment_attention in a model of your own"
    )


def _qwen_windows(config: Fields, kinds: list[str] | None = None) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    if not config["use_sliding_window"]:
        return (None,) * layers
    first = config["max_window_layers"]
    after = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return _windows(config, kinds=kinds or after)


def _windows(
    config: Fields, *, default: str = "full_attention", kinds: list[str] | None = None
) -> tuple[int | None, ...]:
    """The window of each layer: of those that ``layer_types`` names, else ``kinds``, else all of one kind."""
    window = config["sliding_window"] or None
    kinds = config["layer_types"] or kinds or [default] * config["num_hidden_layers"]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
