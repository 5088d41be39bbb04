"""The sizes of a decoder that its memory follows from, read of a config: columns of a token, layers, parameters.

A Hugging Face config, or its ``config.json`` -> :class:`DecoderSizes`. What each kind of mixer keeps is that of
compiled layers, counted by ``tests/torch_backend/test_memory_count.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.planning.pieces import positive

_NORMS_BEHIND = ("gemma2", "gemma3", "gemma3_text", "gemma4_text", "glm4", "olmo2", "olmo3")
_GATED_ATTENTION = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_NORMS_OF_QUERIES = (
    *("gemma3", "gemma3_text", "gemma4_text", "hunyuan_v1_dense", "olmo2", "olmo3"),
    *("olmoe", "qwen3", "qwen3_moe", "glm4_moe", *_GATED_ATTENTION),
)
_LATENT = ("deepseek_v3",)
_NOT_GATED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "nemotron", "opt", "phi", "starcoder2")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_DELTA = "linear_attention"
_CHUNKS = {2: 64, 4: 32}  # bytes of an activation -> tokens of a chunk of the gated delta rule, whose inverses are kept


class Mixer(NamedTuple):
    """Describes what mixes tokens in some layers, in columns of a token.

    Attributes:
        layers: how many have it.
        kept: what its backward reads.
        gradients: those of what it reads and returns.
        output: of these, what it returns.
        parameters: of one layer.
    """

    layers: int
    kept: int
    gradients: int
    output: int
    parameters: int


@dataclass(frozen=True)
class DecoderSizes:
    """Columns of a token in a layer, where nothing else is said.

    Attributes:
        mixers: of each kind that the model has.
        inner: W, of all experts that a token visits.
        routed: copies of a token's input for its experts.
        routing: bytes of a token by which its experts are chosen and found.
        feed_forward: parameters of a layer's MLP, or of all its experts.
        norms: inputs of norms that are as wide as the model.
        adapter_width: inputs and outputs of a layer's linear layers, added up.
    """

    width: int
    layers: int
    heads: int
    mixers: tuple[Mixer, ...]
    inner: int
    routed: int
    routing: int
    feed_forward: int
    norms: int
    gated: bool
    vocabulary: int
    parameters: int
    adapter_width: int

    @property
    def tiled(self) -> tuple[str, ...]:
        """Returns the levels at which long rows compute MLPs or experts by tiles; experts keep a product at others."""
        if self.routed:
            return "full", "offload"
        return ("selective", "full", "offload") if self.gated else ()

    @property
    def inside(self) -> int:
        """Returns the columns that an MLP holds while it computes its gradients, beside its input and output.

        An MLP holds inner columns, their product or activation, and the gradients of these. Experts hold them and a
        gathered input, later inner columns and their gradients with two gathered inputs.
        """
        once = (3 if self.gated else 4) * self.inner
        return max(once + self.routed, 2 * (self.inner + self.routed))

    @classmethod
    def read(cls, config: Any, itemsize: int = 2) -> DecoderSizes:
        """Reads the sizes of a config.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
            UnsupportedModelError: it has layers whose memory is not known.
        """

        def find(*names: str) -> Any:
            for name in names:
                value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
                if value is not None:
                    return value
            return None

        def read(*names: str, default: int = 0) -> int:
            value = find(*names)
            return default if value is None else positive(f"the config's {names[0]}", value)

        if (inside := find("text_config")) is not None:
            return cls.read(inside, itemsize)
        kind, kinds = str(find("model_type")), tuple(find("layer_types") or ())
        known = (*_ATTENTION, _DELTA) if kind in _GATED_ATTENTION else _ATTENTION
        others = sorted({each for each in kinds if each not in known})
        latent = find("kv_lora_rank") is not None
        if (
            others
            or (latent and kind not in _LATENT)
            or find("ssm_cfg", "state_size", "mamba_d_state", "rnn_hidden_size")
        ):
            what = f"layers of the kind {others[0]}" if others else "attention or recurrent layers of its own"
            raise UnsupportedModelError(
                f"the memory of {kind} is not known beforehand, because it has {what}: choose a level by trying, "
                'memory="selective" or "full"'
            )
        width, layers = read("hidden_size", "n_embd", "d_model"), read("num_hidden_layers", "n_layer", "n_layers")
        heads = read("num_attention_heads", "n_head", "n_heads")
        if not (width and layers and heads):
            raise PackingError("the config names no hidden_size, num_hidden_layers and num_attention_heads")
        recurrent = sum(each == _DELTA for each in kinds)
        mixers = [
            (_latent_attention if latent else _attention)(kind, layers - recurrent, width, heads, read),
            *([_gated_delta(recurrent, width, itemsize, read)] if recurrent else []),
        ]
        gated = kind not in _NOT_GATED
        visited, experts = read("num_experts_per_tok"), read("num_local_experts", "num_experts", "n_routed_experts")
        dense = read("intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        one = read("moe_intermediate_size", default=dense) if experts else dense
        shared = read("shared_expert_intermediate_size") or one * read("n_shared_experts") if experts else 0
        halves = 2 if gated else 1
        vocabulary = read("vocab_size", default=1)
        embedded = vocabulary * width * (1 if find("tie_word_embeddings") else 2)
        feed_forward = (halves + 1) * width * ((experts or 1) * one + shared)
        mlp = feed_forward + 2 * width + experts * width
        return cls(
            width=width,
            layers=layers,
            heads=heads,
            mixers=tuple(mixer for mixer in mixers if mixer.layers),
            inner=halves * ((visited or 1) * one + shared),
            routed=visited * width if experts else 0,
            routing=4 * experts + 24 * visited if experts else 0,
            feed_forward=feed_forward,
            norms=3 if kind in _NORMS_BEHIND else 2,
            gated=gated,
            vocabulary=vocabulary,
            parameters=embedded + layers * mlp + sum(m.layers * m.parameters for m in mixers) + width,
            adapter_width=6 * width + mixers[0].gradients + (halves + 1) * one - (0 if gated else width),
        )


Read = Callable[..., int]


def _attention(kind: str, layers: int, width: int, heads: int, read: Read) -> Mixer:
    """Queries, keys, values and output; queries and keys before their norms, and the gate of the output."""
    head = read("head_dim", default=width // heads)
    keys, queries = read("num_key_value_heads", default=heads) * head, heads * head
    again = queries + keys if kind in _NORMS_OF_QUERIES else 0
    gate = queries if kind in _GATED_ATTENTION else 0
    read_and_returned = 2 * queries + 2 * keys
    weights = width * (2 * queries + 2 * keys + gate)
    return Mixer(layers, read_and_returned + again + gate, read_and_returned + gate, queries, weights)


def _latent_attention(kind: str, layers: int, width: int, heads: int, read: Read) -> Mixer:
    """Queries and keys of both parts, values and output of each head; both latents, which their norms read."""
    nope, turned = read("qk_nope_head_dim"), read("qk_rope_head_dim")
    queries, values = heads * (nope + turned), heads * read("v_head_dim")
    low, latent = read("q_lora_rank"), read("kv_lora_rank")
    read_and_returned = 2 * queries + 2 * values
    of_queries = low * (width + queries) if low else width * queries
    weights = of_queries + width * (latent + turned) + latent * (heads * nope + values) + values * width
    return Mixer(layers, read_and_returned + low + latent, read_and_returned, values, weights)


def _gated_delta(layers: int, width: int, itemsize: int, read: Read) -> Mixer:
    """The gated delta rule: what the convolution reads and returns, normalised queries and keys, gates, inverses."""
    heads = read("linear_num_value_heads")
    keys = read("linear_num_key_heads") * read("linear_key_head_dim")
    values = heads * read("linear_value_head_dim")
    before = 2 * keys + values
    # of a head, in float32: both gates, and two sums of a chunk
    gates = 4 * heads * 4 // itemsize
    kept = 2 * before + 2 * keys + 3 * values + gates + heads * _CHUNKS.get(itemsize, 64)
    weights = width * (before + values + 2 * heads) + values * width + before * read("linear_conv_kernel_dim")
    return Mixer(layers, kept, 2 * before + 2 * values, values, weights)
