"""The sizes of a decoder that its memory follows from, read of a config: columns of a token, layers, parameters.

A Hugging Face config, or its ``config.json`` -> the kind of each layer -> :class:`DecoderSizes`: of each kind, what
mixes its tokens (:class:`Mixer`) and the MLP or experts behind it (:class:`FeedForward`). What each keeps is that of
compiled layers on this project's kernels, counted by ``tests/torch_backend/hf/test_memory_count.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from packing_core.errors import PackingError, UnsupportedModelError
from packing_core.planning.model_sizes import SHARED_EXPERTS, ConfigReader

GATED_ATTENTION = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_NORMS_OF_QUERIES = (
    *("afmoe", "dots1", "exaone4", "flex_olmo", "minimax_m2"),
    *("apertus", "gemma3", "gemma3_text", "gemma4_text", "hunyuan_v1_dense", "olmo2", "olmo3"),
    *("olmoe", "qwen3", "qwen3_moe", "glm4_moe", *GATED_ATTENTION),
)
_CHUNKS = {2: 64, 4: 32}  # bytes of an activation -> tokens of a chunk of the gated delta rule, whose inverses are kept

# Families whose layers long rows compute by tiles, as the formula counts them before a model is loaded; of a loaded
# model it counts what that has. It counts the layers of others as whole, so that it promises no row that does not fit.
# tests/torch_backend/hf/test_tiled_families.py holds both lists.
_MLPS = """
afmoe aria_text bamba beam cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v3 diffllama doge dots1 ernie4_5
ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm4_moe gpt_oss granite granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder kolibri1 laguna llama mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral
nemotron_h olmo olmo2 olmo3 olmoe phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
recurrent_gemma smollm3 solar_open stablelm vaultgemma gemma4_text glm4v_moe_text qwen2_vl_text qwen2_5_vl_text
qwen3_vl_text qwen3_vl_moe_text
"""
_PROJECTIONS = """
apertus arcee bitnet cwm diffllama ernie4_5 gemma gemma2 gemma3_text glm glm4 gpt_oss granite granite_swa granitemoe
granitemoe_swa granitemoeshared helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder llama mellum mimo_v2_flash
minimax_m2 ministral ministral3 mistral mixtral olmoe qwen2 qwen3 qwen3_moe seed_oss smollm3 vaultgemma
qwen3_vl_text qwen3_vl_moe_text
"""
# MLPs of a gate, an upper and a lower projection and nothing besides, and routed experts.
MLPS = frozenset(_MLPS.split())
# Every layer hands each norm to one part alone, and these are attention by three projections and an MLP or experts.
PROJECTIONS = frozenset(_PROJECTIONS.split())

Read = Callable[..., int]  # a size of a config by its names, 0 or a default if it has none


class Mixer(NamedTuple):
    """Describes what mixes the tokens of a layer, in columns of a token.

    Attributes:
        kept: what its backward reads.
        gradients: those of what it reads and returns.
        output: of these, what it returns.
        parameters: of one layer.
        linear: inputs and outputs of its linear layers, added up.
        statistics: bytes, of the softmax.
        twice: of ``kept``, what a norm and a rotation make again at "selective": queries and keys that have norms.
        attended: of ``kept``, what "attention" keeps: the results of attention over keys.
    """

    kept: int = 0
    gradients: int = 0
    output: int = 0
    parameters: int = 0
    linear: int = 0
    statistics: int = 0
    twice: int = 0
    attended: int = 0

    def beside(self, other: Mixer) -> Mixer:
        """Returns the sizes of two mixers that run beside each other in one layer."""
        return Mixer(*(a + b for a, b in zip(self, other, strict=True)))


def attention(kind: str, width: int, heads: int, read: Read) -> Mixer:
    """Queries, keys, values and output; queries and keys before their norms, and the gate of the output."""
    head = read("head_dim", default=width // heads)
    keys, queries = read("num_key_value_heads", default=heads) * head, heads * head
    again = queries + keys if kind in _NORMS_OF_QUERIES else 0
    gate = queries if kind in (*GATED_ATTENTION, "afmoe") else 0
    read_and_returned = 2 * queries + 2 * keys
    weights = width * (2 * queries + 2 * keys + gate)
    gradients = read_and_returned + gate
    kept = read_and_returned + again + gate
    return Mixer(kept, gradients, queries, weights, 4 * width + gradients, 4 * heads, again, queries)


def latent_attention(width: int, heads: int, read: Read) -> Mixer:
    """Queries and keys of both parts, values and output of each head; both latents, which their norms read."""
    nope, turned = read("qk_nope_head_dim"), read("qk_rope_head_dim")
    queries, values = heads * (nope + turned), heads * read("v_head_dim")
    low, latent = read("q_lora_rank"), read("kv_lora_rank")
    read_and_returned = 2 * queries + 2 * values
    of_queries = low * (width + queries) if low else width * queries
    weights = of_queries + width * (latent + turned) + latent * (heads * nope + values) + values * width
    linear, kept = 4 * width + read_and_returned, read_and_returned + low + latent
    # keys are put together in place, and a graph marks its view of them as the attention that reads it
    return Mixer(kept, read_and_returned, values, weights, linear, 4 * heads, attended=values + queries)


def gated_delta(width: int, itemsize: int, read: Read) -> Mixer:
    """The gated delta rule: what the convolution reads and returns, normalised queries and keys, gates, inverses."""
    heads = read("linear_num_value_heads")
    keys = read("linear_num_key_heads") * read("linear_key_head_dim")
    values = heads * read("linear_value_head_dim")
    before = 2 * keys + values
    # of a head, in float32: both gates, and two sums of a chunk
    gates = 4 * heads * 4 // itemsize
    kept = 2 * before + 2 * keys + 3 * values + gates + heads * _CHUNKS.get(itemsize, 64)
    weights = width * (before + values + 2 * heads) + values * width + before * read("linear_conv_kernel_dim")
    linear = 3 * width + before + 2 * values + 2 * heads
    return Mixer(kept, 2 * before + 2 * values, values, weights, linear)


def mamba2(width: int, itemsize: int, read: Read) -> Mixer:
    """Mamba-2: what the convolution reads and returns, gate, output; in float32 the step and two sums of a chunk."""
    heads = read("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = heads * read("mamba_d_head", "mamba_head_dim", "head_dim")
    groups, states = (
        read("mamba_n_groups", "n_groups", default=1),
        read("mamba_d_state", "ssm_state_size", "state_size"),
    )
    before = inner + 2 * groups * states
    kept = 2 * before + 2 * inner + 3 * heads * 4 // itemsize
    into = inner + before + heads
    weights = width * into + inner * width + before * read("mamba_d_conv", "conv_kernel", default=4) + inner
    return Mixer(kept, 2 * before + 2 * inner, inner, weights, 2 * width + into + inner)


def rg_lru(width: int, itemsize: int, read: Read) -> Mixer:
    """RG-LRU: both branches before and behind what they go through, both gates; what the scan reads, in float32."""
    lru, heads = read("lru_width", default=width), read("num_attention_heads")
    kept = 9 * lru + 2 * lru * 4 // itemsize
    weights = 2 * width * lru + lru * width + 2 * lru * (lru // heads) + lru * read("conv1d_width")
    return Mixer(kept, 6 * lru, lru, weights, 3 * width + 3 * lru)


_NORMS_BEHIND = (
    "afmoe",
    "exaone4",
    "flex_olmo",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "olmo2",
    "olmo3",
)
_LATENT = ("deepseek_v3",)
_NOT_GATED = (
    *("apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
    *("jais2", "mpt", "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi", "starcoder2", "xglm"),
)
# Families whose experts or attention other names of their configs describe: the formula would count too little.
_OTHER_SIZES = ("dbrx", "hrm_text", "hunyuan_v1_moe", "jetmoe", "moshi")
_ONE_BLOCK = ("mamba2", "nemotron_h")  # whose layers are a norm and a mixer, or a norm and an MLP
Part = Literal["mlp", "projections"]  # of a layer: its MLP or experts; queries, keys and values, and all its norms
LEVELS_OF_TILES = ("selective", "attention", "full", "offload")
# Names of kinds of layers in configs -> the kind.
_ATTENTION, _BOTH, _ALONE = "attention", "attention beside a recurrent layer", "no mixer"
_DELTA, _MAMBA2, _RG_LRU = "the gated delta rule", "Mamba-2", "RG-LRU"
_KINDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "attention", "*"), _ATTENTION),
    **dict.fromkeys(("mlp", "moe", "-", "E"), _ALONE),
}
# Families -> what their recurrent layers are, by any of the names of these.
_RECURRENT = {
    **dict.fromkeys(GATED_ATTENTION, _DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"), _MAMBA2),
    "recurrent_gemma": _RG_LRU,
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NAMES_OF_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "M")


class FeedForward(NamedTuple):
    """Describes the MLP or the experts of a layer, in columns of a token.

    Attributes:
        inner: W, of all experts that a token visits.
        routed: copies of a token's input for its experts.
        routing: bytes of a token by which its experts are chosen and found.
        gated: whether it has a gate.
        untiled: of ``inner``, what tiles cannot compute.
        parameters: of the weights of its products.
        linear: inputs and outputs of its linear layers, added up.
        stacked: of the parameters, those of experts that are stacked in two weights.
    """

    inner: int = 0
    routed: int = 0
    routing: int = 0
    gated: bool = True
    untiled: int = 0
    parameters: int = 0
    linear: int = 0
    stacked: int = 0

    @property
    def tiled(self) -> tuple[str, ...]:
        """Returns the levels at which long rows compute it by tiles; experts keep a product at others."""
        if self.untiled == self.inner:
            return ()
        return ("attention", "full", "offload") if self.routed else LEVELS_OF_TILES

    def is_narrow(self, width: int) -> bool:
        """Returns whether its products are at most twice as wide as the model, which "selective" keeps."""
        return self.inner <= 2 * width * (2 if self.gated else 1)

    @property
    def inside(self) -> int:
        """Returns the columns that it holds while it computes its gradients, beside its input and output.

        An MLP holds inner columns, their product or activation, and the gradients of these. Experts hold them and a
        gathered input, later inner columns and their gradients with two gathered inputs.
        """
        return max(self._once * self.inner + self.routed, 2 * (self.inner + self.routed) if self.routed else 0)

    def beside_adapters(self, kept: bool) -> int:
        """Returns the columns that low-rank adapters add to :attr:`inside`; none for experts.

        The product of an adapter waits beside that of its weight, in the gradient of the activation too, and so do the
        scaled gradients that adapters read. Inner columns that were ``kept`` are added up already.
        """
        if self.routed:
            return 0
        if self.gated:
            return (3 if kept else 5) * self.inner // 2
        return (2 if kept else 3) * self.inner

    @property
    def inside_tiles(self) -> int:
        """Returns those of :attr:`inside` that exist for the whole row where the rest is computed by tiles."""
        return self._once * self.untiled

    @property
    def _once(self) -> int:
        return 3 if self.gated else 4


class LayerSizes(NamedTuple):
    """Describes equal layers of a decoder.

    Attributes:
        norms: inputs of norms and gates that are as wide as the model.
        projections: whether tiles compute queries, keys and values, and each norm with what reads it.
    """

    layers: int
    mixer: Mixer
    feed: FeedForward
    norms: int
    projections: bool = False

    @property
    def tiles(self) -> frozenset[Part]:
        """Returns the parts that long rows compute by tiles."""
        parts: list[Part] = [*["mlp"] * bool(self.feed.tiled), *["projections"] * self.projections]  # type: ignore[list-item]
        return frozenset(parts)


@dataclass(frozen=True)
class DecoderSizes:
    """Columns of a token in a layer, where nothing else is said.

    Attributes:
        kinds: of layers.
        parameters: of the whole model.
        linear: inputs and outputs of the linear layers in all layers, added up.
    """

    width: int
    layers: int
    kinds: tuple[LayerSizes, ...]
    vocabulary: int
    parameters: int
    linear: int

    @classmethod
    def read(cls, config: Any, itemsize: int = 2) -> DecoderSizes:
        """Reads the sizes of a config.

        Raises:
            PackingError: the config does not say how large the model is, or a size is not one integer.
            UnsupportedModelError: it has layers whose memory is not known.
        """

        find, read = ConfigReader(config).find, partial(ConfigReader(config), default=0)
        if (inside := find("text_config")) is not None:
            return cls.read(inside, itemsize)
        family, width = str(find("model_type")), read("hidden_size", "n_embd", "d_model")
        named = find("layers_block_type", "layer_types", "block_types", "hybrid_override_pattern")
        layers = read("num_hidden_layers", "n_layer", "n_layers") or len(named or ())
        heads = read("num_attention_heads", "n_head", "n_heads")
        if not (width and layers and (heads or family == "mamba2")):
            raise PackingError(
                "the config names no hidden_size, num_hidden_layers and num_attention_heads: pass that of a decoder"
            )
        kinds = _kinds(family, layers, named or (), find("attn_layer_indices"), config)
        latent = find("kv_lora_rank") is not None
        strange = (
            family in _OTHER_SIZES
            or find("ssm_cfg", "moe_latent_size")
            or (family not in _RECURRENT and find("state_size", "mamba_d_state", "rnn_hidden_size"))
        )
        if kinds is None or (latent and family not in _LATENT) or strange or find("is_encoder_decoder"):
            others = sorted({str(x) for x in named or ()} - _KINDS.keys())
            what = f"layers of the kind {others[0]}" if others else "attention, experts or recurrent layers of its own"
            what = "an encoder beside its decoder" if find("is_encoder_decoder") else what
            raise UnsupportedModelError(
                f"how much {family} keeps of a step is not known beforehand, because it has {what}: try "
                'memory="selective" or "full"',
                option="memory",
            )

        def mixer(kind: str) -> Mixer:
            if kind == _ALONE:
                return Mixer()
            if kind == _BOTH:
                return mixer(_ATTENTION).beside(mixer(_MAMBA2))
            if kind == _ATTENTION:
                full = attention(family, width, heads, read)
                return latent_attention(width, heads, read) if latent else full
            recurrent = {_DELTA: gated_delta, _MAMBA2: mamba2, _RG_LRU: rg_lru}
            return recurrent[kind](width, itemsize, read)

        norms = 1 if family in _ONE_BLOCK else 3 if family in _NORMS_BEHIND else 2
        norms += bool(find("shared_expert_intermediate_size"))  # a gate reads what such experts return
        found = []
        for (kind, routed), count in kinds.items():
            without = family in _ONE_BLOCK and kind != _ALONE
            feed = FeedForward() if without else _feed_forward(family, width, find, read, routed=routed)
            found.append(LayerSizes(count, mixer(kind), feed, norms, family in PROJECTIONS))
        vocabulary = read("vocab_size", default=1)
        embedded = vocabulary * width * (1 if find("tie_word_embeddings") else 2)
        return cls(
            width=width,
            layers=layers,
            kinds=tuple(found),
            vocabulary=vocabulary,
            parameters=embedded
            + sum(k.layers * (k.mixer.parameters + k.feed.parameters + min(k.norms, 2) * width) for k in found)
            + width,
            linear=sum(k.layers * (k.mixer.linear + k.feed.linear) for k in found),
        )


def _kinds(
    family: str, layers: int, named: Sequence[str], attending: Any, config: Any
) -> Counter[tuple[str, bool]] | None:
    """Counts the layers of each kind, with and without experts where the config names them; None if one is unknown."""
    recurrent = _RECURRENT.get(family)
    if family == "falcon_h1":
        return Counter({(_BOTH, True): layers})
    if family == "mamba2":
        return Counter({(_MAMBA2, True): layers})
    if family == "bamba":
        named = ["attention" if number in (attending or ()) else "mamba" for number in range(layers)]
    known = _KINDS | (dict.fromkeys(_NAMES_OF_RECURRENT, recurrent) if recurrent else {})
    names = [str(named[number % len(named)]) if named else "attention" for number in range(layers)]
    if any(name not in known for name in names):
        return None
    return Counter(
        (known[name], name not in ("mlp", "-") and not ConfigReader(config).is_dense(number))
        for number, name in enumerate(names)
    )


def _feed_forward(family: str, width: int, find: Any, read: Read, *, routed: bool) -> FeedForward:
    """Reads the MLP or the experts of a layer; ``routed``: whether it has experts where the model has some."""
    halves = 1 if family in _NOT_GATED else 2
    has_experts = routed and bool(find(*_EXPERTS))
    experts = read(*_EXPERTS) if has_experts else 0
    visited = read("num_experts_per_tok", "moe_topk") if experts else 0
    dense = read("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * width)
    if family == "recurrent_gemma":
        dense //= 2  # it counts both halves
    one = read("moe_intermediate_size", default=dense) if experts else dense
    always = find("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    shared = int(always or one * (find(*SHARED_EXPERTS) or 0)) if experts else 0
    if family == "granitemoehybrid" and not experts:
        one = int(always or dense)
    inner = halves * ((visited or 1) * one + shared)
    if family in ("granitemoehybrid", "nemotron_h"):  # whose MLPs have another form than experts
        untiled = halves * shared if experts else inner
    else:
        untiled = 0 if family in MLPS else inner
    return FeedForward(
        inner=inner,
        routed=visited * width,
        routing=4 * experts + 24 * visited,
        gated=halves == 2,
        untiled=untiled,
        parameters=(halves + 1) * width * ((experts or 1) * one + shared) + experts * width,
        linear=(halves + 1) * (width + one),
        stacked=(halves + 1) * width * experts * one,
    )
