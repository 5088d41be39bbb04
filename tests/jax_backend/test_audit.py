"""The audit of JAX models: right ones are exact, and each leak is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh

from jax_backend import audit, explain, segment_attention
from jax_backend.losses import output_layer
from jax_backend.model.decoder import Decoder, DecoderConfig
from packing_core.errors import LayoutError, PackingError
from tests.jax_backend.models import CONFIGS

V, M = 50, 16


class Linen(linen.Module):
    """One attention layer; ``leaks`` attends to the whole row before a token."""

    leaks: bool = False
    dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, input_ids, segment_ids, position_ids):
        x = linen.Embed(V, M, dtype=self.dtype)(input_ids) + linen.Embed(600, M, dtype=self.dtype)(position_ids)
        ids = jnp.ones_like(segment_ids) if self.leaks else segment_ids

        def attend(q, k, v, *, mask, **unused):
            return segment_attention(q, k, v, mask, implementation="xla")

        x = x + linen.MultiHeadDotProductAttention(2, attention_fn=attend, dtype=self.dtype)(x, mask=ids)
        return linen.Dense(V, dtype=self.dtype)(x)


def call(module):
    return lambda params, batch: module.apply(params, **batch)


def params_of(module):
    ids = jnp.zeros((1, 8), jnp.int32)
    return module.init(jax.random.key(0), ids, ids, ids)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_linen_model_is_judged_as_a_function(dtype) -> None:
    leaks = dtype == jnp.bfloat16
    model = Linen(leaks=leaks, dtype=dtype)
    verdict = audit(params_of(model), call=call(model))
    assert verdict.exact == (not leaks), verdict.line
    assert (verdict.moved > 0 and verdict.logits > 10 * verdict.allowed_logits) == leaks


def test_an_nnx_model_is_judged_without_its_dropout() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, M, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, input_ids, segment_ids, position_ids):
            x = self.embed(input_ids)[:, :, None]
            x = segment_attention(x, x, x, segment_ids, implementation="xla")
            return self.embed.attend(self.dropout(x[:, :, 0]))

    model = Model(nnx.Rngs(0))
    verdict = audit(model)
    assert verdict.exact, verdict.line
    assert not model.dropout.deterministic  # the model is left as it is


class ShortTable(nnx.Module):
    """Right, and its positions end after 100."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.places = nnx.Embed(V, M, rngs=rngs), nnx.Embed(100, M, rngs=rngs)

    def __call__(self, input_ids, segment_ids, position_ids):
        x = (self.embed(input_ids) + self.places(position_ids))[:, :, None]
        return self.embed.attend(segment_attention(x, x, x, segment_ids, implementation="xla")[:, :, 0])


def test_a_model_with_a_short_table_of_positions_is_judged_up_to_its_end() -> None:
    model = ShortTable(nnx.Rngs(0))
    with pytest.raises(PackingError, match="logits of a document of 128 tokens by itself are not finite.*pass longest"):
        audit(model)
    verdict = audit(model, longest=100)
    assert verdict.exact, verdict.line


def test_logits_that_are_not_finite_are_never_exact() -> None:
    model = ShortTable(nnx.Rngs(0))
    model.embed.embedding[...] = model.embed.embedding[...].at[3].set(jnp.nan)
    with pytest.raises(PackingError, match="look at its weights otherwise"):
        audit(model, longest=100)

    def broken_when_packed(weights, batch):
        logits = jax.nn.one_hot(batch["input_ids"], V) * weights[None, None]
        return jnp.where((batch["segment_ids"] > 1).any(), jnp.nan, logits)

    verdict = audit(jnp.ones(V), call=broken_when_packed)
    assert verdict.logits == float("inf") and not verdict.exact


def test_a_model_that_gives_no_logits_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"gives \(2, 640\) for inputs \[B, S\] = .*: return logits \[B, S, V\]"):
        audit({"w": jnp.ones(3)}, call=lambda params, batch: params["w"][batch["input_ids"]])


def test_what_is_no_argument_by_position_is_refused_by_name() -> None:
    with pytest.raises(PackingError, match=r"audit\(\) takes model by position and got 512 beside: name .* call="):
        audit({}, 512)


def test_explain_names_what_serves_each_kind_of_layer_and_why_not_the_others() -> None:
    config = DecoderConfig.from_hf(CONFIGS["qwen2-window-tied"]().to_dict())
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    full, window, head, _ = explain(model, platform="gpu")
    assert (full.layer, full.implementation) == ("layers 0, full attention", "pallas")
    assert (window.layer, window.implementation) == ("layers 1, window 5", "pallas")
    assert (head.layer, head.implementation) == ("output head and loss", "logits")
    assert re.fullmatch(r"not powers: \d+ channels are no multiple of 64", head.reason)
    model.implementation = "cudnn"
    full, window, *_ = explain(model, platform="gpu")
    assert window.implementation == "none" and "not cudnn: " in window.reason


def test_a_hybrid_is_explained_by_its_two_kinds_of_layers() -> None:
    model = nnx.eval_shape(
        lambda: Decoder(DecoderConfig.from_hf(CONFIGS["qwen3.5"]().to_dict()), rngs=nnx.Rngs(0), implementation="xla")
    )
    nets, attention, *_ = explain(model, platform="cpu")
    assert (nets.layer, nets.implementation) == ("layers 0, gated delta net", "chunked")
    assert (attention.layer, attention.implementation) == ("layers 1, full attention", "xla")


