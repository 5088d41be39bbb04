"""`audit` rejects models with a planted leak, each by its defaults, and passes the model without one.

Every leak is a function of a row [B, S, D], the same for a document alone.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from jax_backend import audit, segment_attention

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
