"""Train steps whose devices share rows: heads and the width of MLPs over ``tensor``, tokens over ``context``."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_backend.model import weights
from jax_backend.model.decoder import Decoder, DecoderConfig
from jax_backend.training.train_step import make_train_step
from packing_core.errors import LayoutError, UnsupportedError
from tests.jax_backend.models import CONFIGS
from tests.jax_backend.test_train_step import BATCHES, largest_difference


def mesh_of(axes: dict[str, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def decoder(family: str, **options: Any) -> Decoder:
    layers = {"num_hidden_layers": 2} if options.get("scan_layers") else {}
    config = DecoderConfig.from_hf(CONFIGS[family]().to_dict() | layers)
    return Decoder(config, rngs=nnx.Rngs(0), **{"implementation": "xla", **options})


def trained(family: str, mesh: Any, **options: Any) -> tuple[nnx.State, list[float]]:
    """Weights and losses after two steps of plain descent, and the loss of an evaluation."""
    train_step = make_train_step(decoder(family, **options), optax.sgd(0.1), mesh)
    state, losses = train_step.init(), []
    for batch in BATCHES[:2]:
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state.params, [*losses, float(train_step.evaluate(state, BATCHES[:1])["loss"])]


on_one_device = cache(lambda family, scan_layers: trained(family, None, scan_layers=scan_layers))


@pytest.mark.parametrize(
    ("family", "axes", "options"),
    [
        ("llama3-rope-biases", {"fsdp": 2, "tensor": 2}, {"scan_layers": True, "remat": "dots"}),
        ("llama3-rope-biases", {"data": 2, "context": 2, "tensor": 2}, {"implementation": "chunked"}),
        ("gpt-oss", {"data": 2, "tensor": 2}, {}),
        ("gpt-oss", {"data": 2, "context": 2}, {}),
        pytest.param("qwen3.5", {"data": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shared_rows_give_the_numbers_of_one_device(family: str, axes: dict[str, int], options: Any) -> None:
    alone, wanted = on_one_device(family, options.get("scan_layers", False))
    spread, found = trained(family, mesh_of(axes), **options)
    assert found == pytest.approx(wanted, rel=1e-6)
    one, other = (weights.export(params) for params in (spread, alone))
    assert one.keys() == other.keys()
    assert largest_difference(one, other) < 1e-6


def test_devices_hold_and_multiply_their_own_heads_and_widths() -> None:
    """Neither weights nor activations of whole layers travel for it: what layers add up is all that is exchanged."""
    model = decoder("llama3-rope-biases")
    train_step = make_train_step(model, optax.sgd(0.1), mesh_of({"fsdp": 2, "tensor": 2}))
    layer = train_step.init().params["model"]["layers"][0]
    config = model.config
    inputs, width = config.hidden_size, config.num_attention_heads * config.head_dim
    held = {
        ("self_attn", "q_proj", "kernel"): (inputs // 2, width // 2),
        ("self_attn", "q_proj", "bias"): (width // 2,),  # nothing is left for fsdp
        ("self_attn", "o_proj", "kernel"): (width // 2, inputs // 2),
        ("mlp", "up_proj", "kernel"): (inputs // 2, config.intermediate_size // 2),
        ("mlp", "down_proj", "kernel"): (config.intermediate_size // 2, inputs // 2),
    }
    for (block, linear, kind), shape in held.items():
        found = layer[block][linear][kind][...]
        assert found.addressable_shards[0].data.shape == shape, (linear, kind)
    program = make_train_step(model, optax.sgd(0.1), mesh_of({"tensor": 2})).compile(rows=2, tokens=48).as_text()
    assert "all-reduce" in program and "collective-permute" not in program and "all-to-all" not in program


def test_a_folder_is_read_in_the_shards_of_the_step(tmp_path: Any) -> None:
    weights.save(decoder("llama3-rope-biases"), tmp_path)
    mesh = mesh_of({"data": 2, "tensor": 2})
    model = weights.load(tmp_path, mesh=mesh, implementation="xla")
    state = make_train_step(model, optax.sgd(0.1), mesh).init()
    read, kept = (
        {path: leaf[...].sharding for path, leaf in nnx.to_flat_state(params)}
        for params in (nnx.state(model, nnx.Param), state.params)
    )
    assert read == kept
    assert read["model", "layers", 0, "self_attn", "q_proj", "kernel"].spec == PartitionSpec(None, "tensor")


def test_what_cannot_share_rows_is_named() -> None:
    tx = optax.sgd(0.1)
    with pytest.raises(LayoutError, match=r"4 query heads and 2 key/value heads do not divide over the 4 devices"):
        make_train_step(decoder("llama3-rope-biases"), tx, mesh_of({"tensor": 4}))
    with pytest.raises(UnsupportedError, match=r"axis 'context': gated delta nets scan whole rows: name it data"):
        make_train_step(decoder("qwen3.5"), tx, mesh_of({"context": 2}))
    with pytest.raises(UnsupportedError, match=r"axis 'context': max_segments counts the segments of whole rows"):
        make_train_step(decoder("llama3-rope-biases", max_segments=9), tx, mesh_of({"context": 2}))
    own = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match=r"cut the heads and tokens of a Decoder, and this is a Linear"):
        make_train_step(own, tx, mesh_of({"data": 2, "tensor": 2}))
    train_step = make_train_step(decoder("llama3-rope-biases"), tx, mesh_of({"context": 5}))
    with pytest.raises(LayoutError, match=r"48 tokens of a row do not divide over the 5 devices of axis 'context'"):
        train_step(train_step.init(), BATCHES[0])
