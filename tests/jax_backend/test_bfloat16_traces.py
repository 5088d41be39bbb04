"""Everything is traced in bfloat16: strict promotion refuses there what the other tests' float32 hides."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_backend
import packing_core
from jax_backend import segment_attention
from jax_backend.attention import IMPLEMENTATIONS
from jax_backend.model.decoder import Decoder, DecoderConfig
from tests.jax_backend.models import CONFIGS

DOCUMENTS = [np.arange(n) % 60 for n in (9, 5, 12, 20)]
BATCH = {name: jnp.asarray(x) for name, x in jax_backend.to_batch(packing_core.pack(DOCUMENTS, 32, seed=None)).items()}
IDS = BATCH["segment_ids"]
B, S = IDS.shape


def trace(function: Any, *shapes: tuple[int, ...]) -> None:
    """Traces the function of arrays of these shapes and all its gradients; nothing is compiled."""

    def total(*arrays: jax.Array) -> jax.Array:
        results = jax.tree.leaves(function(*arrays))
        return sum(
            (x.astype(jnp.float32).sum() for x in results if jnp.issubdtype(x.dtype, jnp.floating)), jnp.zeros(())
        )

    like = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    jax.eval_shape(jax.value_and_grad(total, tuple(range(len(like)))), *like)


def test_promotion_is_forbidden() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        trace(lambda x: x * jnp.ones(3), (3,))
    with pytest.raises(ValueError, match="rank_promotion"):
        trace(lambda x: x * x[0], (2, 3))


OPTIONS: list[dict[str, Any]] = [{}, {"window": 5, "softcap": 3.0, "scale": 0.3}, {"sinks": True, "return_lse": True}]
KERNELS = [name for name in IMPLEMENTATIONS if name != "cudnn"]  # which runs on GPUs alone


@pytest.mark.parametrize(
    ("implementation", "options"),
    [(name, options) for name in KERNELS for options in OPTIONS if name != "tpu" or "sinks" not in options],
)
def test_attention(implementation: str, options: dict[str, Any]) -> None:
    options = options | ({"sinks": jnp.zeros(4, "bfloat16")} if "sinks" in options else {})
    heads = (B, S, 4, 8), (B, S, 2, 8), (B, S, 2, 8)
    trace(lambda *x: segment_attention(*x, IDS, implementation=implementation, **options), *heads)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_attention_to_shared_prefixes_and_other_tokens(implementation: str) -> None:
    rows = packing_core.pack_tree([[1] * 6 + [5, 6], [1] * 6 + [7]], 16, prompt_lengths=[6, 6], shortest=3, seed=None)
    more = {"parents": rows.parent_ids, "implementation": implementation}
    trace(lambda x: segment_attention(x, x, x, rows.segment_ids, **more), (1, 16, 2, 8))
    keys = {"kv_segment_ids": IDS, "q_offset": 16, "implementation": implementation}
    trace(lambda q, k: segment_attention(q, k, k, IDS[:, 16:], **keys), (B, 16, 2, 8), (B, S, 2, 8))


SCANS: dict[str, Any] = {
    "delta rule": (
        lambda q, v, g: jax_backend.gated_delta_rule(q, q, v, g, -g, IDS, normalise=True, return_state=True),
        [(B, S, 2, 8), (B, S, 4, 8), (B, S, 4)],
    ),
    "ssd": (
        lambda x, dt, A, B: jax_backend.ssd(x, dt, A, B, B, IDS, D=A, return_state=True),
        [(B, S, 4, 8), (B, S, 4), (4,), (B, S, 2, 8)],
    ),
    "selective scan": (
        lambda x, A, B, D: jax_backend.selective_scan(x, x, A, B, B, IDS, D=D, z=x),
        [(B, S, 16), (16, 8), (B, S, 8), (16,)],
    ),
    "convolution": (
        lambda x, w, bias: jax_backend.causal_conv(x, w, IDS, bias=bias, activation="silu"),
        [(B, S, 16), (16, 4), (16,)],
    ),
    "rope": (lambda x, f: jax_backend.apply_rope(x, BATCH["position_ids"], f), [(B, S, 2, 8), (4,)]),
    "loss": (lambda x: jax_backend.packed_cross_entropy(x, BATCH["targets"]), [(B, S, 60)]),
    "head and loss": (
        lambda x, w: jax_backend.linear_cross_entropy(x, w, BATCH["targets"], weights=BATCH["loss_weights"]),
        [(B, S, 16), (16, 60)],
    ),
    "capped head": (
        lambda x, w: jax_backend.linear_cross_entropy(x, w, BATCH["targets"], softcap=3.0, transposed=True),
        [(B, S, 16), (60, 16)],
    ),
    **{
        how: (lambda x, how=how: jax_backend.reduce(x, BATCH, how, documents=4), [(B, S)])
        for how in ("sum", "mean", "first", "last")
    },
    "spread": (lambda x: jax_backend.spread(x, BATCH), [(4,)]),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_and_losses(name: str) -> None:
    function, shapes = SCANS[name]
    trace(function, *shapes)


@pytest.mark.parametrize("family", CONFIGS)
def test_decoders(family: str) -> None:
    def grads(batch: dict[str, jax.Array]) -> Any:
        config = DecoderConfig.from_hf(CONFIGS[family]())
        model = Decoder(config, rngs=nnx.Rngs(0), dtype="bfloat16", implementation="xla")
        logprobs = jax_backend.token_logprobs(model, batch, entropy=True, top_k=2)
        return nnx.value_and_grad(lambda model: model.loss(batch)[0])(model), logprobs

    nnx.eval_shape(grads, BATCH)
