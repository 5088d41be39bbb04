"""Tokens of a row split over devices: the numbers of whole rows, forward and backward, and equal work for each."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import packing_core
from conformance.draws import segment_ids
from jax_backend import balance_tokens, context_attention, segment_attention
from jax_backend.context_parallel import reorder_tokens
from packing_core.errors import LayoutError, PackingError
from tests.jax_backend.oracle import assert_same

S = 64
#                 cuts of four devices at 16, 32, 48
IDS = np.array([[1] * 10 + [0] * 3 + [2] * 40 + [3] * 11, [1] * 16 + [2] * 16 + [3] * 30 + [0] * 2], np.int32)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: int(np.prod([*axes.values()]))]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2}
    return {name: rng.standard_normal((2, S, count, 16)).astype(np.float32) for name, count in heads.items()}


def gradients(attend: Any, arrays: dict[str, Any], ids: Any, weights: Any, sinks: Any) -> Any:
    """Output, and gradients of q, k, v and sinks, of a sum that weighs every token by its own."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, ids, sinks=sinks)
        return (weights[..., None, None] * out**2).sum(), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays.values(), sinks)


@pytest.mark.parametrize(
    ("method", "axes", "balanced", "options"),
    [
        ("ring", {"context": 2}, True, {"implementation": "chunked", "window": 11}),
        ("all_gather_kv", {"context": 4}, False, {"implementation": "pallas"}),
        ("ring", {"context": 4}, False, {"implementation": "pallas"}),
        ("all_gather_kv", {"data": 2, "context": 4}, True, {"implementation": "chunked", "softcap": 5.0}),
    ],
    ids=["two-window", "four-natural-pallas", "four-natural-pallas-ring", "four-with-rows"],
)
def test_split_tokens_give_what_whole_rows_give(method, axes, balanced, options) -> None:
    arrays, mesh = operands(), mesh_of(**axes)
    weights = np.random.default_rng(1).random((2, S)).astype(np.float32)
    sinks = None if "window" in options else jnp.asarray([0.5, -1.0, 0.0, 2.0])
    whole = gradients(
        partial(segment_attention, **options | {"implementation": "xla"}), arrays, jnp.asarray(IDS), weights, sinks
    )
    starts = balance_tokens(IDS, axes["context"], window=options.get("window")) if balanced else None
    order = np.arange(S)
    if starts is not None:
        order = reorder_tokens({"at": np.arange(S)[None]}, starts)["at"][0]
        assert not np.array_equal(order, np.arange(S))
    attend = partial(
        context_attention,
        mesh=mesh,
        rows="data" if "data" in axes else None,
        method=method,
        chunk_starts=starts,
        **options,
    )
    (*grads, grad_sinks), out = gradients(
        attend, {name: x[:, order] for name, x in arrays.items()}, jnp.asarray(IDS[:, order]), weights[:, order], sinks
    )
    back = np.argsort(order)
    (*wanted, wanted_sinks), wanted_out = whole
    assert_same(([np.asarray(x)[:, back] for x in grads], np.asarray(out)[:, back]), (wanted, wanted_out))
    if sinks is not None:
        np.testing.assert_allclose(grad_sinks, wanted_sinks, rtol=1e-4, atol=1e-5)
    assert out.sharding.spec[1] == "context", "no device may hold all tokens"


@pytest.mark.parametrize(("method", "starts"), [("all_gather_kv", None), ("ring", np.array([48, 0, 16, 32]))])
def test_an_id_that_comes_again_in_a_row_is_another_document(method: str, starts: np.ndarray | None) -> None:
    #         the cuts of two devices with two chunks each lie at 16, 32 and 48
    ids = np.array([[1] * 10 + [2] * 14 + [1] * 30 + [2] * 10, [5] * 16 + [0] * 16 + [5] * 32], np.int32)
    counted = np.array([[1] * 10 + [2] * 14 + [3] * 30 + [4] * 10, [1] * 16 + [0] * 16 + [2] * 32], np.int32)
    arrays, mesh, weights = operands(), mesh_of(context=2), np.ones((2, S), np.float32)
    (*wanted, _), wanted_out = gradients(
        partial(segment_attention, implementation="xla"), arrays, jnp.asarray(counted), weights, None
    )
    at = np.arange(S) if starts is None else reorder_tokens({"at": np.arange(S)[None]}, starts)["at"][0]
    attend = partial(context_attention, mesh=mesh, method=method, chunk_starts=starts, implementation="xla")
    moved = {name: x[:, at] for name, x in arrays.items()}
    (*found, _), out = gradients(attend, moved, jnp.asarray(ids[:, at]), weights, None)
    assert_same((found, out), ([np.asarray(x)[:, at] for x in wanted], np.asarray(wanted_out)[:, at]))


