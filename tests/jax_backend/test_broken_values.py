"""A document with numbers that are not finite: `chunked` attention keeps them inside it, forward and backward, and so
do the outputs of scans and their gradients of inputs that are not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_backend import gated_delta_rule, segment_attention, selective_scan, ssd

TOKENS, BROKEN = 192, slice(60, 150)  # documents of 60, 90 and 40 tokens, in blocks of 128
IDS = np.repeat([[1, 2, 3, 0]], [60, 90, 40, 2], axis=1)
NAMES = ("q", "k", "v", "dout")


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    return {name: rng.standard_normal((1, TOKENS, heads[name], 8)).astype(np.float32) for name in NAMES}


def broken(x: np.ndarray, value: float) -> np.ndarray:
    """Returns a copy with the value in the second document; JAX may still read the array itself."""
    x = x.copy()
    x[0, 100] = value
    return x


@partial(jax.jit, static_argnums=0)
def attended(implementation: str, q: Any, k: Any, v: Any, dout: Any) -> tuple[jax.Array, ...]:
    """The output and the gradients of q, k and v."""
    options: Any = {"softcap": 3.0, "implementation": implementation, "contain_nonfinite": True}
    out, pullback = jax.vjp(lambda q, k, v: segment_attention(q, k, v, jnp.asarray(IDS), **options), q, k, v)
    return out, *pullback(dout)


@pytest.mark.parametrize(("name", "value"), [("q", np.inf), ("k", np.nan), ("v", np.inf), ("dout", np.nan)])
@pytest.mark.parametrize("implementation", ["xla", "chunked", "pallas", "tpu"])
def test_a_broken_document_changes_no_bit_of_the_others_and_stays_broken(
    implementation: str, name: str, value: float
) -> None:
    arrays = operands()
    wanted = attended(implementation, **arrays)
    arrays[name] = broken(arrays[name], value)
    found = attended(implementation, **arrays)
    for x, y in zip(found, wanted, strict=True):
        for others in (slice(0, BROKEN.start), slice(BROKEN.stop, None)):
            np.testing.assert_array_equal(x[0, others], y[0, others])
    assert any(not np.isfinite(x[0, BROKEN]).all() for x in found)


ROW = jnp.asarray(IDS)
SCANS: dict[str, Any] = {
    "delta rule": lambda q, k, v, g: gated_delta_rule(q, k, v, g, -g, ROW, normalise=True, return_state=True),
    "ssd": lambda q, k, v, g: ssd(v, -g, jnp.ones(4), k, q, ROW, return_state=True),
    "selective scan": lambda q, k, v, g: (selective_scan(v[..., 0], -g, -jnp.ones((4, 8)), k, q, ROW), None),
}


def scan_operands(scan: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    heads = 4 if scan == "delta rule" else 1
    drawn = [rng.standard_normal((1, TOKENS, n, 8)).astype(np.float32) for n in (heads, heads, 4)]
    return [*drawn, -rng.random((1, TOKENS, 4), np.float32)]


@partial(jax.jit, static_argnums=0)
def scanned(scan: str, operands: list[np.ndarray]) -> tuple[Any, tuple[Any, ...], Any]:
    """Outputs, gradients of every operand, the state after the row."""
    out, pullback, state = jax.vjp(SCANS[scan], *operands, has_aux=True)
    return out, pullback(jnp.ones_like(out)), state


@pytest.mark.parametrize(("operand", "value"), [(0, np.nan), (1, np.inf), (2, np.nan), (3, np.inf)])
@pytest.mark.parametrize("scan", SCANS)
def test_a_broken_document_changes_no_bit_of_the_scans_of_others(scan: str, operand: int, value: float) -> None:
    operands = scan_operands(scan)
    wanted, wanted_gradients, state = scanned(scan, operands)
    operands[operand] = broken(operands[operand], value)
    found, gradients, found_state = scanned(scan, operands)
    for x, y in zip((found, *gradients), (wanted, *wanted_gradients), strict=True):
        for others in (slice(0, BROKEN.start), slice(BROKEN.stop, None)):
            np.testing.assert_array_equal(x[0, others], y[0, others])
    assert not np.isfinite(found[0, 100]).all()
    np.testing.assert_array_equal(found_state, state)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scan", SCANS)
def test_what_is_broken_at_padding_reaches_no_output_and_no_gradient(scan: str, value: float) -> None:
    operands = scan_operands(scan)
    wanted, wanted_gradients, _ = scanned(scan, operands)
    for operand in range(4):
        changed = [*operands]
        changed[operand] = operands[operand].copy()
        changed[operand][IDS == 0] = value
        out, gradients, _ = scanned(scan, changed)
        jax.tree.map(np.testing.assert_array_equal, (out, gradients), (wanted, wanted_gradients))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_broken_before_padding_reaches_no_gradient_of_A_by_the_document_after_it(value: float) -> None:
    rng, ids = np.random.default_rng(0), np.array([[1] * 4 + [0] * 2 + [2] * 4])
    x, dt = rng.standard_normal((1, 10, 4), np.float32), rng.random((1, 10, 4), np.float32)
    B, C = rng.standard_normal((2, 1, 10, 8), np.float32)

    def of_the_second(x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array) -> jax.Array:
        return selective_scan(x, dt, A, B, C, jnp.asarray(ids))[ids == 2].sum()

    gradients = jax.jit(jax.grad(of_the_second, argnums=2))
    wanted = gradients(x, dt, -np.ones((4, 8), np.float32), B, C)
    x[:, 3] = value
    np.testing.assert_array_equal(gradients(x, dt, -np.ones((4, 8), np.float32), B, C), wanted)


@pytest.mark.parametrize("scan", ["delta rule", "ssd"])
def test_a_broken_state_reaches_the_document_that_goes_on_from_it_and_is_handed_on(scan: str) -> None:
    whole, one = np.ones((1, 64), np.int32), np.float32(1)
    q, k, v, g = (x[:, :64] for x in scan_operands(scan))

    def run(ids: np.ndarray, state: Any) -> Any:
        options = {"initial_state": state, "return_state": True}
        if scan == "delta rule":
            return gated_delta_rule(q, k, v, g, -g, jnp.asarray(ids), **options)
        return ssd(v, -g, -jnp.ones(4), k, q, jnp.asarray(ids), **options)

    state = np.full((1, 4, 8, 8), one)
    two = np.repeat([[1, 2]], [20, 44], axis=1)
    wanted, wanted_state = run(two, state)
    state = state.copy()
    state[0, 1, 2, 3] = np.nan
    found, found_state = run(two, state)
    assert np.isnan(found[0, :20]).all()
    np.testing.assert_array_equal(found[0, 20:], wanted[0, 20:])
    np.testing.assert_array_equal(found_state, wanted_state)
    assert np.isnan(run(whole, state)[1]).all()
