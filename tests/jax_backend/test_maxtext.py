"""MaxText's own attention operator on a batch with our keys, where MaxText is installed: each document as if alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import packing_core
from tests.jax_backend.test_docs import maxtext_mesh, module

attention_op = pytest.importorskip(
    "maxtext.layers.attention_op", reason="unsupported here: MaxText needs Python 3.12 and JAX 0.11.1"
)
common_types = pytest.importorskip("maxtext.common.common_types")

RULES = (
    (common_types.BATCH_ATTN, ("data", "fsdp")),
    (common_types.HEAD, "tensor"),
    (common_types.LENGTH, "context"),
    (common_types.KV_LENGTH, None),
    (common_types.D_KV, None),
)


class Config:
    """Holds the fields of MaxText's config that the operator reads; all others are None."""

    attention_type = "global"
    context_parallel_strategy = "all_gather"
    context_sharding = "context"
    ici_context_autoregressive_parallelism = 0
    logical_axis_rules = ()

    def __getattr__(self, name: str) -> None:
        return None


class Changed(attention_op.AttentionOp):
    """The operator with the change of docs/jax.md."""

    def cudnn_jax_flash_attention(self, query, key, value, decoder_segment_ids, model_mode="train"):
        return module("packed_maxtext.py").packed_attention(self, query, key, value, decoder_segment_ids, scale=1.0)


def trained(kind: Any, kernel: str, options: dict[str, Any], operands: Any, ids: Any, positions: Any) -> list[Any]:
    """The output and the gradients of q, k and v."""
    op = kind(Config(), maxtext_mesh(), kernel, 32, 4, 2, float32_qk_product=True, float32_logits=True, **options)
    *qkv, dout = operands
    with nn.logical_axis_rules(RULES):
        out, pullback = jax.vjp(lambda *qkv: op(*qkv, ids, positions, "train"), *qkv)
        return [out, *pullback(dout)]


@pytest.mark.parametrize(("kind", "kernel"), [(attention_op.AttentionOp, "dot_product"), (Changed, "cudnn_flash_jax")])
@pytest.mark.parametrize("local", [False, True])
def test_packed_documents_give_what_each_gives_alone(kind: Any, kernel: str, local: bool) -> None:
    documents = [np.arange(length) for length in (9, 14, 7, 16, 16)]
    batch = packing_core.pack(documents, 32, seed=None).to_dict("maxtext")
    ids, positions = jnp.asarray(batch["inputs_segmentation"]), jnp.asarray(batch["inputs_position"])
    options = {"attention_type": common_types.AttentionType.LOCAL_SLIDING, "sliding_window_size": 5} if local else {}
    keys = jax.random.split(jax.random.key(1), 4)
    drawn = [jax.random.normal(key, (*ids.shape, n, 16)) for key, n in zip(keys, (4, 2, 2, 4), strict=True)]
    operands = [*drawn[:3], jnp.where((ids > 0)[..., None, None], drawn[3], 0)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # MaxText promotes
        found = trained(kind, kernel, options, operands, ids, positions)
        for row, segment in sorted({(row, int(ids[row, at])) for row, at in np.argwhere(ids > 0)}):
            at = slice(row, row + 1), np.flatnonzero(ids[row] == segment)
            own = [x[at] for x in operands]
            alone = trained(
                attention_op.AttentionOp, "dot_product", options, own, jnp.ones_like(ids[at]), positions[at]
            )
            for one, other in zip(found, alone, strict=True):
                np.testing.assert_allclose(one[at], other, atol=1e-5)
