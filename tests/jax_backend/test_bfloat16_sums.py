"""Gradients of bfloat16 layers are added over tokens and devices in float32, and the comparisons here notice a single
sum that is not: each mutant puts a plain JAX operation in the place of one that adds in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_backend import context_attention, context_parallel, segment_attention
from jax_backend.model import layers, linear, moe
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.model.lora import add_adapters
from jax_backend.strictness import aligned
from jax_backend.training.train_step import make_train_step
from tests.jax_backend.models import CONFIGS
from tests.jax_backend.test_context_parallel import S, mesh_of
from tests.jax_backend.test_train_step import rows

BIASED = "llama3-rope-biases"


def step(family: str, mesh: Any, rank: int = 0) -> nnx.State:
    """Returns what a step of plain descent adds to float32 weights, or adapters, whose layers compute in bfloat16."""
    config = DecoderConfig.from_hf(CONFIGS[family]().to_dict())
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, implementation="xla")
    if rank:
        add_adapters(model, rank, seed=0)
    train_step = make_train_step(model, optax.sgd(1.0), mesh, trainable=nnx.LoRAParam if rank else nnx.Param)
    state = train_step.init()
    before = jax.tree.map(np.asarray, state.params)
    return jax.tree.map(lambda after, x: np.asarray(after) - x, train_step(state, rows())[0].params, before)


def differing(over_devices: nnx.State, alone: nnx.State) -> list[str]:
    """Returns the names of weights whose update over devices is another one."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(over_devices), jax.tree.leaves(alone), strict=True)
    # A token's own values are rounded to bfloat16, now and then to the other side; sums of rounded shares are off by
    # 3e-3 to 3e-2.
    return [jax.tree_util.keystr(path) for (path, x), y in pairs if not np.abs(x - y).max() <= 2e-3 * np.abs(y).max()]


@pytest.mark.parametrize(
    ("family", "devices", "axis"),
    [
        (BIASED, 8, "fsdp"),
        ("qwen3.5", 8, "data"),
        # Over more devices a row is alone on its own, and the CPU rounds its experts' outputs in another way.
        ("gpt-oss", 2, "data"),
    ],
)
def test_gradients_of_layers_are_added_over_devices_in_float32(family: str, devices: int, axis: str) -> None:
    assert not differing(step(family, jax.make_mesh((devices,), (axis,))), step(family, None))


@pytest.mark.slow
def test_gradients_of_adapters_are_added_over_devices_in_float32() -> None:
    assert not differing(step("llama", jax.make_mesh((2,), ("data",)), rank=4), step("llama", None, rank=4))


def product_in_one_dtype(x: jax.Array, y: jax.Array, *, axes: int) -> jax.Array:
    over = tuple(range(axes))
    return jax.lax.dot_general(x, y, ((over, over), ((), ())))


# The gradient of a weight is a leaf: how it is added shows in no other one.
SUMS: dict[str, tuple[Any, str, Any]] = {
    "kernel": (linear, "add_products", product_in_one_dtype),
    "bias": (linear, "add_bias", lambda x, bias: x + aligned(bias.astype(x.dtype), x.ndim)),
    "norm": (layers, "scale_by", lambda x, weight: x * aligned(weight.astype(x.dtype), x.ndim)),
    "embedding": (layers.Embedding, "__call__", nnx.Embed.__call__),
    "experts": (moe, "weights_of", lambda tensor, expert, dtype: tensor.astype(dtype)[expert]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sums"), [(BIASED, ("kernel", "bias", "norm", "embedding")), ("gpt-oss", ("experts",))]
)
def test_sums_of_weights_gradients_in_bfloat16_are_noticed(
    family: str, sums: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in sums:
        monkeypatch.setattr(*SUMS[name])
    paths = differing(step(family, jax.make_mesh((2,), ("data",))), step(family, None))
    assert all(any(name in path for path in paths) for name in sums), paths


def context_gradients(method: str, devices: int) -> tuple[list[float], list[float], list[str]]:
    """Errors of the gradients of q, k and v over devices, errors of those of whole rows, and what devices add up.

    Errors are distances from float32 gradients of the same bfloat16 values.
    """
    ids = jnp.ones((1, S), jnp.int32)
    rng = np.random.default_rng(0)
    heads = {"q": 8, "k": 1, "v": 1}
    narrow = tuple(jnp.asarray(rng.standard_normal((1, S, n, 16)), jnp.bfloat16) for n in heads.values())
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    weights = rng.random((1, S, 8, 16)).astype(np.float32)  # of one sign: sums grow with what is added

    def gradient(attend: Any) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return (weights * attend(*operands, ids).astype(jnp.float32)).sum()

        return jax.grad(loss, argnums=(0, 1, 2))

    def errors(got: Any) -> list[float]:
        pairs = zip((x.astype(jnp.float32) for x in got), wanted, strict=True)
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]

    alone = jax.jit(gradient(partial(segment_attention, implementation="xla")))
    wanted = alone(*wide)
    starts = np.arange(0, S, S // 8)  # eight chunks in their natural order
    mesh = mesh_of(context=devices)
    attend = partial(context_attention, mesh=mesh, method=method, chunk_starts=starts, implementation="xla")
    spread = gradient(attend)
    exchanges = [line for line in str(jax.make_jaxpr(spread)(*narrow)).splitlines() if "reduce_scatter" in line]
    got = jax.jit(spread)(*narrow)
    assert [each.dtype for each in got] == [jnp.bfloat16] * 3
    return errors(got), errors(alone(*narrow)), exchanges


ALLOWED = 1.3  # of the error of whole rows, whose gradients are rounded and not added


@pytest.mark.parametrize(("method", "devices"), [("all_gather_kv", 8), pytest.param("ring", 8, marks=pytest.mark.slow)])
def test_gradients_of_keys_are_added_over_devices_in_float32(method: str, devices: int) -> None:
    """Errors do not grow with the devices that share a row."""
    found, once, exchanges = context_gradients(method, devices)
    assert all("f32" in line for line in exchanges), exchanges
    assert np.all(np.less(found, ALLOWED * np.array(once))), (found, once)


@pytest.mark.parametrize(("method", "devices"), [("all_gather_kv", 2), pytest.param("ring", 8, marks=pytest.mark.slow)])
def test_a_sum_of_keys_gradients_in_bfloat16_is_noticed(
    method: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_parallel, "_widened", lambda x: x)
    found, once, exchanges = context_gradients(method, devices)
    assert np.all(np.greater(found[1:], ALLOWED * np.array(once[1:]))), (found, once)
    assert not any("f32" in line for line in exchanges), exchanges
