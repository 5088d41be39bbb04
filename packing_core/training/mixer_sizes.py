"""Counts what mixes the tokens of a layer, in columns of a token: attention, the gated delta rule, Mamba-2, RG-LRU.

A config's sizes -> :class:`Mixer`. What each keeps is that of compiled layers on this project's kernels, counted by
``tests/torch_backend/hf/test_memory_count.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

GATED_ATTENTION = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_NORMS_OF_QUERIES = (
    *("afmoe", "dots1", "exaone4", "flex_olmo", "minimax_m2"),
    *("apertus", "gemma3", "gemma3_text", "gemma4_text", "hunyuan_v1_dense", "olmo2", "olmo3"),
    *("olmoe", "qwen3", "qwen3_moe", "glm4_moe", *GATED_ATTENTION),
)
_CHUNKS = {2: 64, 4: 32}  # bytes of an activation -> tokens of a chunk of the gated delta rule, whose inverses are kept

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
