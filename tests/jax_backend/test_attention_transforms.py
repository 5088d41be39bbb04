"""segment_attention under jit, vmap, checkpoint, scan, shard_map and on meshes; how often it is traced."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_backend import explain, find_segments, gated_delta_rule, linear_cross_entropy, segment_attention
from packing_core.errors import LayoutError, PackingError, UnsupportedError
from tests.jax_backend.oracle import assert_same

B, S, N, K, D = 8, 48, 4, 2, 16


def operands(seed: int = 0, rows: int = B) -> tuple[jax.Array, ...]:
    """q, k, v and segment ids of packed rows, every row cut differently."""
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal((rows, S, heads, D)), jnp.float32) for heads in (N, K, K))
    cuts = rng.integers(0, 2, (rows, S)) * (rng.random((rows, S)) < 0.3)
    ids = 1 + np.cumsum(cuts, axis=1)
    ids[:, -5:] = 0
    return q, k, v, jnp.asarray(ids, jnp.int32)


def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, **options: Any) -> jax.Array:
    return (segment_attention(q, k, v, ids, **options) ** 2).sum()


def gradients(function: Any, *arguments: Any) -> Any:
    return jax.jit(jax.grad(function, argnums=(0, 1, 2)))(*arguments)


@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
def test_new_segmentations_are_traced_once(implementation: str) -> None:
    # the first kernel that jax 0.11 interprets in a process imports modules that enter the key of every trace
    segment_attention(*operands(rows=1), implementation=implementation)
    traces = []

    @jax.jit
    def step(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        traces.append(ids.shape)
        return segment_attention(q, k, v, ids, implementation=implementation)

    outputs = [step(*operands(0)[:3], operands(seed)[3]) for seed in range(4)]
    assert len(traces) == 1
    assert len({float(out.sum()) for out in outputs}) == 4, "the segmentations must matter"


def test_vmap_of_a_kernel_is_one_call_per_element() -> None:
    arguments = operands(rows=4)

    def pairs(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        stacked = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v, ids)]
        return jax.vmap(lambda *pair: loss(*pair, implementation="pallas"))(*stacked).sum()

    assert_same(gradients(pairs, *arguments), gradients(lambda *a: loss(*a, implementation="xla"), *arguments))


def test_layers_under_scan_and_checkpoint_share_one_set_of_segments() -> None:
    q, k, v, ids = operands(rows=2)

    def layers(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        segments = find_segments(ids)

        @jax.checkpoint
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + segment_attention(x, k, v, segments), None

        return (jax.lax.scan(layer, q, None, length=3)[0] ** 2).sum()

    def unrolled(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        for _ in range(3):
            q = q + segment_attention(q, k, v, ids, implementation="xla")
        return (q**2).sum()

    assert_same(gradients(layers, q, k, v, ids), gradients(unrolled, q, k, v, ids))


def mesh_of(shape: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(shape.values())))]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(kind,) * devices.ndim)


@pytest.mark.parametrize(("heads_too", "implementation"), [(False, "chunked"), (True, "pallas")])
def test_a_mesh_gives_every_device_its_own_rows_and_heads(heads_too: bool, implementation: str) -> None:
    mesh = mesh_of({"data": 4, "tensor": 2})
    sharding = NamedSharding(mesh, P("data", None, "tensor") if heads_too else P(("data", "tensor")))
    *qkv, ids = operands()
    spread = [jax.device_put(x, sharding) for x in qkv]
    ids_spread = jax.device_put(ids, NamedSharding(mesh, P(sharding.spec[0])))
    given = sharding if heads_too else mesh
    found = gradients(lambda *a: loss(*a, mesh=given, implementation=implementation), *spread, ids_spread)
    assert_same(found, gradients(lambda *a: loss(*a, implementation="xla"), *qkv, ids))
    assert found[0].sharding.is_equivalent_to(sharding, 4), "no device may hold the whole"


def test_inside_shard_map_no_mesh_is_needed() -> None:
    mesh = mesh_of({"data": 4})
    arguments = operands(rows=4)
    local = jax.shard_map(segment_attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    assert_same(jax.jit(local)(*arguments), jax.jit(partial(segment_attention, implementation="xla"))(*arguments))


CHECKED_AXES = {
    "attention": lambda q, k, v, ids: segment_attention(q, k, v, ids, implementation="chunked"),
    "loss": lambda q, k, v, ids: linear_cross_entropy(q[:, :, 0], v[0, :, 0].T, ids)[0][None],
    "scan": lambda q, k, v, ids: gated_delta_rule(k, k, v, -(v[..., 0] ** 2), v[..., 1], ids),
}


@pytest.mark.parametrize("call", CHECKED_AXES)
def test_inside_a_shard_map_that_checks_axes_the_way_out_is_named(call) -> None:
    options = {"mesh": mesh_of({"data": 4}), "in_specs": P("data"), "out_specs": P("data")}
    arguments = operands(rows=4)
    with pytest.raises(UnsupportedError, match="over data .* check_vma=False"):
        jax.jit(jax.shard_map(CHECKED_AXES[call], **options))(*arguments)
    jax.jit(jax.shard_map(CHECKED_AXES[call], **options, check_vma=False))(*arguments)


def test_inside_a_shard_map_that_checks_axes_xla_attends() -> None:
    attend = partial(segment_attention, implementation="xla")
    local = jax.shard_map(attend, mesh=mesh_of({"data": 4}), in_specs=P("data"), out_specs=P("data"))
    arguments = operands(rows=4)
    assert_same(jax.jit(local)(*arguments), jax.jit(attend)(*arguments))


@pytest.mark.parametrize(
    ("spec", "jitted", "in_context"),
    [(P("data"), True, True), (P("data", None, "tensor"), True, False), (P("data"), False, False)],
    ids=str,
)
def test_explicit_axes_tell_without_a_mesh_how_inputs_are_sharded(spec: P, jitted: bool, in_context: bool) -> None:
    mesh = mesh_of({"data": 4, "tensor": 2}, AxisType.Explicit)
    *qkv, ids = operands()
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in qkv]
    arguments = (*sharded, jax.device_put(ids, NamedSharding(mesh, P("data"))))
    call = jax.jit(segment_attention) if jitted else segment_attention
    with jax.set_mesh(mesh) if in_context else nullcontext():
        found = call(*arguments)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4), "no device may hold the whole"
    assert_same(found, jax.jit(partial(segment_attention, implementation="xla"))(*qkv, ids))


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_plain_operations_are_left_to_the_compiler_where_types_do_not_tell(implementation: str) -> None:
    *qkv, ids = operands()
    sharded = [jax.device_put(x, NamedSharding(mesh_of({"data": 4}), P("data"))) for x in (*qkv, ids)]
    found = gradients(lambda *a: loss(*a, implementation=implementation), *sharded)
    assert_same(found, gradients(lambda *a: loss(*a, implementation="xla"), *qkv, ids))


def test_a_kernel_is_refused_where_types_do_not_tell_how_its_inputs_are_sharded() -> None:
    arguments = [jax.device_put(x, NamedSharding(mesh_of({"data": 4}), P("data"))) for x in operands()]
    with pytest.raises(
        UnsupportedError, match="q may be sharded .* pass mesh=, give the mesh explicit axes, .*'chunked'"
    ):
        jax.jit(partial(segment_attention, implementation="pallas"))(*arguments)


def test_operands_that_are_spread_differently_are_refused() -> None:
    q, k, v, ids = operands()
    q = jax.device_put(q, NamedSharding(mesh_of({"data": 4}), P("data")))
    with pytest.raises(LayoutError, match=r"rows and heads of q, k and v are spread differently .*reshard them alike"):
        segment_attention(q, k, v, ids)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P(None, "data"), r"segment_attention splits rows and heads: for split tokens gather the keys"),
        (P(None, None, "data"), r"2 key/value heads do not divide over 4 shards"),
        (P("data"), r"3 rows do not divide over 4 shards of the mesh: \{'data': 4\}"),
    ],
)
def test_what_does_not_divide_over_the_mesh_raises(spec: P, message: str) -> None:
    arguments = operands(rows=3)
    with pytest.raises(LayoutError, match=message):
        segment_attention(*arguments, mesh=NamedSharding(mesh_of({"data": 4}), spec))


def test_an_eager_call_over_a_mesh_leaves_the_kernel_usable() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 96, 2, 24)), jnp.float32)  # a shape of its own
    ids = jnp.asarray([[1] * 40 + [2] * 56, [1] * 96])
    spread = jax.device_put(x, NamedSharding(mesh, P("rows")))
    over_devices = segment_attention(spread, spread, spread, ids, mesh=mesh, implementation="tpu")
    for run in (segment_attention, jax.jit(segment_attention, static_argnames="implementation")):
        assert_same(run(x, x, x, ids, implementation="tpu"), over_devices)
    with jax.enable_x64(True):
        assert_same(segment_attention(x, x, x, ids, implementation="tpu"), over_devices)


def test_64_bits_are_refused_by_the_gpu_kernels_and_taken_by_the_next() -> None:
    x, ids = jnp.ones((1, 64, 2, 16), jnp.float32), jnp.asarray([[1] * 40 + [2] * 24])
    with jax.enable_x64(True):
        with pytest.raises(UnsupportedError, match="its kernels index with 32 bits, and jax_enable_x64 is on"):
            segment_attention(x, x, x, ids, implementation="pallas")
        assert "not pallas: its kernels index with 32 bits" in str(explain(x, x, x, platform="gpu"))
        gradient = jax.grad(lambda x: segment_attention(x, x, x, ids, implementation="chunked").sum())(x)
    assert gradient.dtype == jnp.float32


@pytest.mark.parametrize("option", ["scale", "softcap", "window"])
def test_a_traced_option_is_named(option: str) -> None:
    with pytest.raises(PackingError, match=f"{option} is traced, and it is a constant of the kernel"):
        jax.jit(lambda value: segment_attention(*operands(), **{option: value}))(4)


def test_sinks_may_be_a_list() -> None:
    sinks = [0.5, -1.0, 0.0, 2.0]
    wanted = segment_attention(*operands(), sinks=jnp.array(sinks))
    assert jnp.array_equal(segment_attention(*operands(), sinks=sinks), wanted)


def test_the_tpu_kernel_takes_64_bits_without_grouped_heads_and_refuses_them_by_name_with() -> None:
    q, k, v, ids = operands(rows=1)
    alike = q, q, q, ids
    wanted = jax.grad(partial(loss, implementation="xla"))(*alike)
    with jax.enable_x64(True):
        assert_same(jax.grad(partial(loss, implementation="tpu"))(*alike), wanted)
        with pytest.raises(UnsupportedError, match="tpu cannot serve: it finds the key/value head of a group with 32"):
            segment_attention(q, k, v, ids, implementation="tpu")


@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
def test_on_explicit_axes_the_ids_and_operands_may_be_whole(implementation: str) -> None:
    q, k, v, ids = operands()
    wanted = segment_attention(q, k, v, ids, implementation="xla")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    assert_same(segment_attention(q, k, v, ids, mesh=mesh, implementation=implementation), wanted)
    rows = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v)]
    assert_same(segment_attention(*rows, ids, implementation=implementation), wanted)
