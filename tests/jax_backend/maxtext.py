"""A stand-in for MaxText's ``AttentionOp``, which needs Python 3.12; `test_maxtext` runs the original.

Names, argument order, shapes and return values are those of ``AttentionOp`` in ``layers/attention_op.py`` of MaxText
0.2.5, as far as training reads them; the bodies are written anew, and scale the logits themselves, where MaxText scales
its queries. ``cudnn_jax_flash_attention`` does in training what the original does: it reads no segment ids
(AI-Hypercomputer/maxtext issue 4476).
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

BATCH, HEAD, LENGTH, D_KV = "activation_batch", "activation_heads", "activation_length", "activation_kv"
RULES = ((BATCH, ("data", "fsdp")), (HEAD, "tensor"), (LENGTH, "context"), (D_KV, None))


class AttentionType(enum.Enum):
    GLOBAL = "global"
    LOCAL_SLIDING = "local_sliding"
    CHUNK = "chunk"
    FULL = "full"


class AttentionOp:
    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        attention_kernel: str,
        *,
        flash_axis_names_q: tuple[str, ...] = (BATCH, HEAD, LENGTH, D_KV),
        attention_type: AttentionType = AttentionType.GLOBAL,
        attn_logits_soft_cap: float | None = None,
        sliding_window_size: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.attention_kernel = attention_kernel
        self.flash_axis_names_q = flash_axis_names_q
        self.attention_type = attention_type
        self.attn_logits_soft_cap = attn_logits_soft_cap
        self.sliding_window_size = sliding_window_size

    def apply_attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        decoder_segment_ids: jax.Array | None,
        segment_positions: jax.Array | None,
        lengths: jax.Array | None,
        model_mode: str,
        use_ragged_attention: bool = False,
        previous_chunk: Any = None,
        bidirectional_mask: Any = None,
        sinks: jax.Array | None = None,
        *,
        qk_product_einsum: Any = jnp.einsum,
        wv_product_einsum: Any = jnp.einsum,
    ) -> tuple[Any, Any, Any]:
        """query [B, S, N, D], key and value [B, S, K, D], decoder_segment_ids [B, S]; (output, statistics, None)."""
        if self.attention_kernel == "dot_product":
            return self.apply_attention_dot(query, key, value, decoder_segment_ids), None, None
        assert self.attention_kernel == "cudnn_flash_jax"
        return *self.cudnn_jax_flash_attention(query, key, value, decoder_segment_ids, model_mode), None

    def apply_attention_dot(self, query: Any, key: Any, value: Any, decoder_segment_ids: Any) -> jax.Array:
        """The path that reads the segment ids: one dense mask."""
        at = jnp.arange(query.shape[1])
        distance = at[:, None] - at[None, :]
        visible = (decoder_segment_ids[:, :, None] == decoder_segment_ids[:, None, :]) & (distance >= 0)[None]
        if self.attention_type == AttentionType.LOCAL_SLIDING:
            visible &= (distance < self.sliding_window_size)[None]
        group = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        logits = jnp.einsum("bsnd,btnd->bnst", query, key) * query.shape[-1] ** -0.5
        if self.attn_logits_soft_cap:
            logits = self.attn_logits_soft_cap * jnp.tanh(logits / self.attn_logits_soft_cap)
        weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30), axis=-1)
        return jnp.einsum("bnst,btnd->bsnd", weights, value)

    def cudnn_jax_flash_attention(
        self, query: Any, key: Any, value: Any, decoder_segment_ids: Any, model_mode: str = "train"
    ) -> tuple[jax.Array, jax.Array]:
        """Output [B, S, N, D] and log-sum-exp [B, N, S], causal over the whole row."""
        row = jnp.zeros(query.shape[:2], jnp.int32)
        return self.apply_attention_dot(query, key, value, row), jnp.zeros(())


def logical_rules() -> Any:
    return nn.logical_axis_rules(RULES)
