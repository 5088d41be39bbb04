"""Errors of calls that JAX or flax would answer in words of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jax_backend
import packing_core
from jax_backend import (
    context_attention,
    gated_delta_rule,
    linear_cross_entropy,
    make_train_step,
    packed_cross_entropy,
    segment_attention,
    ssd,
)
from packing_core.errors import PackingError, UnsupportedError
from tests.jax_backend.models import CONFIGS

IDS = jnp.asarray([[1] * 6 + [2] * 7 + [0] * 3])
Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 16, 2, 8)), jnp.float32)
CONFIG = jax_backend.DecoderConfig.from_hf(CONFIGS["llama"]().to_dict() | {"num_hidden_layers": 1})
BATCH = jax_backend.to_batch(packing_core.pack([np.arange(9), np.arange(5)], 16))


def decoder(**options: Any) -> jax_backend.Decoder:
    return jax_backend.Decoder(CONFIG, rngs=nnx.Rngs(0), **options)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, input_ids: jax.Array, segment_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
        return linen.Embed(64, 64)(input_ids)


def step(result: Callable[[Any, Any], Any]) -> Any:
    train_step = make_train_step(decoder(), optax.sgd(0.1), loss_fn=lambda model, batch: result(*model.loss(batch)))
    return train_step(train_step.init(), BATCH)


attend = partial(segment_attention, Q, Q, Q, IDS)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "softcap as an array": (lambda: attend(softcap=np.ones(2)), r"softcap must be one number, got an array .*\(2,\)"),
    "causal as a string": (lambda: attend(causal="yes"), "causal must be True or False, got 'yes'"),
    "sinks as words": (lambda: attend(sinks=["a", "b"]), r"sinks must have one logit per query head, shape \(2,\)"),
    "context mesh": (
        lambda: context_attention(Q, Q, Q, IDS, mesh=(4, 2)),
        r"mesh must be a jax.sharding.Mesh, got tuple: make one with .*\('context',\)",
    ),
    "decoder's mesh": (lambda: decoder(mesh=(4, 2)), "mesh must be a jax.sharding.Mesh, got tuple"),
    "loss without weight": (lambda: step(lambda loss, weight: (loss, None)), "both numbers, and they are .*NoneType"),
    "loss with metrics for its weight": (
        lambda: step(lambda loss, weight: (loss, {"weight": weight})),
        "both numbers, and they are .* and dict",
    ),
    "further values that are words": (
        lambda: step(lambda loss, weight: (loss, weight, {"name": "x"})),
        "extra maps names to numbers: ",
    ),
    "audit of linen": (lambda: jax_backend.audit(Linen()), "audit takes an nnx module, got Linen: .* module.apply"),
    "log-probabilities of linen": (
        lambda: jax_backend.token_logprobs(Linen(), BATCH),
        r"takes a Decoder, or another model with hidden\(...\) and logits\(...\), got Linen",
    ),
    "save of linen": (lambda: jax_backend.save(Linen(), "folder"), "save writes a Decoder, got Linen: .* orbax"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_named_with_what_to_pass(call: str) -> None:
    function, message = CALLS[call]
    with pytest.raises(PackingError, match=message):
        function()


def test_a_mask_of_0_and_1_is_no_segment_ids_where_positions_begin_again() -> None:
    mask = dict(BATCH, segment_ids=(BATCH["segment_ids"] > 0).astype(np.int32))
    message = "position_ids begin again at token [59] of row 0, inside a segment: .* a 0/1 attention mask"
    train_step = make_train_step(decoder(), optax.sgd(0.1))
    on_device = {name: jnp.asarray(value) for name, value in mask.items()}
    for batch in (mask, on_device):  # of batches on a device the first one is read
        with pytest.raises(PackingError, match=message):
            train_step(train_step.init(), batch)
    with pytest.raises(PackingError, match=message):
        decoder()(mask["input_ids"], mask["segment_ids"], mask["position_ids"])
    alone = jax_backend.to_batch(packing_core.pack([np.arange(9), np.arange(5)], 16, max_segments=1))
    train_step(train_step.init(), dict(alone, segment_ids=(alone["segment_ids"] > 0).astype(np.int32)))


def squares(implementation: str | None) -> Callable[[Any], Any]:
    return lambda x: (segment_attention(Q * x, Q, Q * x, IDS, implementation=implementation) ** 2).sum()


def of_delta_rule(x: Any) -> jax.Array:
    return gated_delta_rule(Q, Q * x, Q, -(Q[..., 0] ** 2), Q[..., 1], IDS).sum()


FORWARD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attention": (squares(None), "pass implementation='xla'"),
    "pallas": (squares("pallas"), "pass implementation='xla'"),
    "tpu": (squares("tpu"), "pass implementation='xla'"),
    "head": (lambda x: linear_cross_entropy(Q[:, :, 0] * x, Q[0, :, 0].T, IDS)[0], "to packed_cross_entropy"),
    "delta rule": (of_delta_rule, "gated_delta_rule has a gradient in reverse mode alone"),
    "ssd": (lambda x: ssd(Q * x, Q[..., 0] ** 2, -jnp.ones(2), Q, Q, IDS).sum(), "ssd has a gradient in reverse mode"),
}


@pytest.mark.parametrize("function", FORWARD)
def test_forward_mode_names_what_has_it(function: str) -> None:
    call, message = FORWARD[function]
    of_one = [lambda x, call=each: jax.jvp(call, (x,), (x,)) for each in (call, jax.jit(call))]
    for forward in (*of_one, jax.jit(jax.jacfwd(call)), jax.jacfwd(jax.jit(call))):
        with pytest.raises(UnsupportedError, match=message):
            forward(1.0)
    assert np.isfinite(jax.jit(jax.grad(call))(1.0))


@pytest.mark.parametrize("implementation", ["chunked", "pallas", "tpu"])
def test_gradients_of_rows_under_vmap_are_no_forward_mode(implementation: str) -> None:
    call = squares(implementation)
    each = jax.jit(jax.vmap(jax.grad(jax.jit(call))))(jnp.array([1.0, 2.0]))
    wanted = each[0] + 2 * each[1]
    rows = {
        "chunked": lambda x: jax.vmap(jax.vmap(call))(x * jnp.array([[1.0, 2.0]])).sum(),
        "pallas": lambda x: jax.vmap(call)(x * jnp.array([1.0, 2.0])).sum(),
        "tpu": lambda x: call(x) + call(2 * x),
    }[implementation]
    assert abs(jax.jit(jax.jacrev(rows))(1.0) - wanted) < 1e-4 * abs(wanted)


def test_forward_mode_of_a_decoder_says_that_there_is_none() -> None:
    graph, weights = nnx.split(decoder(implementation="xla"))

    def loss(x: Any) -> jax.Array:
        model = nnx.merge(graph, jax.tree.map(lambda w: w * x, weights))
        logits = model(BATCH["input_ids"], BATCH["segment_ids"], BATCH["position_ids"])
        return packed_cross_entropy(logits, BATCH["targets"])[0]

    with pytest.raises(UnsupportedError, match="the layers of a Decoder have gradients in reverse mode alone"):
        jax.jvp(loss, (1.0,), (1.0,))


SECOND: dict[str, Callable[[Any], Any]] = {
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))[1],
    "hessian": jax.hessian,
    "hessian of a compiled function": lambda f: jax.hessian(jax.jit(f)),
}


@pytest.mark.parametrize("order", SECOND)
def test_second_derivatives_name_xla_which_has_them(order: str) -> None:
    for implementation in ("chunked", "pallas", "tpu"):
        with pytest.raises(UnsupportedError, match="for second derivatives pass implementation='xla'"):
            jax.jit(SECOND[order](squares(implementation)))(1.0)
    with pytest.raises(UnsupportedError, match="for second derivatives pass implementation='xla'"):
        SECOND[order](squares("chunked"))(1.0)
    assert np.isfinite(jax.jit(SECOND[order](squares("xla")))(1.0))


def test_a_gradient_that_is_held_constant_is_no_second_derivative() -> None:
    def sharpness_aware(f: Callable[[Any], Any]) -> Any:
        return jax.jit(jax.grad(lambda x: f(x + 0.01 * jax.lax.stop_gradient(jax.grad(f)(x)))))(1.0)

    wanted = sharpness_aware(squares("xla"))
    assert abs(sharpness_aware(squares("chunked")) - wanted) < 1e-4 * abs(wanted)
