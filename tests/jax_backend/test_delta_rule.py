"""The delta rule and Mamba-2's scan of packed rows, against the float64 recurrence of each document alone."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from conformance.draws import segment_ids
from jax_backend import gated_delta_rule, ssd
from jax_backend.placement import auto_axes
from jax_backend.scan import chunked_scan
from packing_core.errors import LayoutError, UnsupportedError
from tests.jax_backend.scan_operands import (
    EDGES,
    budgets,
    delta_operands,
    delta_rule_alone,
    out_and_gradients,
    quick_jit,
    ssd_operands,
)

IDS = segment_ids(EDGES)
SCANS = {
    "delta rule": (gated_delta_rule, delta_operands, "v"),
    "ssd": (ssd, ssd_operands, "x"),
}


def cotangent(like: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(like.shape).astype(np.float32) * (IDS != 0)[..., None, None]


@pytest.fixture(params=SCANS)
def scan(request) -> Any:
    function, operands, values = SCANS[request.param]
    arrays = operands(EDGES)
    return function, arrays, cotangent(arrays[values])


def test_what_stands_at_padding_does_not_matter_even_nan(scan) -> None:
    function, arrays, dout = scan
    other = {name: x.copy() for name, x in arrays.items()}
    for name, x in other.items():
        if name not in "AD":
            x[IDS == 0] = np.nan
    before = out_and_gradients(function, arrays, IDS, dout)
    after = out_and_gradients(function, other, IDS, dout)
    for name in before:
        assert np.array_equal(before[name], after[name]), name


def test_one_trace_serves_every_segmentation() -> None:
    arrays, traces = delta_operands(EDGES), []

    @quick_jit
    def run(ids: jax.Array) -> jax.Array:
        traces.append(ids)
        return gated_delta_rule(**arrays, segment_ids=ids)

    outputs = [run(jnp.asarray(ids)) for ids in (IDS, np.ones_like(IDS), np.zeros_like(IDS))]
    assert len(traces) == 1
    assert not outputs[2].any() and not np.array_equal(outputs[0], outputs[1])


def test_decays_that_are_total_at_times() -> None:
    arrays = delta_operands(EDGES, decay=0.3)
    arrays["g"][np.random.default_rng(2).random(arrays["g"].shape) < 0.1] = -np.inf
    dout = cotangent(arrays["v"])
    found = out_and_gradients(gated_delta_rule, arrays, IDS, dout)
    finite = arrays | {"g": np.maximum(arrays["g"], -1000.0)}  # 0 as well, and no NaN in the reference
    over = budgets(found, delta_rule_alone, finite, IDS, dout)
    assert max(over.values()) <= 1, over


def test_half_precision_is_computed_in_float32() -> None:
    arrays = {name: np.asarray(jnp.asarray(x, "bfloat16"), np.float32) for name, x in delta_operands(EDGES).items()}
    narrow = {name: jnp.asarray(x, "bfloat16") for name, x in arrays.items()}
    ids = jnp.asarray(IDS)
    run = quick_jit(lambda given: gated_delta_rule(**given, segment_ids=ids))
    found, wide = run(narrow), run(arrays)
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(found, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("cut", [64, 100], ids=["at a chunk", "inside one"])
def test_a_row_in_two_parts_is_the_row(scan, cut: int) -> None:
    """The first part's last state is the second's first one, as context parallelism would hand it on."""
    function, arrays, dout = scan

    def in_parts(segment_ids: jax.Array, **given: jax.Array) -> jax.Array:
        def part(tokens: slice) -> dict[str, jax.Array]:
            return {name: x if x.ndim == 1 else x[:, tokens] for name, x in given.items()}

        first, second = slice(cut), slice(cut, None)
        out, state = function(**part(first), segment_ids=segment_ids[:, first], return_state=True)
        goes_on = segment_ids[:, cut - 1] == segment_ids[:, cut]
        state = jnp.where(goes_on[:, None, None, None], state, 0.0)
        rest = function(**part(second), segment_ids=segment_ids[:, second], initial_state=state)
        return jnp.concatenate([out, rest], axis=1)

    assert (IDS[:, cut - 1] == IDS[:, cut]).any()
    whole = out_and_gradients(function, arrays, IDS, dout)
    parts = out_and_gradients(in_parts, arrays, IDS, dout)
    for name, x in whole.items():
        assert np.abs(x - parts[name]).max() <= 2e-6 * np.abs(x).max(), name


def test_the_last_state_is_that_of_the_last_document() -> None:
    arrays = delta_operands(((3, 20, 70), (93,), (90, -3)))
    ids = segment_ids(((3, 20, 70), (93,), (90, -3)))
    run = quick_jit(lambda given, ids: gated_delta_rule(**given, segment_ids=ids, return_state=True))
    out, state = run(arrays, jnp.asarray(ids))
    _, alone = run({name: x[:1, 23:] for name, x in arrays.items()}, jnp.ones((1, 70), int))
    assert np.allclose(state[0], alone[0], atol=1e-6)
    assert not state[2].any() and state[1].any()
    asked = jnp.einsum("nde,nd->ne", state[1], jnp.repeat(arrays["q"][1, -1], 2, axis=0)) * 8**-0.5
    assert np.allclose(out[1, -1], asked, atol=1e-6)


@pytest.mark.parametrize("scan", SCANS)
def test_chunks_in_groups_are_those_one_by_one(scan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, through five chunks in groups of two."""
    function, operands, values = SCANS[scan]
    arrays = operands(EDGES)
    dout = cotangent(arrays[values])
    one_by_one = out_and_gradients(function, arrays, IDS, dout)
    monkeypatch.setattr(chunked_scan, "GROUP", 2)
    grouped = out_and_gradients(lambda **given: function(**given), arrays, IDS, dout)  # traced anew
    for name, x in one_by_one.items():
        assert np.abs(x - grouped[name]).max() <= 2e-6 * np.abs(x).max(), name


