"""Sums of bfloat16 are in float32: over devices, and in every trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_backend
import packing_core
from jax_backend import context_attention, context_parallel, segment_attention
from jax_backend.attention import IMPLEMENTATIONS
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


DOCUMENTS = [np.arange(n) % 60 for n in (9, 5, 12, 20)]
BATCH = {name: jnp.asarray(x) for name, x in jax_backend.to_batch(packing_core.pack(DOCUMENTS, 32, seed=None)).items()}
IDS = BATCH["segment_ids"]
B, TRACED = IDS.shape


def traced(function: Any, *shapes: tuple[int, ...]) -> None:
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
        traced(lambda x: x * jnp.ones(3), (3,))
    with pytest.raises(ValueError, match="rank_promotion"):
        traced(lambda x: x * x[0], (2, 3))


OPTIONS: list[dict[str, Any]] = [{}, {"window": 5, "softcap": 3.0, "scale": 0.3}, {"sinks": True, "return_lse": True}]
KERNELS = [name for name in IMPLEMENTATIONS if name != "cudnn"]  # which runs on GPUs alone


@pytest.mark.parametrize(
    ("implementation", "options"),
    [(name, options) for name in KERNELS for options in OPTIONS if name != "tpu" or "sinks" not in options],
)
def test_attention(implementation: str, options: dict[str, Any]) -> None:
    options = options | ({"sinks": jnp.zeros(4, "bfloat16")} if "sinks" in options else {})
    heads = (B, TRACED, 4, 8), (B, TRACED, 2, 8), (B, TRACED, 2, 8)
    traced(lambda *x: segment_attention(*x, IDS, implementation=implementation, **options), *heads)


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_attention_to_shared_prefixes_and_other_tokens(implementation: str) -> None:
    rows = packing_core.pack_tree([[1] * 6 + [5, 6], [1] * 6 + [7]], 16, prompt_lengths=[6, 6], shortest=3, seed=None)
    more = {"parents": rows.parent_ids, "implementation": implementation}
    traced(lambda x: segment_attention(x, x, x, rows.segment_ids, **more), (1, 16, 2, 8))
    keys = {"kv_segment_ids": IDS, "q_offset": 16, "implementation": implementation}
    traced(lambda q, k: segment_attention(q, k, k, IDS[:, 16:], **keys), (B, 16, 2, 8), (B, TRACED, 2, 8))


SCANS: dict[str, Any] = {
    "delta rule": (
        lambda q, v, g: jax_backend.gated_delta_rule(q, q, v, g, -g, IDS, normalise=True, return_state=True),
        [(B, TRACED, 2, 8), (B, TRACED, 4, 8), (B, TRACED, 4)],
    ),
    "ssd": (
        lambda x, dt, A, B: jax_backend.ssd(x, dt, A, B, B, IDS, D=A, return_state=True),
        [(B, TRACED, 4, 8), (B, TRACED, 4), (4,), (B, TRACED, 2, 8)],
    ),
    "selective scan": (
        lambda x, A, B, D: jax_backend.selective_scan(x, x, A, B, B, IDS, D=D, z=x),
        [(B, TRACED, 16), (16, 8), (B, TRACED, 8), (16,)],
    ),
    "convolution": (
        lambda x, w, bias: jax_backend.causal_conv(x, w, IDS, bias=bias, activation="silu"),
        [(B, TRACED, 16), (16, 4), (16,)],
    ),
    "rope": (lambda x, f: jax_backend.apply_rope(x, BATCH["position_ids"], f), [(B, TRACED, 2, 8), (4,)]),
    "loss": (lambda x: jax_backend.packed_cross_entropy(x, BATCH["targets"]), [(B, TRACED, 60)]),
    "head and loss": (
        lambda x, w: jax_backend.linear_cross_entropy(x, w, BATCH["targets"], weights=BATCH["loss_weights"]),
        [(B, TRACED, 16), (16, 60)],
    ),
    "capped head": (
        lambda x, w: jax_backend.linear_cross_entropy(x, w, BATCH["targets"], softcap=3.0, transposed=True),
        [(B, TRACED, 16), (60, 16)],
    ),
    **{
        how: (lambda x, how=how: jax_backend.reduce(x, BATCH, how, documents=4), [(B, TRACED)])
        for how in ("sum", "mean", "first", "last")
    },
    "spread": (lambda x: jax_backend.spread(x, BATCH), [(4,)]),
}


@pytest.mark.parametrize("name", SCANS)
def test_scans_and_losses(name: str) -> None:
    function, shapes = SCANS[name]
    traced(function, *shapes)


@pytest.mark.parametrize("family", CONFIGS)
def test_decoders(family: str) -> None:
    def grads(batch: dict[str, jax.Array]) -> Any:
        config = DecoderConfig.from_hf(CONFIGS[family]())
        model = Decoder(config, rngs=nnx.Rngs(0), dtype="bfloat16", implementation="xla")
        logprobs = jax_backend.token_logprobs(model, batch, entropy=True, top_k=2)
        return nnx.value_and_grad(lambda model: model.loss(batch)[0])(model), logprobs

    nnx.eval_shape(grads, BATCH)