def test_the_head_of_a_hopper_gpu_is_named_and_elsewhere_why_not() -> None:
    hidden = jax.ShapeDtypeStruct((4096, 896), jnp.bfloat16)
    device = AbstractDevice("NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert output_layer.answers(hidden, 151_936, platform="gpu") == {"powers": None, "logits": None}
        capped = output_layer.answers(hidden, 151_936, platform="gpu", softcap=30.0)
    assert capped == {"powers": "logits are capped at 30", "logits": None}
    elsewhere = output_layer.answers(hidden, 151_936, platform="tpu")
    assert elsewhere == {"powers": "it is written for Hopper GPUs", "logits": None}
    wide = jax.ShapeDtypeStruct((4096, 896), jnp.float32)
    assert output_layer.answers(wide, 151_936, platform="gpu")["powers"] == "hidden states are float32, not bfloat16"
    assert output_layer.answers(hidden, 192, platform="gpu")["powers"] == "192 classes are fewer than 256"


def test_explain_of_a_call_asks_the_call_s_own_options() -> None:
    q = jax.ShapeDtypeStruct((1, 64, 4, 512), jnp.float32)
    (choice,) = explain(q, q, q, platform="gpu")
    assert choice.implementation == "chunked" and "not pallas: head width 512 is above" in choice.reason
    assert str(explain(q, q, q, platform="gpu")) == f"attention: chunked ({choice.reason})"
    (choice,) = explain(q, q, q, platform="tpu", return_lse=True)
    assert choice.implementation == "chunked" and "not tpu: " in choice.reason
    with pytest.raises(PackingError, match="platform is 'abacus': pass one of cpu, gpu, tpu"):
        explain(q, q, q, platform="abacus")
    with pytest.raises(PackingError, match="explain takes a Decoder, or the q, k and v of a call"):
        explain(q)


V, M = 50, 16


def previous(x: Array) -> Array:
    """At each token what stands at the one before it in the row."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def following(x: Array) -> Array:
    """At each token what stands at the one after it in the row."""
    return previous(x[:, ::-1])[:, ::-1]


@jax.custom_vjp
def leaking_backward(x: Array) -> Array:
    """The gradient of a document's first token reaches the last token of the document before."""
    return x


leaking_backward.defvjp(lambda x: (x, None), lambda _, g: (g + 0.1 * following(g),))


def between_chunks(size: int) -> Callable[[Array], Array]:
    """A state that is handed from chunk to chunk, whatever begins in between."""

    def leak(x: Array) -> Array:
        starts = range(0, x.shape[1], size)
        chunks = [x[:, start : start + size] for start in starts]
        states = [jnp.zeros_like(x[:, :1]), *(chunk.mean(1, keepdims=True) for chunk in chunks[:-1])]
        return jnp.concatenate([chunk + 0.1 * state for chunk, state in zip(chunks, states, strict=True)], 1)

    return leak


LEAKS: dict[str, Callable[[Array], Array]] = {
    "from later documents": lambda x: x + 0.1 * following(x),
    "backward alone": leaking_backward,
    "between chunks of 64": between_chunks(64),
    "between chunks of 256": between_chunks(256),
    "absolute positions": lambda x: x + 0.1 * jnp.sin(jnp.arange(x.shape[1]))[None, :, None],
    "normalisation over the row": lambda x: x / jnp.sqrt(jnp.square(x).mean(1, keepdims=True)),
    "forward, by 1e-6": lambda x: x + 1e-6 * previous(x),
}


def weights() -> dict[str, Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"embed": (V, M), "q": (M, M), "k": (M, M), "v": (M, M), "out": (M, V)}
    drawn = {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return {**drawn, "key bias": jnp.zeros(M)}


def model_with(leak: Callable[[Array], Array]):
    """One attention layer. The bias of keys adds the same to every score of a query, so its gradient is rounding."""

    def call(params: dict[str, Array], batch: dict[str, Array]) -> Array:
        x = params["embed"][batch["input_ids"]]
        q, k, v = x @ params["q"], x @ params["k"] + params["key bias"][None, None], x @ params["v"]
        heads = (y.reshape(*y.shape[:2], 2, M // 2) for y in (q, k, v))
        attended = segment_attention(*heads, batch["segment_ids"], implementation="xla").reshape(x.shape)
        return leak(x + attended) @ params["out"]

    return call


def test_the_model_without_a_leak_is_exact() -> None:
    verdict = audit(weights(), call=model_with(lambda x: x))
    assert verdict.exact and verdict.moved == verdict.gradient_leak == 0, verdict.line
    assert verdict.allowed_gradients < 1e-2


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_found(leak: str) -> None:
    verdict = audit(weights(), call=model_with(LEAKS[leak]))
    assert not verdict.exact, verdict.line
    if leak == "backward alone":
        assert verdict.moved == 0 and verdict.logits <= verdict.allowed_logits
        assert verdict.gradient_leak > 1e-3