def test_a_long_row_in_blocks_is_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> jax.Array:
        return quick_jit(lambda arrays, ids: gated_delta_rule(**arrays, segment_ids=ids))(arrays, jnp.asarray(IDS))

    arrays = delta_operands(EDGES)
    whole = run()
    monkeypatch.setattr(chunked_scan, "_STATES", 2 * 2 * 4 * 8 * 6)  # blocks of two chunks
    assert np.allclose(whole, run(), atol=1e-6)


def test_the_backward_of_a_longer_row_keeps_little_more_than_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further token keeps float32 copies of inputs and gradients, and a share of a block's state; no matrices."""
    monkeypatch.setattr(chunked_scan, "_STATES", 16 * 4 * 8 * 6)  # blocks of 16 chunks

    def temporary(tokens: int) -> tuple[int, int]:
        """Bytes that the compiled forward and backward need beyond arguments and results, and bytes of the inputs."""
        arrays = delta_operands(((tokens,),))

        def loss(arrays: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
            return gated_delta_rule(**arrays, segment_ids=ids).sum()

        compiled = quick_jit(jax.value_and_grad(loss)).lower(arrays, jnp.ones((1, tokens), int)).compile()
        return compiled.memory_analysis().temp_size_in_bytes, sum(x.nbytes for x in arrays.values())

    (few, inputs), (many, more_inputs) = temporary(1024), temporary(4096)
    assert many - few <= 4 * (more_inputs - inputs)


def test_rows_and_heads_that_are_spread_over_devices_stay_there() -> None:
    mesh = auto_axes(jax.make_mesh((2, 2), ("data", "tensor")))
    arrays = delta_operands(EDGES)
    spread = {name: jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor"))) for name, x in arrays.items()}
    ids = jax.device_put(jnp.asarray(IDS), NamedSharding(mesh, P("data")))
    out = quick_jit(lambda given, ids: gated_delta_rule(**given, segment_ids=ids))(spread, ids)
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 320, 2, 6)}
    assert np.allclose(out, gated_delta_rule(**arrays, segment_ids=jnp.asarray(IDS)), atol=1e-6)


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        ("delta rule", {"v": jnp.ones((2, 3, 3, 6))}, LayoutError, "v [B, S, N, E] with H dividing N, got q"),
        ("delta rule", {"g": jnp.ones((2, 320))}, LayoutError, "g must have shape [B, S, N] = (2, 320, 4)"),
        ("delta rule", {"g": jnp.ones((2, 320, 4, 8))}, UnsupportedError, "a decay for each channel"),
        ("delta rule", {"segment_ids": jnp.ones((2, 3), int)}, LayoutError, "segment_ids must have shape [B, S]"),
        ("delta rule", {"initial_state": jnp.ones((2, 4, 8, 8))}, LayoutError, "initial_state must have shape [B, N"),
        ("ssd", {"B": jnp.ones((2, 320, 3, 8))}, LayoutError, "B and C [B, S, G, N] with G dividing H, got x"),
        ("ssd", {"dt": jnp.ones((2, 320, 1))}, LayoutError, "dt must have shape (2, 320, 4), got (2, 320, 1)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_raise(function: str, changes: Any, error: Any, message: str) -> None:
    call, operands, *_ = SCANS[function]
    with pytest.raises(error, match=re.escape(message)):
        call(**{**operands(EDGES), "segment_ids": jnp.asarray(IDS), **changes})
