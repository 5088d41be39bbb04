"""Operations, losses and the decoder over explicit axes, which ``jax.make_mesh`` makes: the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_backend
import packing_core
from packing_core.errors import UnsupportedError
from tests.jax_backend.models import CONFIGS, documents
from tests.jax_backend.oracle import assert_same

B, S, H, D, DOCUMENTS = 4, 48, 2, 8, 40
ROWS = P("data")
INPUTS = ("input_ids", "segment_ids", "position_ids")  # jit hands a batch on with its keys sorted

LLAMA = CONFIGS["llama"]().to_dict()
DECODERS: dict[str, dict[str, Any]] = {
    "chunked": {"implementation": "chunked"},
    "kernel": {"implementation": "pallas"},
    "scanned": {"implementation": "xla", "scan_layers": True, "remat": True},
}


@cache
def made(name: str) -> jax_backend.Decoder:
    with jax.ensure_compile_time_eval():  # first used in a trace
        config = jax_backend.DecoderConfig.from_hf(LLAMA | {"num_hidden_layers": 2 if name == "scanned" else 1})
        return jax_backend.Decoder(config, rngs=nnx.Rngs(0), **DECODERS[name])


def decoder(name: str, w: jax.Array) -> jax_backend.Decoder:
    """A decoder whose weights are operands, so that they have a gradient."""
    graph, weights = nnx.split(made(name))
    return nnx.merge(graph, jax.tree.map(lambda x: x * w[0, 0], weights))


# of q [B, S, H, D], a weight [DOCUMENTS, D] and the batch
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "convolution": lambda q, w, batch: jax_backend.causal_conv(
        q[:, :, 0], w[:D, :4], batch["segment_ids"], activation="silu"
    ),
    "delta rule": lambda q, w, batch: jax_backend.gated_delta_rule(
        q, q, q, -(q[..., 0] ** 2), q[..., 1], batch["segment_ids"], return_state=True
    ),
    "ssd": lambda q, w, batch: jax_backend.ssd(q, q[..., 0] ** 2, -(w[0, :H] ** 2), q, q, batch["segment_ids"]),
    "selective scan": lambda q, w, batch: jax_backend.selective_scan(
        q[:, :, 0], q[:, :, 0] ** 2, -(w[:D] ** 2), q[:, :, 1], q[:, :, 0], batch["segment_ids"]
    ),
    "head": lambda q, w, batch: jax_backend.linear_cross_entropy(q[:, :, 0], w.T, batch["document_positions"])[0],
    "loss": lambda q, w, batch: jax_backend.packed_cross_entropy(q[:, :, 0], batch["document_positions"] % D)[0],
    "reduce": lambda q, w, batch: jax_backend.reduce(q, batch, "mean", documents=DOCUMENTS),
    "spread": lambda q, w, batch: jax_backend.spread(w, batch),
    "rotary": lambda q, w, batch: jax_backend.apply_rope(q, batch["position_ids"], w[0, : D // 2]),
    "logits": lambda q, w, batch: decoder("chunked", w)(*[batch[name] for name in INPUTS]),
    "log-probabilities": lambda q, w, batch: jax_backend.token_logprobs(decoder("chunked", w), batch).logprobs,
    "kernel": lambda q, w, batch: decoder("kernel", w).loss(batch)[0],
    "scanned": lambda q, w, batch: decoder("scanned", w).loss(batch)[0],
}


def operands() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    packed = packing_core.pack(documents(16), S)
    batch = {name: np.asarray(array)[:B] for name, array in jax_backend.to_batch(packed).items()}
    assert len(batch["input_ids"]) == B
    q, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, S, H, D), (DOCUMENTS, D)))
    return q, w, batch


def squares(name: str, q: Any, w: Any, batch: Any) -> tuple[jax.Array, Any]:
    results = CALLS[name](q, w, batch)
    return sum((x**2).sum() for x in jax.tree.leaves(results)), results


def assert_close(found: Any, wanted: Any) -> None:
    """As `assert_same`, where an operand without influence has gradients of exactly 0."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= 1e-5 * np.abs(np.asarray(y)).max()


# Outside of jit each operation of a scan or a decoder is compiled: one is enough.
IN_JIT_ALONE = ("logits", "ssd", "selective scan", "kernel", "scanned", "log-probabilities")


@pytest.mark.parametrize("name", CALLS)
def test_rows_over_explicit_axes_give_the_numbers_of_one_device(name: str) -> None:
    run = jax.jit(jax.grad(squares, (1, 2), has_aux=True), static_argnums=0)
    q, w, batch = operands()
    gradients, results = run(name, q, w, batch)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    rows, whole = NamedSharding(mesh, ROWS), NamedSharding(mesh, P())
    q, batch = jax.device_put((q, batch), rows)

    with jax.set_mesh(mesh):
        found = run(name, q, jax.device_put(w, whole), batch)
    assert_close(found, (gradients, results))
    for leaf in jax.tree.leaves(found[1]):
        assert leaf.sharding.is_equivalent_to(rows if leaf.shape[:1] == (B,) else whole, leaf.ndim)

    if name not in IN_JIT_ALONE:
        assert_close(CALLS[name](q, jnp.asarray(w), batch), results)  # without a context


def test_tokens_over_explicit_axes_are_cut_where_context_attention_wants_them() -> None:
    q, _, batch = operands()
    wanted = jax.jit(jax_backend.segment_attention)(q, q, q, batch["segment_ids"])
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        whole = jax.device_put(q, NamedSharding(mesh, ROWS))
        attend = jax.jit(partial(jax_backend.context_attention, mesh=mesh, rows="data"))
        found = attend(whole, whole, whole, batch["segment_ids"])
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "context")), 4)
    assert_same(found, wanted)


def test_a_decoder_with_random_streams_is_refused_over_explicit_axes() -> None:
    model = nnx.clone(made("chunked"))
    model.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    batch = jax.device_put(operands()[2], NamedSharding(mesh, ROWS))
    with pytest.raises(UnsupportedError, match="random streams .* explicit axes .* make_train_step"):
        model.loss(batch)


@pytest.mark.parametrize("implementation", ["chunked", "pallas", "tpu"])
def test_gradients_of_attention_keep_the_axes(implementation: str) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    ids = jnp.repeat(jnp.array([[1, 2]]), 8, axis=1).repeat(2, axis=0)
    q = jax.random.normal(jax.random.key(0), (2, 16, 2, 8))

    def loss(q: jax.Array) -> jax.Array:
        return (jax_backend.segment_attention(q, q, q, ids, implementation=implementation) ** 2).sum()

    wanted = jax.grad(loss)(q)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(jax.device_put(q, P("data", None, "tensor")))
    assert tuple(found.sharding.spec)[:3] == ("data", None, "tensor")
    assert np.abs(found - wanted).max() < 1e-6 * np.abs(wanted).max()
