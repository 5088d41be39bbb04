"""The device memory of a training step, by a formula: what each level of memory keeps for a token.

A config -> bytes that do not depend on the row (weights, gradients, optimizer) and bytes for a token at each level ->
the longest row that fits a device, and the fastest level at which a row does. It holds for compiled layers of plain
attention with or without experts, whose attention keeps no scores, and a loss that holds no logits.

Where the figures come from: for a token and layer of width D, queries Q, keys and values K and V, attention output O
and an MLP of W inner columns (both halves of a gated one), the backward reads

    "none"       inputs of the norms 2 D, rotated queries and keys Q + K, V, O, the MLP's inner columns W
    "selective"  2 D + Q + K + V + O
    "full"       the layer's input D
    "offload"    D of the four layers whose copies are on their way

and the softmax statistics, 4 bytes a head. Norms of queries and keys read those before the rotation too, and norms
behind attention and MLP their inputs. While a layer computes its gradients it holds what it recomputed, the gradient of
the MLP's product and of both its halves, for the row or, where it is long, for a tile of it. Figures that this was
compared with: benchmarks/RESULTS.md, levels of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.planning.pieces import positive

GIB = 2**30
LEVELS = ("none", "selective", "full", "offload")  # the fastest first
USABLE = 0.95  # of a device: its own context, and what the allocator cannot use

# Chunks of the loss take a seventh of all logits, within these bounds: few sums in float32 where rows are long, and
# little memory beside the activations where they are not. Each chunk reads and writes the gradient of the weight once.
_CHUNKS, _LEAST_BYTES, _MOST_BYTES = 7, 2**29, 2**31
# Rows from this length on compute their MLPs by tiles of so many tokens, at the levels that recompute them.
TILED_FROM, TILE = 65_536, 8_192
_ON_THEIR_WAY = 4  # inputs of layers that offloading holds on the device: two leave, two come back

_NORMS_BEHIND = ("gemma2", "gemma3", "gemma3_text", "gemma4_text", "glm4", "olmo2", "olmo3")
_NORMS_OF_QUERIES = (
    *("gemma3", "gemma3_text", "gemma4_text", "hunyuan_v1_dense", "olmo2", "olmo3"),
    *("olmoe", "qwen3", "qwen3_moe", "glm4_moe"),
)
_NOT_GATED = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "nemotron", "opt", "phi", "starcoder2")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def loss_chunk(tokens: int, row_bytes: int) -> int:
    """Returns the bytes of logits that the loss computes at a time; ``row_bytes``: the logits of a token."""
    return min(max(tokens * row_bytes // _CHUNKS, _LEAST_BYTES), _MOST_BYTES)


@dataclass(frozen=True)
class MemoryModel:
    """The memory of a step with one row of so many tokens, in bytes.

    Attributes:
        fixed: weights, gradients and states of the optimizer.
        kept: at each level, what all layers keep for a token.
        work: at each level, what one layer holds beside that for a token while it computes its gradients.
        tiled: as ``work`` in rows whose MLPs are computed by tiles, without these; empty where none are.
        tile: of a layer, for a tile of its MLP and the sums of its weights' gradients.
        outside: of a token outside of the layers: hidden states and their gradient around the loss.
        logits: of a token, in the dtype of the activations.
        host: of a token, on the host, at ``"offload"``.
    """

    fixed: int
    kept: Mapping[str, int]
    work: Mapping[str, int]
    outside: int
    logits: int
    host: int
    tiled: Mapping[str, int] = field(default_factory=dict)
    tile: int = 0

    def bytes(self, level: str, tokens: int) -> int:
        """Returns the most that a step with ``tokens`` in its largest microbatch holds at a level."""
        loss = min(loss_chunk(tokens, self.logits), tokens * self.logits)
        work = tokens * self.work[level]
        if tokens >= TILED_FROM and level in self.tiled:
            work = tokens * self.tiled[level] + self.tile
        return self.fixed + tokens * (self.kept[level] + self.outside) + max(loss, work)

    def longest(self, level: str, device_bytes: int, host_bytes: int | None = None) -> int:
        """Returns the most tokens of a row, or of one document, that fit; 0 if none does.

        Args:
            device_bytes: what a device has, all of it; :data:`USABLE` of it is used.
            host_bytes: what can be page-locked on the host for ``"offload"``; None for any amount.
        """
        # a row that is just long enough for tiles may fit where shorter ones do not
        low, high = 0, 1
        if level in self.tiled and self._fits(level, TILED_FROM, device_bytes, host_bytes):
            low, high = TILED_FROM, TILED_FROM + 1
        while self._fits(level, high, device_bytes, host_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(level, middle, device_bytes, host_bytes) else (low, middle)
        return low

    def fastest(self, tokens: int, device_bytes: int, host_bytes: int | None = None) -> str | None:
        """Returns the fastest level at which a row of ``tokens`` fits, None if there is none."""
        return next((level for level in LEVELS if self._fits(level, tokens, device_bytes, host_bytes)), None)

    def _fits(self, level: str, tokens: int, device_bytes: int, host_bytes: int | None) -> bool:
        if level == "offload" and host_bytes is not None and tokens * self.host > host_bytes:
            return False
        return self.bytes(level, tokens) <= USABLE * device_bytes

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        fixed: int | None = None,
        rank: int | None = None,
        states: int = 2,
        itemsize: int = 2,
        adapted: int | None = None,
    ) -> MemoryModel:
        """Returns the memory of training a decoder, by its sizes.

        Args:
            config: a Hugging Face config object, or its ``config.json`` as a mapping.
            fixed: bytes of weights, gradients and optimizer, where they are known.
            rank: of low-rank adapters on all linear layers, which alone are trained, in float32; None trains all.
            states: numbers that the optimizer keeps for each trained one: 2 for AdamW.
            itemsize: bytes of an activation, and of a weight and its states.
            adapted: the sum of the ranks of a layer's adapters, where it is known.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
            UnsupportedModelError: it has layers whose memory the formula does not know.
        """
        sizes = _Sizes.read(config)
        if fixed is None:
            fixed = itemsize * sizes.parameters
            if rank is None:
                fixed += itemsize * sizes.parameters * (1 + states)
            else:
                fixed += 4 * sizes.layers * rank * sizes.adapter_width * (2 + states)
        if adapted is None:
            adapted = 7 * rank if rank else 0
        narrow = sizes.norms * sizes.width + sizes.attention + adapted
        statistics = 4 * sizes.heads
        per_layer = {
            "none": itemsize * (narrow + sizes.inner + sizes.routed) + statistics,
            "selective": itemsize * narrow + statistics,
            "full": itemsize * sizes.width,
        }
        half = sizes.inner // 2 if sizes.gated else sizes.inner
        gradients = itemsize * max(half + sizes.inner, sizes.attention)
        kept = {level: sizes.layers * size for level, size in per_layer.items()}
        kept["offload"] = min(sizes.layers, _ON_THEIR_WAY) * per_layer["full"]
        work = {
            "none": gradients,
            "selective": gradients + itemsize * sizes.routed,
            "full": per_layer["none"] - per_layer["full"] + itemsize * half,
        }
        work["offload"] = work["full"]
        recomputed = itemsize * (narrow - sizes.width + sizes.attention) + statistics
        tiled = {"selective": itemsize * sizes.attention, "full": recomputed, "offload": recomputed}
        columns = itemsize * TILE * (2 * sizes.inner + half)
        return cls(
            fixed=fixed,
            kept=kept,
            work=work,
            outside=2 * itemsize * sizes.width,
            logits=itemsize * sizes.vocabulary,
            host=kept["full"],
            tiled=tiled if sizes.tiles else {},
            tile=columns + (0 if adapted else 4 * 3 * sizes.width * half),
        )


@dataclass(frozen=True)
class _Sizes:
    """Sizes that the formula reads of a config: columns of a token in a layer, where nothing else is said.

    Attributes:
        attention: Q + K + V + O, and Q + K again under norms of queries and keys.
        inner: W, of all experts that a token visits.
        routed: copies of a token's input for its experts.
        norms: inputs of norms that are as wide as the model.
        adapter_width: inputs and outputs of a layer's linear layers, added up.
    """

    width: int
    layers: int
    heads: int
    attention: int
    inner: int
    routed: int
    norms: int
    gated: bool
    vocabulary: int
    parameters: int
    adapter_width: int

    @property
    def tiles(self) -> bool:
        """Returns whether long rows compute MLPs by tiles: gated ones, and no experts."""
        return self.gated and not self.routed

    @classmethod
    def read(cls, config: Any) -> _Sizes:
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
            return cls.read(inside)
        kind, kinds = str(find("model_type")), find("layer_types") or ()
        others = sorted({each for each in kinds if each not in _ATTENTION})
        if others or find("kv_lora_rank", "ssm_cfg", "state_size", "mamba_d_state", "rnn_hidden_size"):
            what = f"layers of the kind {others[0]}" if others else "attention or recurrent layers of its own"
            raise UnsupportedModelError(
                f"the memory of {kind} is not known beforehand, because it has {what}: choose a level by trying, "
                'memory="selective" or "full"'
            )
        width, layers = read("hidden_size", "n_embd", "d_model"), read("num_hidden_layers", "n_layer", "n_layers")
        heads = read("num_attention_heads", "n_head", "n_heads")
        if not (width and layers and heads):
            raise PackingError("the config names no hidden_size, num_hidden_layers and num_attention_heads")
        head = read("head_dim", default=width // heads)
        keys, queries = read("num_key_value_heads", default=heads) * head, heads * head
        gated = kind not in _NOT_GATED
        visited, experts = read("num_experts_per_tok"), read("num_local_experts", "num_experts", "n_routed_experts")
        dense = read("intermediate_size", "n_inner", "ffn_dim", default=4 * width)
        one = read("moe_intermediate_size", default=dense) if experts else dense
        shared = read("shared_expert_intermediate_size") or one * read("n_shared_experts") if experts else 0
        halves = 2 if gated else 1
        attended = width * (queries + 2 * keys) + queries * width
        columns = (experts or 1) * one + shared
        vocabulary = read("vocab_size", default=1)
        embedded = vocabulary * width * (1 if find("tie_word_embeddings") else 2)
        per_layer = attended + (halves + 1) * width * columns + 2 * width + experts * width
        again = queries + keys if kind in _NORMS_OF_QUERIES else 0
        return cls(
            width=width,
            layers=layers,
            heads=heads,
            attention=2 * queries + 2 * keys + again,
            inner=halves * ((visited or 1) * one + shared),
            routed=visited * width if experts else 0,
            norms=4 if kind in _NORMS_BEHIND else 2,
            gated=gated,
            vocabulary=vocabulary,
            parameters=embedded + layers * per_layer + width,
            adapter_width=6 * width + 2 * queries + 2 * keys + (halves + 1) * one - (0 if gated else width),
        )