def test_chunks_that_are_no_order_of_the_row_are_refused_and_nan_when_traced() -> None:
    arrays, ids = operands(), jnp.asarray(IDS)
    attend = partial(context_attention, **arrays, segment_ids=ids, mesh=mesh_of(context=2), implementation="xla")
    for starts in ([0, 0, 16, 32], [0, 16, 32, 40], [1, 2, 3, 0]):
        with pytest.raises(LayoutError, match=r"first token of each of 4 chunks of 16 tokens, each chunk once, got \["):
            attend(chunk_starts=np.array(starts))
        with pytest.raises(LayoutError, match="pass what balance_tokens returned"):
            reorder_tokens({"at": IDS}, np.array(starts))
        assert np.isnan(jax.jit(lambda starts: attend(chunk_starts=starts))(jnp.asarray(starts))).all()


def test_balanced_chunks_give_every_device_about_as_many_visible_pairs() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 400), 8, 4096).astype(int)
    batch = packing_core.pack([np.zeros(n, np.int32) for n in lengths], 8192, strategy="best_fit")
    ids = np.asarray(batch.segment_ids)[:4]
    cost = np.where(ids > 0, np.asarray(batch.position_ids)[:4] + 1, 0).sum(axis=0)

    def worst(starts: np.ndarray, shards: int = 4) -> float:
        loads = reorder_tokens({"cost": cost[None]}, starts)["cost"].reshape(shards, -1).sum(axis=1)
        return float(loads.max() / loads.mean())

    natural = np.arange(4) * 2048
    zigzag = np.array([0, 7, 1, 6, 2, 5, 3, 4]) * 1024
    balanced = balance_tokens(ids, 4, chunks=8)
    assert sorted(balanced) == [256 * i for i in range(32)]
    assert worst(balanced) < 1.02 and worst(balanced) < min(worst(natural), worst(zigzag))


def test_a_new_order_compiles_nothing() -> None:
    arrays, traces = operands(), []

    @jax.jit
    def run(q, k, v, ids, starts):
        traces.append(1)
        return context_attention(q, k, v, ids, mesh=mesh_of(context=2), chunk_starts=starts, implementation="xla")

    for starts in ([0, 48, 16, 32], [16, 32, 0, 48]):
        run(*arrays.values(), jnp.asarray(IDS), jnp.asarray(starts))
    assert len(traces) == 1


def test_what_does_not_divide_or_is_not_there_is_refused() -> None:
    arrays, ids = operands(), jnp.asarray(IDS)
    with pytest.raises(PackingError, match="method is 'star': pass all_gather_kv or ring"):
        context_attention(**arrays, segment_ids=ids, mesh=mesh_of(context=2), method="star")
    with pytest.raises(PackingError, match="the mesh has no axis 'context', only data"):
        context_attention(**arrays, segment_ids=ids, mesh=mesh_of(data=2))
    with pytest.raises(LayoutError, match="64 tokens in 3 chunks do not divide over the 3 devices of axis 'context'"):
        context_attention(**arrays, segment_ids=ids, mesh=mesh_of(context=3))
    with pytest.raises(LayoutError, match=r"chunk_starts must have shape \[P\], got \(1, 2\): one order serves all"):
        context_attention(**arrays, segment_ids=ids, mesh=mesh_of(context=2), chunk_starts=np.array([[0, 32]]))
    with pytest.raises(LayoutError, match="64 tokens a row do not divide into 3 shards of 2 chunks"):
        balance_tokens(IDS, 3)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.skipif(
    jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two CUDA devices that JAX sees"
)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("method", ["all_gather_kv", "ring"])
def test_two_gpus_give_what_one_gives(method: str, width: int) -> None:
    ids = segment_ids(((-7, 250, 1, 30, -60, 100, 64), (300, 212)))
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.standard_normal((2, 512, count, width)), jnp.bfloat16)
        for name, count in {"q": 8, "k": 2, "v": 2}.items()
    }
    weights = rng.random((2, 512)).astype(np.float32)
    starts = balance_tokens(ids, 2, chunks=4)
    order = reorder_tokens({"at": np.arange(512)[None]}, starts)["at"][0]
    assert not np.array_equal(order, np.arange(512))
    whole, out = gradients(partial(segment_attention, implementation="pallas"), arrays, jnp.asarray(ids), weights, None)
    attend = partial(
        context_attention, mesh=mesh_of(context=2), method=method, chunk_starts=starts, implementation="pallas"
    )
    split, split_out = gradients(
        attend, {name: x[:, order] for name, x in arrays.items()}, jnp.asarray(ids[:, order]), weights[:, order], None
    )
    back = np.argsort(order)
    for one, other in zip((split_out, *split[:3]), (out, *whole[:3]), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.linalg.norm(one[:, back] - other) < 0.01 * np.linalg.norm(other)
