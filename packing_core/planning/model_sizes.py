"""The sizes of a model from its Hugging Face config: the operations of its forward for a token, a pair, an image token.

The names are those that the configs of transformers use; a config that lacks one means what such models mean by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from packing_core.errors import PackingError
from packing_core.planning.pieces import positive

# Layers of these kinds have no attention: their work grows with the tokens alone.
_RECURRENT = ("linear", "mamba", "conv", "recurrent", "rglru", "delta", "ssm", "mlp", "moe")
# Positions of an audio encoder for each token of the decoder, where it is not one.
_POSITIONS = {
    **dict.fromkeys(("qwen2_audio_encoder", "audioflamingo3_encoder", "qwen2_5_omni_audio_encoder"), 2),
    "voxtral_encoder": 4,
}


SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")  # that every token visits


class ConfigReader:
    """Reads a config object, or its ``config.json`` as a mapping.

    >>> read = ConfigReader({"n_embd": 64, "text_config": None})
    >>> read("hidden_size", "n_embd"), read("n_inner", default=256), read.find("layer_types")
    (64, 256, None)
    >>> ConfigReader({"intermediate_size": [64, 128]}, layer=1)("intermediate_size")
    128

    Args:
        layer: whose size is taken where a config lists one for each layer; None for none.
    """

    def __init__(self, config: Any, layer: int | None = None) -> None:
        self.config = config
        self.layer = layer

    def find(self, *names: str) -> Any:
        """Returns the first of several values that the config has, None without any."""
        return self._first(names)[1]

    def __call__(self, *names: str, default: Any = None) -> Any:
        """Returns the first of several sizes that the config has, or the default.

        Raises:
            PackingError: it is not one positive integer.
        """
        name, value = self._first(names)
        if self.layer is not None and isinstance(value, list | tuple) and self.layer < len(value):
            value = value[self.layer]
        return default if value is None else positive(f"the config's {name}", value)

    def is_dense(self, layer: int) -> bool:
        """Returns whether a layer has an MLP where others have experts."""
        if (kinds := self.find("mlp_layer_types")) is not None and layer < len(kinds):
            return bool(kinds[layer] == "dense")
        first = self.find("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
        period = self.find("decoder_sparse_step", "moe_layer_interval") or 1
        return layer < first or layer in (self.find("mlp_only_layers") or ()) or (layer + 1) % period != 0

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            mapping = isinstance(self.config, Mapping)
            value = self.config.get(name) if mapping else getattr(self.config, name, None)
            if value is not None:
                return name, value
        return "", None


def operations(config: Any) -> tuple[int, int, Mapping[int, int], int]:
    """Forward floating-point operations of a decoder, of a config object or its ``config.json`` as a mapping.

    A config with images holds its decoder's inside.

    Returns:
        Of each token; of each squared segment length, in layers whose attention sees all earlier tokens; window -> the
        same in layers whose attention sees so many; and of each image or audio token, in the tower.

    Raises:
        PackingError: the config does not say how large the model is, or a size is not one integer.
    """
    whole = ConfigReader(config)
    text = whole.find("text_config") or config
    read = ConfigReader(text)
    hidden, count = read("hidden_size", "n_embd"), read("num_hidden_layers", "n_layer")
    layers = _layers(text, count or 0)
    by_layer = [ConfigReader(own, i)("num_attention_heads", "n_head") for i, own in enumerate(layers)]
    if hidden and layers and not any(by_layer) and read("state_size") and read("expand"):  # Mamba
        head = 2 * hidden * read("vocab_size", default=0)
        return head + len(layers) * _recurrent(read, hidden, 0), 0, {}, 0
    if not (hidden and by_layer and all(by_layer)):
        raise PackingError(
            "the config names no hidden_size, num_hidden_layers and num_attention_heads: "
            "pass Cost(tokens=..., squares=...)"
        )
    token, full, windows = 2 * hidden * read("vocab_size", default=0), 0, Counter[int]()
    for number, (layer, heads) in enumerate(zip(layers, by_layer, strict=True)):
        own = ConfigReader(layer, number)
        window = _window(own, number)
        attention, squares = _attention(own, hidden, heads)
        token += _recurrent(read, hidden, attention) if window == 0 else attention
        token += _feed_forward(read, own, hidden, number)
        if window is None:
            full += squares
        elif window:
            windows[window] += squares
    seen, heard = whole.find("vision_config"), whole.find("audio_config")
    merged = ConfigReader(seen)("spatial_merge_size", default=1) ** 2
    tower = _tower(seen, hidden, merged, merged)
    if not tower or str(whole.find("model_type")).endswith("_thinker"):  # which are packed with audio alone
        positions = _POSITIONS.get(str(ConfigReader(heard).find("model_type")), 1)
        tower = _tower(heard, hidden, positions, 1) or tower
    return token, full, windows, tower


def _layers(config: Any, count: int) -> list[Any]:
    """The config of each layer, where some have sizes of their own (``per_layer_config``), as in Gemma 4."""
    if isinstance(config, Mapping):
        own = config.get("per_layer_config") or {}
        return [{**config, **own.get(str(layer), {})} for layer in range(count)] if own else [config] * count
    if getattr(config, "is_heterogeneous", False):
        return [config.per_layer_config[layer] for layer in range(count)]
    return [config] * count


def _attention(read: ConfigReader, hidden: int, heads: int) -> tuple[int, int]:
    """Operations of the projections for a token, and of a squared length."""
    latent = read("kv_lora_rank")
    if latent is not None:  # multi-head latent attention
        rope, value = read("qk_rope_head_dim", default=64), read("v_head_dim", default=128)
        key = read("qk_nope_head_dim", default=128) + rope
        query = read("q_lora_rank")
        queries = hidden * heads * key if query is None else query * (hidden + heads * key)
        keys = hidden * (latent + rope) + latent * heads * (key - rope + value)
        return 2 * (queries + keys + heads * value * hidden), heads * (key + value)
    width = read("head_dim", default=hidden // heads)
    kv_heads = read("num_key_value_heads", default=heads)
    return 2 * hidden * width * (2 * heads + 2 * kv_heads), 2 * heads * width


def _window(read: ConfigReader, layer: int) -> int | None:
    """The tokens that the attention of a layer sees, of its own config: None for all, 0 in a layer without attention.

    A chunk of attention counts as a window of half of it, which has about as many pairs.
    """
    sliding: int | None = None
    if read.find("use_sliding_window") in (None, True):
        sliding = read("sliding_window", "attention_window_size")
    kinds = read.find("layer_types") or read.find("layers_block_type") or read.find("block_types")
    if isinstance(kinds, list | tuple) and kinds:
        return _window_of(str(kinds[layer % len(kinds)]), sliding, read)
    indices = read.find("attn_layer_indices")
    if indices is not None:
        return sliding if layer in indices else 0
    if period := read("attn_layer_period"):  # jamba
        return sliding if layer % period == (read.find("attn_layer_offset") or 0) else 0
    return sliding


def _window_of(kind: str, sliding: int | None, read: ConfigReader) -> int | None:
    if kind == "linear_attention" or ("attention" not in kind and any(word in kind for word in _RECURRENT)):
        return 0
    chunk: int | None = read("attention_chunk_size")
    if "chunk" in kind and chunk:
        return max(1, chunk // 2)
    return sliding if "sliding" in kind or "local" in kind else None


def _recurrent(read: ConfigReader, hidden: int, attention: int) -> int:
    """Operations of a recurrent layer for a token: its projections, and its state where the config has its sizes."""
    keys, values = read("linear_num_key_heads"), read("linear_num_value_heads")
    work: int = attention
    if keys and values:  # the gated delta rule: queries, keys, values, gates and output; five products with the state
        key, value = read("linear_key_head_dim", default=128), read("linear_value_head_dim", default=128)
        work = 2 * hidden * (2 * keys * key + 3 * values * value) + 10 * values * key * value
    elif expand := read("mamba_expand", "expand"):
        inner = read("mamba_d_ssm", default=expand * hidden)
        work = 6 * hidden * inner + 6 * inner * read("mamba_d_state", "state_size", "ssm_state_size", default=16)
    return work


def _feed_forward(model: ConfigReader, read: ConfigReader, hidden: int, layer: int) -> int:
    """Operations of a layer's feed-forward block for a token: the experts that it visits, or the dense block.

    Args:
        model: the config of all layers; read: that of this one.
    """
    dense: int = 6 * hidden * read("intermediate_size", "n_inner", default=4 * hidden)
    visited = read("num_experts_per_tok", "moe_k")
    if visited is None or model.is_dense(layer):
        return dense
    inner = read("moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden)
    shared = model.find("shared_expert_intermediate_size") or inner * (model.find(*SHARED_EXPERTS) or 0)
    experts: int = 6 * hidden * (inner * visited + shared)
    return experts


def _tower(config: Any, hidden: int, positions: int, joined: int) -> int:
    """Operations of a tower for an image or audio token of the decoder.

    Args:
        positions: of the tower, for each token of the decoder.
        joined: of these, those that are projected together.
    """
    read = ConfigReader(config)
    width = read("d_model", "hidden_size", "embed_dim")
    layers = read("encoder_layers", "num_hidden_layers", "depth", "num_layers")
    if not (width and layers):
        return 0
    inner = read("encoder_ffn_dim", "intermediate_size", default=4 * width)
    return int(positions * layers * (8 * width * width + 4 * width * inner) + 2 * joined * width * hidden)
